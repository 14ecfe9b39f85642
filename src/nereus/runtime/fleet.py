"""All units of a job on a cluster: make them, change the plan, synchronise weights, compare and save state.

    Fleet.create(plan, sources)        connect, make shards, load from files
    Fleet.change(plan, devices)        start devices, connect, run the transition's program, commit, stop devices
    Fleet.weight_sync()                actor/training -> actor/generation, by the same transports
    Fleet.digest(...)                  one comparison for "nothing was lost"
    Fleet.gather(file)                 a file of whole tensors, for a checkpoint (`tensor_files`)

No unit is in use while these run (the caller drains first). Who holds what is recorded (`executor.Owners`). When a change
fails, the devices that are left are asked what they have that is complete; the next change starts from that, whatever plan
it was laid out for, so nothing is lost of which one copy is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nereus.core.digest import combine, digest_regions
from nereus.core.errors import PlanError, StateError
from nereus.core.events import Moved
from nereus.core.plan import ACTOR_GENERATION, ACTOR_TRAINING, ModelStage, Plan
from nereus.core.sharding import Holdings, Interval, Move, MovePlan, StateSpec, plan_moves
from nereus.runtime.cluster import Call, Cluster, WorkerDied, WorkerFailed
from nereus.runtime.executor import Executor, OnSpan, Owners, Span
from nereus.runtime.groups import GroupDirectory
from nereus.runtime.tensor_files import TensorFile
from nereus.runtime.transport import STAGING_BYTES
from nereus.transition.groups import Lowering
from nereus.transition.plan import LOWERINGS
from nereus.transition.program import Program, missing, program
from nereus.transition.rates import Ints, Rates

LOCAL_RATES = Rates(intra_bytes_s=2.5e9, inter_bytes_s=2.5e9, copy_bytes_s=3e9, node_bytes_s=4e9, setup_s=2e-3)
"""CPU devices of one machine, where nothing is known of it (measured here, two cores)."""


GROUP_S = 0.01
"""What it takes to open a communicator, where nothing is known of it (measured here: 8 ranks 7-10 ms, pairs 0.4-3)."""

STAGING_SHARE = 1 / 16
"""The most of a device's memory that staging takes."""

LEARN = 0.5
"""Weight of the last change in what is learned of the time that changes take."""

