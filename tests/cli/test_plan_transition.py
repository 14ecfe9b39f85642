"""`nereus plan --transition-to`: what a change of plan takes, for people, as JSON and as a picture."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nereus import describe
from nereus.api.transitions import Transitions
from nereus.cli.main import main
from nereus.core.errors import PlanError

TIGHT = ["--model", "Llama-3.1-8B", "--device", "A100-40GB", "--gpus", "16", "--length", "1024"]
TO = ["--transition-to", "gpus=12", "length=2048"]


def ask(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["plan", *flags, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_what_is_printed_is_what_the_json_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    picture = tmp_path / "transition.png"
    assert main(["plan", *TIGHT, *TO, "--plot", str(picture)]) == 0
    text = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = ask(capsys, *TIGHT, *TO)
    for model_stage, way in found["lowerings"].items():
        row = next(line for line in text.splitlines() if line.startswith(model_stage))
        placement = found["target"][model_stage]
        assert f"tp{placement['tp']} pp{placement['pp']} dp{placement['dp']}" in row
        assert way in row or "stays" in row
    total = re.search(r"predicted: ([\d.]+) s, ([\d.]+) GiB in all", text)
    assert total is not None
    assert float(total[1]) == pytest.approx(found["seconds"], rel=0.01)
    assert float(total[2]) == pytest.approx(found["received_bytes"] / 2**30, rel=0.01)
    assert found["peak_bytes"] <= found["usable_bytes"]


def test_to_the_same_plan_nothing_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(capsys, *TIGHT, "--transition-to", "length=1024")
    assert found["groups"] == [] and found["seconds"] == 0 and found["current"] == found["target"]


def test_every_way_receives_at_least_what_direct_does() -> None:
    scenario = describe(device="H100", gpus=16, response_length=4096)
    current, target = scenario.choose(k=1).best.plan, scenario.at(response_length=512).choose(k=1).best.plan
    found = Transitions(scenario).estimate(current, target)
    assert found.ways
    for ways in found.ways.values():
        assert all(change.received_bytes >= ways["direct"].received_bytes for change in ways.values())


def test_a_target_that_never_fits_beside_what_is_held_says_which_gpus() -> None:
    scenario = describe(device="A100-80GB", gpus=8, response_length=512)
    current = scenario.choose(k=1).best.plan
    small = Transitions(describe(device="A100-40GB", gpus=8, response_length=512))
    with pytest.raises(PlanError, match=r"GPUs [\d, ]+ are short of memory, GPU \d+ by [\d.]+ GiB"):
        small.estimate(current, scenario.at(gpus=4).choose(k=1).best.plan)


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--transition-to", "speed=3"], "length=TOKENS or gpus=NUMBER"),
        (["--transition-to", "gpus=0"], "length=TOKENS or gpus=NUMBER"),
        (["--transition-to", "nowhere.yaml"], "nowhere.yaml"),
        (["--transition-to", "gpus=8", "--sweep", "gpus=8..16"], "ask one of them"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], what: str) -> None:
    assert main(["plan", *TIGHT, *flags]) == 2
    error = capsys.readouterr().err.strip()
    assert what in error and error.count("\n") == 0
