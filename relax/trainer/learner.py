"""One optimizer step at a time over a sharded model: what actor and critic share.

Shapes: B responses, T response positions (right-padded), N response tokens of a micro-batch.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from relax.errors import TrainingError
from relax.trainer import checkpoint, publish
from relax.trainer.batch import MicroBatch
from relax.trainer.build import HeadKind, Use
from relax.trainer.device import peak_flops, peak_memory_gib
from relax.trainer.optimizer import clip, gradient_norm, make_adamw
from relax.trainer.options import TrainerOptions
from relax.trainer.ranks import add_up, gather
from relax.trainer.schedule import learning_rate
from relax.trainer.sequences import StepLoss, TrainSequence
from relax.trainer.sharded import ShardedModel
from relax.trainer.timing import Stopwatch, step_flops

SKIPS_IN_A_ROW = 3


class NonFiniteError(TrainingError):
    """Loss or gradient was not finite for several optimizer steps in a row."""


class Learner:
    """A sharded model, its optimizer and its place in the schedule.

    Every rank calls every method with the same arguments; the work is divided inside.
    step: optimizer steps done.
    skipped_samples: samples of the micro-batches that made the last step non-finite.
    """

    head: ClassVar[HeadKind]

    @classmethod
    def load(
        cls,
        model_dir: Path,
        options: TrainerOptions,
        *,
        num_schedule_steps: int,
        use: Use = "train",
    ) -> Self:
        """Read a Hugging Face directory, shard it over the ranks and start a fresh optimizer.

        A value head that the directory has not starts at zero.
        use: "restore" where `restore` is called next: the weights are not read then.
        """
        return cls(ShardedModel(model_dir, options, cls.head, use=use), options, num_schedule_steps)

    def __init__(
        self, model: ShardedModel, options: TrainerOptions, num_schedule_steps: int
    ) -> None:
        self.options = options
        self.step = 0
        self.skipped_samples: tuple[int, ...] = ()
        self._model = model
        self._num_schedule_steps = num_schedule_steps
        self._trained = {n: w for n, w in model.weights.items() if w.requires_grad}
        self._optimizer = make_adamw(self._trained, options)
        self._skips_in_a_row = 0
        self._seconds: Counter[str] = Counter()
        self._size: Counter[str] = Counter()

    def train_step(
        self,
        sequences: Sequence[TrainSequence],
        loss: StepLoss,
        *,
        inspect_dir: Path | None = None,
    ) -> dict[str, float]:
        """One optimizer step over all the sequences given.

        The loss's parts and metric sums are added up over micro-batches and ranks, gradients
        likewise. Returns those sums and loss, grad_norm (before clipping), lr, skipped_steps.
        Where loss or gradient is not finite, nothing moves and skipped_steps is 1; the third time
        in a row raises NonFiniteError and leaves the batch in inspect_dir, if one is given.
        """
        watch = Stopwatch()
        size: Counter[str] = Counter()  # in tokens; pairs: of tokens of a sequence
        suspects: list[int] = []
        sums: dict[str, Tensor] = {}
        plan = self._model.plan(sequences)
        for number, members in enumerate(plan):
            with watch.phase("data"):
                batch = self._model.lay_out([sequences[index] for index in members])
            self._model.set_last_micro_batch(number == len(plan) - 1)
            parts = self._backward(batch, loss, watch)
            size.update(batch.size._asdict())
            size["pairs"] += sum(len(sequences[index].tokens) ** 2 for index in members)
            if parts and not math.isfinite(parts["loss"].item()):
                suspects += batch.sample_ids
            for name, value in parts.items():
                sums[name] = sums.get(name, 0.0) + value.double()
        with watch.phase("communication"):
            metrics = add_up({"loss": 0.0} | {name: value.item() for name, value in sums.items()})
        with watch.phase("optimizer"):
            metrics["grad_norm"] = gradient_norm(self._trained.values())
            if math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]):
                metrics["lr"] = self._advance(metrics["grad_norm"])
                metrics["skipped_steps"] = 0.0
            else:
                metrics["skipped_steps"] = 1.0
        self._seconds.update({**watch.seconds, "step": watch.total()})
        self._size.update(size)
        if metrics["skipped_steps"]:
            self._skip(metrics, suspects, sequences, inspect_dir)
        return metrics

    def restart_timing(self) -> None:
        """Let `timing` be of the steps that follow alone."""
        self._seconds.clear()
        self._size.clear()

    @property
    def timing(self) -> dict[str, float]:
        """Clock- and machine-dependent facts of this rank's steps since restart_timing.

        PHASE_s and step_s: seconds, added up over the steps; tokens_per_s, padding_waste,
        shared_tokens and mfu: of the sums; peak_memory_gib: the largest so far. Empty without a
        step.
        """
        seconds, size = self._seconds, self._size
        if not seconds:
            return {}
        facts = {f"{name}_s": value for name, value in seconds.items()}
        facts |= {
            "tokens_per_s": size["sequences"] / seconds["step"],
            "padding_waste": size["padding"] / max(1, size["attention"] + size["padding"]),
            "shared_tokens": size["shared"] / max(1, size["sequences"]),
            "peak_memory_gib": peak_memory_gib(),
        }
        peak = peak_flops()
        if peak is not None:
            config = self._model.config
            num_weights = sum(weight.numel() for weight in self._model.weights.values())
            heads, layers = config.num_attention_heads, config.num_hidden_layers
            width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
            flops = step_flops(num_weights, layers, width, size["weights"], size["pairs"])
            facts["mfu"] = flops / seconds["step"] / peak
        return facts

    def begin_save(self, directory: Path, *, in_background: bool = False) -> Callable[[], str]:
        """Write model, optimizer and step into an empty directory, in the background if wanted.

        What it returns finishes that, and gives the content hash; training may go on meanwhile.
        """
        return checkpoint.begin_save(self._state(), Path(directory), in_background=in_background)

    def restore(self, directory: Path) -> None:
        """Continue from a saved directory, whatever number of ranks wrote it."""
        progress = checkpoint.restore(self._state(), Path(directory))
        self.step, self._skips_in_a_row = progress
        self._model.reshard()

    def publish(self, directory: Path, dtype: str) -> str:
        """Write the weights in the Hugging Face layout ("float32" or "bfloat16").

        The ranks write in parallel into a directory that is empty or not there. Returns
        policy_hash(directory).
        """
        return publish.write(self._model, Path(directory), dtype)

    def first_difference(self, directory: Path) -> str:
        """Where what publish would write differs from a published directory; empty: nowhere."""
        return publish.first_difference(self._model, directory, self.options.sampling_dtype)

    def weights_hash(self, dtype: str | None = None) -> str:
        """policy_hash of what publish would write in dtype (default: options.sampling_dtype)."""
        return publish.weights_hash(self._model, dtype or self.options.sampling_dtype)

    def _state(self) -> checkpoint.State:
        return checkpoint.State(
            self._model.weights, self._optimizer, self.step, self._skips_in_a_row
        )

    def _backward(self, batch: MicroBatch, loss: StepLoss, watch: Stopwatch) -> dict[str, Tensor]:
        """Add one micro-batch's gradients; returns its part of the loss and of the metrics.

        The loss sees leaf copies of the model's outputs, so that its gradient with respect to them
        is a tensor at hand, and the model's backward starts from that.
        """
        with watch.phase("forward"):
            outputs_N = self._model.outputs(batch, self.options.temperature)
        if len(batch.place_N) == 0:
            with watch.phase("backward"):
                _backward_from(list(outputs_N.values()), [None] * len(outputs_N))
            return {}
        with watch.phase("loss"):
            leaves_BT = {
                f"{name}_BT": batch.unpack(value_N).requires_grad_()
                for name, value_N in outputs_N.items()
            }
            parts = loss({**leaves_BT, **batch.fields_BT})
            if parts.loss.requires_grad:
                parts.loss.backward()
        with watch.phase("backward"):
            _backward_from(
                list(outputs_N.values()),
                [
                    leaf.grad if leaf.grad is None else batch.pack(leaf.grad)
                    for leaf in leaves_BT.values()
                ],
            )
        return {**parts.sums, "loss": parts.loss.detach()}

    def _advance(self, norm: float) -> float:
        """Clip, optimizer and schedule step; returns the learning rate used."""
        if self.options.clip_grad > 0:
            clip(self._trained.values(), norm, self.options.clip_grad)
        rate = learning_rate(self.options, self.step, self._num_schedule_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        self._skips_in_a_row = 0
        return rate

    def _skip(
        self,
        metrics: dict[str, float],
        suspects: list[int],
        sequences: Sequence[TrainSequence],
        inspect_dir: Path | None,
    ) -> None:
        """Forget the gradients, name the samples; the third time in a row is the last."""
        self._optimizer.zero_grad()
        self._skips_in_a_row += 1
        self.skipped_samples = tuple(sorted({one for part in gather(suspects) for one in part}))
        named = str(list(self.skipped_samples[:20])) if self.skipped_samples else "not one alone"
        message = (
            f"trainer: optimizer step {self.step}: loss = {metrics['loss']}, grad_norm = "
            f"{metrics['grad_norm']}; skipped; samples with a non-finite loss: {named}"
        )
        if self._skips_in_a_row < SKIPS_IN_A_ROW:
            if dist.get_rank() == 0:
                print(f"warning: {message}", file=sys.stderr)
            return
        if inspect_dir is not None and dist.get_rank() == 0:
            keep_batch(sequences, inspect_dir)
        raise NonFiniteError(
            f"{message}; {SKIPS_IN_A_ROW} in a row: stopped; the batch is in {inspect_dir}"
        )


def _backward_from(outputs_N: list[Tensor], gradients_N: list[Tensor | None]) -> None:
    """The model's backward from the outputs that the loss reached.

    Where it reached none, from zeros: the collectives of the backward pass must run on all ranks.
    """
    pairs = [pair for pair in zip(outputs_N, gradients_N, strict=True) if pair[1] is not None]
    if not pairs:
        pairs = [(outputs_N[0], torch.zeros_like(outputs_N[0]))]
    torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])


def keep_batch(sequences: Sequence[TrainSequence], inspect_dir: Path) -> None:
    """One .npz a sample: its tokens and every field that the loss read."""
    inspect_dir.mkdir(parents=True, exist_ok=True)
    for sequence in sequences:
        arrays = {"tokens": sequence.tokens, "response_len": np.array(sequence.response_len)}
        named = {**arrays, **sequence.fields}
        np.savez(inspect_dir / f"sample-{sequence.sample_id}.npz", **named)  # type: ignore[arg-type]
