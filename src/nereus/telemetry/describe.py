"""A run in words: numbers, sentences and lines that views and trackers share. Plain ASCII, for any log."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard

from nereus.core.events import (
    CheckpointFailed,
    CheckpointWritten,
    DeviceFailed,
    PlanChosen,
    PoolChanged,
    Recovered,
    RunStarted,
    StepFinished,
    TransitionFinished,
)
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


def known(value: Any) -> TypeGuard[float]:
    """Whether it is a number that can be calculated with; null stands for one that was not finite."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def seconds(value: float | None) -> str:
    """A time without its unit: `0.03`, `12.3`, `1,204`, `-` for one that was not measured."""
    if not known(value):
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def precise(value: float | None) -> str:
    """A time without its unit that others are made of: three digits that matter."""
    if not known(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def error(predicted: float, measured: float) -> str:
    """` (12% too high)`: how far a prediction was off; nothing where that cannot be said."""
    if not (known(predicted) and known(measured) and measured > 0):
        return ""
    off = predicted / measured - 1
    return f" ({abs(off):.0%} too {'high' if off > 0 else 'low'})" if abs(off) >= 0.005 else " (right)"


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


def count(value: float) -> str:
    """A large number in powers of 1000 and the letter of that power: `2.8 G`."""
    for letter in ("", "k", "M", "G", "T"):
        if abs(value) < 1000:
            return f"{value:.3g} {letter}"
        value /= 1000
    return f"{value:.3g} P"


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
    policy = f", policy {run.policy}" if run.policy != "static" else ""
    paced = "; devices are paced: seconds are emulated" if run.emulated else ""
    return (
        f"{run.job}, run {run.run}: {run.algorithm}, {run.num_steps} steps on "
        f"{len(run.devices)} devices ({ranges(run.devices)}){resumed}{policy}{paced}"
    )


def plan_words(plan: Plan) -> str:
    """A plan in one line: `actor/training tp2 pp1 dp4 mb8 on 0-7; ...`, those that are placed alike together."""
    alike: dict[str, list[str]] = {}
    for p in plan.placements:
        words = f"{_layout(p)} mb{p.micro_batch}{' recompute' if p.recompute else ''} on {ranges(p.gpus)}"
        alike.setdefault(words, []).append(str(p.model_stage))
    return "; ".join(f"{', '.join(names)} {words}" for words, names in alike.items())


def chosen(event: PlanChosen, unit: str = "s") -> str:
    """What the planner chose, in one line."""
    plan = plan_words(event.plan)
    when = f"step {event.step}: " if event.step else ""
    stages = ", ".join(f"{stage} {seconds(s)}" for stage, s in event.stage_s.items())
    return f"{when}plan: auto chose {plan}; predicted {seconds(event.step_s)} {unit} a step ({stages}); {event.why}"


def step(event: StepFinished, progress: Progress, now_s: float) -> str:
    """One step in one line; `progress` already counts it."""
    shown = [(label, event.metrics[name]) for label, name in METRICS if name in event.metrics]
    metrics = ", ".join(f"{label} {number(value)}" for label, value in shown)
    stages = ", ".join(f"{stage} {seconds(s)}" for stage, s in stage_seconds(event).items())
    width = len(str(progress.num_steps))
    return (
        f"[{progress.num_done:{width}}/{progress.num_steps}] step {event.step}: {metrics}, "
        f"{seconds(total_seconds(event))} {progress.unit} ({stages}){_predicted(event)}, "
        f"{duration(progress.left_s(now_s))} left"
    )


def _predicted(event: StepFinished) -> str:
    return f", {seconds(event.predicted['step'])} predicted" if known(event.predicted.get("step")) else ""


def transition(event: TransitionFinished, unit: str = "s") -> str:
    """A change of plan in one paragraph."""
    devices = f"{changed}, " if (changed := _device_change(event)) else ""
    changes = "; ".join(plan_changes(event.before, event.after)) or "nothing but the devices"
    return (
        f"step {event.step}: {devices}plan changed in {seconds(event.seconds)} {unit} "
        f"({seconds(event.predicted_seconds)} predicted): {changes}; "
        f"received {data_size(event.received_bytes)}, kept in place {data_size(event.kept_bytes)}, "
        f"{_equality(event)}"
    )


def transition_outcome(event: TransitionFinished, unit: str = "s") -> str:
    """A change of plan in few words, for a list of them."""
    devices = _device_change(event) or f"{len(event.devices_after)} devices"
    return (
        f"step {event.step}: {devices}, {seconds(event.seconds)} {unit}, "
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


def plan_changes(before: Plan, after: Plan) -> list[str]:
    """What is different, each change once, with the model-stages that share it."""
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


def pool(event: PoolChanged) -> str:
    """The devices are others, in one line."""
    words = [f"{word} {ranges(ids)}" for word, ids in (("joined", event.joined), ("lost", event.lost)) if ids]
    if event.leaving:
        when = f"in {seconds(event.notice_s)} s" if event.notice_s is not None else "when the plan has left them"
        words.append(f"{ranges(event.leaving)} will go {when}")
    why = f" ({event.why})" if event.why else ""
    changed = "; ".join(words) or "as they were"
    return f"step {event.step}: devices: {changed}{why}; {len(event.devices)} may be used ({ranges(event.devices)})"


def failure(event: DeviceFailed, unit: str = "s") -> str:
    """A failure in one line."""
    noticed = f", noticed after {seconds(event.detect_seconds)} {unit}" if event.detect_seconds is not None else ""
    why = f": {' '.join(event.why.split())}" if event.why else ""
    return f"step {event.step}, {event.stage}: device {event.device} FAILED ({event.kind}){noticed}{why}"


def recovery(event: Recovered, unit: str = "s") -> str:
    """A recovery in one line."""
    redone = f", {', '.join(event.redone)} done again" if event.redone else ""
    restored = (
        f", restored from the checkpoint of step {event.restored_from}" if event.restored_from is not None else ""
    )
    return (
        f"step {event.step}, {event.stage}: RECOVERED in {seconds(event.seconds)} {unit} on {len(event.devices)} devices "
        f"({ranges(event.devices)}), update {event.rolled}{redone}{restored}"
    )


def memory(peak_bytes: float, capacity_bytes: float | None) -> str:
    """`12.1 of 16.0 GB (76%)`; `12.1 GB` where the capacity is not known."""
    if not capacity_bytes:
        return data_size(peak_bytes)
    return f"{data_size(peak_bytes)} of {data_size(capacity_bytes)} ({peak_bytes / capacity_bytes:.0%})"


def checkpoint(event: CheckpointWritten) -> str:
    """A checkpoint in one line."""
    size, taken = data_size(event.num_bytes), seconds(event.seconds)
    blocked = "" if event.blocked_seconds is None else f" ({seconds(event.blocked_seconds)} s of them waited for)"
    why = f", not beside the training: {event.waited}" if event.waited else ""
    return f"step {event.step}: checkpoint of {size} in {taken} s{blocked}{why}: {event.path}"


def checkpoint_failed(event: CheckpointFailed) -> str:
    """A checkpoint that did not come about, in one line."""
    return f"step {event.step}: the checkpoint failed: {event.why}"


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
    emulated = " (emulated)" if progress.emulated else ""
    lines = [
        f"{name}: {ended} after {duration(progress.elapsed_s(now_s))}{emulated}, "
        f"{progress.num_done} of {progress.num_steps} steps"
    ]
    for label, metric in (("reward", "reward"), ("length", "length_mean")):
        first, last, window = first_and_last(progress.values(metric))
        if not (math.isnan(first) and math.isnan(last)):
            lines.append(f"  {label} {number(first)} -> {number(last)} (first and last {window}-step mean)")
    lines += [f"  {transition_outcome(t, progress.unit)}" for t in progress.transitions]
    lines += _adapted(progress)
    counts = finished.summary if finished else {}
    samples = [f"{word} {counts[key]}" for word in _SAMPLE_WORDS if (key := f"samples_{word}") in counts]
    if samples:
        lines.append(f"  samples {', '.join(samples)}")
    if folder is not None:
        lines.append(f"  run folder {folder}")
    return lines


def _adapted(progress: Progress) -> list[str]:
    """How often it was decided, and what was lost, for the summary; nothing where nothing of it happened."""
    counts = Counter(decision.verdict for decision in progress.decisions)
    lines = [f"  decisions {', '.join(f'{verdict} {n}' for verdict, n in counts.items())}"] if counts else []
    if progress.failures or progress.recoveries:
        taken = sum(r.seconds for r in progress.recoveries)
        lines.append(
            f"  failures {len(progress.failures)}, recoveries {len(progress.recoveries)}, "
            f"{seconds(taken)} {progress.unit} to recover"
        )
    return lines


_SAMPLE_WORDS = ("trained", "repeated", "skipped")
