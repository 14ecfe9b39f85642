"""The files of a run: nothing confirmed is lost, nothing half-written is believed, one writer at a time."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.core.errors import UserError
from nereus.core.events import StageStarted, StepFinished
from nereus.runtime.files import write_atomically
from nereus.telemetry.folder import RunFolder, event_from_json, read_events

JOB = "model: tiny\n"


def ticks() -> Any:
    return count().__next__


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=refuse) for line in path.read_bytes().splitlines()]


def test_reading_gives_back_every_event_but_stage_starts(tmp_path: Path, story: Any) -> None:
    events = story.whole()
    with RunFolder.create(tmp_path / "run", job=JOB, clock=ticks()) as folder:
        for event in events:
            folder.handle(event)
        kept = [event for event in events if not isinstance(event, StageStarted)]
        assert [r.event for r in read_events(folder.path)] == kept, "a run that goes on can be read"
    records = read_events(tmp_path / "run")
    assert [r.event for r in records] == kept
    assert [r.time_s for r in records] == list(range(len(kept)))
    assert folder.job_path.read_text() == JOB


@settings(max_examples=25, deadline=None)
@given(metrics=st.dictionaries(st.text(max_size=5), st.floats()))
def test_any_metrics_are_strict_json_and_come_back(
    story: Any, metrics: dict[str, float], tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.mktemp("any") / "run"
    with RunFolder.create(path, job=JOB, clock=ticks()) as folder:
        folder.handle(replace(story.step(7), metrics=metrics, sample="\udc80 ü"))
    [row] = rows(path / "metrics.jsonl")
    assert row["step"] == 7 and metrics.keys() <= row.keys(), "no metric's name hides the step"
    [row] = rows(path / "events.jsonl")
    event = event_from_json(row)
    assert isinstance(event, StepFinished) and event.sample == "\udc80 ü"
    for name, value in metrics.items():
        back = event.metrics[name]
        assert back == value if math.isfinite(value) else math.isnan(back)


def test_a_last_line_cut_anywhere_is_skipped_and_then_repaired(tmp_path: Path, story: Any) -> None:
    path = tmp_path / "run"
    with RunFolder.create(path, job=JOB, clock=ticks()) as folder:
        folder.handle(story.started())
        whole = (path / "events.jsonl").stat().st_size
        folder.handle(story.step(0))
    content = (path / "events.jsonl").read_bytes()
    for size in range(whole, len(content)):
        (path / "events.jsonl").write_bytes(content[:size])
        assert [r.event for r in read_events(path)] == [story.started()]
        with RunFolder.open(path, clock=ticks()) as folder:
            folder.handle(story.step(1))
        assert [r.event for r in read_events(path)] == [story.started(), story.step(1)]


def test_a_broken_line_that_is_not_the_last_is_reported_with_its_number(tmp_path: Path, story: Any) -> None:
    with RunFolder.create(tmp_path / "run", job=JOB, clock=ticks()) as folder:
        folder.handle(story.started())
    with (tmp_path / "run" / "events.jsonl").open("a") as file:
        file.write('{"time": 1, "event": "Surprise"}\n')
    with pytest.raises(UserError, match=r"line 2 of .*Surprise"):
        read_events(tmp_path / "run")


def test_a_run_has_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunFolder.create(path, job=JOB, clock=ticks()):
        with pytest.raises(UserError, match=f"process {os.getpid()} "):
            RunFolder.open(path, clock=ticks())
        with pytest.raises(UserError, match="exists already"):
            RunFolder.create(path, job="model: other\n", clock=ticks())
        assert (path / "job.yaml").read_text() == JOB
    RunFolder.open(path, clock=ticks()).close()


WRITER = """
import sys
from itertools import count
from pathlib import Path
from nereus.core.events import CheckpointWritten
from nereus.telemetry.folder import RunFolder

folder = RunFolder.create(Path(sys.argv[1]), job="model: tiny", clock=count().__next__)
for step in count():
    folder.handle(CheckpointWritten(step=step, path="x" * 100, num_bytes=1, seconds=0.1))
    print(step, flush=True)
