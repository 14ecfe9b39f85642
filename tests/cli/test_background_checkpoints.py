"""Checkpoints that are written while training goes on: what is in them, and what comes of them when something fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from gated_worker_for_tests import PROGRAM

from nereus.core.events import CheckpointFailed, CheckpointWritten, Event, Recovered, StepFinished
from nereus.rl.ledger import read_ledger
from nereus.rl.loop import Trainer
from nereus.rl.saving import Checkpoints, checkpoints
from nereus.runtime.checkpoint import read_manifest
from nereus.telemetry.folder import read_events

Run = Callable[..., dict[str, Any]]
WriteJob = Callable[..., Path]


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


@pytest.fixture
def at_start(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[int, tuple[Any, ...]]], None]:
    """Workers of this module; before the first step a command is given to some of them."""
    monkeypatch.setattr("nereus.rl.worker.PROGRAM", PROGRAM)
    train = Trainer.run

    def tell(command: str, arguments: dict[int, tuple[Any, ...]]) -> None:
        def told(self: Trainer, first_step: int) -> int:
            self.fleet.cluster.call(command, arguments).results()
            return train(self, first_step)

        monkeypatch.setattr(Trainer, "run", told)

    return tell


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def only(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoints(folder / "checkpoints")]


def events(folder: Path, *kinds: type) -> list[Any]:
    return [record.event for record in read_events(folder) if isinstance(record.event, kinds)]


def tensors(folder: Path) -> dict[str, str]:
    """The SHA-256 of each tensor file of a checkpoint, which is read back and found whole."""
    files: dict[str, str] = read_manifest(folder)["files"]
    return {name: digest for name, digest in files.items() if name.endswith(".safetensors")}


def trained_steps(folder: Path) -> int:
    return len({entry.step for entry in read_ledger(folder / "ledger.jsonl")})


def test_training_goes_on_and_the_checkpoint_is_of_the_boundary(
    run: Run,
    write_job: WriteJob,
    tmp_path: Path,
    fifo: Path,
    stack: ExitStack,
    at_start: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it is half written, one step is trained and another one begun."""
    at_start("gate", {1: ("step-000002", str(fifo))})
    seen: list[tuple[int, int, list[str]]] = []
    train = Trainer._train

    def hold(self: Trainer, at: Any) -> None:
        folder = only(tmp_path / "runs")
        if at.step == 2:
            stack.enter_context(fifo.open("w"))
        if at.step in (2, 3):
            seen.append((at.step, trained_steps(folder), names(folder)))
        if at.step == 3:
            stack.close()
        train(self, at)

    monkeypatch.setattr(Trainer, "_train", hold)
    job = write_job(steps=4, run={"checkpoint_every": 2})
    folder = Path(run(job)["run"])
    assert seen == [(2, 2, []), (3, 3, [])]
    assert names(folder) == ["step-000002", "step-000004"]
    first, last = events(folder, CheckpointWritten)
    assert (first.step, last.step, first.waited) == (2, 4, "")
    steps = events(folder, StepFinished)
    assert 0 < first.blocked_seconds < first.seconds and first.seconds > steps[2].seconds["step"]
    monkeypatch.undo()

    other = Path(run(job, "steps=2", f"run.folder={tmp_path / 'short'}")["run"])
    newest = other / "checkpoints" / "step-000002"
    assert tensors(folder / "checkpoints" / "step-000002") == tensors(newest)
    manifests = [read_manifest(path) for path in (folder / "checkpoints" / "step-000002", newest)]
    assert manifests[0] == manifests[1], "ledger, plan, digest"
    resumed = run(None, "steps=4", resume=other)  # refuses a state whose digest is not the manifest's
    assert tensors(Path(resumed["run"]) / "checkpoints" / "step-000004") == tensors(
        folder / "checkpoints" / "step-000004"
    )


KILLED = """
import sys
from nereus.cli.main import main
from nereus.rl import worker
from nereus.rl.loop import Trainer
worker.PROGRAM, train = sys.argv[3], Trainer.run
def told(self, first_step):
    self.fleet.cluster.call("gate", {1: ("step-000002", sys.argv[2])}).results()
    return train(self, first_step)
Trainer.run = told
main(["run", sys.argv[1]])
"""


def test_the_controller_is_killed_in_the_middle(run: Run, write_job: WriteJob, tmp_path: Path, fifo: Path) -> None:
    job = write_job(steps=9, run={"checkpoint_every": 1})
    command = [sys.executable, "-c", KILLED, str(job), str(fifo), PROGRAM]
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        command, env={**os.environ, **paths}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    with fifo.open("w"):
        process.kill()
        process.wait()
        folder = only(tmp_path / "runs")
        assert names(folder) == ["step-000001"]
        (half,) = (folder / "checkpoints").glob(".step-000002.*")
        assert any(half.rglob("*.safetensors"))
    process.communicate()  # its workers have ended too
    assert process.returncode == -signal.SIGKILL
    assert len(read_manifest(folder / "checkpoints" / "step-000001")["files"]) > 4
    assert run(None, "steps=2", resume=folder)["samples"] == {"trained": 2 * 8 * 2, "repeated": 0, "skipped": 0}
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000001", "step-000002"]


