"""A run in words: numbers, sentences and lines that views and trackers share. Plain ASCII, for any log."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from nereus.core.events import CheckpointWritten, PlanChosen, RunStarted, StepFinished, TransitionFinished
from nereus.core.plan import Placement, Plan
from nereus.telemetry.progress import Progress, first_and_last, stage_seconds, total_seconds

METRICS = (("reward", "reward"), ("score", "score"), ("KL", "kl"), ("length", "length_mean"))
"""The metrics that a view shows of every step: what it calls them, and their names in the event."""


def number(value: float) -> str:
    """Three decimals, or what says more: `0.512`, `34.1`, `1,204`, `2e-05`, `nan`."""
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if size and size < 0.001:
        return f"{value:.0e}"
    return f"{value:.3f}" if size < 10 else f"{value:.1f}" if size < 1000 else f"{value:,.0f}"


def seconds(value: float) -> str:
    """A measured time without its unit: `0.03`, `12.3`, `1,204`, `-` for one that was not measured."""
    if not math.isfinite(value):
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def duration(value_s: float | None) -> str:
    """A time to wait: `0:09`, `1:02:03`, `2d 03:04`, `?` for one that nobody knows."""
    if value_s is None or not math.isfinite(value_s):
        return "?"
    minutes, secs = divmod(int(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours_of_day = divmod(hours, 24)
    if days:
        return f"{days}d {hours_of_day:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def data_size(num_bytes: float) -> str:
    """`512 B`, `3.2 MB`, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.1f} {unit}" if unit != "B" else f"{num_bytes:.0f} B"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def ranges(ids: Iterable[int]) -> str:
    """Device ids, short: `0-3,6`."""
    runs: list[list[int]] = []
    for i in sorted(ids):
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def placement(p: Placement) -> str:
    """`actor/training: tp2 pp1 dp4, micro-batch 8, recompute, devices 0-7`."""
    recompute = ", recompute" if p.recompute else ""
    return f"{p.model_stage}: {_layout(p)}, micro-batch {p.micro_batch}{recompute}, devices {ranges(p.gpus)}"


def _layout(p: Placement) -> str:
    return f"{p.layout} dp{p.dp}"


def start(run: RunStarted) -> str:
    """What begins, in one line."""
    resumed = f", goes on at step {run.first_step}" if run.first_step else ""
    return (
        f"{run.job}, run {run.run}: {run.algorithm}, {run.num_steps} steps on "
        f"{len(run.devices)} devices ({ranges(run.devices)}){resumed}"
    )


def chosen(event: PlanChosen) -> str:
    """What the planner chose, in one line: model-stages that are placed alike together."""
    alike: dict[str, list[str]] = {}
    for p in event.plan.placements:
        words = f"{_layout(p)} mb{p.micro_batch}{' recompute' if p.recompute else ''} on {ranges(p.gpus)}"
        alike.setdefault(words, []).append(str(p.model_stage))
    plan = "; ".join(f"{', '.join(names)} {words}" for words, names in alike.items())
    when = f"step {event.step}: " if event.step else ""
    stages = ", ".join(f"{stage} {seconds(s)}" for stage, s in event.stage_s.items())
    return f"{when}plan: auto chose {plan}; predicted {seconds(event.step_s)} s a step ({stages}); {event.why}"


def step(event: StepFinished, progress: Progress, now_s: float) -> str:
    """One step in one line; `progress` already counts it."""
    shown = [(label, event.metrics[name]) for label, name in METRICS if name in event.metrics]
    metrics = ", ".join(f"{label} {number(value)}" for label, value in shown)
    stages = ", ".join(f"{stage} {seconds(s)}" for stage, s in stage_seconds(event).items())
    width = len(str(progress.num_steps))
    return (
        f"[{progress.num_done:{width}}/{progress.num_steps}] step {event.step}: {metrics}, "
        f"{seconds(total_seconds(event))} s ({stages}), {duration(progress.left_s(now_s))} left"
    )


