"""The charts of a report: each is one drawing over steps, all with the same steps below each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from nereus.core.events import DeviceFailed, StepFinished
from nereus.core.plan import split_evenly
from nereus.telemetry import describe
from nereus.telemetry.history import History, place
from nereus.telemetry.progress import finite, mean, total_seconds
from nereus.telemetry.svg import Drawing, Point, Scale, nice_ticks

WIDE, HALF = 960.0, 468.0
LEFT, RIGHT, TOP, BOTTOM = 76.0, 16.0, 26.0, 34.0
"""Pixels around what is plotted."""

MOST_BARS = 320
"""More steps than these are drawn as means over some."""

STAGE_STYLES = {
    "generation": "generation",
    "inference": "inference",
    "training": "training",
    "weight_sync": "sync",
    "transition": "change",
    "recovery": "recovery",
    "controller": "controller",
    "other": "other",
}
GB, MB = 1e9, 1e6
CLOSE = 0.1
"""Share of the capacity from which the capacity is drawn too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A drawing in a page. legend: (class, words) of what is drawn."""

    title: str
    svg: str
    legend: tuple[tuple[str, str], ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment in all charts. style: change, failure. label: the number of a decision."""

    at: float
    style: str
    label: str


def marks(history: History) -> list[Mark]:
    """Changes of plan and failures, with the number of the decision."""
    found = []
    for t in history.progress.transitions:
        label = str(t.decision) if t.decision is not None else ""
        found.append(Mark(t.step, "change", label))
    for e in history.happenings:
        if isinstance(e, DeviceFailed):
            found.append(Mark(place(e.step, e.stage), "failure", ""))
    for decided in history.decisions:
        if (recovery := decided.recovery) is not None:
            at = place(recovery.step, recovery.stage)
            found.append(Mark(at, "failure", str(decided.made.number)))
    return found


class Frame:
    """Axes, grid and marks of a chart over steps."""

    def __init__(
        self,
        name: str,
        history: History,
        values: Iterable[float],
        *,
        height: float = 200.0,
        width: float = WIDE,
        unit: str = "",
        zero: bool = True,
        labels: bool = False,
    ) -> None:
        self.drawing = Drawing(name, width, height)
        first, end = span(history)
        self.x = Scale(first, end, LEFT, width - RIGHT)
        low, high = _bounds(values, zero)
        self.y = Scale(low, high, height - BOTTOM, TOP)
        self._axes(unit)
        self._marks(marks(history), labels)

    def _axes(self, unit: str) -> None:
        d = self.drawing
        for value in nice_ticks(self.y.low, self.y.high, 6):
            d.line(LEFT, self.y(value), d.width - RIGHT, self.y(value), "grid")
            d.text(LEFT - 8, self.y(value) + 4, _tick(value), "tick", "end")
        steps_axis(d, self.x, d.height - BOTTOM)
        if unit:
            d.text(6, 13, unit, "tick")

    def _marks(self, found: Sequence[Mark], labels: bool) -> None:
        d = self.drawing
        last = -math.inf
        for mark in sorted(found, key=lambda m: m.at):
            x = self.x(mark.at)
            d.line(x, TOP - 4, x, d.height - BOTTOM, f"mark {mark.style}-line")
            if labels and mark.label and x - last >= 10:
                d.text(x, TOP - 8, mark.label, f"label {mark.style}-text", "middle")
                last = x

    def curve(self, steps: Sequence[StepFinished], value: Callable[[StepFinished], float], style: str) -> None:
        """One value of each step, in the middle of the step."""
        points: list[Point | None] = []
        for group in _groups(steps):
            found = mean([value(s) for s in group])
            middle = (group[0].step + group[-1].step + 1) / 2
            points.append((self.x(middle), self.y(found)) if math.isfinite(found) else None)
        self.drawing.path(points, style)


def steps_axis(d: Drawing, x: Scale, y: float) -> None:
    """The axis of steps at the bottom of a drawing."""
    d.line(x.start, y, x.end, y, "axis")
    for value in nice_ticks(x.low, x.high, 11 if d.width > 600 else 6):
        if value == int(value):
            d.line(x(value), y, x(value), y + 4, "axis")
            d.text(x(value), y + 17, f"{int(value):,}", "tick", "middle")
    d.text(x.end, y + 31, "step", "tick", "end")


def span(history: History) -> tuple[float, float]:
    """The steps that are shown: from the first that is known to the last that is done."""
    steps = history.progress.steps
    first = float(steps[0].step if steps else history.progress.num_done)
    return first, max(float(history.progress.num_done), first + 1)


def _bounds(values: Iterable[float], zero: bool) -> tuple[float, float]:
    kept = finite(list(values)) or [0.0]
    low, high = min(kept), max(kept)
    if zero:
        low, high = min(0.0, low), max(0.0, high)
    if high - low < 1e-12 * max(1.0, abs(high)):
        return (low, low + 1.0) if zero else (low - 0.5, low + 0.5)
    room = 0.06 * (high - low)
    return (low if zero and low == 0 else low - room), high + room


