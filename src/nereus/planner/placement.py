"""From canonical positions to concrete GPUs: the same plan, laid so that as much resident state as possible stays.

Nodes may be exchanged for nodes, and GPUs within a node; neither changes what the plan costs. Two nested assignment
problems (`scipy.optimize.linear_sum_assignment`): for a piece of the line and a piece of a node, which GPU takes which
position; then which piece goes where. Pieces with the same content are one class, so 2,048 nodes are a few classes.

What an old shard and a new one have in common is a share of the layers times a share of each layer: shard (pp_stage,
tp_rank) of Layout(tp, pp) is taken as a rectangle in the unit square, pp_stages along one side and tp along the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from nereus.core.plan import ACTOR_GENERATION, Layout, ModelStage, Placement, Plan
from nereus.planner.frontier import Floats, Ints
from nereus.planner.problem import Problem, Selection

LARGEST_ASSIGNMENT = 256
"""Pieces that are assigned one by one; of more, equal shares of each class go together."""


def shared(new: Layout, old: Layout) -> Floats:
    """[new.size, old.size]: the share of the whole state that a new and an old shard have in common; tp fastest."""

    def along(parts: int, others: int) -> Floats:
        a, b = np.arange(parts)[:, None] / parts, np.arange(others)[None, :] / others
        return np.asarray(np.maximum(0.0, np.minimum(a + 1 / parts, b + 1 / others) - np.maximum(a, b)))

    return np.asarray(np.kron(along(new.pp, old.pp), along(new.tp, old.tp)), dtype=np.float64)


def state_bytes(problem: Problem, selection: Selection) -> dict[ModelStage, float]:
    """Bytes of one unit's whole state, of every model-stage whose state a transition would have to move.

    Not generation's: weight_sync overwrites it after every step, so its units are only made.
    """
    found = {}
    for m, choice in selection.items():
        table, row = problem.tables[m], choice.row
        if m != ACTOR_GENERATION:
            found[m] = float(table.resident_bytes[row]) * int(table.tp[row]) * int(table.pp[row])
    return found


def kept_bytes(plan: Plan, current: Plan, sizes: Mapping[ModelStage, float]) -> float:
    """How many bytes of a plan's state are on their GPUs already. sizes: of one unit's whole state."""
    total = 0.0
    for m, size in sizes.items():
        if m in plan and m in current:
            new, old = plan[m], current[m]
            part, held = shared(new.layout, old.layout), {gpu: i for i, gpu in enumerate(old.gpus)}
            total += size * sum(
                float(part[i % new.layout.size, held[gpu] % old.layout.size])
                for i, gpu in enumerate(new.gpus)
                if gpu in held
            )
    return total


def place(problem: Problem, selection: Selection, current: Plan | None = None) -> Plan:
    """The plan on concrete GPUs. Without a current one, positions are taken in the line's order."""
    line = np.array([gpu for chunk in problem.pool.chunks for gpu in chunk], dtype=np.int64)
    sizes = state_bytes(problem, selection)
    moving = [m for m in selection if current is not None and m in sizes and m in current]
    devices = dict.fromkeys(selection, line)
    if current is not None and moving:
        devices = _assigned(problem, selection, current, {m: sizes[m] for m in moving}, line)
    placements = []
    for m in problem.model_stages:
        table, choice = problem.tables[m], selection[m]
        span = slice(choice.start, choice.start + int(table.gpus[choice.row]))
        placements.append(
            Placement(
                model_stage=m,
                layout=Layout(int(table.tp[choice.row]), int(table.pp[choice.row])),
                dp=int(table.dp[choice.row]),
                gpus=tuple(devices[m][span].tolist()),
                micro_batch=int(table.micro_batch[choice.row]),
                recompute=bool(table.recompute[choice.row]),
            )
        )
    return Plan(tuple(placements))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shards:
    """The model-stages whose state counts. new: [positions, m] shard number or -1. old: [GPUs of the line, m] the same.

    bytes: per model-stage [new shards + 1, old shards + 1] bytes in common; the last row and column, which -1 picks, are
    zero.
    """

    new: Ints
    old: Ints
    bytes: list[Floats]


def _shards(
    problem: Problem, selection: Selection, current: Plan, sizes: Mapping[ModelStage, float], line: Ints
) -> _Shards:
    new = np.full((len(line), len(sizes)), -1, dtype=np.int64)
    old = np.full((len(line), len(sizes)), -1, dtype=np.int64)
    common = []
    place_of = np.full(int(max(line.max(), max(current.gpus))) + 1, -1, dtype=np.int64)
    place_of[line] = np.arange(len(line))
    for i, (m, size) in enumerate(sizes.items()):
        table, choice, held = problem.tables[m], selection[m], current[m]
        layout, gpus = Layout(int(table.tp[choice.row]), int(table.pp[choice.row])), int(table.gpus[choice.row])
        new[choice.start : choice.start + gpus, i] = np.arange(gpus) % layout.size
        at = place_of[np.array(held.gpus)]
        old[at[at >= 0], i] = (np.arange(len(held.gpus)) % held.layout.size)[at >= 0]
        common.append(np.pad(size * shared(layout, held.layout), ((0, 1), (0, 1))))
    return _Shards(new=new, old=old, bytes=common)


