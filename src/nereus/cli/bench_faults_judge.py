"""What a run of `nereus bench faults` must have come to, told from which faults happened and which plans there were.

The judge knows who died (`Marks`), the plans that were in force (events) and the plans that were tried (`Noted`). From these
it knows which state still had a copy: a part of a trained model is gone when all devices that held it are. It does not ask
the recovery, whose events it judges: a restore is right only where something was gone, and from the newest checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nereus.cli.bench_faults_worker import Fault, Mark
from nereus.core.events import (
    CheckpointWritten,
    DeviceFailed,
    Recovered,
    RunStarted,
    StepFinished,
    TransitionFinished,
)
from nereus.core.plan import ACTOR_TRAINING, CRITIC_TRAINING, ModelStage, Plan
from nereus.telemetry.folder import Record

TRAINED = (ACTOR_TRAINING, CRITIC_TRAINING)

PARTS = (2, 2)
"""The finest cut of a model that the bench's layouts make: tp, pp."""

Holders = Mapping[tuple[ModelStage, int, int], frozenset[int]]
"""(model-stage, part of each layer, part of the layers) -> devices that hold it."""


def holders(plan: Plan) -> Holders:
    """Who has which part of the trained models under a plan."""
    found = {}
    for name in TRAINED:
        placement = plan[name]
        for part, layers in itertools.product(range(PARTS[0]), range(PARTS[1])):
            tp, pp = part * placement.layout.tp // PARTS[0], layers * placement.layout.pp // PARTS[1]
            found[name, part, layers] = frozenset(placement.gpu(unit, pp, tp) for unit in range(placement.dp))
    return found


def may_be_gone(plan: Plan, tried: Sequence[Plan], dead: frozenset[int]) -> bool:
    """Whether a part may have lost its last copy. tried: plans that a change was on its way to.

    On the way a replica goes before the change is complete: what is sure to be there then is what both plans have.
    """
    before = holders(plan)
    if any(gpus <= dead for gpus in before.values()):
        return True
    held = dict(before)
    for after in map(holders, tried):
        for part, gpus in after.items():
            if gpus <= dead or (held[part] & gpus and held[part] & gpus <= dead):
                return True
            held[part] = held[part] & gpus or held[part]
    return False


@dataclass(slots=True)
class Verdict:
    """Of one run. detect_s, recover_s: by fault; none for what needed no recovery. wrong: what must not be, in words."""

    detect_s: dict[int, float] = field(default_factory=dict)
    recover_s: dict[int, float] = field(default_factory=dict)
    restores: int = 0
    lost_state: int = 0
    steps_redone: int = 0
    false_positives: int = 0
    wrong: list[str] = field(default_factory=list)


def is_deadly(fault: Fault) -> bool:
    """Whether the device is to be left out. Half of an update cannot be undone."""
    torn = fault.kind == "out of memory" and fault.command == "update" and fault.moment != "before"
    return fault.kind in ("SIGKILL", "SIGSTOP", "error") or torn


def judge(
    records: Sequence[Record], faults: Sequence[Fault], marks: Sequence[Mark], plans: Sequence[Mapping[str, Any]]
) -> Verdict:
    """Go through what a run wrote down. plans: as `Noted` has them, with their times."""
    return _Judge(faults, marks, plans).judge(records)


class _Judge:
    def __init__(self, faults: Sequence[Fault], marks: Sequence[Mark], plans: Sequence[Mapping[str, Any]]) -> None:
        self._faults = {fault.number: fault for fault in faults}
        self._open = sorted(marks, key=lambda mark: mark.time_s)
        self._plans = [(row["time_s"], Plan.from_json(row["plan"])) for row in plans]
        self._plan = Plan(())
        self._since_s = 0.0
        self._buried: set[int] = set()
        self._unrecovered: dict[int, float] = {}
        self._newest = 0
        self._verdict = Verdict()

    def judge(self, records: Sequence[Record]) -> Verdict:
        finished: set[int] = set()
        for record in records:
            event, time_s = record.event, record.time_s
            match event:
                case RunStarted():
                    self._in_force(event.plan, time_s)
                case TransitionFinished():
                    self._in_force(event.after, time_s)
                case CheckpointWritten():
                    self._newest = event.step
                case DeviceFailed():
                    self._failed(event, time_s)
                case Recovered():
                    self._recovered(event, time_s)
                case StepFinished():
                    self._verdict.steps_redone += event.step in finished
                    finished.add(event.step)
                    self._step_is_over(time_s)
        return self._verdict

    def _step_is_over(self, time_s: float) -> None:
        """What was out of memory goes on."""
        self._unrecovered.clear()
        kinds = {number: fault.kind for number, fault in self._faults.items()}
        self._open = [m for m in self._open if m.time_s > time_s or kinds[m.fault] != "out of memory"]

    def _in_force(self, plan: Plan, time_s: float) -> None:
        self._plan, self._since_s = plan, time_s
        self._buried.clear()
        self._unrecovered.clear()

    def _failed(self, event: DeviceFailed, time_s: float) -> None:
        """Find the fault that it is the consequence of."""
        out_of_memory = event.kind == "out of memory"
        for mark in self._open:
            fault = self._faults[mark.fault]
            fits = fault.kind == "out of memory" if out_of_memory else is_deadly(fault)
            if fault.device == event.device and fits and mark.time_s <= time_s:
                self._verdict.detect_s.setdefault(fault.number, time_s - mark.time_s)
                self._unrecovered.setdefault(fault.number, time_s)
                if not out_of_memory:
                    self._buried.add(event.device)
                if not (out_of_memory and is_deadly(fault)):
                    self._open.remove(mark)
                return
        self._verdict.false_positives += 1
        self._verdict.wrong.append(f"step {event.step}: device {event.device} taken for {event.kind}: {event.why}")

    def _recovered(self, event: Recovered, time_s: float) -> None:
        for number, noticed_s in self._unrecovered.items():
            self._verdict.recover_s[number] = time_s - noticed_s
        if event.restored_from is not None:
            self._restored(event, time_s)
        self._in_force(event.plan, time_s)

    def _restored(self, event: Recovered, time_s: float) -> None:
        dead = self._buried | {
            self._faults[m.fault].device for m in self._open if m.time_s <= time_s and is_deadly(self._faults[m.fault])
        }
        tried = [plan for taken_s, plan in self._plans if self._since_s < taken_s < time_s]
        self._verdict.restores += 1
        if not may_be_gone(self._plan, tried, frozenset(dead)):
            self._lost(event, f"restored though every part had a copy: {sorted(dead)} of {self._plan} are dead")
        if event.restored_from != self._newest:
            self._lost(event, f"restored from {event.restored_from}, the newest checkpoint is of step {self._newest}")

    def _lost(self, event: Recovered, what: str) -> None:
        self._verdict.lost_state += 1
        self._verdict.wrong.append(f"step {event.step}: {what}")


def happened(marks: Sequence[Mark], faults: Sequence[Fault]) -> Iterator[Fault]:
    """The faults that did, in their order."""
    by_number = {fault.number: fault for fault in faults}
    return (by_number[mark.fault] for mark in marks)
