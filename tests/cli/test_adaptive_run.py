"""Whole runs that are led by the controller: the pool changes, a device dies, memory runs out; and what they leave."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nereus.api.job_file import load_job
from nereus.cli.directing import CONTROLLER_LOG, make_controller
from nereus.controller.log import replay
from nereus.core.events import DecisionMade, DeviceFailed, Event, PoolChanged, Recovered, RunStarted, StepFinished
from nereus.telemetry.folder import read_events

WriteJob = Callable[..., Path]
Nereus = Callable[..., Any]


def events_of(run: Path) -> list[Event]:
    return [record.event for record in read_events(run)]


def of(kind: type, events: list[Event]) -> list[Any]:
    return [e for e in events if isinstance(e, kind)]


def only_run(tmp_path: Path) -> Path:
    (run,) = (tmp_path / "runs").iterdir()
    return run


def test_a_pool_that_grows_and_shrinks_and_loses_a_device(nereus: Nereus, write_job: WriteJob, tmp_path: Path) -> None:
    supply = [
        {"step": 1, "devices": 4},
        {"step": 3, "gone": [0], "during": "training"},
        {"step": 5, "devices": 2},
    ]
    answer = nereus("run", write_job(steps=7, cluster={"supply": supply}), "--json")
    assert answer.exit_code == 0, answer.stderr
    summary = json.loads(answer.stdout)
    assert summary["steps"] == 7
    assert (summary["samples"]["repeated"], summary["samples"]["skipped"]) == (0, 0)
    assert all(t["state_equal"] for t in summary["transitions"])
    run = only_run(tmp_path)
    events = events_of(run)
    (began,) = of(RunStarted, events)
    assert began.policy == "nereus" and not began.emulated and began.capacity_bytes == 2**30
    grown, died, shrunk = of(PoolChanged, events)
    assert (grown.step, grown.joined, grown.devices) == (1, (2, 3), (0, 1, 2, 3))
    assert (died.step, died.lost, died.devices) == (3, (0,), (1, 2, 3))
    assert (shrunk.step, len(shrunk.leaving), len(shrunk.devices)) == (5, 1, 2)
    assert [(e.step, e.device, e.kind) for e in of(DeviceFailed, events)] == [(3, 0, "died")]
    (recovered,) = of(Recovered, events)
    assert recovered.step == 3 and set(recovered.devices) <= {1, 2, 3}
    assert any(d.urgent and d.verdict == "admitted" for d in of(DecisionMade, events))
    steps = of(StepFinished, events)
    assert all(s.predicted["step"] > 0 for s in steps[1:]) and all(s.peak_bytes for s in steps)
    assert all("controller" in s.seconds for s in steps)
    # What was decided is on record: a new controller answers the same, and people can read why.
    rows = [json.loads(line) for line in (run / CONTROLLER_LOG).read_text().splitlines()]
    assert len(rows) > 7 and replay(rows, partial(make_controller, load_job(run))) == []
    last = of(DecisionMade, events)[-1]
    assert f"decision {last.number}, step {last.step}" in nereus("explain", run, "--decision", str(last.number)).stdout
    resumed = nereus("run", "--resume", run, "--set", "steps=9", "--json")
    assert resumed.exit_code == 0, resumed.stderr
    assert json.loads(resumed.stdout)["samples"] == {"trained": 9 * 8 * 2, "repeated": 0, "skipped": 0}
    rows = [json.loads(line) for line in (run / CONTROLLER_LOG).read_text().splitlines()]
    assert sum("started" in row for row in rows) == 2
    assert replay(rows, partial(make_controller, load_job(run))) == []
    numbers = [d.number for d in of(DecisionMade, events_of(run))]
    assert numbers == sorted(set(numbers))


def test_out_of_memory_ends_a_static_run_and_not_one_that_adapts(
    nereus: Nereus, write_job: WriteJob, tmp_path: Path
) -> None:
    """One micro-batch of all sequences does not fit, smaller ones do."""
    whole = {"all": {"dp": 1, "micro_batch": 64}}
    tight = {"devices": 1, "memory_gib": TIGHT_GIB}
    job = write_job(steps=2, plan=whole, cluster=tight, batch={"prompts": 64}, sampling={"max_new_tokens": 16})
    static = nereus("run", job, "--policy", "static")
    assert static.exit_code == 1
    *_, last = static.stderr.splitlines()
    assert "capacity" in last and "adapt.policy is static" in last and "Traceback" not in static.stderr
    adapting = nereus("run", job, "--json")
    assert adapting.exit_code == 0, adapting.stderr
    assert json.loads(adapting.stdout)["samples"]["repeated"] == 0


TIGHT_GIB = 0.0022


def test_a_running_job_is_scaled_by_a_command(
    nereus: Nereus, write_job: WriteJob, tmp_path: Path, at_step: Any
) -> None:
    """From another terminal; here in the middle of a step."""
    from nereus.cli.main import main

    at_step(2, lambda trainer: main(["scale", str(only_run(tmp_path)), "1"]))
    answer = nereus("run", write_job(steps=5), "--json")
    assert answer.exit_code == 0, answer.stderr
    events = events_of(only_run(tmp_path))
    (news,) = of(PoolChanged, events)
    assert (news.step, news.why, len(news.devices)) == (3, "nereus scale", 1)
    assert nereus("scale", only_run(tmp_path), "2").exit_code == 2  # it runs no more


def test_other_mistakes(mistake: Callable[..., str], write_job: WriteJob) -> None:
    both = write_job(changes=[{"step": 1, "devices": 1}], adapt={"policy": "nereus"})
    assert mistake("run", both).startswith(f"{both}: changes: ") and "adapt.policy" in mistake("run", both)
    point = write_job(cluster={"supply": [{"step": 1}]})
    assert "cluster.supply.0" in mistake("run", point)
    trace = write_job(cluster={"supply_trace": "nowhere.csv"})
    assert "nowhere.csv cannot be read" in mistake("run", trace)
