"""What a device does in an RL job: hold units, generate, score, compute log-probabilities and values, train.

Every command that computes is given to all ranks of a unit with the same arguments; the answering rank of each unit
returns the result. An update is two commands, so that all replicas agree before any of them steps:

    gradients   forward, backward, reduction over all ranks -> statistics, norm
    update      clip and step; purely local, and only once however often it is asked for

So whoever is left after a death between the two can still apply the update, or discard it, and all do the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

from nereus.core.errors import OutOfMemory
from nereus.core.job import PaceSection
from nereus.core.measurements import DeviceMeasurements, task_of
from nereus.core.plan import ACTOR_GENERATION, ModelStage, Placement
from nereus.core.sharding import Holding, Move, StateSpec
from nereus.engine import optimizer
from nereus.engine.architecture import Architecture
from nereus.engine.batch import Sequences
from nereus.engine.budget import Budget
from nereus.engine.generation import Request, Response, Sampling, generate
from nereus.engine.meter import Meter
from nereus.engine.pace import Pace
from nereus.engine.unit import Unit, UnitGroups
from nereus.rl.objectives import Targets
from nereus.runtime.state import LocalState
from nereus.runtime.transport import NO_ADDRESSES
from nereus.runtime.unit_store import Addresses, Built, Names, Room, UnitStore
from nereus.runtime.worker import WorkerContext

PROGRAM = "nereus.rl.worker:RlWorker"
PRELOAD = ("torch.optim.adamw", "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto")


def state_spec(model_stage: ModelStage, architecture: Architecture) -> StateSpec:
    """The logical state of a model-stage's units."""
    return architecture.training_state if model_stage.stage == "training" else architecture.inference_state


P = ParamSpec("P")
R = TypeVar("R")


