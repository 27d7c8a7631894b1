"""Sequences laid out for one forward pass, and back.

Shapes: R rows, L row positions, N response tokens of the micro-batch, B responses,
T response positions (right-padded).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from relax.trainer.attention import Reading, make_reading
from relax.trainer.packing import best_fit
from relax.trainer.sequences import TrainSequence

# Below this width attention is cheaper than the bookkeeping of more rows.
MIN_ROW_TOKENS = 64


class Size(NamedTuple):
    """Tokens of a micro-batch.

    sequences: of all of them. shared: of prompts that are there for another sequence already.
    weights: that go through the weights. attention: places of sequences in attention's input;
    padding: further places in it.
    """

    sequences: int = 0
    shared: int = 0
    weights: int = 0
    attention: int = 0
    padding: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """Packed rows and the places in them that predict a response token.

    reading: who attends to whom; where None, sequences are told apart by positions that restart.
    source_N: flat index into [R, L] of the token that predicts; target_N: the token predicted;
    place_N: flat index into [B, T]. An empty micro-batch has one row of one token and one
    prediction that no result contains, so that a rank without work runs the same collectives.
    size: of what is computed, in tokens.
    """

    sample_ids: tuple[int, ...]
    token_RL: Tensor
    position_RL: Tensor
    reading: Reading | None
    source_N: Tensor
    target_N: Tensor
    place_N: Tensor
    shape_BT: tuple[int, int]
    fields_BT: dict[str, Tensor]
    size: Size

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Reading | None, Tensor]:
        """What a SequenceModel is called with, before the head's own arguments."""
        return self.token_RL, self.position_RL, self.reading, self.source_N

    def unpack(self, values_N: Tensor) -> Tensor:
        """Response-token values as a detached, right-padded [B, T] tensor."""
        num_responses, width = self.shape_BT
        values_BT = values_N.new_zeros(num_responses * width)
        values_BT[self.place_N] = values_N.detach()[: len(self.place_N)]
        return values_BT.view(num_responses, width)

    def pack(self, values_BT: Tensor) -> Tensor:
        """The reverse of unpack; padding is dropped, the stand-in of an empty batch gets 0."""
        values_N = values_BT.new_zeros(len(self.source_N))
        values_N[: len(self.place_N)] = values_BT.reshape(-1)[self.place_N]
        return values_N


def same_prompt(sequences: Sequence[TrainSequence]) -> list[list[int]]:
    """Indices of the sequences by prompt, prompts in the order of their first."""
    families: dict[bytes, list[int]] = {}
    for index, sequence in enumerate(sequences):
        families.setdefault(sequence.prompt.tobytes(), []).append(index)
    return list(families.values())


def lay_out_shared(sequences: Sequence[TrainSequence], device: torch.device) -> MicroBatch:
    """One row of distinct tokens: each prompt once, then what each sequence adds to its own.

    The last token of a response predicts nothing and is left out.
    """
    tokens, positions = [], []
    tokens_B = [np.zeros(0, np.int64)] * len(sequences)
    length = num_shared = 0
    for family in same_prompt(sequences):
        prompt = sequences[family[0]].prompt
        first = len(prompt)
        shared = np.arange(length, length + first)
        tokens.append(prompt)
        positions.append(np.arange(first))
        length += first
        num_shared += first * (len(family) - 1)
        for index in family:
            rest = sequences[index].tokens[first:-1]
            tokens.append(rest)
            positions.append(np.arange(first, first + len(rest)))
            tokens_B[index] = np.concatenate([shared, np.arange(length, length + len(rest))])
            length += len(rest)
    if not sequences:
        nothing = np.zeros(1, np.int64)
        tokens, positions, tokens_B, length = [nothing], [nothing], [nothing], 1
    reading = make_reading(tokens_B, length, device)
    attended = sum(map(len, tokens_B))
    size = Size(
        sequences=sum(len(sequence.tokens) for sequence in sequences),
        shared=num_shared,
        weights=length,
        attention=attended,
        padding=sum(bucket.numel() for bucket in reading.bucket_bS) - attended,
    )
    token_RL, position_RL = np.concatenate(tokens)[None], np.concatenate(positions)[None]
    return _micro_batch(
        sequences, token_RL, position_RL, tokens_B, device, size=size, reading=reading
    )


