"""Random transitions, and a simulation of programs on arrays of element ids that shares no code with what it checks.

Elements are the indices along the cut dimension of every tensor, all tensors one after the other. What a GPU must hold
comes from `state_cases` (head by head, layer by layer); what it has is an array [elements] that contains each element's
own number where it is held and -1 elsewhere, so that a wrong copy is seen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from state_cases import Heads, Rows, State, index_bytes, make_tensor, transformer

from nereus.core.plan import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    REFERENCE_INFERENCE,
    REWARD_INFERENCE,
    Layout,
    ModelStage,
    Placement,
    Plan,
)
from nereus.core.sharding import StateSpec
from nereus.transition.profile import StateProfile
from nereus.transition.program import Program, Step
from nereus.transition.rates import Rates

Array = NDArray[np.int64]

FIVE = (ACTOR_GENERATION, REFERENCE_INFERENCE, REWARD_INFERENCE, ACTOR_TRAINING, CRITIC_TRAINING)
RATES = Rates(
    intra_bytes_s=100.0,
    inter_bytes_s=10.0,
    copy_bytes_s=1000.0,
    intra_latency_s=1e-3,
    inter_latency_s=2e-3,
    setup_s=1e-2,
)


# -- states and plans ------------------------------------------------------------------------------------------------


def random_state(rng: random.Random) -> State:
    """A small decoder, or a few tensors of any kind."""
    if rng.random() < 0.3:
        kv = rng.randint(1, 3)
        return transformer(
            layers=rng.randint(1, 5),
            hidden=rng.randint(1, 3),
            heads=kv * rng.randint(1, 3),
            kv=kv,
            head_dim=rng.randint(1, 2),
            mlp=rng.randint(1, 9),
            vocab=rng.randint(3, 13),
            fused=rng.random() < 0.5,
            tied=rng.random() < 0.5,
        )
    layers = rng.randint(1, 6)
    found = []
    for i in range(rng.randint(2, 7)):
        where = rng.choice(("layer", "layer", "layer", "first", "last", "ends", "everywhere"))
        layer = rng.randrange(layers) if where == "layer" else -1
        parts = tuple(_random_part(rng) for _ in range(rng.randint(0, 2)))
        dtype = rng.choice(("float32", "bfloat16", "int64"))
        found.append(make_tensor(f"t{i}", where, layer, parts, rng.randint(0, 1), rng.randint(0, 2), dtype))
    return State(tuple(found), layers)


def _random_part(rng: random.Random) -> Rows | Heads:
    kind = rng.randrange(3)
    if kind == 0:
        return Rows(rng.randint(1, 9))
    kv, dim = rng.randint(1, 4), rng.randint(1, 3)
    return Heads(kv * (1 if kind == 1 else rng.randint(1, 4)), kv, dim)


def random_placement(
    rng: random.Random, m: ModelStage, pool: int, degrees: tuple[int, ...] = (1, 2, 3, 4)
) -> Placement:
    """Any layout and dp on any GPUs; mostly in rank order, as plans are."""
    while True:
        tp, pp, dp = rng.choice(degrees), rng.choice(degrees), rng.choice(degrees)
        if (size := tp * pp * dp) <= pool:
            break
    first = rng.randint(0, pool - size)
    gpus = list(range(first, first + size)) if rng.random() < 0.6 else rng.sample(range(pool), size)
    return Placement(model_stage=m, layout=Layout(tp, pp), dp=dp, gpus=tuple(gpus))


@dataclass(frozen=True, kw_only=True)
class Case:
    """Two plans, and the states of their model-stages."""

    states: dict[ModelStage, State]
    current: Plan
    target: Plan
    node_of: Array

    @property
    def num_gpus(self) -> int:
        return len(self.node_of)

    @cached_property
    def elements(self) -> dict[ModelStage, Elements]:
        return {m: Elements.of(s) for m, s in self.states.items()}

    @property
    def specs(self) -> dict[ModelStage, StateSpec]:
        return {m: s.spec for m, s in self.states.items()}

    @cached_property
    def resting_bytes(self) -> float:
        """What the fullest GPU holds before or after."""
        return float(max(self.at_rest(plan).max() for plan in (self.current, self.target)))

    def at_rest(self, plan: Plan) -> NDArray[np.float64]:
        """[GPUs] bytes that a plan holds on each."""
        total = np.zeros(self.num_gpus)
        for p in plan.placements:
            elements = self.elements[p.model_stage]
            for gpu, held in elements.wanted(p).items():
                total[gpu] += elements.weights @ held
        return total

    def initial(self) -> dict[ModelStage, NDArray[np.bool_]]:
        """[GPUs, elements] what each holds of every model-stage under the current plan."""
        found = {m: np.zeros((self.num_gpus, len(e.weights)), dtype=bool) for m, e in self.elements.items()}
        for p in self.current.placements:
            for gpu, held in self.elements[p.model_stage].wanted(p).items():
                found[p.model_stage][gpu] = held
        return found

    @property
    def profiles(self) -> dict[ModelStage, StateProfile]:
        return {m: StateProfile.of(s.spec) for m, s in self.states.items()}


def random_case(rng: random.Random, *, stages: int | None = None, pool: int | None = None) -> Case:
    """Up to five model-stages on up to twelve GPUs; now and then one is only in one of the plans, or stays as it is."""
    pool, count = pool or rng.randint(2, 12), stages or rng.randint(1, 5)
    chosen = rng.sample(FIVE, count)
    states = {m: random_state(rng) for m in chosen}
    before, after = [], []
    for m in chosen:
        old = random_placement(rng, m, pool)
        new = old if rng.random() < 0.1 else random_placement(rng, m, pool)
        before += [old] if rng.random() < 0.95 or not before else []
        after += [new] if rng.random() < 0.95 or not after else []
    node = rng.choice([2, 4, 16])
    current, target = Plan(tuple(before)), Plan(tuple(after))
    return Case(states=states, current=current, target=target, node_of=np.arange(pool) // node)


# -- elements --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Elements:
    """The elements of a state. first: of each tensor. weights: [elements] bytes. tensor: [elements] number of its tensor."""

    state: State
    first: dict[str, int]
    weights: Array
    tensor: Array
    names: tuple[str, ...]
    _masks: dict[object, NDArray[np.bool_]] = field(default_factory=dict)
    _wanted: dict[object, dict[int, NDArray[np.bool_]]] = field(default_factory=dict)

    @classmethod
    def of(cls, state: State) -> Elements:
        first, weights, tensor = {}, [], []
        for i, t in enumerate(state.tensors):
            length = sum(p.size for p in t.parts) or t.spec.shape[0]
            first[t.spec.name] = len(weights)
            weights += [index_bytes(t)] * length
            tensor += [i] * length
        return cls(state, first, np.array(weights), np.array(tensor), tuple(first))

    def wanted(self, placement: Placement) -> dict[int, NDArray[np.bool_]]:
        """By GPU, what it must hold."""
        key = (placement.layout, placement.gpus)
        if key not in self._wanted:
            unit = replace(placement, dp=1, gpus=placement.unit_gpus(0))
            by_position = [self.mask(rows) for rows in self.state.held(unit).values()]
            size = len(by_position)
            self._wanted[key] = {gpu: by_position[i % size] for i, gpu in enumerate(placement.gpus)}
        return self._wanted[key]

    def mask(self, rows: Mapping[str, list[int]]) -> NDArray[np.bool_]:
        found = np.zeros(len(self.weights), dtype=bool)
        for name, held in rows.items():
            found[self.first[name] + np.array(held, dtype=int)] = True
        return found

    def intervals(self, holding: Mapping[str, tuple[tuple[int, int], ...]]) -> NDArray[np.bool_]:
        """What a holding says."""
        key = tuple(holding.items())
        if key not in self._masks:
            rows = {name: [i for a, b in pieces for i in range(a, b)] for name, pieces in key}
            self._masks[key] = self.mask(rows)
        return self._masks[key]

    def of_tensors(self, names: frozenset[str]) -> NDArray[np.bool_]:
        if names not in self._masks:
            self._masks[names] = np.isin(self.tensor, [i for i, name in enumerate(self.names) if name in names])
        return self._masks[names]

    def holding(self, held: NDArray[np.bool_]) -> dict[str, tuple[tuple[int, int], ...]]:
        """The inverse of `intervals`, without the tensors of which nothing is held."""
        found = {}
        for i, name in enumerate(self.names):
            edges = np.flatnonzero(np.diff(np.concatenate([[0], held[self.tensor == i], [0]]).astype(int)))
            if len(edges):
                found[name] = tuple((int(a), int(b)) for a, b in edges.reshape(-1, 2))
        return found

    def whole(self, equal: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Elements of the tensors all of whose elements are `equal`."""
        differ = np.bincount(self.tensor, ~equal, len(self.names))
        return np.asarray(differ == 0)[self.tensor]