def transition(event: TransitionFinished) -> str:
    """A change of plan in one paragraph."""
    devices = f"{changed}, " if (changed := _device_change(event)) else ""
    changes = "; ".join(_plan_changes(event.before, event.after)) or "nothing but the devices"
    return (
        f"step {event.step}: {devices}plan changed in {seconds(event.seconds)} s "
        f"({seconds(event.predicted_seconds)} predicted): {changes}; "
        f"received {data_size(event.received_bytes)}, kept in place {data_size(event.kept_bytes)}, "
        f"{_equality(event)}"
    )


def transition_outcome(event: TransitionFinished) -> str:
    """A change of plan in few words, for a list of them."""
    devices = _device_change(event) or f"{len(event.devices_after)} devices"
    return (
        f"step {event.step}: {devices}, {seconds(event.seconds)} s, "
        f"received {data_size(event.received_bytes)}, {_equality(event)}"
    )


def _equality(event: TransitionFinished) -> str:
    return f"state equal: {'yes' if event.state_equal else 'NO'}"


def _device_change(event: TransitionFinished) -> str:
    before, after = event.devices_before, event.devices_after
    if set(before) == set(after):
        return ""
    if len(before) == len(after):
        return f"devices {ranges(before)} -> {ranges(after)}"
    return f"devices {len(before)} -> {len(after)}"


def _plan_changes(before: Plan, after: Plan) -> list[str]:
    """What changed, each change once, with the model-stages that share it."""
    old = {p.model_stage: p for p in before.placements}
    new = {p.model_stage: p for p in after.placements}
    by_change: dict[str, list[str]] = {}
    for model_stage in old | new:
        if old.get(model_stage) != new.get(model_stage):
            change = _change(old.get(model_stage), new.get(model_stage))
            by_change.setdefault(change, []).append(str(model_stage))
    return [f"{', '.join(names)} {change}" for change, names in by_change.items()]


def _change(old: Placement | None, new: Placement | None) -> str:
    if old is None or new is None:
        return f"placed as {_layout(new)}" if new else "removed"
    parts = []
    if old.layout == new.layout and old.dp != new.dp:
        parts.append(f"{_layout(old)} -> dp{new.dp}")
    elif old.layout != new.layout:
        parts.append(f"{_layout(old)} -> {_layout(new)}")
    elif old.gpus != new.gpus:
        parts.append(f"devices {ranges(old.gpus)} -> {ranges(new.gpus)}")
    if old.micro_batch != new.micro_batch:
        parts.append(f"micro-batch {old.micro_batch} -> {new.micro_batch}")
    if old.recompute != new.recompute:
        parts.append(f"recompute {'on' if new.recompute else 'off'}")
    return ", ".join(parts)


def checkpoint(event: CheckpointWritten) -> str:
    """A checkpoint in one line."""
    size, taken = data_size(event.num_bytes), seconds(event.seconds)
    return f"step {event.step}: checkpoint of {size} in {taken} s: {event.path}"


def not_finite(step_number: int, names: Iterable[str]) -> str:
    """A warning about metrics that became NaN or infinite."""
    return f"step {step_number}: not finite: {', '.join(names)}"


def summary(progress: Progress, now_s: float, folder: Path | None) -> list[str]:
    """What came of the run, line by line; to be read when it has ended.

    Of `RunFinished.summary` it reads samples_trained, samples_repeated and samples_skipped, if present.
    """
    finished = progress.finished
    ended = "interrupted" if finished and finished.interrupted else "done"
    name = f"{progress.run.job}, run {progress.run.run}" if progress.run else "run"
    lines = [
        f"{name}: {ended} after {duration(progress.elapsed_s(now_s))}, "
        f"{progress.num_done} of {progress.num_steps} steps"
    ]
    for label, metric in (("reward", "reward"), ("length", "length_mean")):
        first, last, window = first_and_last(progress.values(metric))
        if not (math.isnan(first) and math.isnan(last)):
            lines.append(f"  {label} {number(first)} -> {number(last)} (first and last {window}-step mean)")
    lines += [f"  {transition_outcome(t)}" for t in progress.transitions]
    counts = finished.summary if finished else {}
    samples = [f"{word} {counts[key]}" for word in _SAMPLE_WORDS if (key := f"samples_{word}") in counts]
    if samples:
        lines.append(f"  samples {', '.join(samples)}")
    if folder is not None:
        lines.append(f"  run folder {folder}")
    return lines


_SAMPLE_WORDS = ("trained", "repeated", "skipped")