def _task(
    command: Callable[Concatenate[RlWorker, ModelStage, P], R],
) -> Callable[Concatenate[RlWorker, ModelStage, P], R]:
    """A command that is a part of a model-stage's task, and is measured as such."""

    @wraps(command)
    def measured(self: RlWorker, name: ModelStage, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._running(command.__name__, name):
            return command(self, name, *args, **kwargs)

    return measured


class RlWorker(UnitStore[Unit]):
    """The program of a worker process (`runtime.worker`).

    capacity_bytes: what the device may hold; None: whatever there is. pace: a CPU device takes at least the time of the
    declared one.
    """

    def __init__(
        self,
        context: WorkerContext,
        architectures: Mapping[ModelStage, Architecture],
        capacity_bytes: float | None = None,
        pace: PaceSection | None = None,
    ) -> None:
        super().__init__(context, {m: state_spec(m, a) for m, a in architectures.items()})
        kept = Pace(pace, check=context.flag.check) if pace is not None and context.device.type == "cpu" else None
        self.meter = self.groups.watcher = Meter(context.device_id, kept)
        self.budget = self._budget(capacity_bytes)
        self.budget.until_written = lambda: self.writes.wait(context.flag.check)
        self._resident_bytes: int | None = None
        self._architectures = architectures
        self._norms: dict[ModelStage, torch.Tensor] = {}

    def make_unit(self, placement: Placement, state: LocalState) -> Unit:
        name = placement.model_stage
        self._norms.pop(name, None)
        return Unit(
            self._architectures[name],
            placement,
            self.me,
            state,
            UnitGroups.of(placement, self.me, self.groups),
            trainable=name.stage == "training",
            meter=self.meter,
            budget=self.budget,
        )

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response] | None:
        """Responses to this unit's requests."""
        with self._running("generate", ACTOR_GENERATION):
            return generate(self.units[ACTOR_GENERATION], requests, sampling)

    @_task
    def logprobs(self, name: ModelStage, sequences: Sequences, temperature: float) -> torch.Tensor | None:
        """Log-probabilities of the response tokens, [n, r]."""
        unit = self.units[name]
        return unit.forward(sequences, unit.logprobs(temperature))

    @_task
    def values(self, name: ModelStage, sequences: Sequences) -> torch.Tensor | None:
        """The value before each response token, [n, r]."""
        unit = self.units[name]
        return unit.forward(sequences, unit.response_values)

    @_task
    def scores(self, name: ModelStage, sequences: Sequences) -> torch.Tensor | None:
        """The reward model's score of each sequence, [n, 1]."""
        unit = self.units[name]
        return unit.forward(sequences, unit.final_scores)

    @_task
    def gradients(
        self, name: ModelStage, sequences: Sequences, targets: Targets
    ) -> tuple[list[float] | None, float, int]:
        """Accumulate and reduce the gradients of this unit's part of a mini-batch.

        Returns (this unit's summed statistics, on the answering rank; the norm of the whole gradient; the updates so far).
        """
        unit = self.units[name]
        optimizer.clear_gradients(unit)
        statistics = unit.accumulate(sequences, targets.loss(unit))
        optimizer.reduce_gradients(unit)
        self._norms[name] = optimizer.gradient_norm(unit)
        answer = statistics.tolist() if unit.answers and statistics is not None else None
        return answer, float(self._norms[name]), optimizer.updates(unit)

    @_task
    def update(self, name: ModelStage, number: int, settings: optimizer.AdamW) -> int:
        """Apply the gradients that `gradients` left after `number` updates, unless that is done; returns the updates so far.

        Local: no rank waits for another. After an error in the middle of a step the answer is `optimizer.TORN`.
        """
        unit = self.units[name]
        if optimizer.updates(unit) == number:
            norm = self._norms[name]
            assert math.isfinite(norm), "an update with a gradient that is not finite must be discarded"
            optimizer.step(unit, settings, norm)
            del self._norms[name]
        return optimizer.updates(unit)

    def updates(self, name: ModelStage) -> int:
        """How many updates this rank's shard has had."""
        return optimizer.updates(self.units[name])

    def discard(self, name: ModelStage) -> None:
        """Forget the gradients that `gradients` left."""
        self._norms.pop(name, None)
        optimizer.clear_gradients(self.units[name])

    def commit(self, version: int, placements: Mapping[ModelStage, Placement]) -> dict[ModelStage, int]:
        """See `UnitStore`. Until the next one, what is resident stays as it is."""
        self._resident_bytes, self.budget.most_bytes = None, 0
        return super().commit(version, placements)

    def build(
        self,
        model_stage: ModelStage,
        holding: Holding | None,
        names: Names,
        moves: Sequence[Move],
        addresses: Addresses = NO_ADDRESSES,
    ) -> Built:
        """See `UnitStore`."""
        began = self.meter.clock()
        with _memory_errors(self.me):
            built = super().build(model_stage, holding, names, moves, addresses)
        if self.context.shared_memory:
            self.meter.transferred(built.received_bytes, self.meter.clock() - began)
        return built

    def synchronise(
        self, source: ModelStage, target: ModelStage, moves: Sequence[Move], addresses: Addresses = NO_ADDRESSES
    ) -> int:
        """See `UnitStore`."""
        with self._running("synchronise", target):
            began = self.meter.clock()
            received = super().synchronise(source, target, moves, addresses)
            if self.context.shared_memory:  # without messages, which the meter would have seen
                self.meter.transferred(received, self.meter.clock() - began)
            return received

    def clear_writes(self) -> Room:
        """See `UnitStore`. The room is what commands left at their peaks, since the plan changed."""
        room = super().clear_writes()
        if self.budget.capacity_bytes is None:
            return room
        used = max(self._held_bytes(), self.budget.most_bytes)
        return replace(room, device_bytes=self.budget.capacity_bytes - used)

    def measurements(self) -> DeviceMeasurements:
        """What this device measured since it was last asked."""
        peaks = self.budget.take_peaks()
        fullest = max(peaks.values(), key=lambda kinds: sum(kinds.values()), default={"resident": self._held_bytes()})
        tasks = self.meter.take(lambda task: peaks.get(task, {}))
        return DeviceMeasurements(device=self.me, tasks=tasks, memory=fullest)

    def set_link_factor(self, factor: float) -> None:
        """From now on the declared links have this share of their bandwidth."""
        if self.meter.pace is not None:
            self.meter.pace.link_factor = factor

    def admit(self, num_bytes: int) -> None:
        """State is going to take so much more. Raises OutOfMemory."""
        self._resident_bytes = None
        with self._accounted("transition"):
            self.budget.take("resident", num_bytes)

    @contextmanager
    def _running(self, command: str, name: ModelStage) -> Iterator[None]:
        """A command of a task: measured, accounted for, and cleaned up after where memory was short."""
        task = task_of(command, name)
        try:
            with self.meter.command(task), self._accounted(task):
                yield
        except OutOfMemory:
            if command == "gradients":
                self.discard(name)
            raise
        if self.context.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
            self.context.flag.check()  # an abort ends kernels in the middle: what they left must not count

    @contextmanager
    def _accounted(self, task: str) -> Iterator[None]:
        cuda = self.context.device if self.context.device.type == "cuda" else None
        staged = 0 if self._messages is None else self._messages.staged_bytes
        gradients = sum(unit.counts.gradient_bytes for unit in self.units.values() if unit.has_gradients)
        if self._resident_bytes is None:
            self._resident_bytes = self._held_bytes()
        copies = self.writes.held_bytes if cuda is None else 0  # a GPU's lie in the machine's memory
        self.budget.begin(self._resident_bytes, gradients, staged, copies)
        if cuda is not None:
            torch.cuda.reset_peak_memory_stats(cuda)
        try:
            with _memory_errors(self.me):
                yield
        finally:
            measured = None if cuda is None else torch.cuda.max_memory_allocated(cuda)
            rest = "activations" if task in ("actor_update", "critic_update") else "workspace"
            self.budget.end(task, measured, rest)

    def _budget(self, capacity_bytes: float | None) -> Budget:
        """A GPU's allocator keeps to the capacity by itself."""
        device = self.context.device
        if device.type != "cuda":
            return Budget(self.me, capacity_bytes)
        if capacity_bytes is not None:
            whole = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, capacity_bytes / whole), device)
        return Budget(self.me, allocator=True)


@contextmanager
def _memory_errors(device: int) -> Iterator[None]:
    """What a GPU's allocator refuses is the same error as what the account refuses."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"device {device}: {' '.join(str(error).split())}") from error
