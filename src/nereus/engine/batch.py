"""Sequences as the engine takes them, and how they are cut into micro-batches of similar length.

A sequence is prompt + response without a gap, padded on the right; response token j of a sequence is predicted after
index prompt_length + j - 1. Everything that belongs to response tokens is laid out [n, r], response-aligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """tokens: int64 [n, t], right padded. prompt_lengths, lengths (prompt + response): int64 [n]."""

    tokens: torch.Tensor
    prompt_lengths: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def build(cls, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad: int) -> Sequences:
        whole = [[*p, *r] for p, r in zip(prompts, responses, strict=True)]
        width = max(map(len, whole))
        return cls(
            tokens=torch.tensor([[*row, *[pad] * (width - len(row))] for row in whole]),
            prompt_lengths=torch.tensor([len(p) for p in prompts]),
            lengths=torch.tensor([len(row) for row in whole]),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def response_lengths(self) -> torch.Tensor:
        return self.lengths - self.prompt_lengths

    def rows(self, index: torch.Tensor) -> Sequences:
        """Some of the sequences, trimmed to the longest of them."""
        lengths = self.lengths[index]
        return Sequences(
            tokens=self.tokens[index, : int(lengths.max())],
            prompt_lengths=self.prompt_lengths[index],
            lengths=lengths,
        )

    def to(self, device: torch.device) -> Sequences:
        return Sequences(
            tokens=self.tokens.to(device),
            prompt_lengths=self.prompt_lengths.to(device),
            lengths=self.lengths.to(device),
        )

    def response_mask(self) -> torch.Tensor:
        """bool [n, r]: which response-aligned places exist."""
        lengths = self.response_lengths
        return torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]

    def response_tokens(self) -> torch.Tensor:
        """int64 [n, r]; padding where there is no token."""
        width = int(self.response_lengths.max())
        index = self.prompt_lengths[:, None] + torch.arange(width, device=self.tokens.device)
        return self.tokens.gather(1, index.clamp(max=self.tokens.shape[1] - 1))

    def response_places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(row, index) of the hidden state after which each response token is predicted, in the mask's order."""
        row, place = self.response_mask().nonzero(as_tuple=True)
        return row, self.prompt_lengths[row] + place - 1


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows of a batch. index: int64 [b], where they stand in it. num_places: response tokens."""

    index: torch.Tensor
    sequences: Sequences
    num_places: int


def micro_batches(sequences: Sequences, size: int, device: torch.device) -> list[MicroBatch]:
    """Cut a batch into micro-batches of at most `size`, longest first, so that little is padded.

    The first micro-batch is the largest: what fits for it fits for all.
    """
    order = torch.argsort(sequences.lengths, descending=True, stable=True)
    return [
        MicroBatch(index, sequences.rows(index).to(device), int(sequences.response_lengths[index].sum()))
        for index in order.split(size)
    ]


def scatter_rows(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], num_rows: int) -> torch.Tensor:
    """Put [b, w] results of micro-batches back in batch order, zero-padded to the widest: [n, w]."""
    width = max(values.shape[1] for _, values in parts)
    whole = torch.zeros(num_rows, width, dtype=parts[0][1].dtype)
    for index, values in parts:
        whole[index, : values.shape[1]] = values.cpu()
    return whole
