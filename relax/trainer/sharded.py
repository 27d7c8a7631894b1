"""A model spread over the ranks, and the way sequences go through it.

Shapes: N response tokens of a micro-batch.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig

from relax.errors import ConfigError
from relax.trainer.batch import MicroBatch, lay_out_rows, lay_out_shared, same_prompt
from relax.trainer.build import HeadKind, Use, build, fsdp_modules, rotary_limit
from relax.trainer.device import keep_freed_memory
from relax.trainer.options import TrainerOptions
from relax.trainer.packing import plan_count, plan_families
from relax.trainer.ranks import ensure_group, gather, make_mesh
from relax.trainer.sequences import TrainSequence


class ShardedModel:
    """Decoder and head over a mesh; every rank calls every method with the same arguments.

    weights: Hugging Face name -> sharded parameter, sorted by name. described: its config.json.
    """

    def __init__(
        self, model_dir: Path, options: TrainerOptions, head: HeadKind, *, use: Use = "train"
    ) -> None:
        """Read a Hugging Face directory; each rank reads its own rows only."""
        ensure_group()
        keep_freed_memory()
        self.options = options
        self.model_dir = Path(model_dir)
        self.mesh = make_mesh(options.num_replicas)
        self.module = build(self.model_dir, options, head, self.mesh, use)
        self.config = AutoConfig.from_pretrained(self.model_dir, local_files_only=True)
        self._rotary_limit = rotary_limit(self.config)
        self.described = self.config.to_diff_dict()
        self.weights = self.module.named_weights()
        self.device = torch.device(self.mesh.device_type)

    @property
    def embedding_name(self) -> str:
        """Name of the weight that a tied head shares."""
        table = self.module.decoder.get_input_embeddings().weight
        return next(name for name, weight in self.weights.items() if weight is table)

    def plan(self, sequences: Sequence[TrainSequence]) -> list[list[int]]:
        """This rank's micro-batches, as indices into sequences; as many as any other rank's."""
        lengths = [len(sequence.tokens) for sequence in sequences]
        self._check_rotary(max(lengths, default=0))
        num_ranks = dist.get_world_size()
        families = [[index] for index in range(len(sequences))]
        if self.module.shares_prompts:
            families = same_prompt(sequences)
        if self.options.micro_batch_size:
            order = [index for family in families for index in family]
            ranks = plan_count(lengths, order, self.options.micro_batch_size, num_ranks)
        else:
            shared = [len(sequences[family[0]].prompt) for family in families]
            budget = self.options.max_tokens_per_gpu
            ranks = plan_families(lengths, families, shared, budget, num_ranks)
        return ranks[dist.get_rank()]

    def _check_rotary(self, longest: int) -> None:
        if self._rotary_limit is not None and longest > self._rotary_limit:
            raise ConfigError(
                f"model {self.model_dir}: a sequence has {longest} tokens, and with this model's "
                f"rotary scaling one of more than {self._rotary_limit} changes what the others in "
                "its micro-batch get; shorten prompts or rollout_max_response_len"
            )

    def lay_out(self, sequences: Sequence[TrainSequence]) -> MicroBatch:
        """The sequences of one micro-batch, as the model's attention wants them."""
        if self.module.shares_prompts:
            return lay_out_shared(sequences, self.device)
        # The cost of flash attention does not depend on the row's width: one row, no padding.
        one_row = self.options.attention == "flash_attention_2"
        return lay_out_rows(sequences, self.device, one_row=one_row)

    def outputs(self, batch: MicroBatch, temperature: float) -> dict[str, Tensor]:
        """The head's outputs at the N response tokens, by name; float32 (float64 of float64)."""
        head = self.module.head
        arguments = (batch.target_N, temperature) if "logp" in head.outputs else ()
        values = self.module(*batch.inputs, *arguments)
        return dict(zip(head.outputs, values, strict=True))

    def rows(
        self, sequences: Sequence[TrainSequence], output: str, temperature: float
    ) -> list[np.ndarray]:
        """One output of every response without gradient: float32 [response_len], on every rank."""
        mine: dict[int, np.ndarray] = {}
        for members, batch in self._forward_only(sequences):
            with torch.no_grad():
                values_N = self.outputs(batch, temperature)[output]
            rows = batch.unpack(values_N).float().cpu().numpy()
            for row, index in zip(rows, members, strict=True):
                mine[index] = row[: sequences[index].response_len].copy()
        return self._in_order(mine, len(sequences))

    def top_words(
        self,
        sequences: Sequence[TrainSequence],
        num_top: int,
        told: Callable[[int, np.ndarray], np.ndarray] = lambda _, words_TK: words_TK,
    ) -> list[np.ndarray]:
        """The num_top likeliest words of every response token, on every rank.

        int32 [response_len, num_top], likeliest first; for distillation. The same at any
        temperature. `told`: what the rank that found them makes of the words of a sequence, to be
        handed to the others in their place.
        """
        mine: dict[int, np.ndarray] = {}
        for members, batch in self._forward_only(sequences):
            with torch.no_grad():
                (word_NK,) = self.module(*batch.inputs, batch.target_N, 1.0, num_top)
            words_NK, start = word_NK.cpu().numpy(), 0
            for index in members:
                end = start + sequences[index].response_len
                mine[index] = told(index, words_NK[start:end].copy())
                start = end
        return self._in_order(mine, len(sequences))

    def _in_order(self, mine: dict[int, np.ndarray], count: int) -> list[np.ndarray]:
        """Results of all ranks by index, once the gathered parameters are let go."""
        self.reshard()
        merged = {index: row for part in gather(mine) for index, row in part.items()}
        return [merged[index] for index in range(count)]

    def _forward_only(
        self, sequences: Sequence[TrainSequence]
    ) -> Iterator[tuple[list[int], MicroBatch]]:
        for members in self.plan(sequences):
            yield members, self.lay_out([sequences[index] for index in members])

    def reshard(self) -> None:
        """Free gathered parameters; without a backward pass the outermost ones would go stale."""
        for module in fsdp_modules(self.module):
            module.reshard()

    def set_last_micro_batch(self, is_last: bool) -> None:
        """Replicas exchange gradients once a step, after the last micro-batch."""
        if self.options.num_replicas > 1:
            self.module.set_requires_all_reduce(is_last)  # type: ignore[operator]
