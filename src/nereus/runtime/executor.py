"""Runs the program of a transition on a cluster. It makes no choices: order, sources and regions are the program's.

Every primitive is a call to its devices alone, so primitives on different devices overlap. A primitive is issued when those
that it waits for are done and its devices are done with what comes before; so every device keeps to the program's order,
with the memory that was predicted for it, and no two of them can wait for each other.

    build    on all of the primitive's devices       copies; old shards stay
    settle   when all of them have answered          old shards freed, new ones take their place

A failure ends it between two such points: `Owners` then says which device holds what of every model-stage.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from nereus.core.plan import ModelStage
from nereus.core.sharding import Holding, Holdings, Move
from nereus.runtime.cluster import Call, Cluster
from nereus.runtime.state import StateAddress
from nereus.transition.program import Program, Step

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One primitive as it was executed, in seconds of the executor's clock. received: bytes from others, by device."""

    step: Step
    start_s: float
    end_s: float
    received: Mapping[int, int]

    @property
    def received_bytes(self) -> int:
        return sum(self.received.values())


OnSpan = Callable[[Span, int, int], None]
"""Told of every primitive that is done, how many are now, and of how many."""


@dataclass(slots=True)
class Owners:
    """Which device holds what, and where in memory, as far as the devices have confirmed it."""

    holdings: dict[ModelStage, dict[int, Holding]] = field(default_factory=dict)
    addresses: dict[ModelStage, dict[int, StateAddress]] = field(default_factory=dict)

    def of(self, model_stage: ModelStage) -> Holdings:
        return self.holdings.get(model_stage, {})

    def set(self, model_stage: ModelStage, device: int, holding: Holding | None, address: StateAddress | None) -> None:
        """What a device holds from now on; None: nothing."""
        held, places = self.holdings.setdefault(model_stage, {}), self.addresses.setdefault(model_stage, {})
        held.pop(device, None)
        places.pop(device, None)
        if holding is not None:
            held[device] = holding
        if address is not None:
            places[device] = address


@dataclass(slots=True)
class _Running:
    """A primitive under way. batch: how many batches of tensors have been issued."""

    step: Step
    call: Call
    start_s: float
    batch: int = 1
    received: Counter[int] = field(default_factory=Counter)
    addresses: dict[int, StateAddress] = field(default_factory=dict)


class Executor:
    """One transition. owners: brought up to date as primitives are done. clock: for the spans."""

    def __init__(
        self, cluster: Cluster, owners: Owners, clock: Clock = time.monotonic, on_span: OnSpan | None = None
    ) -> None:
        self._cluster, self._owners, self._clock, self._on_span = cluster, owners, clock, on_span
        self._total = 0
        self._running: list[_Running] = []
        self._done: set[int] = set()
        self._settling: list[Call] = []
        self.spans: list[Span] = []

    def run(self, program: Program) -> None:
        """Execute all primitives. Raises what the cluster raises; nothing is under way then."""
        waiting, self._total = list(program.steps), len(program.steps)
        while waiting or self._running:
            waiting = self._issue(waiting)
            running = self._running.pop(self._cluster.wait_any([r.call for r in self._running]))
            self._advance(running)
        for call in self._settling:
            call.results()

    def _issue(self, waiting: Sequence[Step]) -> list[Step]:
        """Start what can start; returns the rest. A device is taken by what runs on it, or comes before on it."""
        left: list[Step] = []
        taken = {gpu for running in self._running for gpu in running.step.primitive.gpus}
        for step in waiting:
            ready = all(number in self._done for number in step.primitive.after)
            if ready and taken.isdisjoint(step.primitive.gpus):
                self._running.append(_Running(step=step, call=self._start(step, 0), start_s=self._clock()))
            else:
                left.append(step)
            taken |= set(step.primitive.gpus)
        return left

    def _start(self, step: Step, batch: int) -> Call:
        kind, name = step.primitive.kind, step.primitive.model_stage
        if kind == "destroy":
            return self._call("settle", step.primitive.gpus, name, None, True)
        if kind == "create":
            return self._cluster.call("create", {g: (name, h) for g, h in step.holdings.items()})
        return self._cluster.call("build", self._orders(step, batch))

    def _orders(self, step: Step, batch: int) -> dict[int, tuple[object, ...]]:
        """By device: its part of a batch. A device that has nothing to do is left out, if there is another one."""
        name, names = step.primitive.model_stage, step.batches[batch]
        builders = self._builders(step)
        everything = len(step.batches) == 1
        own: dict[int, list[Move]] = {}
        sources: dict[int, set[int]] = {}
        for move in step.moves:
            if move.target in builders and (everything or move.tensor in names):
                own.setdefault(move.target, []).append(move)
                if move.source != move.target:
                    sources.setdefault(move.target, set()).add(move.source)
                    if not self._cluster.shared_memory:
                        own.setdefault(move.source, []).append(move)
        places = self._owners.addresses.get(name, {})
        return {
            g: (
                name,
                builders.get(g),
                None if everything else names,
                own.get(g, []),
                {s: places[s] for s in sources.get(g, ())} if self._cluster.shared_memory else {},
            )
            for g in (*sorted({*builders, *own}),) or step.primitive.gpus[:1]
        }

    def _builders(self, step: Step) -> dict[int, Holding]:
        """The devices whose shard changes, with the new one."""
        held = self._owners.of(step.primitive.model_stage)
        return {g: h for g, h in step.holdings.items() if held.get(g) != h}

    def _advance(self, running: _Running) -> None:
        """A call of a primitive has ended: settle, and go on to the next batch or to what waits for it."""
        step, name = running.step, running.step.primitive.model_stage
        results = running.call.results()
        if step.primitive.kind not in ("destroy", "create"):
            running.received.update({g: r.received_bytes for g, r in results.items()})
            running.addresses |= {g: r.address for g, r in results.items() if r.address is not None}
            last = running.batch == len(step.batches)
            self._settle(step, running.batch - 1, last)
            if not last:
                running.call, running.batch = self._start(step, running.batch), running.batch + 1
                self._running.append(running)
                return
        for gpu in step.primitive.gpus:
            if gpu in step.holdings:
                if self._owners.of(name).get(gpu) != step.holdings[gpu]:
                    self._owners.set(name, gpu, step.holdings[gpu], running.addresses.get(gpu))
            elif step.primitive.kind in ("destroy", "reshard"):
                self._owners.set(name, gpu, None, None)
        self._done.add(step.primitive.number)
        self.spans.append(
            Span(step=step, start_s=running.start_s, end_s=self._clock(), received=dict(running.received))
        )
        if self._on_span is not None:
            self._on_span(self.spans[-1], len(self.spans), self._total)

    def _settle(self, step: Step, batch: int, last: bool) -> None:
        """Not waited for: a device's next command comes after it, and what waits elsewhere needs no memory here."""
        builders = self._builders(step)
        leaving = set(step.primitive.gpus) - set(step.holdings) if step.primitive.kind == "reshard" else set()
        names = None if len(step.batches) == 1 else step.batches[batch]
        if devices := sorted({*builders, *leaving}):
            self._settling.append(self._call("settle", devices, step.primitive.model_stage, names, last))

    def _call(self, method: str, devices: Sequence[int], *arguments: object) -> Call:
        return self._cluster.call(method, dict.fromkeys(devices, arguments))
