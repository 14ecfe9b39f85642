"""A run looked back on: its events put together, for views that need more than where it stands.

    records ── Progress.after ──> progress      where it stands
            └─ look_back ───────> decisions     each with the plan before, its transition or recovery, and what was measured
                                  periods       which plan was in force from where to where
                                  happenings    failures, recoveries, pool changes
                                  sessions      when it was started and gone on with

A run may be going on, or have been killed: any prefix of its events is a history. Where a resume or a restore has undone
steps, the plans and changes of those steps are undone too; decisions and happenings stay, since they took place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nereus.core.events import (
    DecisionMade,
    DeviceFailed,
    OutcomeMeasured,
    PoolChanged,
    Recovered,
    RunFinished,
    RunStarted,
    TransitionFinished,
)
from nereus.core.plan import Plan
from nereus.telemetry import decisions
from nereus.telemetry.folder import Record
from nereus.telemetry.progress import Progress

Happening = PoolChanged | DeviceFailed | Recovered

WITHIN_STEP = {"generation": 0.25, "inference": 0.55, "training": 0.8}
"""Where in a step something in a stage is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A decision, what was in force when it was made, and what became of it."""

    made: DecisionMade
    time_s: float
    current: Plan | None
    transition: TransitionFinished | None = None
    outcome: OutcomeMeasured | None = None
    recovery: Recovered | None = None

    def to_json(self) -> dict[str, Any]:
        best = self.made.chosen or decisions.best(self.made)
        return {
            **self.made.to_json(),
            "time": self.time_s,
            "plan": self.current.to_json() if self.current else None,
            "limit_steps": decisions.limit(self.made),
            "reason": decisions.reason(self.made),
            "equation": decisions.equation(self.made, best) if best else None,
            "transition": self.transition.to_json() if self.transition else None,
            "outcome": self.outcome.to_json() if self.outcome else None,
            "recovery": self.recovery.to_json() if self.recovery else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """A plan in force on a pool. start, end: in steps; a fraction is the place within a step."""

    start: float
    end: float
    plan: Plan
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """See the module."""

    progress: Progress
    first: RunStarted | None = None
    sessions: tuple[tuple[float, RunStarted], ...] = ()
    ended: RunFinished | None = None
    decisions: tuple[Decided, ...] = ()
    periods: tuple[Period, ...] = ()
    happenings: tuple[Happening, ...] = ()
    last_time_s: float = math.nan

    @property
    def unit(self) -> str:
        return self.progress.unit

    @property
    def emulated(self) -> bool:
        return self.progress.emulated

    def decision(self, number: int) -> Decided | None:
        """The decision with this number; the newest, should a resume have begun to count anew."""
        return next((d for d in reversed(self.decisions) if d.made.number == number), None)


def place(step: int, stage: str) -> float:
    """A moment of a run in steps: 12.8 is in the training of step 12."""
    return step + WITHIN_STEP.get(stage, 0.0)


def look_back(records: Iterable[Record]) -> History:
    """Put the events of a run together, oldest first."""
    progress = Progress()
    sessions: list[tuple[float, RunStarted]] = []
    decided: list[Decided] = []
    periods: list[Period] = []
    happenings: list[Happening] = []
    time_s = math.nan
    for record in records:
        event, time_s = record.event, record.time_s
        match event:
            case RunStarted():
                sessions.append((time_s, event))
                periods = _undone(periods, event.first_step)
                periods = _change(periods, event.first_step, event.plan, event.devices)
            case TransitionFinished():
                periods = _change(periods, _not_before(periods, event.step), event.after, event.devices_after)
                _attach(decided, event.decision, transition=event)
            case DecisionMade():
                decided.append(Decided(made=event, time_s=time_s, current=progress.plan))
            case OutcomeMeasured():
                _attach(decided, event.number, outcome=event)
            case PoolChanged() | DeviceFailed():
                happenings.append(event)
                if isinstance(event, PoolChanged) and periods:
                    at = _not_before(periods, _moment(event.step, happenings))
                    periods = _change(periods, at, periods[-1].plan, event.devices)
            case Recovered():
                happenings.append(event)
                _attach_recovery(decided, event)
                restored = event.restored_from
                at = place(event.step, event.stage) if restored is None else float(restored)
                periods = periods if restored is None else _undone(periods, restored)
                periods = _change(periods, at, event.plan, event.devices)
        progress = progress.after(event, time_s)
    return History(
        progress=progress,
        first=sessions[0][1] if sessions else None,
        sessions=tuple(sessions),
        ended=progress.finished,
        decisions=tuple(decided),
        periods=_closed(periods, float(progress.num_done)),
        happenings=tuple(happenings),
        last_time_s=time_s,
    )


def _moment(step: int, happenings: Sequence[Happening]) -> float:
    """A change of the pool because of a failure in a stage is where that was; any other is before the step."""
    for event in reversed(happenings[:-1]):
        if isinstance(event, DeviceFailed) and event.step == step:
            return place(step, event.stage)
        if not isinstance(event, PoolChanged):
            break
    return float(step)


def _not_before(periods: Sequence[Period], at: float) -> float:
    """Changes within a step come after each other, whatever they say of where they were."""
    return max(at, periods[-1].start) if periods and periods[-1].start < math.floor(at) + 1 else at


def _undone(periods: list[Period], step: float) -> list[Period]:
    return [replace(p, end=min(p.end, step)) for p in periods if p.start < step]


def _change(periods: list[Period], at: float, plan: Plan, devices: tuple[int, ...]) -> list[Period]:
    before = [replace(p, end=min(p.end, at)) for p in periods if p.start < at]
    return [*before, Period(start=at, end=math.inf, plan=plan, devices=devices)]


def _closed(periods: Sequence[Period], end: float) -> tuple[Period, ...]:
    """The last one lasts as long as steps are done; a change that no step has followed yet has no length."""
    return tuple(replace(p, end=max(p.start, min(p.end, end))) for p in periods)


def _attach(decided: list[Decided], number: int | None, **found: Any) -> None:
    for i in range(len(decided) - 1, -1, -1):
        if decided[i].made.number == number:
            decided[i] = replace(decided[i], **found)
            return


def _attach_recovery(decided: list[Decided], event: Recovered) -> None:
    """To the decision that said how to go on: the last one, if it was urgent and about this step."""
    if decided and decided[-1].made.urgent and decided[-1].made.step == event.step and decided[-1].transition is None:
        decided[-1] = replace(decided[-1], recovery=event)