"""


def test_a_kill_loses_no_event_that_was_confirmed_and_frees_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for _ in range(100):
        writer.stdout.readline()
    with pytest.raises(UserError, match=f"process {writer.pid} "):
        RunFolder.open(path, clock=ticks())
    writer.send_signal(signal.SIGKILL)
    confirmed = 99 + len([line for line in writer.stdout.read().splitlines() if line])
    writer.wait()
    RunFolder.open(path, clock=ticks()).close()
    steps = [r.event.step for r in read_events(path)]  # type: ignore[union-attr]
    assert steps[: confirmed + 1] == list(range(confirmed + 1))


FULL_DISK = """
import resource, sys
from pathlib import Path
from nereus.core.events import CheckpointWritten
from nereus.telemetry.folder import RunFolder

folder = RunFolder.create(Path(sys.argv[1]), job="model: tiny", clock=lambda: 0.0)
resource.setrlimit(resource.RLIMIT_FSIZE, (450, 450))
for step in range(10):
    try:
        folder.handle(CheckpointWritten(step=step, path="x" * 100, num_bytes=1, seconds=0.1))
    except OSError:
        print("full", flush=True)
"""


def test_a_full_disk_leaves_whole_lines_only(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    refused = done.stdout.count("full")
    assert 0 < refused < 10
    assert (tmp_path / "run" / "events.jsonl").read_bytes().endswith(b"}\n")
    assert len(read_events(tmp_path / "run")) == 10 - refused


def test_metrics_hold_each_step_once_after_a_resume(tmp_path: Path, story: Any) -> None:
    path = tmp_path / "run"
    with RunFolder.create(path, job=JOB, clock=ticks()) as folder:
        for event in (story.started(), *(story.step(s) for s in range(5))):
            folder.handle(event)
    with RunFolder.open(path, clock=ticks()) as folder:
        for event in (story.started(first_step=3), story.step(3, reward=9.0)):
            folder.handle(event)
    metrics = rows(path / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert [row["reward"] for row in metrics] == [0.0, 0.1, 0.2, 9.0]
    assert all(row["generation_s"] == 1.0 and row["step_s"] == 2.0 for row in metrics)


def test_metrics_are_made_again_from_the_events(tmp_path: Path, story: Any) -> None:
    """A kill between the two files may cost the metrics a row; the next start of the run brings it back."""
    path = tmp_path / "run"
    with RunFolder.create(path, job=JOB, clock=ticks()) as folder:
        for event in (story.started(), story.step(0), story.step(1)):
            folder.handle(event)
    before = (path / "metrics.jsonl").read_bytes()
    (path / "metrics.jsonl").write_bytes(before[:-20])
    with RunFolder.open(path, clock=ticks()) as folder:
        folder.handle(story.started(first_step=2))
    assert (path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "no such folder"),
        ([], "no job.yaml"),
        (["events.jsonl"], "no job.yaml"),
        (["job.yaml"], "no events.jsonl"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path, files: list[str] | None, message: str) -> None:
    path = tmp_path / "thing"
    if files is not None:
        path.mkdir()
        for name in files:
            (path / name).touch()
    for attempt in (lambda: read_events(path), lambda: RunFolder.open(path, clock=ticks())):
        with pytest.raises(UserError, match=message) as caught:
            attempt()
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert not (path / "lock").exists(), "looking leaves no trace"


def test_a_folder_that_cannot_be_made_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot make the run folder"):
        RunFolder.create(tmp_path / "file" / "run", job=JOB, clock=ticks())


def test_an_atomic_write_replaces_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")
    write_atomically(path, b"n\xc3\xabw")
    assert path.read_text() == "nëw"
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "nëw"
    (tmp_path / "taken" / "inside").mkdir(parents=True)
    with pytest.raises(OSError):
        write_atomically(tmp_path / "taken", "x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "taken"], "no temporary is left"
