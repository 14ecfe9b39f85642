"""The global transition DAG: the changes of all model-stages, put in one order that cannot deadlock or overflow memory.

Groups of primitives are taken one by one: what releases first, then by the order of kinds, then generation before inference
before training. A group that takes memory is taken only if it fits *in every legal order of execution*: on each of its
GPUs, with everything that was taken before it allocated and nothing freed but what this group must wait for in any case.
Where that is too much, it waits for releases of other model-stages on that GPU, as many as it needs: a `ResourceEdge`.
Groups depend only on groups taken earlier, so the graph is acyclic by construction.

If no group fits, model-stages are tried in another order, then in ways that need less memory (`StageChange.lowering`), at
last all orders of all ways; if there is none, the target is infeasible, and `InfeasibleTransition` says which GPUs are short
of what.

Of several orders that fit the one with the shortest schedule is taken. The schedule: every GPU does its primitives in this
order, one at a time; a part begins when all of its GPUs have come to it. It gives the transition's seconds and the memory
of every GPU at every moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, permutations, product
from typing import Any, get_args

import numpy as np

from nereus.core.errors import PlanError
from nereus.core.plan import ModelStage
from nereus.transition.groups import Kind, Lowering, PrimitiveGroup, StageChange
from nereus.transition.rates import Floats, Ints, Rates

KINDS: tuple[str, ...] = get_args(Kind)
GIB = 2**30
CLOSE = 1.001
"""A schedule this close to what no schedule can be shorter than is not improved on."""
MOST_ORDERS = 12
"""Of the model-stages, that are tried for a shorter schedule."""
MOST_WAYS = len(get_args(Lowering))
MOST_SEARCHED = 20_000
"""Groups that are tried in a search through all orders and ways, before a target is called infeasible."""
SLACK_BYTES = 0.5
"""Sums of whole bytes are exact in float64 below 2**53; what is on a GPU in any case may be a fraction."""


class InfeasibleTransition(PlanError):
    """No order and no way to change keeps every GPU within its memory. gpus: those that are short."""

    def __init__(self, message: str, gpus: tuple[int, ...]) -> None:
        super().__init__(message)
        self.gpus = gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceEdge:
    """On each of these GPUs the acquiring primitive waits for the releasing one. Both are numbers of groups of a DAG."""

    release: int
    acquire: int
    gpus: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Primitive:
    """One node of the graph: a part of a group. after: the nodes that it waits for."""

    number: int
    kind: Kind
    model_stage: ModelStage
    gpus: tuple[int, ...]
    start_s: float
    seconds: float
    received_bytes: float
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionDag:
    """groups: in the order of issue. starts: [parts] of each group, seconds from the beginning.

    held_bytes: [GPUs] before the transition. peak_bytes: [GPUs] the most at any moment of the schedule.
    """

    groups: tuple[PrimitiveGroup, ...]
    edges: tuple[ResourceEdge, ...]
    lowerings: dict[ModelStage, Lowering]
    starts: tuple[Floats, ...]
    held_bytes: Floats
    peak_bytes: Floats
    seconds: float

    @property
    def received_bytes(self) -> float:
        return float(sum(g.received_bytes.sum() for g in self.groups))

    def changes(self, model_stage: ModelStage) -> bool:
        """Whether a model-stage does anything."""
        return any(g.model_stage == model_stage for g in self.groups)

    def received_by_gpu(self) -> Floats:
        """[GPUs]"""
        return self._by_gpu(lambda group: group.received_bytes)

    def copied_by_gpu(self) -> Floats:
        """[GPUs] on the spot."""
        return self._by_gpu(lambda group: group.copied_bytes)

    def _by_gpu(self, of: Callable[[PrimitiveGroup], Floats]) -> Floats:
        total = np.zeros(len(self.held_bytes))
        for g in self.groups:
            total[g.gpus] += of(g)
        return total

    def primitives(self) -> tuple[Primitive, ...]:
        """Every node, in the order of issue, with what it waits for: its own model-stage's and the resource edges."""
        return tuple(_primitives(self))

    def to_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "received_bytes": self.received_bytes,
            "peak_bytes": float(self.peak_bytes.max(initial=0.0)),
            "lowerings": {str(m): way for m, way in self.lowerings.items()},
            "edges": [{"release": e.release, "acquire": e.acquire, "gpus": e.gpus.tolist()} for e in self.edges],
            "groups": [
                {
                    "kind": g.kind,
                    "model_stage": str(g.model_stage),
                    "primitives": g.num_parts,
                    "gpus": len(g.gpus),
                    "received_bytes": float(g.received_bytes.sum()),
                    "seconds": float(g.seconds.max(initial=0.0)),
                    "start_s": float(starts.min(initial=0.0)),
                }
                for g, starts in zip(self.groups, self.starts, strict=True)
            ],
        }


