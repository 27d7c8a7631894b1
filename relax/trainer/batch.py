"""Sequences laid out for one forward pass, and back.

Shapes: R rows, L row positions, N response tokens of the micro-batch, B responses,
T response positions (right-padded).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from relax.trainer.packing import best_fit
from relax.trainer.sequences import TrainSequence

# Below this width attention is cheaper than the bookkeeping of more rows.
MIN_ROW_TOKENS = 64


@dataclass(frozen=True)
class MicroBatch:
    """Packed rows and the places in them that predict a response token.

    position_RL restarts at 0 with each sequence, which is what confines attention to it.
    source_N: flat index into [R, L] of the token that predicts; target_N: the token predicted;
    place_N: flat index into [B, T]. An empty micro-batch has one row of one token and one
    prediction that no result contains, so that a rank without work runs the same collectives.
    """

    sample_ids: tuple[int, ...]
    token_RL: Tensor
    position_RL: Tensor
    source_N: Tensor
    target_N: Tensor
    place_N: Tensor
    shape_BT: tuple[int, int]
    fields_BT: dict[str, Tensor]
    num_tokens: int

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


def lay_out(
    sequences: Sequence[TrainSequence], row_tokens: int, device: torch.device
) -> MicroBatch:
    """Pack sequences into rows of row_tokens (0: chosen from the longest) and index them."""
    lengths = [len(sequence.tokens) for sequence in sequences]
    width = max([row_tokens or MIN_ROW_TOKENS, *lengths])
    rows = best_fit(lengths, width) or [[]]
    num_columns = max(1, *(sum(lengths[i] for i in row) for row in rows), 1)
    token_RL = np.zeros((len(rows), num_columns), np.int64)
    position_RL = np.zeros((len(rows), num_columns), np.int64)
    start_B = [0] * len(sequences)
    for number, row in enumerate(rows):
        column = 0
        for index in row:
            end = column + lengths[index]
            token_RL[number, column:end] = sequences[index].tokens
            position_RL[number, column:end] = np.arange(lengths[index])
            start_B[index] = number * num_columns + column
            column = end
        position_RL[number, column:] = np.arange(num_columns - column)
    source_N, target_N, place_N, response_width = _predictions(sequences, start_B)
    return MicroBatch(
        sample_ids=tuple(sequence.sample_id for sequence in sequences),
        token_RL=torch.from_numpy(token_RL).to(device),
        position_RL=torch.from_numpy(position_RL).to(device),
        source_N=torch.from_numpy(source_N).to(device),
        target_N=torch.from_numpy(target_N).to(device),
        place_N=torch.from_numpy(place_N).to(device),
        shape_BT=(len(sequences), response_width),
        fields_BT=_pad_fields(sequences, response_width, device),
        num_tokens=sum(lengths),
    )


def _predictions(
    sequences: Sequence[TrainSequence], start_B: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Flat sources, targets and [B, T] places of every response token, and T."""
    response_width = max((sequence.response_len for sequence in sequences), default=0)
    sources, targets, places = [], [], []
    for number, (sequence, start) in enumerate(zip(sequences, start_B, strict=True)):
        first = len(sequence.tokens) - sequence.response_len
        sources.append(np.arange(first - 1, len(sequence.tokens) - 1) + start)
        targets.append(sequence.tokens[first:])
        places.append(np.arange(sequence.response_len) + number * response_width)
    if response_width == 0:
        nothing = np.zeros(0, np.int64)
        return np.zeros(1, np.int64), np.zeros(1, np.int64), nothing, 0
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