def test_a_writer_dies(
    run: Run,
    write_job: WriteJob,
    tmp_path: Path,
    fifo: Path,
    at_start: Callable[..., None],
    at_step: Callable[..., None],
) -> None:
    """Its checkpoint is given up; what was there is there, and the next boundary makes another one."""
    at_start("gate", {1: ("step-000004", str(fifo))})

    def kill(trainer: Trainer) -> None:
        with fifo.open("w"):
            trainer.fleet.cluster.kill(1)
        assert names(only(tmp_path / "runs")) == ["step-000002"]

    at_step(4, kill)
    folder = Path(run(write_job(steps=7, run={"checkpoint_every": 2, "keep_checkpoints": 9}))["run"])
    (failed,) = events(folder, CheckpointFailed)
    assert failed.step == 4 and "device 1 is gone" in failed.why
    assert [event.devices for event in events(folder, Recovered)] == [(0,)]
    assert names(folder) == [f"step-00000{step}" for step in (2, 5, 6, 7)]
    assert not list((folder / "checkpoints").glob(".*"))


def test_a_restore_waits_for_the_checkpoint_that_is_being_written(
    run: Run,
    write_job: WriteJob,
    tmp_path: Path,
    fifo: Path,
    stack: ExitStack,
    at_start: Callable[..., None],
    at_step: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device that dies has written its own files and told so: they are as good as any."""
    at_start("gate", {1: ("step-000002", str(fifo))})
    settle = Checkpoints.settle

    def settled(self: Checkpoints, *leaving: Any) -> None:
        stack.close()
        settle(self, *leaving)

    def kill(trainer: Trainer) -> None:
        stack.enter_context(fifo.open("w"))
        assert not trainer.fleet.cluster.call("written", {0: (True,)}).results()[0].error
        trainer.before_stage()
        assert names(only(tmp_path / "runs")) == []
        trainer.fleet.cluster.kill(0)

    monkeypatch.setattr(Checkpoints, "settle", settled)
    at_step(2, kill)
    plan = {"all": {"dp": 2}, "actor/training": {"tp": 2}}
    folder = Path(run(write_job(steps=3, plan=plan, run={"checkpoint_every": 2}))["run"])
    assert [(event.step, event.restored_from) for event in events(folder, Recovered)] == [(2, 2)]
    assert not events(folder, CheckpointFailed)


def full(trainer: Trainer) -> None:
    trainer.fleet.cluster.call("limit_files", {1: (1000,)}).results()


@pytest.mark.parametrize("for_good", [False, True])
def test_the_disk_is_full(
    nereus: Callable[..., Any],
    write_job: WriteJob,
    tmp_path: Path,
    at_start: Callable[..., None],
    at_step: Callable[..., None],
    for_good: bool,
) -> None:
    """The run goes on, and says so; it is an error where its last state cannot be saved."""
    at_start("limit_files", {1: (-1,)})
    at_step(1, full)
    if not for_good:
        at_step(3, lambda trainer: trainer.fleet.cluster.call("limit_files", {1: (-1,)}).results())
    answer = nereus("run", write_job(steps=4, run={"checkpoint_every": 1}))
    folder = only(tmp_path / "runs")
    said = [line for line in answer.stdout.splitlines() if "the checkpoint failed" in line]
    assert all("device 1 cannot write" in line and "File too large" in line for line in said)
    failed = [event.step for event in events(folder, CheckpointFailed)]
    assert len(events(folder, StepFinished)) == 4
    if for_good:
        assert answer.exit_code == 1 and failed == [2, 3, 4, 4], "the last one is tried again"
        (line,) = answer.stderr.splitlines()
        assert "the checkpoint of step 4 cannot be written: device 1 cannot write" in line
        assert "go on from the checkpoint of step 1" in line and names(folder) == ["step-000001"]
    else:
        assert answer.exit_code == 0 and failed == [2, 3] and len(said) == 2
        assert names(folder) == ["step-000001", "step-000004"]
    assert not list((folder / "checkpoints").glob(".*"))


def test_no_room_for_copies(run: Run, write_job: WriteJob) -> None:
    """Devices are full to within less than a copy: files are written one by one, and nothing runs out of memory."""
    plan = {"all": {"dp": 2}}
    first = Path(run(write_job(steps=1, plan=plan))["run"])
    peak = max(size for event in events(first, StepFinished) for size in event.peak_bytes.values())
    assert [event.waited for event in events(first, CheckpointWritten)] == [""]
    tight = {"devices": 2, "memory_gib": (peak + 50_000) / 2**30}
    job = write_job(steps=2, plan=plan, cluster=tight, adapt={"policy": "static"}, run={"checkpoint_every": 1})
    folder = Path(run(job)["run"])
    written = events(folder, CheckpointWritten)
    assert [event.step for event in written] == [1, 2]
    assert all("has room for 0.0 MiB" in e.waited and e.blocked_seconds > 0.95 * e.seconds for e in written)
    assert not events(folder, CheckpointFailed, Recovered)
    assert all(read_manifest(path)["files"] for path in checkpoints(folder / "checkpoints"))


def lines_of(event: Event) -> str:
    from nereus.telemetry import describe

    assert isinstance(event, CheckpointWritten)
    return describe.checkpoint(event)


def test_what_is_said_of_a_checkpoint() -> None:
    event = CheckpointWritten(step=3, path="p", num_bytes=5_000_000, seconds=2.0, blocked_seconds=0.5)
    assert lines_of(event) == "step 3: checkpoint of 5.0 MB in 2.00 s (0.50 s of them waited for): p"
    waited = CheckpointWritten(step=3, path="p", num_bytes=5_000_000, seconds=2.0, blocked_seconds=2.0, waited="full")
    assert "not beside the training: full" in lines_of(waited)
