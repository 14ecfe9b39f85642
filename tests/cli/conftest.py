"""`nereus` as its users have it: in this process where nothing but its answer matters, else as a process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from nereus.cli.main import main
from nereus.rl.loop import Trainer
from nereus.rl.step import StepState


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    exit_code: int
    stdout: str
    stderr: str


@pytest.fixture
def nereus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """`nereus("run", "job.yaml")`, in the folder tmp_path; no process may outlive it."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path) -> Answer:
        capfd.readouterr()
        exit_code = main([str(argument) for argument in arguments])
        assert not multiprocessing.active_children()
        said = capfd.readouterr()
        return Answer(exit_code=exit_code, stdout=said.out, stderr=said.err)

    return call


@pytest.fixture
def mistake(nereus: Callable[..., Answer], tmp_path: Path) -> Callable[..., str]:
    """A `nereus` call that must be refused: one line on stderr, exit code 2, nothing else; returns the message."""

    def call(*arguments: str | Path) -> str:
        files = set(tmp_path.rglob("*"))
        answer = nereus(*arguments)
        assert answer.exit_code == 2, answer
        assert answer.stdout == ""
        assert answer.stderr.startswith("nereus: error: ") and answer.stderr.endswith("\n")
        assert answer.stderr.count("\n") == 1, f"not one line:\n{answer.stderr}"
        for jargon in ("Traceback", "Input should be", "pydantic", "validation error"):
            assert jargon not in answer.stderr
        assert set(tmp_path.rglob("*")) == files, "something was left behind"
        return answer.stderr.removeprefix("nereus: error: ").strip()

    return call


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Do something when the training of a step is about to begin: once, or whenever that is tried again."""

    def plan(step: int, act: Callable[[Trainer], None], *, again: bool = False) -> None:
        train, done = Trainer._train, list[int]()

        def wrapped(self: Trainer, at: StepState) -> None:
            at.stage = "training"
            if at.step == step and (again or not done):
                done.append(step)
                act(self)
            train(self, at)

        monkeypatch.setattr(Trainer, "_train", wrapped)

    return plan
