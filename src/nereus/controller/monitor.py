"""What the run reports, against what the plan was made for: when is it time to plan again, and for how long will that hold?

Each signal (response length, efficiencies, ...) has a reference, its value at the last replan. It *crosses* when it is
further from the reference than its threshold (paper §4.1). horizon_steps of a signal, the steps until it will cross again,
is an exponential moving average of the intervals between its crossings; one step before the first interval is known
(§4.3). Changes of the pool are crossings too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

POOL = "pool"
"""The signal whose crossings are changes of the pool."""

WEIGHT = 0.5
"""Of the newest interval in a horizon."""

OF_THE_PLAN = ("compute", "bandwidth")
"""Signals that another plan has other values of, though nothing has changed."""

THRESHOLDS: Mapping[str, float] = {
    "length_mean": 0.30,
    "length_p95": 0.30,
    "length_max": 0.30,
    "compute": 0.20,
    "bandwidth": 0.20,
}
"""Relative changes that matter: of lengths in tokens (paper §4.1), of achieved efficiencies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A signal has left the neighbourhood of its reference. threshold: relative; None for one without (the pool)."""

    signal: str
    value: float
    reference: float
    horizon_steps: float
    threshold: float | None = None

    @property
    def change(self) -> float:
        """Relative to the reference."""
        return self.value / self.reference - 1 if self.reference else float("inf")


@dataclass(slots=True)
class Monitor:
    """thresholds: by signal; a signal without one is not watched."""

    thresholds: Mapping[str, float] = field(default_factory=lambda: THRESHOLDS)
    references: dict[str, float] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    _crossed_at: dict[str, int] = field(default_factory=dict)
    _horizons: dict[str, float] = field(default_factory=dict)

    def observe(self, step: int, values: Mapping[str, float]) -> tuple[Crossing, ...]:
        """Take the values of a step; the signals that cross with it. The first value of a signal is its reference."""
        found = []
        for signal, value in values.items():
            self.values[signal] = value
            reference = self.references.setdefault(signal, value)
            threshold = self.thresholds.get(signal)
            if threshold is not None and abs(value - reference) > threshold * abs(reference):
                found.append(self._crossing(signal, step, value, reference))
        return tuple(found)

    def pool_changed(self, step: int, before: int, after: int) -> Crossing:
        """The number of devices is another one."""
        return self._crossing(POOL, step, float(after), float(before))

    def reset(self) -> None:
        """The present values are what the next ones are compared with: at every replan, admitted or not."""
        self.references.update(self.values)

    def plan_changed(self) -> None:
        """What the next step measures of the signals of a plan is what they are compared with from then on."""
        for signal in OF_THE_PLAN:
            self.references.pop(signal, None)
            self.values.pop(signal, None)

    def horizon_steps(self, signal: str) -> float:
        """Steps until its next crossing, as far as its past tells."""
        return self._horizons.get(signal, 1.0)

    def _crossing(self, signal: str, step: int, value: float, reference: float) -> Crossing:
        before = self._crossed_at.get(signal)
        if before is not None and step > before:
            interval, known = float(step - before), self._horizons.get(signal)
            self._horizons[signal] = interval if known is None else WEIGHT * interval + (1 - WEIGHT) * known
        self._crossed_at[signal] = step
        return Crossing(
            signal=signal,
            value=value,
            reference=reference,
            horizon_steps=self.horizon_steps(signal),
            threshold=self.thresholds.get(signal),
        )
