"""`nereus plan`: what is asked reaches the planner, and what comes out is a plan for it, readable in 80 columns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import nereus
from nereus.cli.main import main
from nereus.cli.plan import plot, sweep_axes
from nereus.core.plan import ACTOR_TRAINING, Plan

ASKED = ("plan", "--model", "Qwen2.5-0.5B", "--gpus", "8", "--device", "H200", "--prompts", "64", "--length", "256")
ACTOR = str(ACTOR_TRAINING)


def scenario() -> nereus.Scenario:
    return nereus.describe(
        "Qwen2.5-0.5B", device="H200", gpus=8, prompt_length=64, response_length=256, prompts=64, algorithm="ppo"
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
    asked = found["scenario"]
    assert (asked["device"], asked["gpus"], asked["workload"]["response_length"]) == ("H200", 8, 256)
    assert found["estimate"]["step_latency_s"] == pytest.approx(best["step_latency_s"])


@pytest.mark.parametrize("columns", [80, 150])
@pytest.mark.parametrize("more", [(), ("--sweep", "lengths=256..1024", "gpus=64..256")])
def test_tables_fit_the_terminal_and_nothing_is_cut(
    more: tuple[str, ...], columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["plan", "--model", "Llama-3.1-8B", "--gpus", "64", *(more or ("--length", "512"))]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    assert "\u2026" not in text
    if not more:
        rows = text.splitlines()
        for name in ("actor/generation", "reference/inference", "reward/inference", "critic/training", ACTOR):
            assert sum(row.startswith(name) for row in rows) == 2, "one row of the plan, one of the reasons"
        assert "held back by" in text and "could save" in text
        assert text.count(ACTOR) >= 2 + 4, "an alternative says what it does with actor/training"


def test_recompute_is_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for asked, wanted in (("on", True), ("off", False)):
        assert main([*ASKED, "--recompute", asked, "--json"]) == 0
        for planned in json.loads(capsys.readouterr().out)["plans"]:
            assert planned["plan"][ACTOR]["recompute"] == planned["plan"]["critic/training"]["recompute"] == wanted


def test_longer_responses_take_longer_and_more_gpus_less() -> None:
    points = scenario().sweep(response_lengths=[256, 1024], gpus=[8, 16])
    rows = {(p.gpus, p.response_length): p.best.step_latency_s for p in points if p.best is not None}
    assert rows[8, 256] < rows[8, 1024]
    assert rows[16, 1024] < rows[8, 1024]


def test_axes_double() -> None:
    assert sweep_axes(("lengths=100..900", "gpus=8"), scenario()) == ([100, 200, 400, 800], [8])
    assert sweep_axes((), scenario()) == ([256], [8])


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    plot(scenario().sweep(response_lengths=[256, 512]), tmp_path / "sweep.png", "title")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--gpus", "0"), "gpus: 0 must be at least 1"),
        (("--length", "0"), "response_length=0"),
        (("--length", "2048", "--longest", "1024"), "response_max=1024"),
        (("--model", "Llama-9"), "Llama-9"),
        (("--device", "abacus"), "abacus"),
        (("--sweep", "length=1..2"), "length=1..2"),
        (("--sweep", "gpus=8..4"), "gpus=8..4"),
        (("--set", "steps=1"), "none is given"),
        (("--model", "Llama-3.3-70B", "--gpus", "1"), "smallest pool"),
        (("--calibration", "nowhere.json"), "nowhere.json"),
        (("--recompute", "maybe"), "recompute"),
        (("--algorithm", "grpo", "--prompts", "0"), "prompts=0"),
    ],
)
def test_mistakes_are_one_line(more: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *more]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("nereus: error: ") and said.err.count("\n") == 1 and words in said.err
    assert said.out == ""


def test_a_job_file_says_what_it_trains(write_job: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job()
    assert main(["plan", str(job), "--device", "H200", "--gpus", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"] == 2
    assert main(["plan", str(job), "--model", "Llama-3.1-8B"]) == 2
    assert "--model" in capsys.readouterr().err
    assert main(["plan", str(job), "--longest", "64"]) == 2
    assert "--longest" in capsys.readouterr().err
    assert main(["plan", str(job), "--set", "model.path=/nowhere/Llama-9"]) == 2
    assert "model.path: model folder /nowhere/Llama-9 does not exist" in capsys.readouterr().err
    assert main(["plan", str(job), "--device", "H200", "--set", "model.path=/nowhere/Qwen3-0.6B"]) == 0
    capsys.readouterr()
    assert main(["plan", str(write_job(cluster={"device": "cuda", "devices": 99}))]) == 2
    assert "--device" in capsys.readouterr().err
