"""Where a run stands: what its events so far add up to. Plain data, for any view of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from nereus.core.events import (
    CheckpointFailed,
    CheckpointWritten,
    DecisionMade,
    DeviceFailed,
    Event,
    OutcomeMeasured,
    PlanChosen,
    PoolChanged,
    PrimitiveFinished,
    Recovered,
    RunFinished,
    RunStarted,
    StageStarted,
    StepFinished,
    TransitionFinished,
)
from nereus.core.plan import Plan

STAGES = ("generation", "inference", "training")
RECENT_STEPS = 8
"""How many steps a table of the last ones has, and how many the time left is estimated from."""
SUMMARY_STEPS = 3
"""How many steps the first and the last value of a summary are a mean over: one step alone is too noisy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A run as seen so far. `after` gives the next one; times are seconds of the view's own clock."""

    run: RunStarted | None = None
    plan: Plan | None = None
    devices: tuple[int, ...] = ()
    stage: StageStarted | None = None
    primitive: PrimitiveFinished | None = None
    steps: tuple[StepFinished, ...] = ()
    transitions: tuple[TransitionFinished, ...] = ()
    decisions: tuple[DecisionMade, ...] = ()
    outcomes: tuple[OutcomeMeasured, ...] = ()
    failures: tuple[DeviceFailed, ...] = ()
    recoveries: tuple[Recovered, ...] = ()
    checkpoint: CheckpointWritten | None = None
    finished: RunFinished | None = None
    started_s: float = 0.0
    step_ended_s: float = 0.0

    def after(self, event: Event, now_s: float) -> Progress:
        """A step that is done over after a resume replaces the first try, and those that came after it."""
        match event:
            case RunStarted():
                return replace(
                    self,
                    run=event,
                    plan=event.plan,
                    devices=event.devices,
                    stage=None,
                    steps=_before(self.steps, event.first_step),
                    transitions=tuple(t for t in self.transitions if t.step < event.first_step),
                    finished=None,
                    started_s=now_s,
                    step_ended_s=now_s,
                )
            case PlanChosen():
                return self
            case StageStarted():
                return replace(self, stage=event, primitive=None)
            case PrimitiveFinished():
                return replace(self, primitive=event)
            case StepFinished():
                return replace(self, steps=(*_before(self.steps, event.step), event), step_ended_s=now_s)
            case TransitionFinished():
                return replace(
                    self,
                    plan=event.after,
                    devices=event.devices_after,
                    transitions=(*self.transitions, event),
                )
            case PoolChanged():
                return replace(self, devices=event.devices)
            case DecisionMade():
                return replace(self, decisions=(*self.decisions, event))
            case OutcomeMeasured():
                return replace(self, outcomes=(*self.outcomes, event))
            case DeviceFailed():
                return replace(self, failures=(*self.failures, event))
            case Recovered():
                first = self.num_steps if event.restored_from is None else event.restored_from
                return replace(
                    self,
                    plan=event.plan,
                    devices=event.devices,
                    recoveries=(*self.recoveries, event),
                    steps=_before(self.steps, first),
                    transitions=tuple(t for t in self.transitions if t.step < first),
                )
            case CheckpointWritten():
                return replace(self, checkpoint=event)
            case CheckpointFailed():
                return self
            case RunFinished():
                return replace(self, finished=event, stage=None)

    @property
    def num_done(self) -> int:
        """Steps that are trained, those before a resume included."""
        if self.steps:
            return self.steps[-1].step + 1
        return self.run.first_step if self.run else 0

    @property
    def num_steps(self) -> int:
        return self.run.num_steps if self.run else 0

    @property
    def emulated(self) -> bool:
        return self.run is not None and self.run.emulated

    @property
    def unit(self) -> str:
        """Of seconds, for people: those of a paced run are of the devices that were described."""
        return "emulated s" if self.emulated else "s"

    @property
    def peak_bytes(self) -> int | None:
        """Of the fullest device in the last step; None where nobody measured."""
        return max(self.steps[-1].peak_bytes.values(), default=None) if self.steps else None

    @property
    def changed_steps(self) -> frozenset[int]:
        """The steps before which the plan changed."""
        return frozenset(t.step for t in self.transitions)

    def elapsed_s(self, now_s: float) -> float:
        return now_s - self.started_s

    def left_s(self, now_s: float) -> float | None:
        """The time that the remaining steps will take, going by the last ones under the current plan."""
        recent = self.steps[-RECENT_STEPS:]
        changed = max(self.changed_steps, default=0)
        durations = finite([total_seconds(s) for s in recent if s.step >= changed])
        durations = durations or finite([total_seconds(s) for s in recent])
        if not durations:
            return None
        left_s = (self.num_steps - self.num_done) * median(durations) - (now_s - self.step_ended_s)
        return max(0.0, left_s)

    def values(self, metric: str) -> list[float]:
        """One metric over the steps, NaN where a step lacks it."""
        return [step.metrics.get(metric, math.nan) for step in self.steps]


def _before(steps: Sequence[StepFinished], step: int) -> tuple[StepFinished, ...]:
    return tuple(s for s in steps if s.step < step)


def finite(values: Sequence[float]) -> list[float]:
    """Those that can be calculated with, see `is_finite`."""
    return [value for value in values if is_finite(value)]


def is_finite(value: float) -> bool:
    """Neither NaN nor infinite, nor so large that a sum or a difference of some could overflow."""
    return abs(value) < 1e300


def mean(values: Sequence[float]) -> float:
    """The mean of the finite ones, NaN if there are none."""
    return fmean(kept) if (kept := finite(values)) else math.nan


def first_and_last(values: Sequence[float]) -> tuple[float, float, int]:
    """The means over the first few and over the last few values, and how many: at most half of them."""
    window = max(1, min(SUMMARY_STEPS, len(values) // 2))
    return mean(values[:window]), mean(values[-window:]), window


def total_seconds(step: StepFinished) -> float:
    """The whole step; the sum of its parts where the whole is not reported."""
    return step.seconds.get("step", sum(step.seconds.values()))


def stage_seconds(step: StepFinished) -> dict[str, float]:
    """The three stages, NaN where one is not reported, and "other": the rest of the step, at least 0.

    In asynchronous mode stages overlap, so that the parts may add up to more than the whole.
    """
    parts = {stage: step.seconds.get(stage, math.nan) for stage in STAGES}
    return {**parts, "other": max(0.0, total_seconds(step) - sum(finite(list(parts.values()))))}


def newly_not_finite(progress: Progress) -> list[str]:
    """Metrics of the last step that are NaN or infinite and were not so in the step before."""
    if not progress.steps:
        return []
    last, earlier = progress.steps[-1], progress.steps[-2].metrics if len(progress.steps) > 1 else {}
    return [name for name, value in last.metrics.items() if not is_finite(value) and is_finite(earlier.get(name, 0.0))]
