"""What is told of a run that adapts: the numbers of each decision, at any moment of the run, whatever the log is like."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from adaptive_story import AdaptiveRun, decision_event, plan, write_log
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from nereus.cli import explain, status
from nereus.cli.main import main
from nereus.controller.admission import AnyGain, Option, Payback, decide
from nereus.core.events import (
    DecisionMade,
    Event,
    OutcomeMeasured,
    Recovered,
    RunFinished,
    RunStarted,
    StepFinished,
    TransitionFinished,
)
from nereus.telemetry import decisions
from nereus.telemetry.console import LiveView, PlainView
from nereus.telemetry.folder import Record, RunFolder, read_events
from nereus.telemetry.history import History, look_back
from nereus.telemetry.report import page


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any, adaptive: list[Event]) -> Path:
    return write_log(tmp_path_factory.mktemp("runs") / "grow-1", adaptive)


def told(view: Any, *arguments: Any, width: int = 120) -> tuple[str, dict[str, Any]]:
    """What a command prints, and what it returns, which must be JSON."""
    out = StringIO()
    found = view(Console(file=out, width=width), *arguments)
    json.dumps(found)
    return out.getvalue(), found


def history_of(events: list[Event]) -> History:
    return look_back(Record(time_s=float(i), event=event) for i, event in enumerate(events))


# the console


def plain(events: list[Event]) -> list[str]:
    out = StringIO()
    with PlainView(Console(file=out, width=80), clock=count().__next__) as view:
        for event in events:
            view.handle(event)
    return out.getvalue().splitlines()


def test_each_decision_failure_recovery_and_change_of_pool_is_one_line(adaptive: list[Event]) -> None:
    lines = plain(adaptive)
    for number in range(1, 8):
        assert len([line for line in lines if f": decision {number}, " in line]) == 1
    [refused] = [line for line in lines if ": decision 1, " in line]
    assert "length_mean +31% (110.0 -> 144.1)" in refused and "at most 0.5 (0.5 x horizon 1)" in refused
    assert refused.endswith("refused")
    [urgent] = [line for line in lines if ": decision 5, " in line]
    assert "urgent: the current plan lacks devices" in urgent and "saves" not in urgent
    assert "actor/training tp2 pp1 dp3 -> dp2" in urgent
    assert len([line for line in lines if "FAILED (died), noticed after 0.34 emulated s" in line]) == 3
    assert len([line for line in lines if "RECOVERED in 2.20 emulated s" in line]) == 2
    assert "step 28: devices: 6-7 will go in 30.0 s (notice); 6 may be used (0-5)" in lines
    assert "\n".join(lines).isascii()


def test_seconds_of_a_paced_run_say_that_they_are_emulated(adaptive: list[Event]) -> None:
    lines = plain(adaptive)
    steps = [line for line in lines if "] step " in line]
    assert len(steps) == 41 and all(" emulated s (generation" in line for line in steps)
    real = [replace(e, emulated=False) if isinstance(e, RunStarted) else e for e in adaptive]
    assert "emulated" not in "\n".join(plain(real))


@pytest.mark.parametrize("width", [80, 120])
def test_the_live_display_of_an_adaptive_run_fits(adaptive: list[Event], width: int) -> None:
    out = StringIO()
    view = LiveView(Console(file=StringIO()), clock=count().__next__)
    for event in adaptive[:-1]:
        view.handle(event)
    Console(file=out, width=width, height=40).print(view)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width and len(lines) <= 40 and "…" not in out.getvalue()
    assert "7 at step 38: pool 3 -> 5 devices: ADMITTED" in out.getvalue()


# looking back


def test_plans_are_in_force_one_after_the_other_until_the_last_step(adaptive: list[Event]) -> None:
    history = history_of(adaptive)
    periods = history.periods
    assert [(p.start, p.end) for p in periods] == [
        (0, 19), (19, 28), (28, 32.8), (32.8, 35), (35, 38), (38, 40),
    ]  # fmt: skip
    assert [len(p.devices) for p in periods] == [8, 8, 6, 5, 3, 5]
    assert all(set(p.plan.gpus) <= set(p.devices) for p in periods)


def test_a_decision_is_told_with_its_transition_and_what_was_measured(adaptive: list[Event]) -> None:
    history = history_of(adaptive)
    second = history.decision(2)
    assert second is not None and second.transition is not None and second.outcome is not None
    assert second.transition.step == 19 and second.outcome.number == 2
    assert second.current == plan(range(8))
    refused, lost = history.decision(1), history.decision(5)
    assert refused is not None and refused.transition is None and refused.recovery is None
    assert lost is not None and lost.recovery is not None and lost.recovery.step == 32
    assert history.decision(99) is None


def test_a_resume_undoes_plans_of_the_steps_that_are_done_over(adaptive: list[Event]) -> None:
    cut = next(i for i, e in enumerate(adaptive) if isinstance(e, StepFinished) and e.step == 30)
    first = adaptive[0]
    assert isinstance(first, RunStarted)
    again = replace(first, first_step=25, plan=plan(range(4), 2), devices=tuple(range(4)))
    history = history_of([*adaptive[:cut], again, adaptive[1]])
    assert [(p.start, p.end) for p in history.periods] == [(0, 19), (19, 25), (25, 25)]
    assert history.progress.num_done == 25 and len(history.decisions) == 4, "what was decided has been decided"


def test_decisions_that_are_counted_anew_after_a_resume_get_their_own_outcome(adaptive: list[Event]) -> None:
    made = [e for e in adaptive if isinstance(e, DecisionMade)]
    outcome = next(e for e in adaptive if isinstance(e, OutcomeMeasured))
    history = history_of([adaptive[0], made[1], adaptive[0], made[1], outcome])
    assert [d.outcome for d in history.decisions] == [None, outcome]


# status, explain


def test_status_says_where_a_run_stands(run: Path) -> None:
    words, found = told(status.show, run)
    assert found["state"] == "done" and found["steps_done"] == 40 and found["devices"] == [2, 4, 5, 8, 9]
    assert found["memory"]["capacity_bytes"] == 4 * 2**30 and found["memory"]["fullest_device"] == 2
    assert found["last_decision"]["number"] == 7 and len(found["failures"]) == 3 and len(found["recoveries"]) == 2
    for shown in ("40 of 40 done", "emulated", "decision 7", "restored from the checkpoint of step 35", "step-40"):
        assert shown in " ".join(words.split())


def test_status_knows_by_the_lock_whether_a_run_is_going_on(run: Path, tmp_path: Path, adaptive: list[Event]) -> None:
    path = tmp_path / "r"
    shutil.copytree(run, path)
    (path / "events.jsonl").write_text("".join((run / "events.jsonl").read_text().splitlines(True)[:20]))
    _, found = told(status.show, path)
    assert found["state"] == "stopped" and found["left_s"] is None
    with RunFolder.open(path, clock=count().__next__):
        words, found = told(status.show, path)
        assert found["state"] == "running" and found["left_s"] is not None and "process" in words
    assert told(status.show, path)[1]["state"] == "stopped", "the lock is free again, looking did not take it"


def test_explain_puts_the_numbers_into_the_equation(run: Path, adaptive: list[Event]) -> None:
    words, found = told(explain.show, run, 2)
    said = " ".join(words.split())
    chosen = next(option for option in found["considered"] if option["admitted"])
    payback = chosen["transition_cost_s"] / chosen["savings_s"]
    assert f"= {payback:.3g} steps <= margin x horizon = 0.5 x 12 = 6 steps" in said
    outcome = found["outcome"]
    measured = f"{outcome['predicted_s']:.2f} {outcome['after_s']:.2f} ("
    assert found["limit_steps"] == 6 and found["equation"] in said.replace("emulated s", "s")
    assert "144.1 247.2 +72% 30% 12" in said, "reference, value, change, threshold, horizon"
    assert "cannot be executed: device 2 would hold 4.3 of 4.0 GiB" in said
    for shown in ("tp1 pp1 dp8 -> tp2 pp1 dp4", "1.90 2.16 (12% too low)", measured):
        assert shown in said
    refused, _ = told(explain.show, run, 1)
    assert "> margin x horizon = 0.5 x 1 = 0.5 steps" in " ".join(refused.split())


def test_explain_without_a_number_has_all_decisions_and_the_last_one_in_full(run: Path) -> None:
    words, found = told(explain.show, run, None)
    assert [d["verdict"] for d in found["decisions"]] == ["refused", "admitted", "refused", *["admitted"] * 4]
    assert "decision 7, step 38" in words


def test_mistakes_are_one_line_and_exit_code_2(
    run: Path, tmp_path: Path, story: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = write_log(tmp_path / "static", story.whole())
    cases = {
        ("status", str(tmp_path)): "is not the folder of a run",
        ("explain", str(tmp_path / "none")): "no such folder",
        ("explain", str(nothing)): "has decided nothing yet",
        ("explain", str(run), "--decision", "9"): "no such decision, it has 1-7",
        ("explain", str(run), "--decision", "x"): "--decision",
    }
    for arguments, words in cases.items():
        assert main(arguments) == 2
        said = capsys.readouterr()
        assert said.out == "" and words in said.err and said.err.count("\n") == 1


def test_json_is_one_object_and_nothing_else(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["status", str(run)], ["explain", str(run)], ["explain", str(run), "--decision", "3"]):
        assert main([*command, "--json"]) == 0
        said = capsys.readouterr()
        assert isinstance(json.loads(said.out), dict) and said.err


# whatever the log is like


def spoiled(value: Any) -> Any:
    """The same JSON with each number that is no whole one gone, as NaN is written."""
    if isinstance(value, dict):
        return {k: spoiled(v) for k, v in value.items()}
    if isinstance(value, list):
        return [spoiled(v) for v in value]
    return None if isinstance(value, float) else value


def logs(run: Path) -> Iterator[list[Record]]:
    """Odd ones: nothing, only a start, all numbers NaN, twice the same, old ones without what is new."""
    lines = (run / "events.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    new = {"predicted", "peak_bytes", "signals", "policy", "emulated", "capacity_bytes", "decision"}
    yield from (
        read(run, chosen)
        for chosen in (
            [],
            rows[:1],
            rows[5:],
            [{**spoiled(row), "time": row["time"]} for row in rows],
            [*rows, *rows],
            [{k: v for k, v in row.items() if row["event"] == "DecisionMade" or k not in new} for row in rows],
        )
    )


def read(run: Path, rows: list[dict[str, Any]]) -> list[Record]:
    path = run.parent / "odd"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(run, path)
    (path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_events(path)


def every_view(records: list[Record]) -> None:
    """All of them, of these records; views that refuse to answer must do so with a UserError."""
    history = look_back(records)
    out = Console(file=StringIO(), width=100)
    json.dumps(status.status_of(history, Path("r"), None, history.last_time_s))
    status._print(out, history, status.status_of(history, Path("r"), "process 1", history.last_time_s))
    out.print(explain.overview(history))
    for decided in history.decisions:
        out.print(explain.explanation(decided, history.unit))
    assert all(p.start <= p.end for p in history.periods)
    assert all(a.end <= b.start for a, b in zip(history.periods, history.periods[1:], strict=False))
    plain([r.event for r in records])
    ElementTree.fromstring(page(history, "done"))  # well-formed


def test_views_take_any_log(run: Path) -> None:
    for records in logs(run):
        every_view(records)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_views_take_any_prefix_resumed_anywhere(run: Path, data: st.DataObject) -> None:
    records = read_events(run)
    kept = records[: data.draw(st.integers(0, len(records)))]
    if kept and data.draw(st.booleans()):
        first = records[0].event
        assert isinstance(first, RunStarted)
        step = data.draw(st.integers(0, 40))
        kept += [Record(time_s=kept[-1].time_s, event=replace(first, first_step=step))]
        kept += records[data.draw(st.integers(0, len(records))) :]
    every_view(kept)


@settings(max_examples=60, deadline=None)
@given(
    now=st.none() | st.floats(0.01, 1e4),
    options=st.lists(st.tuples(st.floats(0.01, 1e4), st.none() | st.floats(0, 1e5)), max_size=3),
    horizon=st.floats(1, 500),
    margin=st.floats(0, 1),
    urgent=st.booleans(),
    any_gain=st.booleans(),
)
def test_any_decision_can_be_told_and_its_equation_says_what_was_decided(
    now: float | None,
    options: list[tuple[float, float | None]],
    horizon: float,
    margin: float,
    urgent: bool,
    any_gain: bool,
) -> None:
    made = decide(
        [Option(plan=plan(range(4), 2), step_latency_s=s, transition_cost_s=c) for s, c in options],
        step_latency_s=now,
        horizon_steps=horizon,
        urgent=urgent or now is None,
        policy=AnyGain() if any_gain else Payback(margin),
    )
    event = decision_event(made, step=3, number=1, triggers=(), devices=(0, 1, 2, 3))
    event = replace(event, margin=margin, policy="any-gain" if any_gain else "nereus")
    line = decisions.line(event, plan(range(4)))
    assert "\n" not in line and decisions.verdict(event) in line
    history = history_of([AdaptiveRun().events[0], event])
    Console(file=StringIO(), width=100).print(explain.explanation(history.decisions[0], "s"))
    option = event.chosen or decisions.best(event)
    if option is not None and not event.urgent and not any_gain and margin > 0:
        assert (" <= " in decisions.equation(event, option)) == (event.verdict == "admitted")


def test_old_events_are_read_with_defaults(story: Any, tmp_path: Path) -> None:
    path = write_log(tmp_path / "old", story.whole())
    rows = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    for row in rows:
        for name in ("predicted", "peak_bytes", "signals", "policy", "emulated", "capacity_bytes", "decision"):
            row.pop(name, None)
    (path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, found = told(status.show, path)
    assert found["memory"] is None and found["policy"] == "static" and found["emulated"] is False


def test_a_restore_makes_the_steps_after_the_checkpoint_undone(adaptive: list[Event]) -> None:
    i = next(i for i, e in enumerate(adaptive) if isinstance(e, Recovered) and e.restored_from is not None)
    assert history_of(adaptive[:i]).progress.num_done == 36
    assert history_of(adaptive[: i + 1]).progress.num_done == 35


def test_numbers_that_were_not_finite_come_back_as_nan(tmp_path: Path, adaptive: list[Event]) -> None:
    outcome = next(e for e in adaptive if isinstance(e, OutcomeMeasured))
    moved = next(e for e in adaptive if isinstance(e, TransitionFinished))
    with RunFolder.create(tmp_path / "r", job="", clock=count().__next__) as folder:
        folder.handle(replace(outcome, after_s=math.nan, before_s=None))
        folder.handle(replace(moved, predicted_seconds=math.inf))
        folder.handle(RunFinished(summary={}, interrupted=False))
    back = [r.event for r in read_events(tmp_path / "r")]
    assert isinstance(back[0], OutcomeMeasured) and math.isnan(back[0].after_s) and back[0].before_s is None
    assert isinstance(back[1], TransitionFinished) and math.isnan(back[1].predicted_seconds)