LEAST_S = 5e-3
"""Primitives that were predicted to take less teach nothing: it is all latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a model-stage's state comes from: tensor name -> safetensors file; seed for a head made fresh."""

    files: Mapping[str, str]
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """A change of plan that came about. seconds: of all of it, measured; `program.dag.seconds`: predicted.

    primitives_s: of these the primitives. moved: by model-stage. peak_bytes: by device, the most state it held at once.
    """

    program: Program
    spans: tuple[Span, ...]
    seconds: float
    primitives_s: float
    moved: Mapping[ModelStage, Moved]
    peak_bytes: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Who holds what, and what a change is planned with. nodes: of each device of the pool. setup_s: before it begins.

    gone: of these model-stages no device has all any more: they will be loaded from files.
    """

    specs: Mapping[ModelStage, StateSpec]
    holdings: Mapping[ModelStage, Holdings]
    plan: Plan
    nodes: Mapping[int, int]
    rates: Rates
    usable_bytes: float
    base_bytes: float
    lowerings: tuple[Lowering, ...]
    setup_s: float
    gone: frozenset[ModelStage] = frozenset()

    def node_of(self, plan: Plan) -> Ints:
        """[devices] node of every device id up to the largest; a device that is not there yet is taken to be on node 0."""
        largest = max((*self.nodes, *plan.gpus, *self.plan.gpus), default=0)
        return np.array([self.nodes.get(g, 0) for g in range(largest + 1)])

    def program(self, plan: Plan, restored: Set[ModelStage] = frozenset()) -> Program:
        """See `Fleet.prepare`."""
        return program(
            self.specs,
            self.holdings,
            self.plan,
            plan,
            node_of=self.node_of(plan),
            rates=self.rates,
            usable_bytes=self.usable_bytes,
            base_bytes=self.base_bytes,
            lowerings=self.lowerings,
            remade={ACTOR_GENERATION, *self.gone, *restored},
            setup_s=self.setup_s,
        )


class Fleet:
    """See the module. specs: the logical state of every model-stage of the job.

    rates, usable_bytes: what transitions are planned with; rates are learned from each one's measured time.
    lowerings: the ways to change that may be taken.
    """

    def __init__(
        self,
        cluster: Cluster,
        specs: Mapping[ModelStage, StateSpec],
        *,
        rates: Rates = LOCAL_RATES,
        usable_bytes: float = float("inf"),
        lowerings: Sequence[Lowering] = LOWERINGS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cluster = cluster
        self.specs = specs
        self.plan = Plan(())
        self.rates, self.usable_bytes, self.lowerings, self.clock = rates, usable_bytes, lowerings, clock
        self._owners = Owners()
        self._groups = GroupDirectory()
        self._epoch = cluster.epoch
        self._version = 0
        self._versions: dict[ModelStage, int] = {}
        self._broken = False
        self._gone: frozenset[ModelStage] = frozenset()
        self._loading: frozenset[ModelStage] = frozenset()
        self._sync: MovePlan | None = None
        self._group_s, self._opened = GROUP_S, 0

    @property
    def pool(self) -> tuple[int, ...]:
        return self.cluster.devices

    @property
    def staging_bytes(self) -> int:
        """What a device may take to pack messages in; nothing where devices read each other's memory."""
        return 0 if self.cluster.shared_memory else int(min(STAGING_BYTES, self.usable_bytes * STAGING_SHARE))

    def create(self, plan: Plan, sources: Mapping[ModelStage, Source]) -> None:
        """Make all units of a plan; those without a source start as zeros, for `weight_sync` to fill.

        The first thing that a fleet does; what devices held before is forgotten.
        """
        self._owners, self._broken = Owners(), False
        self._connect(plan, self.pool)
        self._call("forget", self.pool).results()
        for placement in plan.placements:
            name = placement.model_stage
            holdings = self.specs[name].holdings(placement)
            self.cluster.call("create", {g: (name, h) for g, h in holdings.items()}).results()
            for gpu, holding in holdings.items():
                self._owners.set(name, gpu, holding, None)
        self._load(plan, sources)
        self._locate()
        self._commit(plan)

    def _load(self, plan: Plan, sources: Mapping[ModelStage, Source]) -> None:
        for name, source in sources.items():
            if name in plan:
                self._call("load", plan[name].gpus, name, dict(source.files), source.seed).results()

    def prepare(self, plan: Plan, restored: Set[ModelStage] = frozenset()) -> Program:
        """How the fleet would get to a plan. restored: model-stages that will be loaded from files.

        Raises InfeasibleTransition; StateError when the last copy of something else is gone.
        """
        return replace(self.situation(), gone=frozenset()).program(plan, restored)

    def situation(self) -> Situation:
        """What a change would start from now: a copy, good until the next change or failure, for any thread."""
        return Situation(
            specs=self.specs,
            holdings={name: dict(self._owners.of(name)) for name in self.specs},
            plan=self.plan,
            nodes={g: self.cluster.node_of(g) for g in self.pool},
            rates=self.rates,
            usable_bytes=self.usable_bytes,
            base_bytes=self.staging_bytes,
            lowerings=tuple(self.lowerings),
            setup_s=self._opened * self._group_s,
            gone=self._gone,
        )

    def change(
        self,
        plan: Plan,
        devices: Sequence[int],
        sources: Mapping[ModelStage, Source] | None = None,
        on_span: OnSpan | None = None,
    ) -> Transition:
        """Go to another plan on `devices`, at a step boundary. actor/generation is only made: weight_sync must follow.

        sources: model-stages that are loaded from files, since no device has them any more.
        After an exception the devices that are left hold what they held, or will; call it again, with a plan for them.
        """
        beyond = sorted(set(plan.gpus) - set(devices))
        if beyond:
            raise PlanError(f"the plan uses devices {beyond}, which are not in the pool {sorted(devices)}")
        if self._broken or not set(self.plan.gpus) <= set(self.pool):
            running = [device for device in self.pool if device in devices]
            self.salvage()
            self._call("ping", running).results()  # one that has died just now is not started as if it held nothing
        if added := sorted(set(devices) - set(self.pool)):
            self.cluster.start(added)
        self._loading = frozenset(sources or ())
        try:
            transition = self._run(plan, sources or {}, on_span)
        except (WorkerDied, WorkerFailed):
            self._broken = True
            raise
        self._loading = frozenset()
        if leaving := sorted(set(self.pool) - set(devices)):
            self.cluster.stop(leaving)
            self._connect(plan, self.pool)
        return transition

    def salvage(self) -> dict[ModelStage, dict[str, tuple[Interval, ...]]]:
        """Ask the devices that are left what they hold, and make that the record; returns what no device has, if anything.

        No unit is in use after this: a change must follow. A device that dies in between is left out.
        """
        reports: dict[int, Any] | None = None
        while reports is None:
            try:
                reports = self._call("consolidate", self.pool).results()
                for name in self._loading:  # there is memory for it, and not yet what files were to fill it with
                    self._call("settle", self.pool, name, None, True).results()
            except WorkerDied:
                reports = None
        self._owners = Owners()
        for gpu, shards_here in reports.items():
            for name, holding in shards_here.items():
                if name not in self._loading:
                    self._owners.set(name, gpu, holding, None)
        self._broken, self._sync = True, None
        lost = {name: missing(self.specs[name], self._owners.of(name)) for name in self.specs}
        found = {name: regions for name, regions in lost.items() if regions and name != ACTOR_GENERATION}
        self._gone = frozenset(found)
        return found

    def drop(self, names: Sequence[ModelStage]) -> None:
        """Free what devices hold of model-stages that the next change will load from files. Only after `salvage`."""
        for name in names:
            self._call("settle", sorted(self._owners.of(name)), name, None, True).results()
            for gpu in [*self._owners.of(name)]:
                self._owners.set(name, gpu, None, None)

    def _run(self, plan: Plan, sources: Mapping[ModelStage, Source], on_span: OnSpan | None) -> Transition:
        began = self.clock()
        self._connect(plan, self.pool)
        self._locate()
        todo = self.prepare(plan, sources.keys())
        names = list(self.specs) if self._broken else [m for m in self.specs if self._changes(m, plan)]
        self._call("retire", self.pool, names).results()
        self._call("peak_bytes", self.pool).results()
        executor = Executor(self.cluster, self._owners, self.clock, on_span)
        started = self.clock()
        executor.run(todo)
        primitives_s = self.clock() - started
        self._load(plan, sources)
        self._locate()
        self._commit(plan, names)
        self._broken = False
        seconds = self.clock() - began
        self._learn(todo, primitives_s, seconds)
        return Transition(
            program=todo,
            spans=tuple(executor.spans),
            seconds=seconds,
            primitives_s=primitives_s,
            moved=self._moved(plan, executor.spans),
            peak_bytes=self._call("peak_bytes", self.pool).results(),
        )

    def _learn(self, done: Program, primitives_s: float, seconds: float) -> None:
        """Bring rates, and the time to open a communicator, closer to what this change took."""
        predicted_s = done.dag.seconds - self._opened * self._group_s
        if predicted_s >= LEAST_S:
            self.rates = self.rates.slowed((primitives_s / predicted_s) ** LEARN)
        if self._opened:
            self._group_s += LEARN * ((seconds - primitives_s) / self._opened - self._group_s)

    def _moved(self, plan: Plan, spans: Sequence[Span]) -> dict[ModelStage, Moved]:
        """What was received, and what stayed, of each model-stage whose state counts."""
        received: dict[ModelStage, int] = {p.model_stage: 0 for p in plan.placements}
        for span in spans:
            name = span.step.primitive.model_stage
            received[name] = received.get(name, 0) + span.received_bytes
        return {
            name: Moved(received_bytes=size, kept_bytes=max(0, self._held_bytes(name) - size))
            for name, size in received.items()
            if name in plan and name != ACTOR_GENERATION
        }

    def _changes(self, name: ModelStage, plan: Plan) -> bool:
        before, after = (p[name] if name in p else None for p in (self.plan, plan))  # noqa: SIM401
        return before != after

    def held_bytes(self) -> dict[ModelStage, dict[int, float]]:
        """Model-stage -> device -> bytes of its shard there."""
        return {
            name: {gpu: float(spec.holding_bytes(h)) for gpu, h in self._owners.of(name).items()}
            for name, spec in self.specs.items()
        }

    def _held_bytes(self, name: ModelStage) -> int:
        spec = self.specs[name]
        return sum(spec.holding_bytes(h) for h in self._owners.of(name).values())

    def _locate(self) -> None:
        """Where shards lie of which that is not known yet, for peers to read."""
        if not self.cluster.shared_memory:
            return
        unknown: dict[int, list[ModelStage]] = {}
        for name in self.specs:
            places = self._owners.addresses.get(name, {})
            for gpu in self._owners.of(name):
                if gpu not in places:
                    unknown.setdefault(gpu, []).append(name)
        if not unknown:
            return
        for gpu, found in (
            self.cluster.call("addresses", {g: (names,) for g, names in unknown.items()}).results().items()
        ):
            for name, address in found.items():
                self._owners.set(name, gpu, self._owners.of(name)[gpu], address)

    def _commit(self, plan: Plan, names: Sequence[ModelStage] | None = None) -> None:
        """Make units of the shards of these model-stages (None: of all of the plan).

        Raises StateError when a device has a unit of another version, or one that the plan does not have there.
        """
        self._version += 1
        by_gpu: dict[int, dict[ModelStage, Any]] = {g: {} for g in self.pool}
        for placement in plan.placements:
            if names is None or placement.model_stage in names:
                for gpu in placement.gpus:
                    by_gpu[gpu][placement.model_stage] = placement
                self._versions[placement.model_stage] = self._version
        found = self.cluster.call("commit", {g: (self._version, made) for g, made in by_gpu.items()}).results()
        for gpu, versions in found.items():
            if versions != {p.model_stage: self._versions[p.model_stage] for p in plan.placements if gpu in p.gpus}:
                raise StateError(f"device {gpu} has units of versions {versions}, the plan has others")
        self.plan, self._sync, self._gone = plan, None, frozenset()

    def weight_sync(self) -> int:
        """Give the generation units the trained parameters; returns the bytes that crossed between ranks."""
        if self._sync is None:
            self._sync = plan_moves(
                self.specs[ACTOR_GENERATION],
                self._owners.of(ACTOR_TRAINING),
                self._owners.of(ACTOR_GENERATION),
                node_of=self.cluster.node_of,
            )
        arguments = self._parts(self._sync.moves, ACTOR_TRAINING)
        orders = {g: (ACTOR_TRAINING, ACTOR_GENERATION, *part) for g, part in arguments.items()}
        self.cluster.call("synchronise", orders).results()
        return self._sync.total_received_bytes

    def _parts(self, moves: Sequence[Move], source: ModelStage) -> dict[int, tuple[list[Move], dict[int, Any]]]:
        """By device that has to do something: its moves, and where the shards lie that it reads."""
        shared, places = self.cluster.shared_memory, self._owners.addresses.get(source, {})
        own: dict[int, list[Move]] = {}
        for move in moves:
            for gpu in {move.target} if shared else {move.source, move.target}:
                own.setdefault(gpu, []).append(move)
        return {
            g: (listed, {s: places[s] for s in {m.source for m in listed} - {g}} if shared else {})
            for g, listed in own.items()
        }

    def digest(self, names: Sequence[ModelStage]) -> str:
        """One line for the logical state of several model-stages; raises StateError when replicas differ."""
        return " ".join(f"{name}={self.digest_of(name, self.specs[name])[:32]}" for name in names)

    def digest_of(self, name: ModelStage, spec: StateSpec) -> str:
        """The digest of one model-stage's tensors that are in `spec`."""
        regions = digest_regions(spec, self._owned(name, spec))
        reports = self.cluster.call("digest_sums", {gpu: (name, regions[gpu]) for gpu in regions}).results()
        return combine(spec, regions, reports)

    def check_generation_weights(self) -> None:
        """Raise StateError unless actor/generation holds bitwise what actor/training holds."""
        spec = self.specs[ACTOR_GENERATION]
        if self.digest_of(ACTOR_GENERATION, spec) != self.digest_of(ACTOR_TRAINING, spec):
            raise StateError("actor/generation does not hold the weights of actor/training after weight_sync")

    def gather(self, file: TensorFile) -> Call:
        """Have a file's tensors gathered, whole, on its writer, which writes them from then on in the background."""
        specs = file.spec.by_name()
        targets: Holdings = {file.writer: {n: ((0, t.length),) for n, t in specs.items()}}
        sources = self._owned(file.model_stage, file.spec)
        moves = plan_moves(file.spec, sources, targets, node_of=self.cluster.node_of).moves
        arguments = {
            g: (file.model_stage, targets.get(g, {}), own, str(file.path), places)
            for g, (own, places) in self._parts(moves, file.model_stage).items()
        }
        return self.cluster.call("write_gathered", arguments)

    def _owned(self, name: ModelStage, spec: StateSpec) -> Holdings:
        """What is held of a model-stage's tensors that are in `spec`."""
        names = {t.name for t in spec.tensors}
        return {g: {n: i for n, i in h.items() if n in names} for g, h in self._owners.of(name).items()}

    def _connect(self, plan: Plan, pool: Sequence[int]) -> None:
        if self.cluster.epoch != self._epoch:
            self._groups.forget()
            self._epoch = self.cluster.epoch
        groups, self._opened = self._groups.change(plan, pool, {r: self.cluster.incarnation(r) for r in pool})
        self._call("connect", pool, groups, pool, self.staging_bytes, self.usable_bytes).results()

    def _call(self, method: str, ranks: Sequence[int], *arguments: Any) -> Call:
        return self.cluster.call(method, dict.fromkeys(ranks, arguments))
