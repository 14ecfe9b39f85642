"""`nereus run` from start to end: what it prints, what it leaves in the run folder, how it fails."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nereus.core.events import (
    CheckpointWritten,
    DeviceFailed,
    PlanChosen,
    Recovered,
    RunFinished,
    RunStarted,
    StepFinished,
    TransitionFinished,
)
from nereus.rl.loop import Trainer
from nereus.telemetry.folder import read_events

WriteJob = Callable[..., Path]

CHANGES = [
    {"step": 1, "plan": {"actor/training": {"tp": 2}, "critic/training": {"pp": 2}}},
    {"step": 2, "devices": 1},
]


def only(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def test_json_is_one_object_with_the_documented_keys(
    nereus: Callable[..., Any], write_job: WriteJob, tmp_path: Path
) -> None:
    answer = nereus("run", write_job(changes=CHANGES, run={"checkpoint_every": 2}), "--json")
    assert answer.exit_code == 0
    assert answer.stdout.count("\n") == 1
    summary = json.loads(answer.stdout)
    folder = only(tmp_path / "runs")
    assert list(summary) == [
        "run", "steps", "seconds", "reward_first", "reward_last", "length_first", "length_last", "transitions",
        "samples", "history",
    ]  # fmt: skip
    assert summary["run"] == str(folder) and summary["steps"] == 3 and summary["seconds"] > 0
    assert summary["samples"] == {"trained": 3 * 8 * 2, "repeated": 0, "skipped": 0}
    assert [list(t) for t in summary["transitions"]] == [
        ["step", "before", "after", "bytes", "seconds", "state_equal"]
    ] * 2
    first, second = summary["transitions"]
    assert (first["step"], first["before"]["actor/training"]["tp"], first["after"]["actor/training"]["tp"]) == (1, 1, 2)
    assert second["step"] == 2 and second["after"]["critic/training"]["gpus"] == [0] and second["bytes"] > 0
    assert first["state_equal"] is True and second["state_equal"] is True
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [step["kl"] for step in summary["history"]] == [row["kl"] for row in rows]
    assert summary["reward_first"] == rows[0]["reward"] and summary["length_last"] == rows[-1]["length_mean"]
    assert "step 2" in answer.stderr and "checkpoint" in answer.stderr
    check_folder(folder)


def check_folder(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {
        "job.yaml", "events.jsonl", "metrics.jsonl", "ledger.jsonl", "checkpoints", "lock", "trace.json",
    }  # fmt: skip
    events = [record.event for record in read_events(folder)]
    assert [type(event) for event in events] == [
        RunStarted, PlanChosen, StepFinished, TransitionFinished, StepFinished, CheckpointWritten, TransitionFinished,
        StepFinished, CheckpointWritten, RunFinished,
    ]  # fmt: skip
    assert [e.step for e in events if isinstance(e, CheckpointWritten)] == [2, 3]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000002", "step-000003"]


def test_plain_output_goes_to_stdout(nereus: Callable[..., Any], write_job: WriteJob) -> None:
    answer = nereus("run", write_job(steps=1))
    assert answer.exit_code == 0 and answer.stderr == ""
    assert "[1/1] step 0: reward" in answer.stdout and "samples trained 16, repeated 0, skipped 0" in answer.stdout


def test_a_run_leaves_nothing_outside_its_folder(
    nereus: Callable[..., Any], write_job: WriteJob, tmp_path: Path, tiny_models: Path
) -> None:
    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tiny_models.rglob("*") if path.is_file()}

    before = contents()
    assert nereus("run", write_job(steps=1)).exit_code == 0
    assert contents() == before
    assert {path.name for path in tmp_path.iterdir()} == {"job.yaml", "runs"}


def test_two_runs_at_the_same_second_have_two_folders(run: Callable[..., Any], write_job: WriteJob) -> None:
    job = write_job(steps=1)
    assert run(job)["run"] != run(job)["run"]


def test_only_the_newest_checkpoints_are_kept(run: Callable[..., Any], write_job: WriteJob) -> None:
    summary = run(write_job(steps=4, run={"checkpoint_every": 1, "keep_checkpoints": 2}))
    kept = sorted(path.name for path in (Path(summary["run"]) / "checkpoints").iterdir())
    assert kept == ["step-000003", "step-000004"]
    written = [r.event.step for r in read_events(Path(summary["run"])) if isinstance(r.event, CheckpointWritten)]
    assert written == [1, 2, 3, 4], "each once"


def test_a_number_that_is_none_is_null(
    nereus: Callable[..., Any], write_job: WriteJob, tiny_models: Path, tmp_path: Path
) -> None:
    """A reward model that answers NaN: nothing is trained, and what is printed is still JSON."""
    weights = load_file(tiny_models / "reward" / "model.safetensors")
    weights["score.weight"] = torch.full_like(weights["score.weight"], torch.nan)
    (tmp_path / "nan").mkdir()
    save_file(weights, tmp_path / "nan" / "model.safetensors")
    (tmp_path / "nan" / "config.json").write_text((tiny_models / "reward" / "config.json").read_text())
    answer = nereus("run", write_job(reward={"path": str(tmp_path / "nan")}, steps=1), "--json")
    assert answer.exit_code == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    summary = json.loads(answer.stdout, parse_constant=refuse)
    assert summary["samples"] == {"trained": 0, "repeated": 0, "skipped": 16}
    assert summary["history"][0]["score"] is None and summary["history"][0]["reward"] >= 0
    assert "not finite" in answer.stderr


def test_replay(nereus: Callable[..., Any], mistake: Callable[..., str], write_job: WriteJob) -> None:
    """The responses are those of the other run; where it has none, or not enough of them, that is said beforehand."""
    job = write_job(steps=2)

    def summary(*arguments: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(nereus("run", job, "--json", *arguments).stdout)
        return found

    without = summary("--set", "steps=1")["run"]
    message = mistake("run", job, "--replay", without)
    assert message == f"run {without} has no rollouts to replay: record them with --set run.record_rollouts=true"
    first = summary("--set", "run.record_rollouts=true")
    message = mistake("run", job, "--replay", first["run"], "--set", "steps=3")
    assert f"run {first['run']} has no rollouts of step 2, and steps 0 to 2 are needed" in message
    message = mistake("run", job, "--replay", first["run"], "--set", "batch.prompts=16")
    assert "lacks sample 0 of prompt 8: batch.prompts and batch.samples_per_prompt must be those" in message

    def outcome(run: dict[str, Any]) -> tuple[float, float]:
        return run["reward_first"], run["length_last"]

    assert outcome(summary("--replay", first["run"], "--set", "seed=9")) == outcome(first)
    assert outcome(summary("--set", "seed=9")) != outcome(first)


# -- failures ------------------------------------------------------------------------------------------------------


def kill(*devices: int) -> Callable[[Trainer], None]:
    def act(trainer: Trainer) -> None:
        cluster: Any = trainer.fleet.cluster
        for process in [cluster.process_id(device) for device in devices]:
            os.kill(process, signal.SIGKILL)

    return act


def test_a_device_that_dies(
    nereus: Callable[..., Any], write_job: WriteJob, tmp_path: Path, at_step: Callable[..., None]
) -> None:
    """It had the only copy of half of the actor: the run goes back to its start, and on with the other device alone."""
    at_step(3, kill(1))
    changes = [{"step": 2, "plan": {"actor/training": {"tp": 2}}}, {"step": 4, "devices": 2}]
    answer = nereus("run", write_job(steps=5, changes=changes), "--json")
    assert answer.exit_code == 0, answer.stderr
    summary = json.loads(answer.stdout)
    assert summary["samples"] == {"trained": 5 * 8 * 2, "repeated": 0, "skipped": 0}
    events = [record.event for record in read_events(only(tmp_path / "runs"))]
    (failed,) = [e for e in events if isinstance(e, DeviceFailed)]
    assert (failed.step, failed.stage, failed.device, failed.kind) == (3, "training", 1, "died")
    (recovered,) = [e for e in events if isinstance(e, Recovered)]
    assert (recovered.step, recovered.stage, recovered.devices) == (3, "training", (0,))
    assert recovered.restored_from == 0
    assert recovered.plan.gpus == (0,) and 0 < recovered.seconds < 60
    assert [t["step"] for t in summary["transitions"]] == [2, 4]


@pytest.mark.parametrize("every", [0, 1, 2])
def test_the_last_device_dies(
    nereus: Callable[..., Any], write_job: WriteJob, tmp_path: Path, at_step: Callable[..., None], every: int
) -> None:
    def act(trainer: Trainer) -> None:
        trainer.leaving({0, 1})  # what they write is there
        kill(0, 1)(trainer)

    at_step(3, act)
    changes = [{"step": 2, "plan": {"actor/training": {"tp": 2}}}]
    answer = nereus("run", write_job(steps=5, run={"checkpoint_every": every}, changes=changes), "--json")
    assert answer.exit_code == 1 and answer.stdout == ""
    *_, last = answer.stderr.splitlines()
    assert last.startswith("nereus: error: no device is left, in step 3; ")
    assert "Traceback" not in answer.stderr
    folder = only(tmp_path / "runs")
    if every == 0:
        assert "there is no checkpoint yet" in last and "start the job again" in last and "--resume" not in last
    elif every == 1:
        assert f"no step is lost, go on from the checkpoint of step 3: nereus run --resume {folder}" in last
    else:
        assert f"step 2 is lost, go on from the checkpoint of step 2: nereus run --resume {folder}" in last
    if every:
        resumed = nereus("run", "--resume", folder, "--json")
        assert resumed.exit_code == 0, resumed.stderr
        summary = json.loads(resumed.stdout)
        assert summary["samples"] == {"trained": 5 * 8 * 2, "repeated": 0, "skipped": 0}
        assert [t["step"] for t in summary["transitions"]] == [2], "also where it was made twice"


def test_an_error_inside_a_device(
    nereus: Callable[..., Any], write_job: WriteJob, tmp_path: Path, at_step: Callable[..., None]
) -> None:
    """The first time it may be the device, which is left out; the same on another one is an error of the program."""

    def act(trainer: Trainer) -> None:
        trainer.fleet.cluster.call("no_such_command", {trainer.fleet.pool[0]: ()}).results()

    at_step(1, act, again=True)
    answer = nereus("run", write_job(cluster={"devices": 3}), "--json")
    assert answer.exit_code == 1 and answer.stdout == ""
    (line,) = [line for line in answer.stderr.splitlines() if line.startswith("nereus: error:")]
    assert "device 1 failed while running no_such_command: AttributeError: " in line and "in step 1" in line
    after = answer.stderr.partition(line)[2]
    assert after.count("Traceback") == 1, "the worker's, and none of ours"
    assert after.rstrip().splitlines()[-1].startswith("AttributeError: ")
    events = [record.event for record in read_events(only(tmp_path / "runs"))]
    assert [(e.device, e.kind) for e in events if isinstance(e, DeviceFailed)] == [(0, "error")]


def test_a_full_disk(nereus: Callable[..., Any], write_job: WriteJob, at_step: Callable[..., None]) -> None:
    def act(trainer: Trainer) -> None:
        raise OSError(28, "No space left on device", "/some/file")

    at_step(1, act)
    answer = nereus("run", write_job())
    assert answer.exit_code == 1
    assert answer.stderr.startswith("nereus: error: ") and answer.stderr.count("\n") == 1
    assert (
        "No space left on device" in answer.stderr and "/some/file" in answer.stderr and "in step 1;" in answer.stderr
    )
