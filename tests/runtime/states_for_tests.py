"""Logical states drawn at random, what is in them, and what a rank must hold of it by plain slicing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from nereus.core.plan import Layout
from nereus.core.sharding import Cut, Interval, Segment, StateSpec, TensorSpec

LAYOUTS = [Layout(tp, pp) for tp in (1, 2, 3, 4) for pp in (1, 2, 3, 4) if tp * pp <= 4]
"""All that fit on four devices."""


def random_segment(draw: random.Random) -> Segment:
    if draw.random() < 0.5:
        return Segment.rows(draw.randint(1, 9))
    blocks = draw.choice([1, 2, 3])
    return Segment(blocks * draw.randint(1, 3), blocks, blocks * draw.randint(1, 4))


def random_tensor(draw: random.Random, index: int, num_layers: int) -> TensorSpec:
    cut, shape = None, [draw.randint(1, 4) for _ in range(draw.randint(1, 3))]
    if draw.random() < 0.75:
        cut = Cut(draw.randrange(len(shape)), tuple(random_segment(draw) for _ in range(draw.randint(1, 3))))
        shape[cut.dim] = sum(segment.size for segment in cut.segments)
    where = draw.choice(["layer", "layer", "layer", "first", "last", "ends", "everywhere"])
    return TensorSpec(
        name=f"tensor {index}",
        shape=tuple(shape),
        dtype=draw.choice(["float32", "float64", "int64", "int32"]),
        where=where,  # type: ignore[arg-type]
        layer=draw.randrange(num_layers) if where == "layer" else -1,
        cut=cut,
    )


def random_spec(draw: random.Random) -> StateSpec:
    num_layers = draw.randint(4, 7)
    return StateSpec(tuple(random_tensor(draw, i, num_layers) for i in range(draw.randint(4, 12))), num_layers)


def logical(tensor: TensorSpec) -> torch.Tensor:
    """A whole logical tensor, every element another."""
    count = 1
    for length in tensor.shape:
        count *= length
    first = sum(map(ord, tensor.name)) * 1000
    return torch.arange(first, first + count).to(getattr(torch, tensor.dtype)).view(tensor.shape)


def cut_out(tensor: TensorSpec, intervals: Sequence[Interval]) -> torch.Tensor:
    """The local tensor of a rank that holds `intervals`, by plain slicing."""
    whole = logical(tensor)
    pieces = [whole.narrow(tensor.dim, start, stop - start) for start, stop in intervals]
    return torch.cat(pieces, tensor.dim) if pieces else whole.narrow(tensor.dim, 0, 0)