def lower_bound(elements: Elements, old: Placement, new: Placement) -> dict[int, int]:
    """Bytes that each GPU needs and does not hold."""
    held, wanted = elements.wanted(old), elements.wanted(new)
    nothing = np.zeros(len(elements.weights), dtype=bool)
    return {gpu: int(elements.weights[want & ~held.get(gpu, nothing)].sum()) for gpu, want in wanted.items()}


# -- simulation ------------------------------------------------------------------------------------------------------


@dataclass
class Running:
    """A primitive under way. new: what it has written so far, by GPU; batch: the next one."""

    step: Step
    new: dict[int, Array]
    batch: int = 0


@dataclass
class Simulation:
    """Executes a program, one event at a time: a primitive starts, does a batch, or ends.

    initial: what is held, if it is not what the current plan says. held: [elements] by model-stage and GPU.
    used: [GPUs] bytes of a model-stage, old and new; a tensor that goes over as it is counts once.
    has: [GPUs, elements] old shards, and complete tensors of new ones.
    Every event checks what it does; `check_memory` and `check_covered` look at the state between events.
    """

    case: Case
    program: Program
    usable_bytes: float
    initial: dict[ModelStage, NDArray[np.bool_]] | None = None
    held: dict[ModelStage, dict[int, Array]] = field(init=False)
    running: dict[int, Running] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.elements = self.case.elements
        self.held = {m: {} for m in self.case.states}
        for m, held in (self.initial or self.case.initial()).items():
            numbers = np.arange(held.shape[1])
            self.held[m] = {gpu: np.where(mask, numbers, -1) for gpu, mask in enumerate(held) if mask.any()}
        self.moved = [m for m in self.case.states if m != ACTOR_GENERATION and m in self.case.current]
        self.moved = [m for m in self.moved if m in self.case.target]
        self.steps = {s.primitive.number: s for s in self.program.steps}
        self.used = {m: np.zeros(self.case.num_gpus) for m in self.case.states}
        self.has = {m: np.zeros((self.case.num_gpus, len(e.weights)), dtype=bool) for m, e in self.elements.items()}
        for m, by_gpu in self.held.items():
            for gpu in by_gpu:
                self._look(m, gpu)

    def events(self, *, exclusive: bool = False) -> Iterator[int]:
        """Primitives that can have their next event. exclusive: only those whose GPUs no other primitive is using."""
        yield from self.running
        busy = {g for r in self.running.values() for g in r.step.primitive.gpus}
        for number, step in self.steps.items():
            if number in self.done or number in self.running or not self.done.issuperset(step.primitive.after):
                continue
            if not (exclusive and busy & set(step.primitive.gpus)):
                yield number

    def advance(self, number: int) -> None:
        """The next event of a primitive: it starts, does a batch, or ends."""
        running = self.running.get(number)
        if running is None:
            step = self.steps[number]
            size = len(self.elements[step.primitive.model_stage].weights)
            self.running[number] = Running(step, {g: np.full(size, -1) for g in step.holdings})
        elif running.batch < len(running.step.batches):
            self._batch(running)
        else:
            self._end(running)
            del self.running[number]
            self.done.add(number)
        primitive = self.steps[number].primitive
        for gpu in primitive.gpus:
            self._look(primitive.model_stage, gpu)

    def _batch(self, running: Running) -> None:
        step, m = running.step, running.step.primitive.model_stage
        elements, held, names = self.elements[m], self.held[m], step.batches[running.batch]
        for move in (x for x in step.moves if x.tensor in names):
            assert {move.source, move.target} <= set(step.primitive.gpus)
            region = slice(elements.first[move.tensor] + move.start, elements.first[move.tensor] + move.stop)
            what = held[move.source][region]
            assert (what >= 0).all(), f"{move} reads what GPU {move.source} does not hold"
            assert (running.new[move.target][region] < 0).all(), f"{move} writes again"
            running.new[move.target][region] = what
        running.batch += 1
        if step.primitive.kind not in ("reshard", "split", "merge"):
            return
        mine = elements.of_tensors(names)
        for gpu in step.primitive.gpus:  # all of the batch has arrived everywhere: its sources go
            if gpu in held and (gpu in step.holdings or step.primitive.kind == "reshard"):
                held[gpu] = np.where(mine, -1, held[gpu])

    def _end(self, running: Running) -> None:
        step, m = running.step, running.step.primitive.model_stage
        for gpu in step.primitive.gpus:
            if gpu in step.holdings:
                expected = self.elements[m].intervals(step.holdings[gpu])
                if m in self.moved:
                    assert np.array_equal(running.new[gpu] >= 0, expected), "not everything was written"
                self.held[m][gpu] = running.new[gpu] if m in self.moved else np.where(expected, 0, -1)
            elif step.primitive.kind in ("destroy", "reshard"):
                self.held[m].pop(gpu, None)

    def _look(self, m: ModelStage, gpu: int) -> None:
        """Bring `used` and `has` up to date."""
        elements, old_ids = self.elements[m], self.held[m].get(gpu)
        old = np.zeros(len(elements.weights), dtype=bool) if old_ids is None else old_ids >= 0
        running = next((r for r in self.running.values() if r.step.primitive.model_stage == m and gpu in r.new), None)
        allocated, complete = self._new(running, gpu) if running else (np.zeros_like(old), np.zeros_like(old))
        twice = old & allocated & elements.whole(old == allocated)
        self.used[m][gpu] = elements.weights @ old + elements.weights @ allocated - elements.weights @ twice
        self.has[m][gpu] = old | complete

    def _new(self, running: Running, gpu: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """What a primitive has allocated on a GPU: all of the batch that it is at; what of it is complete."""
        step, elements = running.step, self.elements[running.step.primitive.model_stage]
        expected = elements.intervals(step.holdings[gpu])
        if len(step.batches) == 1:
            return expected, expected & (running.batch > 0)
        batches = [elements.of_tensors(names) for names in step.batches[: running.batch + 1]]
        complete = np.any(batches[: running.batch], axis=0) if running.batch else np.zeros_like(expected)
        return expected & np.any(batches, axis=0), expected & complete

    def check_memory(self) -> None:
        now = np.sum(list(self.used.values()), axis=0)
        assert now.max() <= self.usable_bytes, (
            f"GPU {now.argmax()} holds {now.max()} of {self.usable_bytes} bytes, under way {sorted(self.running)}"
        )

    def check_covered(self) -> None:
        for m in self.moved:
            assert self.has[m].any(0).all(), f"{m}: a region is on no GPU, under way {sorted(self.running)}"

    def check_one_more_loss(self, gpu: int) -> None:
        """If this GPU is lost now, the others hold everything but what it alone held."""
        for m in self.moved:
            others = np.delete(self.has[m], gpu, axis=0).any(0)
            alone = self.has[m][gpu] & (self.has[m].sum(0) == 1)
            assert np.array_equal(~others, alone)

    def check_arrived(self) -> None:
        """Every GPU has what the target says, each element in its place, and nothing else."""
        for m, elements in self.elements.items():
            wanted = elements.wanted(self.case.target[m]) if m in self.case.target else {}
            numbers = np.arange(len(elements.weights))
            for gpu in range(self.case.num_gpus):
                want = wanted.get(gpu, np.zeros(len(numbers), dtype=bool))
                have = self.held[m].get(gpu, np.full(len(numbers), -1))
                if m in self.moved:
                    assert np.array_equal(have, np.where(want, numbers, -1)), f"{m} on GPU {gpu}"
                else:
                    assert np.array_equal(have >= 0, want), f"{m} on GPU {gpu}"
