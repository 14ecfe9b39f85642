"""From canonical positions to concrete GPUs: the same plan, laid so that as much resident state as possible stays.

Nodes may be exchanged for nodes, and GPUs within a node; neither changes what the plan costs. Two nested assignment
problems (`scipy.optimize.linear_sum_assignment`): for a piece of the line and a piece of a node, which GPU takes which
position; then which piece goes where. Pieces with the same content are one class, so 2,048 nodes are a few classes.

What an old shard and a new one have in common is a share of the layers times a share of each layer: shard (pp_stage,
tp_rank) of Layout(tp, pp) is taken as a rectangle in the unit square, pp_stages along one side and tp along the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from nereus.core.plan import ACTOR_GENERATION, Layout, ModelStage, Placement, Plan
from nereus.planner.frontier import Floats, Ints
from nereus.planner.problem import Problem, Selection

LARGEST_ASSIGNMENT = 256
"""Pieces, or groups of them, that are assigned in one go; of more, equal shares of each class go together."""


def shared(new: Layout, old: Layout) -> Floats:
    """[new.size, old.size]: the share of the whole state that a new and an old shard have in common; tp fastest."""

    by_layers, by_tensors = _overlaps(new.pp, old.pp), _overlaps(new.tp, old.tp)
    return np.asarray((by_layers[:, None, :, None] * by_tensors[:, None]).reshape(new.size, old.size))


def _overlaps(parts: int, others: int) -> Floats:
    """[parts, others]: what the parts of two even cuts of the unit interval have in common."""
    a, b = np.arange(parts + 1)[:, None] / parts, np.arange(others + 1) / others
    return np.asarray(np.maximum(0.0, np.minimum(a[1:], b[1:]) - np.maximum(a[:-1], b[:-1])))


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
    line = problem.pool.line
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
    devices = {m: np.array(current[m].gpus) for m in sizes}
    place_of = np.full(max(map(np.max, [line, *devices.values()])) + 1, -1, dtype=np.int64)
    place_of[line] = np.arange(len(line))
    for i, (m, size) in enumerate(sizes.items()):
        table, choice, held = problem.tables[m], selection[m], current[m].layout
        layout, gpus = Layout(int(table.tp[choice.row]), int(table.pp[choice.row])), int(table.gpus[choice.row])
        new[choice.start : choice.start + gpus, i] = np.arange(gpus) % layout.size
        at, shards = place_of[devices[m]], np.arange(len(devices[m])) % held.size
        old[at[at >= 0], i] = shards[at >= 0]
        bordered = np.zeros((layout.size + 1, held.size + 1))
        np.multiply(shared(layout, held), size, out=bordered[:-1, :-1])
        common.append(bordered)
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
        inner = _Inners(shards, slots, pieces)
        to = match_pieces(_benefit(inner), new_class, old_class)
        pairs, which = np.unique(new_class * len(pieces) + old_class[to], return_inverse=True)
        chosen = [inner.of(*divmod(pair, len(pieces))) for pair in pairs.tolist()]
        first = here.start + to[:, None] * length  # of each slot's piece
        shared_line[here] = line[first + np.array([c.order for c in chosen])[which]].ravel()
        for i, m in enumerate(sizes):
            own[m][here] = line[first + np.array([c.own[i] for c in chosen])[which]].ravel()
    return {m: own.get(m, shared_line) for m in selection}


def _benefit(inner: _Inners) -> Floats:
    """[slots, pieces]: the most bytes that stay if this piece of the line goes to this piece of a node."""
    shards, slots, pieces = inner.shards, inner.slots, inner.pieces
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
        total[a] = [inner.of(int(a), b).kept for b in range(len(pieces))]
    return total


def _classes(rows: Ints) -> tuple[Ints, Ints]:
    """Distinct rows, and which of them each row is."""
    if (rows == rows[0]).all():
        return rows[:1], np.zeros(len(rows), dtype=np.int64)
    content, width = rows.tobytes(), rows[0].nbytes
    numbers: dict[bytes, int] = {}
    which: list[int] = []
    first: list[int] = []
    for i in range(len(rows)):
        number = numbers.setdefault(content[i * width : (i + 1) * width], len(numbers))
        if number == len(first):
            first.append(i)
        which.append(number)
    return rows[first], np.array(which)


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
        worth = np.array([common[new[:, i, None], old[:, i]] for i, common in enumerate(shards.bytes)])
        order = _best(worth.sum(axis=0))
        own, kept = [], 0.0
        for i, each in enumerate(worth):
            mine = order.copy()
            here = np.flatnonzero(new[:, i] >= 0)
            if len(here):
                mine[here] = order[here][_best(each[here[:, None], order[here]])]
            kept += float(each[np.arange(len(mine)), mine].sum())
            own.append(mine)
        return cls(order=order, own=own, kept=kept)


@dataclass(frozen=True, slots=True)
class _Inners:
    """The best ways, by class of pieces of the line and of the nodes; each worked out once.

    slots, pieces: [classes, GPUs, model-stages] shard numbers.
    """

    shards: _Shards
    slots: Ints
    pieces: Ints
    known: dict[tuple[int, int], _Inner] = field(default_factory=dict)

    def of(self, slot: int, piece: int) -> _Inner:
        if (slot, piece) not in self.known:
            self.known[slot, piece] = _Inner.of(self.shards, self.slots[slot], self.pieces[piece])
        return self.known[slot, piece]


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
    news = [(new_class == a).nonzero()[0].tolist() for a in range(len(benefit))]
    olds = [(old_class == b).nonzero()[0].tolist() for b in range(benefit.shape[1])]
    # whole multiples of a common divisor of all class sizes are exact: a transportation problem has an integral optimum
    share = max(math.gcd(*map(len, (*news, *olds))), -(-count // LARGEST_ASSIGNMENT))
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
    chosen = linear_sum_assignment(benefit[rows[:, None], columns], maximize=True)
    pairs, times = np.unique(rows[chosen[0]] * len(demand) + columns[chosen[1]], return_counts=True)
    return [(*divmod(pair, len(demand)), n) for pair, n in zip(pairs.tolist(), times.tolist(), strict=True)]
