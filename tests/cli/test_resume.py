"""A run that stopped, however it stopped, goes on as if it had not: same weights, every sample exactly once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nereus.cli.main import main
from nereus.core.events import PlanChosen, RunFinished, RunStarted
from nereus.rl.ledger import account, read_ledger
from nereus.telemetry.folder import read_events

WriteJob = Callable[..., Path]
Run = Callable[..., dict[str, Any]]

AUTO = None
"""Of a plan: what the planner chose, by the run's own events."""
SAME = 1e-4
"""Largest difference of a weight between a run in one piece and one in two, under other plans."""


def checkpoint(folder: str | Path) -> Path:
    """The newest checkpoint of a run."""
    return sorted((Path(folder) / "checkpoints").glob("step-*"))[-1]


def number(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def state(folder: str | Path) -> dict[str, torch.Tensor]:
    """All that the newest checkpoint holds: weights, moments, counters."""
    files = checkpoint(folder).rglob("*.safetensors")
    return {f"{file.parent.name}/{name}": t for file in files for name, t in load_file(file).items()}


def largest_difference(a: str | Path, b: str | Path) -> float:
    left, right = state(a), state(b)
    assert left.keys() == right.keys() and any("exp_avg" in name for name in left)
    return max((left[name].double() - right[name].double()).abs().max().item() for name in left)


def assert_exactly_once(folder: str | Path, steps: int, prompts: int = 8, epochs: int = 2) -> None:
    entries = read_ledger(Path(folder) / "ledger.jsonl")
    counted = account(entries, positions=steps * prompts, samples_per_prompt=1, epochs=epochs)
    assert (counted.trained, counted.repeated, counted.skipped) == (steps * prompts * epochs, 0, 0)
    order = [(e.step, e.epoch, e.mini_batch) for e in entries]
    assert order == sorted(order)


def started(folder: str | Path) -> list[RunStarted]:
    return [r.event for r in read_events(Path(folder)) if isinstance(r.event, RunStarted)]


COMMANDS = """
import glob, sys
from nereus.cli.main import main
for command in sys.argv[1:]:
    words = [word.replace("RUN", "".join(glob.glob("runs/*"))) for word in command.split("|")]
    print("exit code", main(words), flush=True)
"""
"""One process for several commands, as to start one takes most of the time. RUN is the only run folder."""


class Process:
    """`nereus` commands, one after the other, in a process group of their own, as a terminal starts them."""

    def __init__(self, *commands: Sequence[object], cwd: Path) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-c", COMMANDS, *("|".join(map(str, command)) for command in commands)],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.lines: list[str] = []

    def read_until(self, word: str) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self.lines.append(line.rstrip("\n"))
            if word in line:
                return
        pytest.fail(f"{word!r} did not come:\n" + "\n".join(self.lines))

    def signal_group(self, number: int) -> None:
        os.killpg(self._popen.pid, number)

    def kill_controller(self) -> None:
        self._popen.kill()

    def end(self) -> int:
        """Wait for it and for all of its processes, which hold the pipe that is read here; the exit code."""
        rest, _ = self._popen.communicate()
        self.lines += rest.splitlines()
        deadline = time.monotonic() + 10
        while self._group():
            assert time.monotonic() < deadline, f"left behind: {self._group()}"
        return self._popen.returncode

    def _group(self) -> list[str]:
        """Command lines of the group's processes that have not ended."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
                if int(group) == self._popen.pid and state not in "ZX":
                    found.append((stat.parent / "cmdline").read_text())
            except OSError:
                continue  # it has just ended
        return found


def only(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


# -- how a run stops -----------------------------------------------------------------------------------------------


def test_interrupted_then_killed_then_done(run: Run, write_job: WriteJob, tmp_path: Path) -> None:
    """Ctrl-C; on with another plan until SIGKILL between two checkpoints; on with a third: as one run in one piece."""
    job = write_job(steps=500, run={"checkpoint_every": 100}, changes=[{"step": 1, "devices": 1}])
    resume = ["run", "--resume", "RUN", "--set", "plan={all: {tp: 2}}", "--set", "cluster.devices=2"]
    process = Process(["run", job], resume, cwd=tmp_path)
    process.read_until("] step 1:")
    process.signal_group(signal.SIGINT)
    process.read_until("exit code 0")
    assert any(line.startswith("stopping: ") for line in process.lines)
    assert any("interrupted after" in line for line in process.lines)
    folder = only(tmp_path / "runs")
    stopped = number(checkpoint(folder))
    assert stopped >= 2
    assert_exactly_once(folder, stopped)
    last = read_events(folder)[-1].event
    assert isinstance(last, RunFinished) and last.interrupted

    process.read_until(f"] step {stopped + 1}:")
    process.kill_controller()
    assert process.end() == -signal.SIGKILL
    assert number(checkpoint(folder)) == stopped
    assert len(read_ledger(folder / "ledger.jsonl")) >= 4 * (stopped + 2), "the ledger has more than the checkpoint"
    assert not any("Traceback" in line for line in process.lines)

    steps = stopped + 2
    plan = "plan={all: {dp: 1}, actor/training: {tp: 2, pp: 2}, critic/training: {dp: 4, micro_batch: 1}}"
    summary = run(None, f"steps={steps}", "cluster.devices=4", plan, resume=folder)
    assert summary["run"] == str(folder) and summary["steps"] == steps
    assert summary["samples"] == {"trained": steps * 16, "repeated": 0, "skipped": 0}
    assert_exactly_once(folder, steps)
    assert [event.first_step for event in started(folder)] == [0, stopped, stopped]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(steps))

    whole = run(job, f"steps={steps}", f"run.folder={tmp_path / 'whole'}", static=True)
    assert largest_difference(folder, whole["run"]) < SAME
    assert {"reward": rows[-1]["reward"], "length": rows[-1]["length_mean"]} == {
        "reward": whole["history"][-1]["reward"],
        "length": whole["history"][-1]["length_mean"],
    }


def test_one_at_a_time(
    run: Run, write_job: WriteJob, nereus: Callable[..., Any], at_step: Callable[..., None], tmp_path: Path
) -> None:
    """A second resume is refused while the first one runs, and the first is not disturbed."""
    job = write_job(steps=3, run={"checkpoint_every": 1})
    answers = []

    def resume(_: object) -> None:
        answers.append(main(["run", "--resume", str(only(tmp_path / "runs")), "--set", "steps=9"]))

    at_step(1, resume)
    answer = nereus("run", job)
    assert answers == [2] and answer.exit_code == 0
    assert answer.stderr.startswith("nereus: error: the run in ") and answer.stderr.count("\n") == 1
    assert "is being written by process" in answer.stderr
    assert_exactly_once(only(tmp_path / "runs"), 3)


def test_sigterm_stops_as_ctrl_c_does(
    nereus: Callable[..., Any], write_job: WriteJob, at_step: Callable[..., None], tmp_path: Path
) -> None:
    at_step(1, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    answer = nereus("run", write_job(steps=500))
    assert answer.exit_code == 0 and "2 of 500 steps" in answer.stdout
    assert checkpoint(only(tmp_path / "runs")).name == "step-000002"
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_a_resumed_run_was_asked_for_is_kept(run: Run, write_job: WriteJob, at_step: Callable[..., None]) -> None:
    folder = Path(run(write_job(steps=1))["run"])
    at_step(1, lambda _: signal.raise_signal(signal.SIGINT))
    assert run(None, "steps=4", "sampling.max_new_tokens=5", resume=folder)["steps"] == 2
    summary = run(resume=folder)
    assert summary["steps"] == 4
    assert [row["length_max"] <= 5 for row in summary["history"]] == [False, True, True, True]


@pytest.mark.parametrize("every", [0, 1])
def test_a_second_ctrl_c_leaves_at_once(
    nereus: Callable[..., Any], write_job: WriteJob, at_step: Callable[..., None], every: int
) -> None:
    def twice(_: object) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    at_step(1, twice)
    answer = nereus("run", write_job(steps=500, run={"checkpoint_every": every}))
    assert answer.exit_code == 130
    assert answer.stderr.startswith("nereus: error: left at once, in step 1; ") and answer.stderr.count("\n") == 1
    assert ("no step is lost, go on from the checkpoint of step 1" in answer.stderr) == bool(every)


def test_the_command_itself(tmp_path: Path) -> None:
    command = [Path(sys.executable).with_name("nereus"), "run", "none.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "nereus: error: job file none.yaml cannot be read: No such file or directory\n"


# -- how it goes on ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def originals() -> dict[str, Path]:
    """Runs that several tests go on with, by what they are; each is made once and copied."""
    return {}


@pytest.fixture
def done(run: Run, write_job: WriteJob, originals: dict[str, Path], tmp_path: Path) -> Path:
    """A run of three steps that has ended, with two checkpoints."""
    if "done" not in originals:
        job = write_job(changes=[{"step": 3, "devices": 1}], run={"checkpoint_every": 2})
        originals["done"] = Path(run(job)["run"])
    return Path(shutil.copytree(originals["done"], tmp_path / "done"))


@pytest.fixture
def moved(run: Run, write_job: WriteJob, originals: dict[str, Path], tmp_path: Path) -> Path:
    """A run of two steps, the first on one device, the second, by the job file too, on two."""
    if "moved" not in originals:
        first = run(write_job(steps=1, plan={"all": {"dp": 1}}, cluster={"devices": 1}))["run"]
        again = run(None, "steps=2", "cluster.devices=2", "plan.all.dp=2", resume=Path(first))
        originals["moved"] = Path(again["run"])
    return Path(shutil.copytree(originals["moved"], tmp_path / "moved"))


def test_a_finished_run_says_what_to_do_and_does_it(done: Path, mistake: Callable[..., str], run: Run) -> None:
    message = mistake("run", "--resume", done)
    assert "has trained its 3 steps" in message and f"nereus run --resume {done} --set steps=13" in message
    summary = run(None, "steps=5", resume=done)
    assert summary["steps"] == 5
    assert_exactly_once(done, 5)
    assert [t["step"] for t in summary["transitions"]] == [3], "a change that was due when the run ended"
    run(None, "steps=6", "plan={all: {micro_batch: 1}}", resume=done)
    assert started(done)[-1].devices == (0,), "the devices are those of the checkpoint"
    assert_exactly_once(done, 6)
    assert f"nereus run --resume {done} --set steps=16" in mistake("run", "--resume", done)


@pytest.mark.parametrize(
    ("overrides", "devices", "training", "generation"),
    [
        ((), 2, (1, 1, 2), (1, 1, 2)),
        (("cluster.devices=4",), 4, AUTO, AUTO),
        (("cluster.devices=1",), 1, (1, 1, 1), (1, 1, 1)),
        (("plan=auto",), 2, AUTO, AUTO),
        (("plan.actor/training={tp: 2}",), 2, (2, 1, 1), (1, 1, 2)),
        (("plan={all: {pp: 2}}",), 2, (1, 2, 1), (1, 2, 1)),
    ],
)
def test_another_plan(
    run: Run,
    moved: Path,
    overrides: tuple[str, ...],
    devices: int,
    training: tuple[int, ...] | None,
    generation: tuple[int, ...] | None,
) -> None:
    """Overrides work as a change of plan does: what they do not name stays as it was at the checkpoint."""
    run(None, "steps=3", *overrides, resume=moved)
    event = started(moved)[-1]
    assert len(event.devices) == devices
    plan = {name: (p["tp"], p["pp"], p["dp"]) for name, p in event.plan.to_json().items()}
    if training is AUTO:
        chosen = [r.event for r in read_events(moved) if isinstance(r.event, PlanChosen)][-1]
        assert (chosen.step, chosen.devices, chosen.plan) == (event.first_step, event.devices, event.plan)
    else:
        assert plan["actor/training"] == training and plan["actor/generation"] == generation
    assert_exactly_once(moved, 3)


def test_another_plan_that_cannot_be(moved: Path, mistake: Callable[..., str]) -> None:
    asked = ["--set", "steps=3", "--set", "cluster.devices=3", "--set", "plan.all.dp=3"]
    assert mistake("run", "--resume", moved, *asked).startswith("plan: actor/generation: dp=3 does not divide the 8")


def test_what_a_resumed_run_cannot_change(done: Path, mistake: Callable[..., str]) -> None:
    for override, words in {
        "batch.prompts=4": "batch.prompts: a run that is resumed cannot change it from 8 to 4",
        "batch.epochs=1": "batch.epochs",
        "task.args.seed=1": "task: a run that is resumed cannot change it",
        "algorithm.name=grpo": "samples_per_prompt",
        "model.path=/none": "model.path: model folder /none does not exist",
    }.items():
        assert words in mistake("run", "--resume", done, "--set", "steps=9", "--set", override)


@pytest.mark.parametrize(
    "how", ["no checkpoint", "damaged weights", "missing file", "damaged manifest", "wrong manifest"]
)
def test_a_damaged_checkpoint(done: Path, mistake: Callable[..., str], run: Run, how: str) -> None:
    newest = checkpoint(done)
    if how == "no checkpoint":
        shutil.rmtree(done / "checkpoints")
        message = mistake("run", "--resume", done, "--set", "steps=5")
        assert message == f"run {done} has no checkpoint to go on from: it ended before its first one"
        return
    weights = next((newest / "actor").glob("model-*.safetensors"))
    manifest = newest / "manifest.json"
    match how:
        case "damaged weights":
            data = weights.read_bytes()
            weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "missing file":
            weights.unlink()
        case "damaged manifest":
            manifest.write_text(manifest.read_text()[:50])
        case "wrong manifest":
            manifest.write_text('{"format": 1, "files": {}}')
    message = mistake("run", "--resume", done, "--set", "steps=5")
    assert (manifest.name if "manifest" in how else f"actor/{weights.name}") in message
    assert "delete that folder to go on from step-000002" in message
    shutil.rmtree(newest)
    assert run(resume=done)["steps"] == 3
    assert_exactly_once(done, 3)


def test_a_ledger_that_lost_its_end(done: Path, mistake: Callable[..., str]) -> None:
    with (done / "ledger.jsonl").open("r+b") as file:
        file.truncate(10)
    message = mistake("run", "--resume", done, "--set", "steps=5")
    assert "ledger.jsonl is damaged: it has 10 bytes" in message


# -- what it goes on from, for others ------------------------------------------------------------------------------


def test_transformers_read_a_checkpoint(run: Run, write_job: WriteJob, tiny_models: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    folder = checkpoint(run(write_job(steps=2, plan={"all": {"tp": 2}}))["run"])
    tokens = torch.tensor([[6, 0, 1, 2, 3], [6, 4, 0, 5, 7]])
    for kind, name in ((AutoModelForCausalLM, "actor"), (AutoModelForTokenClassification, "critic")):
        model, missing = kind.from_pretrained(folder / name, output_loading_info=True)
        assert not any(missing.values()), missing
        first = kind.from_pretrained(tiny_models / name)
        written = {n: t for f in (folder / name).glob("model-*.safetensors") for n, t in load_file(f).items()}
        assert written.keys() == dict(first.named_parameters()).keys()
        with torch.no_grad():
            logits, untrained = model(input_ids=tokens).logits, first(input_ids=tokens).logits
            first.load_state_dict(written)
            assert torch.equal(logits, first(input_ids=tokens).logits)
        assert logits.shape == ((2, 5, 8) if name == "actor" else (2, 5, 1))
        assert not torch.allclose(logits, untrained, atol=1e-3), "it is not what was trained"
