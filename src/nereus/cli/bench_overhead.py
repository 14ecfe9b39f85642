"""`nereus bench overhead`: what adapting costs a run that would do without it.

A small job runs many short steps while its pool follows a published trace of spot GPUs. From its own events:

    controller   monitoring, deciding, taking answers: seconds on the training path, as a share of the run
    replans      beside the training: how many, and how long each took
    transitions  changes of plan and their digests, as a share of the run
    recovery     none should be needed: the trace gives devices time to leave

Shares are of the wall time of all steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

from nereus.cli import bench
from nereus.cli.run import RunRequest, run_job
from nereus.core.errors import UserError
from nereus.core.events import DecisionMade, StepFinished, TransitionFinished
from nereus.telemetry.folder import read_events

SMALL = (
    "batch={prompts: 16, mini_batches: 1, epochs: 1}",
    "sampling.max_new_tokens=16",
    "changes=[]",
    "cluster.pace=null",
    "cluster.memory_gib=1",
    "cluster.supply=[]",
    "plan={all: {dp: 8}}",
    "adapt.policy=nereus",
)
"""What makes a job's steps short."""


def bench_overhead(
    job: Path, overrides: Sequence[str], *, supply: Path, steps: int, folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run the bench. supply: a trace (`device_counts`). Raises UserError."""
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / "supply.csv"
    counts = device_counts(supply, steps)
    trace.write_text("step,devices\n" + "".join(f"{step},{n}\n" for step, n in changes(counts)))
    say(f"{steps} steps, {len(changes(counts))} changes of the pool")
    settings = (*SMALL, f"steps={steps}", f"cluster.supply_trace={trace}", f"run.folder={folder}", *overrides)
    with open(os.devnull, "w") as nowhere:
        summary = run_job(RunRequest(job=job, overrides=settings), Console(file=nowhere))
    found = figures(Path(summary["run"]))
    found |= {f"samples_{name}": value for name, value in summary["samples"].items()}
    return {
        "bench": "overhead",
        "machine": bench.machine(),
        "rows": [found],
        "summary": {**found, "run": summary["run"], "supply": supply.name},
    }


def figures(run: Path) -> dict[str, Any]:
    """What a run's events say of the cost of adapting."""
    events = [record.event for record in read_events(run)]
    steps = [e for e in events if isinstance(e, StepFinished)]
    decisions = [e for e in events if isinstance(e, DecisionMade)]
    transitions = [e for e in events if isinstance(e, TransitionFinished)]
    if not steps:
        raise UserError(f"{run} has no finished step to measure")
    total = sum(s.seconds["step"] for s in steps)
    controller = sum(s.seconds.get("controller", 0.0) for s in steps)
    changing = sum(t.seconds for t in transitions)
    digests = sum(t.digest_seconds for t in transitions)
    return {
        "steps": len(steps),
        "step_s": total / len(steps),
        "controller_ms_a_step": 1e3 * controller / len(steps),
        "controller_share_pct": 100 * controller / total,
        "replans": len(decisions),
        "replan_ms": 1e3 * mean(d.replan_seconds for d in decisions) if decisions else 0.0,
        "admitted": sum(d.verdict == "admitted" for d in decisions),
        "transitions": len(transitions),
        "transition_s": changing / max(len(transitions), 1),
        "transition_share_pct": 100 * changing / total,
        "digest_share_pct": 100 * digests / total,
        "state_equal": all(t.state_equal for t in transitions),
    }


def device_counts(path: Path, steps: int, most: int = 8) -> list[int]:
    """Devices at each step, 1 to `most`: a trace stretched over the steps, its largest count being `most`.

    JSON {"data": [count, ...]} at equal intervals (SkyPilot's spot traces), or [{"Time": seconds, "GPUs": count}, ...].
    Raises UserError.
    """
    try:
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            points = [(float(i), int(n)) for i, n in enumerate(found["data"])]
        else:
            points = [(float(row["Time"]), int(row["GPUs"])) for row in found]
    except OSError as error:
        raise UserError(f"--supply: {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--supply: {path} is not a trace of spot GPUs: {error!r}") from error
    if not points or max(n for _, n in points) < 1:
        raise UserError(f"--supply: {path} has no GPUs in it")
    end, largest = points[-1][0] or 1.0, max(n for _, n in points)
    counts, at = [], 0
    for step in range(steps):
        while at + 1 < len(points) and points[at + 1][0] <= end * step / steps:
            at += 1
        counts.append(max(1, round(points[at][1] * most / largest)))
    return counts


def changes(counts: Sequence[int]) -> list[tuple[int, int]]:
    """(step, devices) wherever the count is another one than before; the first step has its own."""
    return [(i, n) for i, n in enumerate(counts) if i == 0 or n != counts[i - 1]]