class Ways:
    """The ways to change one model-stage, in the order of preference; a later one is worked out when it is needed."""

    def __init__(self, changes: Iterable[StageChange]) -> None:
        self._found: list[StageChange] = []
        self._more = iter(changes)

    def get(self, index: int) -> StageChange | None:
        """None when there are no more."""
        while len(self._found) <= index:
            change = next(self._more, None)
            if change is None:
                return None
            self._found.append(change)
        return self._found[index]

    def all(self) -> list[StageChange]:
        return [change for i in range(MOST_WAYS) if (change := self.get(i)) is not None]


def build(
    ways: Sequence[Ways],
    held_bytes: Floats,
    usable_bytes: float,
    *,
    setup_s: float = 0.0,
    node_of: Ints | None = None,
    rates: Rates | None = None,
) -> TransitionDag:
    """The DAG of a change of all model-stages.

    ways: of each model-stage, in stage order. held_bytes: [GPUs] what all model-stages,
    changing or not, hold now. usable_bytes: of one GPU's memory. setup_s: once, for communicators. node_of, rates: where the
    GPUs of a node can do only so much together.
    Raises InfeasibleTransition.
    """
    chosen = [0] * len(ways)
    changes = [way.get(0) or _no_way() for way in ways]
    while True:
        attempt = _attempts(changes, held_bytes, usable_bytes)
        if not attempt.blocked:
            shortest = _shortest(attempt, changes, held_bytes, usable_bytes)
            return _scheduled(shortest, changes, held_bytes, setup_s, node_of, rates)
        others = [(i, other) for i in attempt.blocked if (other := ways[i].get(chosen[i] + 1)) is not None]
        if not others:
            searched, changes = _searched(ways, held_bytes, usable_bytes) or (attempt, changes)
            if searched.blocked:
                raise attempt.infeasible(usable_bytes)
            return _scheduled(searched, changes, held_bytes, setup_s, node_of, rates)
        index, other = min(others, key=lambda pair: pair[1].seconds - changes[pair[0]].seconds)
        chosen[index] += 1
        changes[index] = other


def _no_way() -> StageChange:
    raise PlanError("a model-stage has no way to change")


def _attempts(changes: Sequence[StageChange], held: Floats, usable: float) -> _Builder:
    """In stage order; if that gets stuck, with each of the stuck model-stages first."""
    first = _Builder.run(changes, range(len(changes)), held, usable)
    for stuck in first.blocked:
        again = _Builder.run(changes, [stuck, *(i for i in range(len(changes)) if i != stuck)], held, usable)
        if not again.blocked:
            return again
    return first


def _searched(ways: Sequence[Ways], held: Floats, usable: float) -> tuple[_Builder, list[StageChange]] | None:
    """Every order of groups of every combination of ways, the shortest first, until one fits or `MOST_SEARCHED`."""
    left = MOST_SEARCHED
    for changes in sorted(product(*(way.all() for way in ways)), key=lambda all_: sum(c.seconds for c in all_)):
        sequence, left = _sequence(changes, held, usable, left)
        if sequence is not None:
            return _Builder.follow(changes, sequence, held, usable), list(changes)
        if left <= 0:
            break
    return None


def _sequence(
    changes: Sequence[StageChange], held: Floats, usable: float, left: int
) -> tuple[tuple[int, ...] | None, int]:
    """(whose group is next, again and again, so that all fit; what is left of the groups that may be tried).

    What is on a GPU depends on how many groups of each model-stage are done, not on their order.
    """
    end = tuple(len(c.groups) for c in changes)
    seen = {(0,) * len(changes)}
    waiting: list[tuple[tuple[int, ...], tuple[int, ...], Floats]] = [((0,) * len(changes), (), held)]
    while waiting and left > 0:
        at, sequence, now = waiting.pop()
        if at == end:
            return sequence, left
        for i in (i for i in range(len(changes)) if at[i] < end[i]):
            group, reached = changes[i].groups[at[i]], (*at[:i], at[i] + 1, *at[i + 1 :])
            left -= 1
            if reached in seen:
                continue
            over = now[group.gpus] + group.take_bytes > usable + SLACK_BYTES
            if not (over & (group.take_bytes > 0)).any():
                after = now.copy()
                after[group.gpus] += group.take_bytes - group.free_bytes
                seen.add(reached)
                waiting.append((reached, (*sequence, i), after))
    return None, left


