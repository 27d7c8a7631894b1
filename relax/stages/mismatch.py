"""How far the sampling engine's log-probabilities are from the trainer's, token by token.

Shapes: B responses, T response positions, N valid tokens.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from relax.algorithms.loss import mismatch
from relax.store import Output
from relax.trainer.ranks import add_up, gather
from relax.trainer.sequences import LossParts, StepLoss

MEAN = "train/train_rollout_logprob_abs_diff"
LARGEST = "train/train_rollout_logprob_abs_max"
K3 = "train/mismatch_k3_kl"
TOKENS = "tokens"


class Mismatch:
    """Watches the micro-batches of one optimizer step.

    own: compare what this pass computes although the batch has old log-probabilities, for these
    are the engine's (use_rollout_logprobs).
    """

    def __init__(self, own: bool = False) -> None:
        self._own = own
        self._largest = [torch.zeros(())]
        self._sums: defaultdict[str, float] = defaultdict(float)

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
        known = "old_logp_BT" in tensors and not self._own
        trainer_BT = tensors["old_logp_BT" if known else "logp_BT"].detach().float()
        valid_BT = tensors["mask_BT"] != 0
        trainer_N, engine_N = trainer_BT[valid_BT], tensors["rollout_logp_BT"].float()[valid_BT]
        found = mismatch(trainer_N, engine_N)
        if len(engine_N):
            self._largest.append(found[MEAN].max())
        for name, value_N in found.items():
            self._sums[name] += value_N.double().sum().item()
        self._sums[TOKENS] += len(engine_N)

    def metrics(self) -> dict[str, float]:
        """In nats, over the valid tokens of all micro-batches and ranks: means and largest."""
        sums = add_up(self._sums)
        tokens = max(sums.pop(TOKENS), 1)
        mine = max(value.item() for value in self._largest)
        return {name: value / tokens for name, value in sums.items()} | {LARGEST: max(gather(mine))}


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
