"""The seam between doing and deciding: the loop asks a `Director` where to go, and tells it what came of it.

    boundary   before each step             the change of plan to make now, if any
    failed     after a failure in a step    the pool and the plan to go on with, of what survivors hold
    changed    after each change            it came about, or it failed and `failed` is asked next
    generated  once a step has rollouts     their lengths, so that there is time to think of them
    measured   after each step              what `StepFinished` says beside the metrics

`FixedDirector` plays the changes of a job file, and takes another plan only when a device fails.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nereus.core.errors import UserError
from nereus.core.job import PlannedChange
from nereus.core.plan import Placement, Plan
from nereus.runtime.cluster import WorkerFailed
from nereus.runtime.fleet import Transition


class Unrecoverable(RuntimeError):
    """No plan for the devices that are left lets the job go on. The message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """What `StepFinished` says beside the metrics; see there."""

    predicted: Mapping[str, float] = field(default_factory=dict)
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    signals: Mapping[str, float] = field(default_factory=dict)


class Director(Protocol):
    """Decides on plans. Called by the loop's thread, one call at a time."""

    def boundary(self, step: int) -> PlannedChange | None:
        """Before each step, also one that is done again after a restore: the change to make now. Must not block."""
        ...

    def failed(self, step: int, stage: str, failure: BaseException) -> PlannedChange:
        """After a failure, once the fleet has recorded what survivors hold (`Fleet.pool`): where to go on.

        stage: where in the step, or "transition" where the change itself failed. May be asked again before the answer
        has come about, if more fails. Raises Unrecoverable.
        """
        ...

    def changed(self, step: int, transition: Transition | None) -> None:
        """A change, of `boundary` or of `failed`, came about; None: it failed, and `failed` follows."""
        ...

    def generated(self, step: int, lengths: Sequence[int]) -> None:
        """The responses of a step are there: their lengths, tokens. Must not block."""
        ...

    def measured(
        self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float], measurements: Mapping[int, Any]
    ) -> Extra:
        """After each step. seconds: by stage, and "step" for all so far.

        measurements: by device, what its worker measured; empty if it does not.
        """
        ...


class Devices(Protocol):
    """What a director sees of a `Fleet`."""

    plan: Plan

    @property
    def pool(self) -> tuple[int, ...]: ...


Replan = Callable[[Sequence[int], Plan], Plan]
"""(devices, the plan before) -> a plan for these devices. Raises UserError where there is none."""


class FixedDirector:
    """The changes of a job file; after a failure what `replan` says for the devices that are left.

    A device that has failed is left out for good, of later changes too. A plan whose devices are all there is kept, as it is
    where it was a change that ran out of memory, which is then given up; else, where a step did, with smaller micro-batches
    on that device, then with recomputation.
    """

    def __init__(self, changes: Sequence[PlannedChange], replan: Replan, fleet: Devices) -> None:
        self._changes = {change.step: change for change in changes}
        self._replan, self._fleet = replan, fleet
        self._wanted: set[int] | None = None
        self._known = set(fleet.pool)
        self._failed: set[int] = set()

    def boundary(self, step: int) -> PlannedChange | None:
        self._failed |= self._known - set(self._fleet.pool)
        change = self._changes.get(step)
        if change is None:
            return None
        self._known |= set(change.devices)
        self._wanted = set(change.devices)
        if self._failed.isdisjoint(change.devices):
            return change
        return self._for(step, tuple(d for d in change.devices if d not in self._failed) or self._fleet.pool)

    def failed(self, step: int, stage: str, failure: BaseException) -> PlannedChange:
        pool, plan = self._fleet.pool, self._fleet.plan
        self._failed |= self._known - set(pool)
        wanted = tuple(d for d in pool if self._wanted is None or d in self._wanted) or pool
        if not set(plan.gpus) <= set(wanted):
            return self._for(step, wanted)
        if isinstance(failure, WorkerFailed) and out_of_memory(failure) and stage != "transition":
            plan = leaner(plan, failure.device)
        return PlannedChange(step, wanted, plan)

    def changed(self, step: int, transition: Transition | None) -> None:
        if transition is not None:
            self._known = set(self._fleet.pool)

    def generated(self, step: int, lengths: Sequence[int]) -> None:
        pass

    def measured(
        self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float], measurements: Mapping[int, Any]
    ) -> Extra:
        return Extra()

    def _for(self, step: int, devices: tuple[int, ...]) -> PlannedChange:
        if not devices:
            raise Unrecoverable("no device is left")
        try:
            return PlannedChange(step, devices, self._replan(devices, self._fleet.plan))
        except UserError as error:
            raise Unrecoverable(f"no plan for devices {list(devices)}: {error}") from error


def out_of_memory(failure: BaseException) -> bool:
    """Whether a worker said that its device's memory would not do."""
    return isinstance(failure, WorkerFailed) and failure.failure.kind in ("OutOfMemory", "OutOfMemoryError")


def leaner(plan: Plan, device: int) -> Plan:
    """The plan with what runs on a device in micro-batches of half the size; trained units of one sequence recompute.

    Raises Unrecoverable when nothing can be made smaller.
    """
    after = Plan(tuple(_leaner(p) if device in p.gpus else p for p in plan.placements))
    if after == plan:
        raise Unrecoverable(f"device {device} is out of memory with micro-batches of one sequence and recomputation")
    return after


def _leaner(placement: Placement) -> Placement:
    if placement.micro_batch > 1:
        return dataclasses.replace(placement, micro_batch=placement.micro_batch // 2)
    return dataclasses.replace(placement, recompute=placement.model_stage.stage == "training")