def _shortest(first: _Builder, changes: Sequence[StageChange], held: Floats, usable: float) -> _Builder:
    """Other orders of the model-stages, longest first, for as long as no GPU and no model-stage explains the seconds."""
    best, (seconds, enough) = first, first.seconds_and_bound()
    if seconds <= enough * CLOSE:
        return best
    busy = sorted((i for i, c in enumerate(changes) if c.seconds > 0), key=lambda i: -changes[i].seconds)
    idle = [i for i in range(len(changes)) if i not in busy]
    for order in islice(permutations(busy), MOST_ORDERS):
        other = _Builder.run(changes, [*order, *idle], held, usable)
        if not other.blocked and (found := other.seconds_and_bound()[0]) < seconds:
            best, seconds = other, found
            if seconds <= enough * CLOSE:
                break
    return best


@dataclass(slots=True, kw_only=True)
class _Builder:
    """taken: [GPUs] held before, and all that was taken since. freed: by model-stage, what its own groups gave back."""

    usable: float
    taken: Floats
    freed: dict[ModelStage, Floats]
    groups: list[PrimitiveGroup]
    edges: list[ResourceEdge]
    blocked: list[int]
    short: Floats

    @classmethod
    def run(cls, changes: Sequence[StageChange], order: Sequence[int], held: Floats, usable: float) -> _Builder:
        """Take all groups; those of the same kind in `order` of the model-stages. blocked: whose groups did not fit."""
        self = cls.empty(held, usable)
        queues = {i: list(changes[i].groups) for i in order if changes[i].groups}
        while queues:
            heads = sorted(queues, key=lambda i: KINDS.index(queues[i][0].kind))  # stable: ties keep the order
            done = next((i for i in heads if self.take(queues[i][0])), None)
            if done is None:
                self.blocked = sorted(queues)
                break
            queues[done].pop(0)
            if not queues[done]:
                del queues[done]
        return self

    @classmethod
    def empty(cls, held: Floats, usable: float) -> _Builder:
        short = np.zeros(len(held))
        return cls(usable=usable, taken=held.copy(), freed={}, groups=[], edges=[], blocked=[], short=short)

    @classmethod
    def follow(cls, changes: Sequence[StageChange], sequence: Sequence[int], held: Floats, usable: float) -> _Builder:
        """Take the groups in an order that is known to fit."""
        self = cls.empty(held, usable)
        groups = [iter(c.groups) for c in changes]
        for i in sequence:
            fits = self.take(next(groups[i]))
            assert fits, "a group fits whenever all before it are done"
        return self

    def take(self, group: PrimitiveGroup) -> bool:
        """Put a group at the end of the order if it fits, with the edges it needs."""
        if group.take_bytes.any():
            edges = self.edges_for(group)
            if edges is None:
                return False
            self.edges += edges
            self.taken[group.gpus] += group.take_bytes
        own = self.freed.get(group.model_stage)
        if own is None:
            own = self.freed[group.model_stage] = np.zeros(len(self.taken))
        own[group.gpus] += group.free_bytes
        self.groups.append(group)
        return True

    def edges_for(self, group: PrimitiveGroup) -> list[ResourceEdge] | None:
        """What a group must wait for; None if that is not enough."""
        short = self.taken[group.gpus] + group.take_bytes - self.usable
        own = self.freed.get(group.model_stage)
        if own is not None:
            short -= own[group.gpus]
        short[group.take_bytes <= 0] = 0
        edges: list[ResourceEdge] = []
        if short.max() <= SLACK_BYTES:
            return edges
        at = np.full(len(self.taken), -1, dtype=np.int64)
        at[group.gpus] = np.arange(len(group.gpus))
        for number, release in enumerate(self.groups):
            if release.model_stage == group.model_stage:
                continue
            index = at[release.gpus]
            helps = (index >= 0) & (release.free_bytes > 0)
            helps[helps] = short[index[helps]] > SLACK_BYTES
            if helps.any():
                short[index[helps]] -= release.free_bytes[helps]
                edges.append(ResourceEdge(release=number, acquire=len(self.groups), gpus=release.gpus[helps]))
        if short.max() <= SLACK_BYTES:
            return edges
        self.short[group.gpus] = np.maximum(self.short[group.gpus], short)
        return None

    def seconds_and_bound(self) -> tuple[float, float]:
        """When the last GPU is done; and the busiest GPU's or the longest model-stage's seconds: no order has less."""
        done, busy = np.zeros(len(self.taken)), np.zeros(len(self.taken))
        lasting = [g for g in self.groups if g.seconds.any()]
        for g in lasting:
            starts_of(g, done)
            busy[g.gpus] += g.seconds[g.part]
        seconds, bound = float(done.max(initial=0.0)), float(busy.max(initial=0.0))
        if seconds <= bound * CLOSE:
            return seconds, bound
        for model_stage in {g.model_stage for g in lasting}:
            alone = np.zeros(len(self.taken))
            for g in (g for g in lasting if g.model_stage == model_stage):
                starts_of(g, alone)
            bound = max(bound, float(alone.max()))
        return seconds, bound

    def infeasible(self, usable: float) -> InfeasibleTransition:
        gpus = np.flatnonzero(self.short > SLACK_BYTES)
        worst = int(gpus[np.argmax(self.short[gpus])])
        listed = ", ".join(map(str, gpus[:8].tolist())) + (f" and {len(gpus) - 8} more" if len(gpus) > 8 else "")
        return InfeasibleTransition(
            f"no order of the transition fits: GPUs {listed} are short of memory, GPU {worst} by "
            f"{self.short[worst] / GIB:.2f} GiB of {usable / GIB:.2f} GiB, and nothing there can be released before",
            tuple(gpus.tolist()),
        )