def lay_out_rows(
    sequences: Sequence[TrainSequence], device: torch.device, *, one_row: bool
) -> MicroBatch:
    """Sequences side by side in rows as wide as the longest, or all in one row.

    Positions restart with each sequence, which is what confines attention to it.
    """
    lengths = [len(sequence.tokens) for sequence in sequences]
    width = sum(lengths) if one_row else max([MIN_ROW_TOKENS, *lengths])
    rows = best_fit(lengths, width) or [[]]
    num_columns = max([1, *(sum(lengths[i] for i in row) for row in rows)])
    token_RL = np.zeros((len(rows), num_columns), np.int64)
    position_RL = np.zeros((len(rows), num_columns), np.int64)
    tokens_B = [np.zeros(0, np.int64)] * len(sequences)
    for number, row in enumerate(rows):
        column = 0
        for index in row:
            end = column + lengths[index]
            token_RL[number, column:end] = sequences[index].tokens
            position_RL[number, column:end] = np.arange(lengths[index])
            tokens_B[index] = np.arange(column, end) + number * num_columns
            column = end
        position_RL[number, column:] = np.arange(num_columns - column)
    filled = sum(lengths)
    size = Size(sequences=filled, weights=filled, attention=filled, padding=token_RL.size - filled)
    return _micro_batch(sequences, token_RL, position_RL, tokens_B, device, size=size, reading=None)


def _micro_batch(
    sequences: Sequence[TrainSequence],
    token_RL: np.ndarray,
    position_RL: np.ndarray,
    tokens_B: Sequence[np.ndarray],
    device: torch.device,
    *,
    size: Size,
    reading: Reading | None,
) -> MicroBatch:
    """tokens_B: where each sequence's tokens are, flat in [R, L]."""
    source_N, target_N, place_N, response_width = _predictions(sequences, tokens_B)
    return MicroBatch(
        sample_ids=tuple(sequence.sample_id for sequence in sequences),
        token_RL=torch.from_numpy(token_RL).to(device),
        position_RL=torch.from_numpy(position_RL).to(device),
        reading=reading,
        source_N=torch.from_numpy(source_N).to(device),
        target_N=torch.from_numpy(target_N).to(device),
        place_N=torch.from_numpy(place_N).to(device),
        shape_BT=(len(sequences), response_width),
        fields_BT=_pad_fields(sequences, response_width, device),
        size=size,
    )


def _predictions(
    sequences: Sequence[TrainSequence], tokens_B: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Flat sources, targets and [B, T] places of every response token, and T."""
    response_width = max((sequence.response_len for sequence in sequences), default=0)
    if response_width == 0:
        nothing = np.zeros(0, np.int64)
        return np.zeros(1, np.int64), np.zeros(1, np.int64), nothing, 0
    sources, targets, places = [], [], []
    for number, (sequence, tokens) in enumerate(zip(sequences, tokens_B, strict=True)):
        first = len(sequence.prompt)
        sources.append(tokens[first - 1 : len(sequence.tokens) - 1])
        targets.append(sequence.tokens[first:])
        places.append(np.arange(sequence.response_len) + number * response_width)
    return np.concatenate(sources), np.concatenate(targets), np.concatenate(places), response_width


def _pad_fields(
    sequences: Sequence[TrainSequence], width: int, device: torch.device
) -> dict[str, Tensor]:
    """Each field of the sequences as a right-padded [B, T] tensor under name_BT."""
    padded: dict[str, Tensor] = {}
    for name in sequences[0].fields if sequences else ():
        values_BT = np.zeros((len(sequences), width), np.float32)
        for row, sequence in zip(values_BT, sequences, strict=True):
            row[: sequence.response_len] = sequence.fields[name]
        padded[f"{name}_BT"] = torch.from_numpy(values_BT).to(device)
    return padded
