"""How far the sampling engine's log-probabilities are from the trainer's, token by token.

Their means are metrics of the loss; this keeps the largest, and warns. Shapes: B responses,
T response positions.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from torch import Tensor

from relax.store import Output
from relax.trainer.ranks import gather
from relax.trainer.sequences import LossParts, StepLoss

MEAN = "train/train_rollout_logprob_abs_diff"
LARGEST = "train/train_rollout_logprob_abs_max"
K3 = "train/mismatch_k3_kl"


class Mismatch:
    """Watches the micro-batches of one optimizer step."""

    def __init__(self) -> None:
        self._largest = [torch.zeros(())]

    def watching(self, loss: StepLoss) -> StepLoss:
        """The same loss, seen."""

        def watched(tensors: Mapping[str, Tensor]) -> LossParts:
            self.see(tensors)
            return loss(tensors)

        return watched

    def see(self, tensors: Mapping[str, Tensor]) -> None:
        """Both log-probabilities are of the whole vocabulary at the sampling temperature.

        The trainer's are those before the updates, where they were computed, else this pass's own.
        """
        trainer_BT = tensors.get("old_logp_BT", tensors["logp_BT"]).detach()
        gap_BT = (trainer_BT.float() - tensors["rollout_logp_BT"].float()).abs()
        valid_N = gap_BT[tensors["mask_BT"] != 0]
        if len(valid_N):
            self._largest.append(valid_N.max())

    def metrics(self) -> dict[str, float]:
        """The largest difference over all micro-batches and ranks, in nats."""
        mine = max(value.item() for value in self._largest)
        return {LARGEST: max(gather(mine))}


def warn(output: Output, step: int, metrics: Mapping[str, float], threshold: float) -> None:
    """Print and record that a step's engine and trainer differ by more than the threshold.

    metrics: of the step's first optimizer step, before anything moved.
    """
    if metrics.get(MEAN, 0.0) <= threshold:
        return
    line = (
        f"update: step {step}: engine and trainer differ by {metrics[MEAN]:.4f} nats a token on "
        f"average (largest {metrics[LARGEST]:.4f}, k3 KL {metrics[K3]:.2g}); "
        f"rollout_mismatch_warning = {threshold:g}: check dtypes and versions of the engine, or "
        "correct for it with use_tis"
    )
    print(f"warning: {line}", file=sys.stderr)
    output.measure("warning", text=line)
