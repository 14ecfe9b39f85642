"""`nereus status`: where a run stands, from what it has written down."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nereus.core.events import DeviceFailed, PoolChanged, Recovered, StepFinished
from nereus.telemetry import decisions, describe
from nereus.telemetry.console import sparkline
from nereus.telemetry.folder import holder_of, read_events
from nereus.telemetry.history import History, look_back
from nereus.telemetry.plan_table import plan_table
from nereus.telemetry.progress import total_seconds


def show(console: Console, path: Path) -> dict[str, Any]:
    """Print where the run in folder `path` stands; returns it as JSON. Raises UserError if that is no run."""
    holder = holder_of(path)  # before the events: a run that ends in between is then read to its end
    history = look_back(read_events(path))
    status = status_of(history, path, holder, time.time() if holder else history.last_time_s)
    _print(console, history, status)
    return status


def status_of(history: History, path: Path, holder: str | None, now_s: float) -> dict[str, Any]:
    """Where a run stands as plain data. now_s: by the clock of the run."""
    progress, first = history.progress, history.first
    last = progress.steps[-1] if progress.steps else None
    running = holder is not None
    return {
        "run": str(path),
        "job": first.job if first else None,
        "algorithm": first.algorithm if first else None,
        "policy": progress.run.policy if progress.run else None,
        "emulated": history.emulated,
        "state": state_of(history, running),
        "held_by": holder,
        "steps_done": progress.num_done,
        "num_steps": progress.num_steps,
        "elapsed_s": _elapsed_s(history, now_s),
        "left_s": progress.left_s(now_s) if running else None,
        "devices": list(progress.devices),
        "plan": progress.plan.to_json() if progress.plan else None,
        "last_step": _step_row(last) if last else None,
        "memory": _memory(history, last),
        "decisions": len(history.decisions),
        "last_decision": history.decisions[-1].to_json() if history.decisions else None,
        "transitions": len(progress.transitions),
        "lost": [list(e.lost) for e in history.happenings if isinstance(e, PoolChanged) and e.lost],
        "failures": [e.to_json() for e in history.happenings if isinstance(e, DeviceFailed)],
        "recoveries": [e.to_json() for e in history.happenings if isinstance(e, Recovered)],
        "checkpoint": progress.checkpoint.to_json() if progress.checkpoint else None,
        "last_event_time": history.last_time_s,
    }


def state_of(history: History, running: bool) -> str:
    """running, starting, done, interrupted; stopped: by a kill or an error, since it did not say goodbye."""
    if running:
        return "running" if history.progress.run else "starting"
    if history.ended is not None:
        return "interrupted" if history.ended.interrupted else "done"
    return "stopped"


def _elapsed_s(history: History, now_s: float) -> float | None:
    """Of the present session, or the last one."""
    return max(0.0, now_s - history.sessions[-1][0]) if history.sessions else None


def _step_row(step: StepFinished) -> dict[str, Any]:
    return {
        "step": step.step,
        "metrics": dict(step.metrics),
        "seconds": dict(step.seconds),
        "predicted": dict(step.predicted),
        "signals": dict(step.signals),
    }


def _memory(history: History, step: StepFinished | None) -> dict[str, Any] | None:
    if step is None or not step.peak_bytes:
        return None
    device = max(step.peak_bytes, key=lambda d: step.peak_bytes[d])
    run = history.progress.run
    return {
        "fullest_device": int(device),
        "peak_bytes": step.peak_bytes[device],
        "capacity_bytes": run.capacity_bytes if run else None,
        "by_device": dict(step.peak_bytes),
    }


def _print(console: Console, history: History, status: Mapping[str, Any]) -> None:
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, words in _facts(history, status, console.encoding.startswith("utf")):
        facts.add_row(name, words)
    console.print(facts)
    progress = history.progress
    if progress.plan is not None:
        console.print()
        console.print(plan_table(progress.plan, progress.devices, width=console.width))


def _facts(history: History, status: Mapping[str, Any], can_draw: bool) -> list[tuple[str, Text]]:
    progress, unit = history.progress, history.unit
    rows = [("run", Text(f"{status['job'] or status['run']}, {status['run']}")), ("state", _state_words(status))]
    if progress.run is None:
        return rows
    emulated = " (emulated)" if history.emulated else ""
    left = f", {describe.duration(status['left_s'])} left" if status["state"] == "running" else ""
    steps = (
        f"{progress.num_done} of {progress.num_steps} done, {describe.duration(status['elapsed_s'])} since the start"
    )
    rows.append(("steps", Text(f"{steps}{left}{emulated}")))
    rows.append(("job", Text(f"{status['algorithm']}, policy {status['policy']}")))
    rows.append(("devices", Text(f"{len(progress.devices)} ({describe.ranges(progress.devices)})")))
    if progress.steps:
        rows += _step_facts(history, can_draw)
    if (memory := status["memory"]) is not None:
        words = describe.memory(memory["peak_bytes"], memory["capacity_bytes"])
        rows.append(("memory", Text(f"at most {words}, on device {memory['fullest_device']}")))
    if history.decisions:
        last = history.decisions[-1]
        rows.append(("decided", Text(decisions.line(last.made, last.current, unit))))
    if progress.transitions:
        rows.append(("changed", Text(describe.transition_outcome(progress.transitions[-1], unit))))
    rows += [(name, Text(words, style=style)) for name, words, style in _happenings(history)]
    if progress.checkpoint is not None:
        rows.append(("checkpoint", Text(describe.checkpoint(progress.checkpoint))))
    return rows


def _state_words(status: Mapping[str, Any]) -> Text:
    state = status["state"]
    style = {"running": "bold green", "stopped": "bold red"}.get(state, "bold")
    more = ""
    if status["held_by"]:
        more = f" ({status['held_by']})"
    elif state == "stopped":
        more = f": killed, or ended by an error; go on with nereus run --resume {status['run']}"
    elif state == "interrupted":
        more = f": go on with nereus run --resume {status['run']}"
    return Text.assemble((state, style), more)


def _step_facts(history: History, can_draw: bool) -> list[tuple[str, Text]]:
    step, unit = history.progress.steps[-1], history.unit
    metrics = [
        f"{label} {describe.number(step.metrics[name])}" for label, name in describe.METRICS if name in step.metrics
    ]
    predicted = step.predicted.get("step", math.nan)
    off = f", {describe.seconds(predicted)} predicted{describe.error(predicted, total_seconds(step))}"
    words = f"{step.step}: {describe.seconds(total_seconds(step))} {unit}{off if step.predicted else ''}"
    rows = [("last step", Text(", ".join([words, *metrics])))]
    for label, metric in (("reward", "reward"), ("length", "length_mean")) if can_draw else ():
        line = sparkline(history.progress.values(metric), 50)
        if line.strip():
            rows.append((label, Text(line)))
    return rows


def _happenings(history: History) -> list[tuple[str, str, str]]:
    """The last of each kind in words, after how many there were."""
    found = []
    for kind, name, style in (
        (PoolChanged, "pool", "yellow"),
        (DeviceFailed, "failures", "red"),
        (Recovered, "recoveries", "green"),
    ):
        events = [e for e in history.happenings if isinstance(e, kind)]
        if events:
            last = events[-1]
            match last:
                case PoolChanged():
                    words = describe.pool(last)
                case DeviceFailed():
                    words = describe.failure(last, history.unit)
                case Recovered():
                    words = describe.recovery(last, history.unit)
            found.append((name, f"{len(events)}, the last {words}", style))
    return found
