"""Where the rows of logical tensors lie in the local tensors of other systems.

`core.sharding` cuts a logical tensor into ascending intervals, the same way for every system of that kind. Some systems
permute rows or add rows that no logical tensor has; for those a backend's adapter needs, for every local row, the logical
row that it is (`Rows`), and nothing else:

    qkv_rows_by_group   fused attention, rows [q..q k v] of each KV group    of the logical [Q | K | V]
    padded_rows         a vocabulary that is padded before it is cut         of the unpadded one
    rows_of             what a `Cut` says, in the same form

    held_intervals(rows)        what the planner must know: part of a `Holding`
    local_rows(rows, a, b)      where the regions of its `Move`s are read from or written to

With these, state goes from a system to another without a common layout. Fused halves cut each on its own (Megatron's
`linear_fc1`, vLLM's `gate_up_proj`) and vLLM's [Q_r | K_r | V_r] with shared KV heads need none of this: they are `Cut`s.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from nereus.core.errors import StateError
from nereus.core.sharding import Interval

Rows = NDArray[np.int64]
"""[local rows] the logical row that each is; PADDING where it is none."""

PADDING = -1


def rows_of(intervals: Sequence[Interval]) -> Rows:
    """The rows of a local tensor that holds `intervals` one after the other."""
    return np.concatenate([np.arange(0), *(np.arange(start, stop) for start, stop in intervals)])


def qkv_rows_by_group(heads: int, kv_heads: int, head_dim: int, tp: int, tp_rank: int) -> Rows:
    """Megatron-core's `linear_qkv`: the query heads of a KV group, its key head, its value head; then the next group.

    All rows are dealt out evenly, in order. With more ranks than groups a rank has a part of a group, without regard to
    heads (Megatron-core gathers the group's output in every forward). Raises ValueError where tp does not divide the rows.
    """
    total = (heads + 2 * kv_heads) * head_dim
    if total % tp:
        raise ValueError(f"tp={tp} does not divide the {total} rows of {heads} + 2 x {kv_heads} heads of {head_dim}")
    head_of = np.arange(heads + 2 * kv_heads)
    queries, keys, values = np.split(head_of, [heads, heads + kv_heads])
    in_order = np.concatenate([queries.reshape(kv_heads, -1), keys[:, None], values[:, None]], axis=1).ravel()
    rows = (in_order[:, None] * head_dim + np.arange(head_dim)).ravel()
    return _dealt_out(rows, tp, tp_rank)


def padded_rows(length: int, multiple: int, tp: int, tp_rank: int) -> Rows:
    """Rows padded at the end to a multiple, then dealt out evenly. Raises ValueError where tp does not divide them.

    Megatron-LM pads a vocabulary to a multiple of 128 x tp, so that its size depends on tp; vLLM to one of 64.
    """
    padded = -(-length // multiple) * multiple
    if padded % tp:
        raise ValueError(f"tp={tp} does not divide {length} rows padded to {padded}")
    rows = np.arange(padded)
    rows[length:] = PADDING
    return _dealt_out(rows, tp, tp_rank)


def _dealt_out(rows: Rows, tp: int, tp_rank: int) -> Rows:
    return np.split(rows, tp)[tp_rank]


def stage_layers(num_layers: int, pp: int, first: int | None = None, last: int | None = None) -> tuple[range, ...]:
    """The layers of every pp_stage as Megatron-core deals them out: `first` and `last` as given, the others evenly.

    A layer's local name counts from its pp_stage's first one. Raises ValueError where it does not come out even.
    """
    given = {stage: count for stage, count in ((0, first), (pp - 1, last)) if count is not None}
    left, stages = num_layers - sum(given.values()), pp - len(given)
    if left < 0 or (left % stages if stages else left):
        raise ValueError(f"{num_layers} layers, of which {given} are given, do not divide over pp={pp}")
    counts = [given.get(stage, left // stages if stages else 0) for stage in range(pp)]
    return tuple(range(a, b) for a, b in pairwise(accumulate(counts, initial=0)))


def held_intervals(rows: Rows) -> tuple[Interval, ...]:
    """The logical rows that a local tensor has: ascending, touching ones merged, padding left out."""
    held = np.unique(rows[rows != PADDING])
    runs = np.split(held, np.flatnonzero(np.diff(held) != 1) + 1)
    return tuple((int(run[0]), int(run[-1]) + 1) for run in runs if len(run))


def local_rows(rows: Rows, start: int, stop: int) -> Rows:
    """Where logical rows [start, stop) lie in a local tensor, in order. Raises StateError if one is not there."""
    order = np.argsort(rows, kind="stable")
    at = np.searchsorted(rows, np.arange(start, stop), sorter=order)
    found = order[np.minimum(at, len(rows) - 1)] if len(rows) else at
    if not len(rows) or not np.array_equal(rows[found], np.arange(start, stop)):
        raise StateError(f"rows {start} to {stop - 1} are not all held: {held_intervals(rows)}")
    return found