def _scheduled(
    built: _Builder,
    changes: Sequence[StageChange],
    held: Floats,
    setup_s: float,
    node_of: Ints | None,
    rates: Rates | None,
) -> TransitionDag:
    free_at, now, peak = np.zeros(len(held)), held.copy(), held.copy()
    starts = []
    for g in built.groups:
        starts.append(starts_of(g, free_at))
        now[g.gpus] += g.take_bytes
        peak[g.gpus] = np.maximum(peak[g.gpus], now[g.gpus])
        now[g.gpus] -= g.free_bytes
    dag = TransitionDag(
        groups=tuple(built.groups),
        edges=tuple(built.edges),
        lowerings={c.model_stage: c.lowering for c in changes},
        starts=tuple(starts),
        held_bytes=held,
        peak_bytes=peak,
        seconds=float(free_at.max(initial=0.0)),
    )
    seconds = dag.seconds
    if node_of is not None and rates is not None and np.isfinite(rates.node_bytes_s):
        seconds = max(seconds, rates.node_seconds(dag.received_by_gpu(), dag.copied_by_gpu(), node_of))
    return replace(dag, seconds=seconds + (setup_s if built.groups else 0.0))


def starts_of(group: PrimitiveGroup, free_at: Floats) -> Floats:
    """[parts] when the last of each part's GPUs is free. free_at: [GPUs], moved on to the parts' ends."""
    start = np.zeros(group.num_parts)
    np.maximum.at(start, group.part, free_at[group.gpus])
    free_at[group.gpus] = (start + group.seconds)[group.part]
    return start


def _primitives(dag: TransitionDag) -> Iterator[Primitive]:
    """A node waits for the nearest earlier nodes of its model-stage on its GPUs, and along the resource edges."""
    last: dict[tuple[ModelStage, int], int] = {}
    node_at: list[dict[int, int]] = []
    number = 0
    for index, (g, starts) in enumerate(zip(dag.groups, dag.starts, strict=True)):
        node_at.append({gpu: number + part for gpu, part in zip(g.gpus.tolist(), g.part.tolist(), strict=True)})
        waits: dict[int, set[int]] = {}
        for gpu, node in node_at[-1].items():
            if (before := last.get((g.model_stage, gpu))) is not None:
                waits.setdefault(node, set()).add(before)
            last[(g.model_stage, gpu)] = node
        for e in (e for e in dag.edges if e.acquire == index):
            for gpu in e.gpus.tolist():
                waits.setdefault(node_at[-1][gpu], set()).add(node_at[e.release][gpu])
        received = np.bincount(g.part, g.received_bytes, g.num_parts)
        for part in range(g.num_parts):
            yield Primitive(
                number=number + part,
                kind=g.kind,
                model_stage=g.model_stage,
                gpus=g.part_gpus(part),
                start_s=float(starts[part]),
                seconds=float(g.seconds[part]),
                received_bytes=float(received[part]),
                after=tuple(sorted(waits.get(number + part, ()))),
            )
        number += g.num_parts
