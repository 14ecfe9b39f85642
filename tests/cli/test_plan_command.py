"""`nereus plan`: what is asked reaches the planner, and what comes out is a plan for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nereus.cli.main import main
from nereus.cli.plan import plot, question_of_flags, sweep, sweep_axes
from nereus.core.plan import Plan

ASKED = ("plan", "--model", "Qwen2.5-0.5B", "--gpus", "8", "--device", "H200", "--prompts", "64", "--length", "256")


def question():  # type: ignore[no-untyped-def]
    return question_of_flags(
        model="Qwen2.5-0.5B", device="H200", gpus=8, prompt=64, length=256, prompts=64, samples=1, algorithm="ppo"
    )


def test_json_is_one_object_with_a_plan_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["plans"][0]
    plan = Plan.from_json(best["plan"])
    assert set(plan.gpus) <= set(range(8)) and len(plan.placements) == 5
    assert best["peak_bytes"] <= found["usable_bytes"]
    assert [p["step_latency_s"] for p in found["plans"]] == sorted(p["step_latency_s"] for p in found["plans"])
    assert set(found["why"]["model_stages"]) == set(best["plan"])


def test_longer_responses_take_longer_and_more_gpus_less() -> None:
    rows = {(r["gpus"], r["length"]): r["step_latency_s"] for r in sweep(question(), [256, 1024], [8, 16])}
    assert rows[8, 256] < rows[8, 1024]
    assert rows[16, 1024] < rows[8, 1024]


def test_axes_double() -> None:
    assert sweep_axes(("lengths=100..900", "gpus=8"), question()) == ([100, 200, 400, 800], [8])
    assert sweep_axes((), question()) == ([256], [8])


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    plot(sweep(question(), [256, 512], [8]), tmp_path / "sweep.png", "title")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--gpus", "0"), "0"),
        (("--model", "Llama-9"), "Llama-9"),
        (("--device", "abacus"), "abacus"),
        (("--sweep", "length=1..2"), "length=1..2"),
        (("--set", "steps=1"), "none is given"),
        (("--model", "Llama-3.3-70B", "--gpus", "1"), "smallest pool"),
        (("--calibration", "nowhere.json"), "nowhere.json"),
    ],
)
def test_mistakes_are_one_line(more: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *more]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("nereus: error: ") and said.err.count("\n") == 1 and words in said.err
    assert said.out == ""


def test_a_job_file_says_what_it_trains(write_job, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    job = write_job()
    assert main(["plan", str(job), "--device", "H200", "--gpus", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"] == 2
    assert main(["plan", str(job), "--model", "Llama-3.1-8B"]) == 2
