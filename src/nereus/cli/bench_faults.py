"""`nereus bench faults`: devices fail at random points of real runs, until so many faults have happened.

    run 0      without faults, its rollouts recorded
    run 1...   on the same rollouts, with faults (`bench_faults_draw`), each in a process of its own (`bench_faults_run`)
               mixed    another plan at every step, devices replaced by the next one; every kind of fault
               nereus   the adaptive policy; `nereus scale` asks for new devices
               static   the same, the layouts kept

Of every run: the ledger, the final weights beside those of run 0, and what its events say (`bench_faults_judge`). A run that
makes no progress for a minute is a hang, and is killed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from nereus.cli import bench
from nereus.cli.bench_equivalence import SAME, weights_of
from nereus.cli.bench_faults_draw import GROUPS, draw_faults, kind_of
from nereus.cli.bench_faults_judge import Verdict, happened, judge
from nereus.cli.bench_faults_run import MARKS, PLANS, RESULT, Order
from nereus.cli.bench_faults_worker import Fault, Marks
from nereus.core.errors import UserError
from nereus.telemetry.folder import EVENTS, read_events

DEVICES = 4

MOST_STEPS = 20

HUNG_S = 60.0
"""Without an event for so long, a run hangs."""

MOST_RUNS = 3.0
"""Runs are begun until the faults have happened, at most so many times as many as if every step had one that does."""

DIRECTORS = ("mixed", "nereus", "mixed", "static", "mixed")
"""What runs are directed by, in turn."""

PLANS_OF = {
    "mixed": "{all: {dp: 4}}",
    "nereus": "{all: {dp: 4}, actor/training: {pp: 2, dp: 2}, critic/training: {tp: 2, dp: 2}}",
    "static": "{all: {dp: 4}, actor/training: {tp: 2, dp: 2}, critic/training: {pp: 2, dp: 2}}",
}
"""Where runs start, by director."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run that is over. hung: it was killed. why: its last words, where it did not end well. difference: of weights."""

    faults: tuple[Fault, ...]
    verdict: Verdict
    samples: Mapping[str, int]
    difference: float
    hung: bool
    why: str


def bench_faults(
    job: Path, overrides: Sequence[str], *, faults: int, seed: int, folder: Path, say: Say
) -> dict[str, Any]:
    """Run the bench until so many faults have happened. Raises UserError."""
    if faults < 1:
        raise UserError(f"--faults {faults} is not possible: it must be at least 1")
    began = time.monotonic()
    root = folder / f"faults-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    steps = min(MOST_STEPS, faults + 1)
    settings = (*_settings(steps, root), *overrides)
    say(f"{steps} steps without faults")
    reference = _reference(root / "run-000", str(job), settings)
    outcomes: list[Outcome] = []
    numbers = itertools.count()
    for index in range(1, 2 + int(MOST_RUNS * faults / steps)):
        director = DIRECTORS[(index - 1) % len(DIRECTORS)]
        drawn = draw_faults(f"{seed} {index}", steps=steps, devices=DEVICES, numbers=numbers, director=director)
        order = Order(
            job=str(job),
            settings=(*settings, *_directed(director)),
            replay=reference["run"],
            director=director,
            devices=DEVICES,
            seed=seed + index,
            faults=drawn,
        )
        outcomes.append(_run(root / f"run-{index:03d}", order, reference))
        num = sum(len(o.faults) for o in outcomes)
        say(
            f"run {index}, {director}: {_in_words(outcomes[-1])}; {num} of {faults} after {time.monotonic() - began:.0f} s"
        )
        if num >= faults:
            break
    summary = _summary(outcomes, reference, faults)
    return {
        "bench": "faults",
        "machine": bench.machine(),
        "rows": list(_rows(outcomes)),
        "summary": {**summary, "seconds": time.monotonic() - began, "folder": str(root)},
    }


def _settings(steps: int, root: Path) -> tuple[str, ...]:
    """Short steps, which still have every part: two mini-batches of both models, a checkpoint at every other step."""
    return (
        f"steps={steps}",
        "batch={prompts: 24, mini_batches: 2, epochs: 1}",
        "sampling.max_new_tokens=10",
        f"cluster={{devices: {DEVICES}, memory_gib: 1, device: cpu, heartbeat_s: 1.0, timeout_s: {HUNG_S / 2}}}",
        f"plan={PLANS_OF['mixed']}",
        "changes=[]",
        "adapt.policy=static",
        "run.checkpoint_every=2",
        "run.record_rollouts=true",
        f"run.folder={root}",
    )


def _directed(director: str) -> tuple[str, ...]:
    return (
        f"plan={PLANS_OF[director]}",
        f"adapt.policy={'static' if director == 'mixed' else director}",
        "run.record_rollouts=false",
    )


# -- one run -------------------------------------------------------------------------------------------------------


def _reference(folder: Path, job: str, settings: tuple[str, ...]) -> dict[str, Any]:
    """The summary of the run without faults. Raises UserError where there is none."""
    order = Order(job=job, settings=settings, replay=None, director="static", devices=DEVICES, seed=0, faults=())
    hung, why = _execute(folder, order)
    if hung or why:
        raise UserError(f"the run without faults did not end: {why or 'it made no progress'}")
    found: dict[str, Any] = json.loads((folder / RESULT).read_text())
    return found