def _tick(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _groups(steps: Sequence[StepFinished]) -> list[Sequence[StepFinished]]:
    """Each step alone, or as many together as it takes to stay below MOST_BARS."""
    if len(steps) <= MOST_BARS:
        return [[s] for s in steps]
    return [[steps[i] for i in group] for group in split_evenly(len(steps), MOST_BARS)]


def latency(history: History) -> Chart:
    """Seconds of each step, its stages on each other, and the line of what was predicted."""
    steps = history.progress.steps
    groups = _groups(steps)
    bars = [(g, parts(g)) for g in groups]
    tops = [sum(p.values()) for _, p in bars]
    predicted = [s.predicted.get("step", math.nan) for s in steps]
    f = Frame(
        "latency", history, [*tops, *(total_seconds(s) for s in steps), *predicted], height=280, unit=history.unit,
        labels=True,
    )  # fmt: skip
    for group, stages in bars:
        left, right = f.x(group[0].step), f.x(group[-1].step + 1)
        gap = min(1.0, 0.15 * (right - left))
        base = 0.0
        for stage, value in stages.items():
            top = base + value
            words = f"step {group[0].step}, {stage}: {describe.precise(value)} {history.unit}"
            style = STAGE_STYLES.get(stage, "other")
            f.drawing.rect(left + gap / 2, f.y(top), right - left - gap, f.y(base) - f.y(top), f"{style}-fill", words)
            base = top
    f.curve(steps, lambda s: s.predicted.get("step", math.nan), "predicted")
    used = dict.fromkeys(stage for _, stages in bars for stage in stages)
    legend = [(f"{STAGE_STYLES.get(stage, 'other')}-fill", stage) for stage in used]
    if finite(predicted):
        legend.append(("predicted", "predicted for the plan in force"))
    if history.progress.transitions:
        decided = any(t.decision is not None for t in history.progress.transitions)
        legend.append(("change-line", "plan changed" + ("; the number is that of its decision" if decided else "")))
    if any(isinstance(e, DeviceFailed) for e in history.happenings):
        legend.append(("failure-line", "device failed, and the number of the decision how to go on"))
    note = f"Each bar is the mean of {len(groups[0])} or so steps." if len(steps) > MOST_BARS else ""
    first, last = (total_seconds(steps[i]) for i in (0, -1))
    words = (
        f"Stacked bars by step; step {steps[0].step} took {describe.seconds(first)} {history.unit}, step "
        f"{steps[-1].step} {describe.seconds(last)} {history.unit}."
    )
    return Chart(title="Step latency by stage", svg=f.drawing.svg("Step latency by stage", words), legend=tuple(legend),
                 note=note)  # fmt: skip


def parts(group: Sequence[StepFinished]) -> dict[str, float]:
    """Mean seconds of the stages of some steps, what is left over as "other"; in the order they are drawn."""
    names = [name for name in STAGE_STYLES if name != "other"]
    found = {}
    for name in names:
        value = mean([s.seconds[name] for s in group if name in s.seconds])
        if math.isfinite(value) and value > 0:
            found[name] = value
    total = mean([total_seconds(s) for s in group])
    if math.isfinite(total) and total - sum(found.values()) > 0:
        found["other"] = total - sum(found.values())
    return found


def lengths(history: History) -> Chart | None:
    """Response lengths in tokens: mean, 95th percentile, longest."""
    curves = (
        ("length_mean", "mean", "one"),
        ("length_p95", "95th percentile", "two"),
        ("length_max", "longest", "three"),
    )
    return _curves("lengths", "Response length", history, curves, unit="tokens", height=200)


def reward(history: History) -> Chart | None:
    return _curves(
        "reward", "Reward", history, (("reward", "reward", "one"), ("score", "score", "two")), width=HALF, zero=False
    )


def divergence(history: History) -> Chart | None:
    return _curves("kl", "KL divergence", history, (("kl", "KL from the reference model", "two"),), width=HALF)


def _curves(
    name: str,
    title: str,
    history: History,
    curves: Sequence[tuple[str, str, str]],
    *,
    width: float = WIDE,
    height: float = 180,
    unit: str = "",
    zero: bool = True,
) -> Chart | None:
    """Metrics as lines; nothing where none was reported."""
    steps = history.progress.steps
    found = [(m, words, style) for m, words, style in curves if finite(history.progress.values(m))]
    if not found:
        return None
    values = [v for m, _, _ in found for v in history.progress.values(m)]
    f = Frame(name, history, values, width=width, height=height, unit=unit, zero=zero)
    said = []
    for metric, words, style in found:

        def value(s: StepFinished, metric: str = metric) -> float:
            return s.metrics.get(metric, math.nan)

        f.curve(steps, value, f"curve {style}-line")
        kept = finite(history.progress.values(metric))
        said.append(f"{words} from {describe.number(kept[0])} to {describe.number(kept[-1])}")
    legend = tuple((f"{style}-line", words) for _, words, style in found)
    return Chart(title=title, svg=f.drawing.svg(title, "; ".join(said)), legend=legend)


def memory(history: History) -> Chart | None:
    """The fullest device's peak, against what a device has; far below that, only the peak."""
    steps = [s for s in history.progress.steps if s.peak_bytes]
    if not steps:
        return None
    peak = max(max(s.peak_bytes.values()) for s in steps)
    capacity = (history.progress.run.capacity_bytes if history.progress.run else None) or 0
    near = capacity if peak >= CLOSE * capacity else 0
    scale, unit = (GB, "GB") if max(peak, near) >= GB else (MB, "MB")
    f = Frame("memory", history, [peak / scale, near / scale], height=180, unit=unit)
    f.curve(steps, lambda s: max(s.peak_bytes.values()) / scale, "curve one-line")
    f.curve(steps, lambda s: min(s.peak_bytes.values()) / scale, "curve three-line")
    legend = [("one-line", "fullest device"), ("three-line", "emptiest device")]
    if near:
        y = f.y(near / scale)
        f.drawing.line(LEFT, y, f.drawing.width - RIGHT, y, "capacity")
        legend.append(("capacity", "capacity"))
    words = f"The fullest device took at most {describe.memory(peak, capacity)}."
    title = "Memory peak of a step"
    note = words if capacity and not near else ""
    return Chart(title=title, svg=f.drawing.svg(title, words), legend=tuple(legend), note=note)
