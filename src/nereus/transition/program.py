"""The transition as it is executed: the DAG, and for each of its primitives the exact regions that are copied.

`plan_transition` estimates from placements; here the very tensors and their holders count, so that it also starts from
what is left after a failure, when GPUs hold parts of shards that no layout describes. Both build the DAG with the same
functions (`groups.direct`, `dag.build`) out of the same quantities; tests hold the one to the other.

    Program
      dag                                    order, edges, seconds, peak memory
      steps[i] of primitive i
        holdings   GPU -> what it holds when the primitive is done   (no entry: nothing after a Destroy or a Reshard, else as
                   before)
        moves      regions to copy, source == target: on the spot
        batches    names of tensors that change together; more than one if streamed
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from nereus.core.errors import StateError
from nereus.core.plan import ACTOR_GENERATION, Layout, ModelStage, Placement, Plan
from nereus.core.sharding import (
    Holding,
    Holdings,
    Move,
    MovePlan,
    StateSpec,
    intersect,
    merge_intervals,
    plan_moves,
    subtract,
)
from nereus.transition.dag import Primitive, TransitionDag, Ways, build
from nereus.transition.estimate import Grid, staged, stream_order
from nereus.transition.groups import Lowering, PrimitiveGroup, Shards, StageChange, direct, made
from nereus.transition.plan import LOWERINGS, changes_of
from nereus.transition.profile import PLACES, StateProfile
from nereus.transition.rates import Floats, Flows, Ints, Rates
from nereus.transition.units import common_layout, split, units_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the GPUs of one primitive do. See the module."""

    primitive: Primitive
    holdings: Holdings
    moves: tuple[Move, ...]
    batches: tuple[frozenset[str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """steps: in the order of issue; those that a step waits for come before it."""

    dag: TransitionDag
    steps: tuple[Step, ...]


def program(
    specs: Mapping[ModelStage, StateSpec],
    holdings: Mapping[ModelStage, Holdings],
    current: Plan,
    target: Plan,
    *,
    node_of: Ints,
    rates: Rates,
    usable_bytes: float,
    base_bytes: float = 0.0,
    lowerings: Sequence[Lowering] = LOWERINGS,
    setup_s: float = 0.0,
    remade: Set[ModelStage] = frozenset({ACTOR_GENERATION}),
) -> Program:
    """From what is held to a plan. current: what it was laid out for; holdings: what is really there, by GPU.

    remade: model-stages that are only made, and filled from elsewhere: by weight_sync, or from a checkpoint.
    A model-stage whose holdings are those of its placement may be staged; others are changed directly.
    Raises InfeasibleTransition, and StateError when something that the target needs is held by no GPU.
    """
    held = np.full(len(node_of), float(base_bytes))
    ways, exact = [], []
    for m, old, new in changes_of(current, target):
        change = _ExactChange(specs[m], m, old, new, holdings.get(m, {}), node_of, rates, remade=m in remade)
        held += change.shards.old_bytes
        exact.append(change)
        ways.append(Ways(change.ways(lowerings)))
    dag = build(ways, held, usable_bytes, setup_s=setup_s, node_of=node_of, rates=rates)
    makers = {change.model_stage: change.steps(dag.lowerings[change.model_stage]) for change in exact}
    numbers = iter(dag.primitives())
    steps = []
    for group in dag.groups:
        primitives = [next(numbers) for _ in range(group.num_parts)]
        steps += makers[group.model_stage].steps(group, primitives)
    order = sorted(range(len(steps)), key=lambda i: (steps[i].primitive.start_s, i))
    return Program(dag=dag, steps=tuple(steps[i] for i in _topological(steps, order)))


def _topological(steps: Sequence[Step], order: Sequence[int]) -> list[int]:
    """`order`, by scheduled start, with what a step waits for moved before it (a Destroy takes no time: starts tie)."""
    found: dict[int, None] = {}
    waiting = list(reversed(order))
    while waiting:
        i = waiting.pop()
        missing = [j for j in steps[i].primitive.after if j not in found]
        if i in found:
            continue
        if missing:
            waiting += [i, *missing]
        else:
            found[i] = None
    return list(found)


class _ExactChange:
    """One model-stage from what its GPUs hold to a placement, or none."""

    def __init__(
        self,
        spec: StateSpec,
        model_stage: ModelStage,
        old: Placement | None,
        new: Placement | None,
        sources: Holdings,
        node_of: Ints,
        rates: Rates,
        *,
        remade: bool,
    ) -> None:
        self.spec, self.model_stage, self.old, self.new = spec, model_stage, old, new
        self.sources = dict(sources)
        self.targets: Holdings = {} if new is None else spec.holdings(new)
        self.node_of, self.rates = node_of, rates
        known = bool(self.sources) or old is not None  # if none of it is left, making it anew would not do
        self.moved = known and bool(self.targets) and not remade
        self._plans: dict[bool, MovePlan] = {}
        self.shards = self._shards()

    def ways(self, lowerings: Sequence[Lowering]) -> Iterator[StageChange]:
        if self.sources == self.targets:
            yield StageChange(model_stage=self.model_stage, lowering="direct", groups=())
            return
        if not self.moved:
            yield made(self.model_stage, self.shards)
            return
        for lowering in lowerings:
            if lowering == "staged":
                with contextlib.suppress(StateError):
                    yield self._staged()
                continue
            peak = self._streamed_peak() if lowering == "streamed" else None
            flows = flows_of(self.spec, self._moves(lowering == "lean").moves)
            yield direct(self.model_stage, lowering, self.shards, flows, self.node_of, self.rates, peak)

    def steps(self, lowering: Lowering) -> _Steps:
        """What makes the steps of this model-stage, for the way that was taken."""
        if lowering == "staged":
            assert self.old is not None and self.new is not None
            return _StagedSteps(self.spec, self.old, self.new, self.node_of)
        moves = self._moves(lowering == "lean").moves if self.moved else ()
        names = self._streamed_names() if lowering == "streamed" else None
        return _DirectSteps(self.spec, self.targets, moves, names)

    def _moves(self, staying: bool) -> MovePlan:
        if staying not in self._plans:
            self._plans[staying] = plan_moves(
                self.spec,
                self.sources,
                self.targets,
                node_of=lambda gpu: int(self.node_of[gpu]),
                preferred=frozenset(self.targets) if staying else frozenset(),
            )
        return self._plans[staying]

    def _shards(self) -> Shards:
        old, new, adopted, received = (np.zeros(len(self.node_of)) for _ in range(4))
        for gpu, held in self.sources.items():
            old[gpu] = self.spec.holding_bytes(held)
        for gpu, wanted in self.targets.items():
            held = self.sources.get(gpu, {})
            new[gpu] = self.spec.holding_bytes(wanted)
            adopted[gpu] = self.spec.holding_bytes({n: i for n, i in wanted.items() if held.get(n) == i})
        if self.moved:
            for gpu, size in self._moves(False).received_bytes.items():
                received[gpu] = size
        return Shards(old_bytes=old, new_bytes=new, adopted_bytes=adopted, received_bytes=received)

    def _staged(self) -> StageChange:
        if self.old is None or self.new is None or self.sources != self.spec.holdings(self.old):
            raise StateError(f"{self.model_stage}: its shards are not those of a layout")
        n = len(self.node_of)
        profile = StateProfile.of(self.spec)
        before, after = Grid.of(self.old, n), Grid.of(self.new, n)
        return staged(self.model_stage, profile, before, after, self.node_of, self.rates)

    def _streamed_names(self) -> tuple[frozenset[str], ...]:
        """Tensors that change together: those of a slot, in the order of `stream_order`."""
        num_layers = self.spec.num_layers
        slots: dict[int, list[str]] = defaultdict(list)
        for t in self.spec.tensors:
            slots[t.layer if t.where == "layer" else num_layers + PLACES.index(t.where)].append(t.name)
        old, new = (Layout() if p is None else p.layout for p in (self.old, self.new))
        order = stream_order(num_layers, old, new, num_layers + len(PLACES))
        return tuple(frozenset(slots[s]) for s in order.tolist() if s in slots)

    def _streamed_peak(self) -> Floats:
        """[GPUs] the most that both take when each batch's sources are freed once it has arrived."""
        now = self.shards.old_bytes.copy()
        peak = now.copy()
        for names in self._streamed_names():
            for gpu in {*self.sources, *self.targets}:
                gone = {n: i for n, i in self.sources.get(gpu, {}).items() if n in names}
                come = {n: i for n, i in self.targets.get(gpu, {}).items() if n in names}
                same = {n: i for n, i in come.items() if gone.get(n) == i}
                adopted = self.spec.holding_bytes(same)
                now[gpu] += self.spec.holding_bytes(come) - adopted
                peak[gpu] = max(peak[gpu], now[gpu])
                now[gpu] -= self.spec.holding_bytes(gone) - adopted
        return np.asarray(peak)


class _Steps(ABC):
    """Makes the steps of one model-stage, group by group."""

    def __init__(self, spec: StateSpec, targets: Holdings) -> None:
        self.spec, self.targets = spec, targets
        self.everything = (frozenset(t.name for t in spec.tensors),)

    @abstractmethod
    def steps(self, group: PrimitiveGroup, primitives: Sequence[Primitive]) -> list[Step]:
        """One for each primitive of a group."""

    def step(
        self,
        primitive: Primitive,
        holdings: Holdings,
        moves: Sequence[Move] = (),
        batches: tuple[frozenset[str], ...] | None = None,
    ) -> Step:
        return Step(primitive=primitive, holdings=holdings, moves=tuple(moves), batches=batches or self.everything)


class _DirectSteps(_Steps):
    """batches: if streamed."""

    def __init__(
        self,
        spec: StateSpec,
        targets: Holdings,
        moves: Sequence[Move],
        batches: tuple[frozenset[str], ...] | None,
    ) -> None:
        super().__init__(spec, targets)
        self.moves, self.batches = moves, batches

    def steps(self, group: PrimitiveGroup, primitives: Sequence[Primitive]) -> list[Step]:
        part_of = dict(zip(group.gpus.tolist(), group.part.tolist(), strict=True))
        moves: list[list[Move]] = [[] for _ in primitives]
        if group.kind == "reshard":
            for move in self.moves:
                if move.target in part_of:
                    moves[part_of[move.target]].append(move)
        found = []
        for primitive, listed in zip(primitives, moves, strict=True):
            after = {} if group.kind == "destroy" else {g: self.targets[g] for g in primitive.gpus if g in self.targets}
            found.append(self.step(primitive, after, listed, self.batches if group.kind == "reshard" else None))
        return found


class _StagedSteps(_Steps):
    """Through the holdings of the common layout."""

    def __init__(self, spec: StateSpec, old: Placement, new: Placement, node_of: Ints) -> None:
        super().__init__(spec, spec.holdings(new))
        self.sources = spec.holdings(old)
        sub = common_layout(old.layout, new.layout)
        self._before, self._after = (_sub_holdings(spec, p, sub) for p in (old, new))
        self._node_of = node_of

    def steps(self, group: PrimitiveGroup, primitives: Sequence[Primitive]) -> list[Step]:
        return [getattr(self, f"_{group.kind}")(primitive) for primitive in primitives]

    def _destroy(self, primitive: Primitive) -> Step:
        return self.step(primitive, {})

    def _split(self, primitive: Primitive) -> Step:
        sources = {g: self.sources[g] for g in primitive.gpus}
        return self._copied(primitive, sources, {g: self._before[g] for g in primitive.gpus})

    def _extend(self, primitive: Primitive) -> Step:
        sources = {g: self._before[g] for g in primitive.gpus if g in self._before}
        return self._copied(primitive, sources, {g: self._after[g] for g in primitive.gpus if g not in sources})

    def _merge(self, primitive: Primitive) -> Step:
        sources = {g: self._after[g] for g in primitive.gpus}
        return self._copied(primitive, sources, {g: self.targets[g] for g in primitive.gpus})

    def _copied(self, primitive: Primitive, sources: Holdings, targets: Holdings) -> Step:
        moves = plan_moves(self.spec, sources, targets, node_of=lambda gpu: int(self._node_of[gpu])).moves
        return self.step(primitive, targets, moves)


def _sub_holdings(spec: StateSpec, placement: Placement, sub: Layout) -> Holdings:
    """What every GPU of a placement holds when its units have been split to `sub`."""
    split_units = (u for unit in units_of(placement) for u in split(unit, sub))
    positions = [spec.position_holding(sub, p, t) for p in range(sub.pp) for t in range(sub.tp)]
    return {gpu: positions[at] for unit in split_units for at, gpu in enumerate(unit.gpus)}


def flows_of(spec: StateSpec, moves: Sequence[Move]) -> Flows:
    """How many bytes go from GPU to GPU."""
    index_bytes = {t.name: t.index_bytes for t in spec.tensors}
    total: dict[tuple[int, int], int] = defaultdict(int)
    for m in moves:
        if m.source != m.target:
            total[(m.source, m.target)] += index_bytes[m.tensor] * (m.stop - m.start)
    if not total:
        return Flows.none()
    pairs = np.array(list(total), dtype=np.int64)
    return Flows(source=pairs[:, 0], target=pairs[:, 1], num_bytes=np.array(list(total.values()), dtype=np.float64))


def union(a: Holding, b: Holding) -> Holding:
    """What a GPU has that holds both."""
    return {name: merge_intervals((*a.get(name, ()), *b.get(name, ()))) for name in {**a, **b}}


def missing(spec: StateSpec, holdings: Holdings) -> dict[str, tuple[tuple[int, int], ...]]:
    """The regions of a state that no GPU holds, by tensor; empty if all is there."""
    lost = {}
    for t in spec.tensors:
        held = merge_intervals(i for h in holdings.values() for i in h.get(t.name, ()))
        if gap := subtract(((0, t.length),), intersect(((0, t.length),), held)):
            lost[t.name] = gap
    return lost