def _assigned(
    problem: Problem, selection: Selection, current: Plan, sizes: Mapping[ModelStage, float], line: Ints
) -> dict[ModelStage, Ints]:
    """Model-stage -> [positions] device."""
    shards = _shards(problem, selection, current, sizes, line)
    shared_line = line.copy()
    own = {m: line.copy() for m in sizes}
    low = 0
    for length, run in groupby(map(len, problem.pool.chunks)):
        count = len(list(run))
        here = slice(low, low + count * length)
        low = here.stop
        slots, new_class = _classes(shards.new[here].reshape(count, -1))
        pieces, old_class = _classes(shards.old[here].reshape(count, -1))
        slots, pieces = slots.reshape(len(slots), length, -1), pieces.reshape(len(pieces), length, -1)
        to = match_pieces(_benefit(shards, slots, pieces), new_class, old_class)
        index = line[here].reshape(count, length)
        at = np.arange(here.start, here.stop).reshape(count, length)
        pairs = new_class * len(pieces) + old_class[to]
        for pair in np.unique(pairs):
            which = np.flatnonzero(pairs == pair)
            inner = _Inner.of(shards, slots[pair // len(pieces)], pieces[pair % len(pieces)])
            shared_line[at[which]] = index[to[which]][:, inner.order]
            for m, order in zip(sizes, inner.own, strict=True):
                own[m][at[which]] = index[to[which]][:, order]
    return {m: own.get(m, shared_line) for m in selection}


def _benefit(shards: _Shards, slots: Ints, pieces: Ints) -> Floats:
    """[slots, pieces]: the most bytes that stay if this piece of the line goes to this piece of a node.

    slots, pieces: [classes, GPUs, model-stages] shard numbers.
    """
    total = np.zeros((len(slots), len(pieces)))
    for i, common in enumerate(shards.bytes):
        new, which_new = _classes(slots[:, :, i])
        old, which_old = _classes(pieces[:, :, i])
        worth = common[new[:, None, :, None], old[None, :, None, :]]
        kept = worth.trace(axis1=2, axis2=3)
        better = kept < worth.max(axis=3).sum(axis=2) * (1 - 1e-12)
        for a, b in zip(*np.nonzero(better), strict=True):  # exchanging GPUs may keep more
            kept[a, b] = worth[a, b][np.arange(worth.shape[2]), _best(worth[a, b])].sum()
        total += kept[which_new][:, which_old]
    # the above lets every model-stage order the GPUs by itself, which it can only where it has all of them
    partial = np.any(slots >= 0, axis=1) & np.any(slots < 0, axis=1)
    for a in np.flatnonzero(np.any(partial, axis=1)):
        total[a] = [_Inner.of(shards, slots[a], piece).kept for piece in pieces]
    return total


def _classes(rows: Ints) -> tuple[Ints, Ints]:
    """Distinct rows, and which of them each row is."""
    if (rows == rows[0]).all():
        return rows[:1], np.zeros(len(rows), dtype=np.int64)
    packed = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1])))[:, 0]
    _, first, which = np.unique(packed, return_index=True, return_inverse=True)
    return rows[first], which.reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inner:
    """The best way to put one piece of the line on one piece of a node. order: position -> GPU, both local.

    own: the same for each model-stage whose state counts: its own GPUs, in the order that suits it best.
    """

    order: Ints
    own: list[Ints]
    kept: float

    @classmethod
    def of(cls, shards: _Shards, new: Ints, old: Ints) -> _Inner:
        worth = [common[new[:, i]][:, old[:, i]] for i, common in enumerate(shards.bytes)]
        order = _best(np.sum(worth, axis=0))
        own, kept = [], 0.0
        for i, each in enumerate(worth):
            mine = order.copy()
            here = np.flatnonzero(new[:, i] >= 0)
            if len(here):
                mine[here] = order[here][_best(each[np.ix_(here, order[here])])]
            kept += float(each[np.arange(len(mine)), mine].sum())
            own.append(mine)
        return cls(order=order, own=own, kept=kept)


def _best(worth: NDArray[np.float64]) -> Ints:
    """The assignment of rows to columns of the greatest worth; the identity where that is as good."""
    identity = np.arange(len(worth))
    if worth.trace() >= worth.max(axis=1).sum() * (1 - 1e-12):
        return identity
    return np.asarray(linear_sum_assignment(worth, maximize=True)[1])


def match_pieces(benefit: Floats, new_class: Ints, old_class: Ints) -> Ints:
    """[slots]: which piece each slot gets, for the greatest total benefit (class by class)."""
    count = len(new_class)
    to = np.full(count, -1, dtype=np.int64)
    if benefit.size == 1:
        return np.arange(count)
    news = [list(np.flatnonzero(new_class == a)) for a in range(len(benefit))]
    olds = [list(np.flatnonzero(old_class == b)) for b in range(benefit.shape[1])]
    share = 1
    numbers = [len(group) for group in (*news, *olds)]
    if count > LARGEST_ASSIGNMENT:
        share = max(int(np.gcd.reduce(numbers)), -(-count // LARGEST_ASSIGNMENT))
    while any(news):
        for a, b, times in _flows(benefit, [len(g) // share for g in news], [len(g) // share for g in olds]):
            for _ in range(times * share):
                to[news[a].pop(0)] = olds[b].pop(0)
        share = max(1, share // 4)
    return to


def _flows(benefit: Floats, supply: Sequence[int], demand: Sequence[int]) -> list[tuple[int, int, int]]:
    """(new class, old class, how many) of the best assignment of as many as the smaller side has."""
    rows, columns = np.repeat(np.arange(len(supply)), supply), np.repeat(np.arange(len(demand)), demand)
    if not len(rows) or not len(columns):
        return []
    chosen = linear_sum_assignment(benefit[np.ix_(rows, columns)], maximize=True)
    pairs = np.stack([rows[chosen[0]], columns[chosen[1]]], axis=1)
    found, times = np.unique(pairs, axis=0, return_counts=True)
    return [(int(a), int(b), int(n)) for (a, b), n in zip(found, times, strict=True)]
