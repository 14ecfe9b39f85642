"""A run on the console while it goes on: a live display for a terminal, plain lines for a log.

    event -> Progress.after -> progress (frozen) -> what is drawn

The live display is drawn by a thread of rich's, several times a second; it reads one frozen `Progress`, so
that `handle` needs no lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nereus.core.events import (
    CheckpointFailed,
    CheckpointWritten,
    DecisionMade,
    DeviceFailed,
    Event,
    OutcomeMeasured,
    PlanChosen,
    PoolChanged,
    Recovered,
    RunFinished,
    RunStarted,
    StepFinished,
    TransitionFinished,
)
from nereus.core.plan import split_evenly
from nereus.telemetry import decisions, describe
from nereus.telemetry.plan_table import plan_table
from nereus.telemetry.progress import (
    RECENT_STEPS,
    Progress,
    finite,
    is_finite,
    mean,
    newly_not_finite,
    stage_seconds,
    total_seconds,
)

BLOCKS = "▁▂▃▄▅▆▇█"
WIDE, NARROW = 92, 76
"""Characters from which there is room to breathe, and below which only the essential is shown."""


class View(Protocol):
    """Shows a run as its events come in; a context manager, so that the terminal is always given back."""

    def handle(self, event: Event) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def view_for(
    console: Console, *, clock: Callable[[], float], folder: Path | None = None, history: Iterable[Event] = ()
) -> View:
    """The live view if the console is a terminal that can draw it, plain lines otherwise."""
    can_draw = console.is_interactive and not console.is_dumb_terminal and console.encoding.startswith("utf")
    kind = LiveView if can_draw else PlainView
    return kind(console, clock=clock, folder=folder, history=history)


class PlainView:
    """A run as lines of plain ASCII: one a step, a transition, a checkpoint. What a CI log shows.

    clock: seconds, for elapsed and remaining time. folder: named in the summary.
    history: the events before a resume, so that the summary is of the whole run.
    """

    def __init__(
        self,
        console: Console,
        *,
        clock: Callable[[], float],
        folder: Path | None = None,
        history: Iterable[Event] = (),
    ) -> None:
        self._console = console
        self._clock = clock
        self._folder = folder
        self._progress = _replay(history)

    def handle(self, event: Event) -> None:
        """Print what this event is about, if a line is due."""
        now_s = self._clock()
        self._progress = self._progress.after(event, now_s)
        for line in self._lines(event, now_s):
            # soft_wrap: a log has no width, so a line must stay one line
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _lines(self, event: Event, now_s: float) -> list[str]:
        match event:
            case RunStarted():
                return [describe.start(event), *(f"  {describe.placement(p)}" for p in event.plan.placements)]
            case StepFinished():
                return [describe.step(event, self._progress, now_s), *_warnings(self._progress)]
            case CheckpointWritten():
                return [describe.checkpoint(event)]
            case RunFinished():
                return describe.summary(self._progress, now_s, self._folder)
            case _:
                return [text for text, _ in news(event, self._progress)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


class LiveView:
    """A run as a display that stays in place; what happens once (transitions, warnings) is printed above it.

    The same arguments as PlainView. `rich` draws the view itself, which is what it is at that moment.
    """

    def __init__(
        self,
        console: Console,
        *,
        clock: Callable[[], float],
        folder: Path | None = None,
        history: Iterable[Event] = (),
    ) -> None:
        self._console = console
        self._clock = clock
        self._folder = folder
        self._progress = _replay(history)
        self._live = Live(self, console=console, refresh_per_second=4)

    def handle(self, event: Event) -> None:
        """Take the event into the display, print above it what should stay to be read."""
        now_s = self._clock()
        self._progress = self._progress.after(event, now_s)
        match event:
            case StepFinished():
                self._announce(_warnings(self._progress), "yellow")
            case RunFinished():
                self._live.stop()
                self._console.print()
                self._announce(describe.summary(self._progress, now_s, self._folder))
            case _:
                for text, style in news(event, self._progress):
                    self._announce([text], style)

    def _announce(self, lines: Sequence[str], style: str = "") -> None:
        for line in lines:
            self._console.print(_coloured(line, style))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        progress = self._progress
        if progress.run is None or progress.plan is None:
            yield Text("starting ...", style="dim")
            return
        width = options.max_width
        below = [
            *_trends(progress, width),
            *_adapting(progress),
            *_sample(progress),
            Text(),
            plan_table(progress.plan, progress.devices, width=width),
        ]
        above = _header(progress, self._clock(), width)
        fixed_lines = 4 + len(above) + len(below) + len(progress.plan.placements)
        num_rows = max(2, min(RECENT_STEPS, console.height - fixed_lines))
        yield Group(*above, Text(), _step_table(progress, num_rows, width), Text(), *below)


def news(event: Event, progress: Progress) -> list[tuple[str, str]]:
    """What happened beside steps, as (line, style): changes of plan and pool, decisions, failures, recoveries.

    progress: of the run with this event in it.
    """
    unit = progress.unit
    match event:
        case PlanChosen():
            return [(describe.chosen(event, unit), "")]
        case TransitionFinished():
            return [(describe.transition(event, unit), "")]
        case PoolChanged():
            return [(describe.pool(event), "yellow" if event.lost or event.leaving else "cyan")]
        case DecisionMade():
            style = {"admitted": "cyan", "restart": "bold red"}.get(event.verdict, "dim")
            return [(decisions.line(event, progress.plan, unit), style)]
        case OutcomeMeasured():
            return [(decisions.outcome(event, unit), "dim")]
        case DeviceFailed():
            return [(describe.failure(event, unit), "bold red")]
        case Recovered():
            return [(describe.recovery(event, unit), "green")]
        case CheckpointFailed():
            return [(describe.checkpoint_failed(event), "bold red")]
        case _:
            return []


def _replay(history: Iterable[Event]) -> Progress:
    progress = Progress()
    for event in history:
        progress = progress.after(event, 0.0)
    return progress


def _warnings(progress: Progress) -> list[str]:
    names = newly_not_finite(progress)
    return [describe.not_finite(progress.steps[-1].step, names)] if names else []


def _coloured(line: str, style: str = "") -> Text:
    text = Text(line, style=style)
    text.highlight_regex(r"state equal: yes", "green")
    text.highlight_regex(r"state equal: NO", "bold red")
    text.highlight_regex(r"^step \d+: .*plan changed", "bold")
    return text


def _header(progress: Progress, now_s: float, width: int) -> list[RenderableType]:
    assert progress.run is not None
    run = progress.run
    title = Text(run.job, style="bold", no_wrap=True, overflow="ellipsis")
    title.append(f"  run {run.run}  {run.algorithm}  {len(progress.devices)} devices", style="dim")
    if progress.checkpoint is not None:
        title.append(f"  checkpoint at step {progress.checkpoint.step}", style="dim")
    elapsed, left = describe.duration(progress.elapsed_s(now_s)), describe.duration(progress.left_s(now_s))
    times = f"{progress.num_done}/{progress.num_steps} steps  elapsed {elapsed}  left {left}"
    now = f"step {progress.stage.step}: {progress.stage.stage}" if progress.stage else ""
    if progress.stage and progress.primitive:
        now += f" ({progress.primitive.number} of {progress.primitive.total})"
    line = Table.grid(padding=(0, 2, 0, 0))
    bar_width = 24 if width >= WIDE else 14 if width >= NARROW else 4
    line.add_row(
        ProgressBar(total=max(1, progress.num_steps), completed=progress.num_done, width=bar_width),
        Text(times, no_wrap=True),
        Text(now, style="cyan", no_wrap=True, overflow="ellipsis"),
    )
    return [title, line]


def _step_table(progress: Progress, num_rows: int, width: int) -> Table:
    """The last steps. A step before which the plan changed is marked with a star."""
    steps = progress.steps[-num_rows:]
    metrics = [
        (label, name)
        for label, name in describe.METRICS
        if name != "score" or any("score" in step.metrics for step in steps)
    ]
    table = Table(box=None, padding=(0, 2 if width >= WIDE else 1, 0, 0), header_style="dim", pad_edge=False)
    stages = ("generation", "inference", "training", "other") if width >= NARROW else ()
    total = "emulated s" if progress.emulated else "seconds"
    for heading in ("step", *(label for label, _ in metrics), total, *stages):
        table.add_column(heading, justify="right", no_wrap=True, min_width=6 if heading != "step" else 5)
    for step in steps:
        changed = step.step in progress.changed_steps
        parts = stage_seconds(step)
        table.add_row(
            Text(f"* {step.step}" if changed else str(step.step), style="bold yellow" if changed else ""),
            *(_metric(step.metrics.get(name)) for _, name in metrics),
            Text(describe.seconds(total_seconds(step)), style="bold"),
            *(describe.seconds(parts[stage]) for stage in stages),
        )
    return table


def _metric(value: float | None) -> Text:
    if value is None:
        return Text("-", style="dim")
    return Text(describe.number(value), style="" if is_finite(value) else "bold red")


def _trends(progress: Progress, width: int) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for label, metric, style in (("reward", "reward", "green"), ("length", "length_mean", "cyan")):
        values = progress.values(metric)
        if kept := finite(values):
            line = Text(f"{label}  ", no_wrap=True, overflow="crop")
            line.append(sparkline(values, max(8, min(80, width - 30))), style=style)
            line.append(f"  {describe.number(kept[0])} -> {describe.number(kept[-1])}")
            lines.append(line)
    return lines


def _adapting(progress: Progress) -> list[RenderableType]:
    """The memory of the fullest device, and what was decided last."""
    lines: list[RenderableType] = []
    if (peak := progress.peak_bytes) is not None:
        words = describe.memory(peak, progress.run.capacity_bytes if progress.run else None)
        lines.append(Text.assemble(("memory  ", "dim"), f"at most {words}", no_wrap=True, overflow="ellipsis"))
    if progress.decisions:
        last = progress.decisions[-1]
        words = f"{last.number} at step {last.step}: {decisions.reason(last)}: {decisions.verdict(last)}"
        lines.append(Text.assemble(("decision  ", "dim"), words, no_wrap=True, overflow="ellipsis"))
    return lines


def _sample(progress: Progress) -> list[RenderableType]:
    if not progress.steps or not progress.steps[-1].sample:
        return []
    words = " ".join(progress.steps[-1].sample.split())
    shown = "".join(c if c.isprintable() else "?" for c in words)  # a model may well write escape codes
    return [Text.assemble(("sample  ", "dim"), shown, no_wrap=True, overflow="ellipsis")]


def sparkline(values: Sequence[float], width: int) -> str:
    """One character for each value, lowest to highest block; for more than `width`, for the mean of some.

    A value that is not finite, or a group without a finite one, is a gap.
    """
    if len(values) > width:
        values = [mean([values[i] for i in group]) for group in split_evenly(len(values), width)]
    kept = finite(values)
    low, high = min(kept, default=0.0), max(kept, default=0.0)
    return "".join(_block(v, low, high) if is_finite(v) else " " for v in values)


def _block(value: float, low: float, high: float) -> str:
    if high == low:
        return BLOCKS[len(BLOCKS) // 2]
    return BLOCKS[round((value - low) / (high - low) * (len(BLOCKS) - 1))]