def _run(folder: Path, order: Order, reference: Mapping[str, Any]) -> Outcome:
    hung, why = _execute(folder, order)
    marks = Marks(folder / MARKS).read()
    runs = sorted(path.parent for path in folder.glob(f"*/{EVENTS}"))
    plans = (
        [json.loads(line) for line in (folder / PLANS).read_text().splitlines()] if (folder / PLANS).exists() else []
    )
    verdict = judge(read_events(runs[0]), order.faults, marks, plans) if runs else Verdict()
    samples, difference = {}, 0.0
    if not why and not hung:
        found = json.loads((folder / RESULT).read_text())
        samples = found["samples"]
        difference = _difference(Path(reference["run"]), Path(found["run"]))
    return Outcome(
        faults=tuple(happened(marks, order.faults)),
        verdict=verdict,
        samples=samples,
        difference=difference,
        hung=hung,
        why=why,
    )


def _execute(folder: Path, order: Order) -> tuple[bool, str]:
    """(whether it hung and was killed, its last words if it failed). The run's folder is made in `folder`."""
    folder.mkdir(parents=True)
    # Without settings of its own the last one counts.
    settings = (*order.settings, f"run.folder={folder}")
    Order(**{**_fields(order), "settings": settings}).write(folder)
    log = folder / "log.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "nereus.cli.bench_faults_run", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            hung = not _ends(process, folder)
        finally:
            _end_session(process)
    if hung or not process.returncode:
        return hung, ""
    words = log.read_text().strip().splitlines()
    return False, next((line for line in words if line.strip()), f"exit code {process.returncode}")


def _fields(order: Order) -> dict[str, Any]:
    return {name: getattr(order, name) for name in Order.__dataclass_fields__}


def _ends(process: subprocess.Popen[bytes], folder: Path) -> bool:
    """Wait for as long as there is progress; whether the process has ended."""
    before: list[int] = []
    since = time.monotonic()
    while time.monotonic() - since < HUNG_S:
        try:
            process.wait(timeout=0.2)
            return True
        except subprocess.TimeoutExpired:
            pass
        files = [*folder.glob(f"*/{EVENTS}"), folder / MARKS]
        if (now := [file.stat().st_size for file in files if file.exists()]) != before:
            before, since = now, time.monotonic()
    return False


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """Nothing of a run stays behind: the devices of one that was killed may be stopped."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _difference(a: Path, b: Path) -> float:
    """The largest of a final weight."""
    worst = 0.0
    for model in ("actor", "critic"):
        left, right = weights_of(a, model), weights_of(b, model)
        if left.keys() != right.keys():
            return float("inf")
        worst = max([worst, *((left[name] - right[name]).abs().max().item() for name in left)])
    return worst


# -- figures -------------------------------------------------------------------------------------------------------


def _summary(outcomes: Sequence[Outcome], reference: Mapping[str, Any], wanted: int) -> dict[str, Any]:
    """See `nereus bench faults` in docs/loop.md."""
    ended = [o for o in outcomes if not o.hung and not o.why]
    samples = {
        name: sum(o.samples[name] for o in ended) + reference["samples"][name] for name in ("skipped", "repeated")
    }
    summary: dict[str, Any] = {
        "faults": sum(len(o.faults) for o in outcomes),
        "lost_state": sum(o.verdict.lost_state for o in outcomes),
        "restores": sum(o.verdict.restores for o in outcomes),
        "steps_redone": sum(o.verdict.steps_redone for o in outcomes),
        "false_positives": sum(o.verdict.false_positives for o in outcomes),
        "samples_skipped": samples["skipped"],
        "samples_repeated": samples["repeated"],
        "hangs": sum(o.hung for o in outcomes),
        **_times([(o, f) for o in outcomes for f in o.faults]),
        "max_weight_difference": max((o.difference for o in ended), default=float("inf")),
        "runs": len(outcomes),
        "runs_failed": sum(bool(o.why) for o in outcomes),
        "places": dict(Counter(f.phase for o in outcomes for f in o.faults)),
        "wrong": [what for o in outcomes for what in (*o.verdict.wrong, *([o.why] if o.why else []))],
    }
    none = ("lost_state", "false_positives", "samples_skipped", "samples_repeated", "hangs", "runs_failed")
    summary["ok"] = (
        not any(summary[name] for name in none)
        and summary["max_weight_difference"] <= SAME
        and summary["faults"] >= wanted
    )
    return summary


def _rows(outcomes: Sequence[Outcome]) -> Iterator[dict[str, Any]]:
    found: dict[str, list[tuple[Outcome, Fault]]] = {}
    for outcome in outcomes:
        for fault in outcome.faults:
            found.setdefault(kind_of(fault, outcome.faults), []).append((outcome, fault))
    for kind in sorted(found, key=lambda kind: (list(GROUPS).index(kind) if kind in GROUPS else len(GROUPS), kind)):
        yield {"kind": kind, "faults": len(found[kind]), **_times(found[kind])}


def _times(faults: Sequence[tuple[Outcome, Fault]]) -> dict[str, float | None]:
    """Seconds from faults to their being noticed, and from there to the work going on."""
    times: dict[str, float | None] = {}
    for name in ("detect_s", "recover_s"):
        rows = [(getattr(o.verdict, name), f.number) for o, f in faults]
        found = [seconds[number] for seconds, number in rows if number in seconds]
        times[f"{name}_median"] = median(found) if found else None
        times[f"{name}_max"] = max(found, default=None)
    return times


def _in_words(outcome: Outcome) -> str:
    if outcome.hung:
        return f"{len(outcome.faults)} faults, then it hung"
    if outcome.why:
        return f"{len(outcome.faults)} faults, then it ended: {outcome.why}"
    wrong = f", wrong: {'; '.join(outcome.verdict.wrong)}" if outcome.verdict.wrong else ""
    restores = f"{outcome.verdict.restores} restores"
    return f"{len(outcome.faults)} faults, {restores}, weights within {outcome.difference:.1g}{wrong}"
