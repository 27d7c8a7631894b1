"""The policy in training: packed steps, scoring, checkpoints and publishing.

Shapes: B responses, T response positions (right-padded), N response tokens of a micro-batch.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedConfig

from relax.trainer import checkpoint, publish
from relax.trainer.batch import MicroBatch, lay_out
from relax.trainer.optimizer import clip, gradient_norm, make_adamw
from relax.trainer.options import TrainerOptions
from relax.trainer.packing import plan_count, plan_tokens
from relax.trainer.policy import Policy, load_policy, shard
from relax.trainer.publish import DTYPES, policy_hash
from relax.trainer.ranks import add_up, ensure_group
from relax.trainer.schedule import learning_rate
from relax.trainer.sequences import LossParts, StepLoss, TrainSequence

__all__ = ["Actor", "LossParts", "StepLoss", "TrainSequence", "TrainerOptions", "policy_hash"]


class Actor:
    """A policy, its optimizer and its place in the schedule, sharded over the ranks.

    Every rank calls every method with the same arguments; the work is divided inside. step is
    the number of optimizer steps done.
    """

    def __init__(
        self,
        policy: Policy,
        config: PreTrainedConfig,
        model_dir: Path,
        options: TrainerOptions,
        num_schedule_steps: int,
    ) -> None:
        self.options = options
        self.step = 0
        self._policy = policy
        self._config = config
        self._model_dir = model_dir
        self._num_schedule_steps = num_schedule_steps
        self._weights = policy.named_weights()
        self._optimizer = make_adamw(self._weights, options)
        self._device = next(iter(self._weights.values())).device

    @classmethod
    def load(cls, model_dir: Path, options: TrainerOptions, *, num_schedule_steps: int) -> "Actor":
        """Read a Hugging Face directory, shard it over the ranks and start a fresh optimizer."""
        ensure_group()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("shard",))
        policy, config = load_policy(Path(model_dir))
        shard(policy, mesh, DTYPES[options.dtype])
        return cls(policy, config, Path(model_dir), options, num_schedule_steps)

    def train_step(self, sequences: Sequence[TrainSequence], loss: StepLoss) -> dict[str, float]:
        """One optimizer step over all the sequences given.

        The loss's parts and metric sums are added up over micro-batches and ranks, gradients
        likewise. Returns those sums and loss, grad_norm (before clipping) and lr.
        """
        sums: dict[str, float] = {"loss": 0.0}
        for batch in self._micro_batches(sequences):
            for name, value in self._backward(batch, loss).items():
                sums[name] = sums.get(name, 0.0) + value
        metrics = add_up(sums)
        metrics["grad_norm"] = gradient_norm(self._weights.values())
        if self.options.clip_grad > 0:
            clip(self._weights.values(), metrics["grad_norm"], self.options.clip_grad)
        metrics["lr"] = self._advance()
        return metrics

    def logp(self, sequences: Sequence[TrainSequence], temperature: float) -> list[np.ndarray]:
        """Log-probabilities of every response, float32 [response_len] each, on every rank."""
        plan = self._plan(sequences)[dist.get_rank()]
        mine: dict[int, np.ndarray] = {}
        for members in plan:
            batch = self._lay_out([sequences[index] for index in members])
            with torch.no_grad():
                logp_N, _ = self._forward(batch, temperature)
            rows = batch.unpack(logp_N).cpu().numpy()
            for row, index in zip(rows, members, strict=True):
                mine[index] = row[: sequences[index].response_len].copy()
        return _gather_rows(mine, len(sequences))

    def save(self, directory: Path) -> None:
        """Write model, optimizer, schedule and step; every rank calls it."""
        checkpoint.write(self._state(), Path(directory))

    def restore(self, directory: Path) -> None:
        """Continue from a saved directory, whatever number of ranks wrote it."""
        self.step = checkpoint.read(self._state(), Path(directory))

    def publish(self, directory: Path, dtype: str) -> None:
        """Write the policy in the Hugging Face layout; dtype: "float32" or "bfloat16"."""
        tensors = publish.full_tensors(self._weights, DTYPES[dtype], self._embedding())
        if dist.get_rank() == 0:
            publish.write_policy(
                tensors,
                Path(directory),
                config=self._config,
                dtype=dtype,
                model_dir=self._model_dir,
            )
        else:
            for _ in tensors:
                pass
        dist.barrier()

    def weights_hash(self) -> str:
        """policy_hash of what publish would write in options.sampling_dtype."""
        dtype = DTYPES[self.options.sampling_dtype]
        return publish.hash_tensors(publish.full_tensors(self._weights, dtype, self._embedding()))

    def first_difference(self, directory: Path) -> str:
        """The first tensor that publish would write otherwise than it stands in directory."""
        dtype = DTYPES[self.options.sampling_dtype]
        tensors = publish.full_tensors(self._weights, dtype, self._embedding())
        return publish.first_difference(tensors, directory)

    def _state(self) -> dict:
        return checkpoint.training_state(self._weights, self._optimizer, self.step)

    def _embedding(self) -> str:
        table = self._policy.decoder.get_input_embeddings().weight
        return next(name for name, weight in self._weights.items() if weight is table)

    def _plan(self, sequences: Sequence[TrainSequence]) -> list[list[list[int]]]:
        lengths = [len(sequence.tokens) for sequence in sequences]
        ranks = dist.get_world_size()
        if self.options.micro_batch_size:
            return plan_count(lengths, self.options.micro_batch_size, ranks)
        return plan_tokens(lengths, self.options.max_tokens_per_gpu, ranks)

    def _lay_out(self, sequences: Sequence[TrainSequence]) -> MicroBatch:
        return lay_out(sequences, self.options.row_tokens, self._device)

    def _micro_batches(self, sequences: Sequence[TrainSequence]) -> list[MicroBatch]:
        plan = self._plan(sequences)[dist.get_rank()]
        return [self._lay_out([sequences[index] for index in members]) for members in plan]

    def _forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        return self._policy(
            batch.token_RL, batch.position_RL, batch.source_N, batch.target_N, temperature
        )

    def _backward(self, batch: MicroBatch, loss: StepLoss) -> dict[str, float]:
        """Add one micro-batch's gradients; returns its part of the loss and of the metrics.

        The loss sees leaf copies of logp and entropy, so that its gradient with respect to them
        is a tensor at hand, and the model's backward starts from that.
        """
        logp_N, entropy_N = self._forward(batch, self.options.temperature)
        if len(batch.place_N) == 0:
            torch.autograd.backward([logp_N], [torch.zeros_like(logp_N)])
            return {}
        logp_BT = batch.unpack(logp_N).requires_grad_()
        entropy_BT = batch.unpack(entropy_N).requires_grad_()
        parts = loss({"logp_BT": logp_BT, "entropy_BT": entropy_BT, **batch.fields_BT})
        parts.loss.backward()
        outputs, gradients = [], []
        for output_N, leaf_BT in ((logp_N, logp_BT), (entropy_N, entropy_BT)):
            if leaf_BT.grad is not None:
                outputs.append(output_N)
                gradients.append(batch.pack(leaf_BT.grad))
        torch.autograd.backward(outputs, gradients)
        sums = {name: value.item() for name, value in parts.sums.items()}
        return {**sums, "loss": parts.loss.item()}

    def _advance(self) -> float:
        """Optimizer and schedule step; returns the learning rate used."""
        rate = learning_rate(self.options, self.step, self._num_schedule_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        return rate


def _gather_rows(mine: dict[int, np.ndarray], count: int) -> list[np.ndarray]:
    """Rows by index from all ranks, in order."""
    if dist.get_world_size() == 1:
        return [mine[index] for index in range(count)]
    parts: list[dict[int, np.ndarray]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, mine)
    rows = {index: row for part in parts for index, row in part.items()}
    return [rows[index] for index in range(count)]
