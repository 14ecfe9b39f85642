"""`plan: auto`: the planner's plan, the same that `nereus plan JOB` prints; the engine can run it; a resume keeps it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nereus.api import jobs
from nereus.api.job_file import load_job
from nereus.api.jobs import AutoPlanner, scenario_of
from nereus.api.machine import cpu_host, rounded, rounded_down
from nereus.api.scenario import describe
from nereus.cli.main import main
from nereus.core.events import PlanChosen
from nereus.core.inventory import CpuHost
from nereus.core.job import check_plan
from nereus.core.plan import Plan
from nereus.telemetry.folder import read_events

WriteJob = Callable[..., Path]
HOST = CpuHost(cores=2, flops=1e11, memory_bandwidth_bytes_s=2e10, memory_bytes=16 * 2**30)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every measurement gives the same."""
    monkeypatch.setattr("nereus.api.machine.cpu_host", lambda: HOST)


def chosen(run: Path) -> list[PlanChosen]:
    return [r.event for r in read_events(run) if isinstance(r.event, PlanChosen)]


def test_a_run_starts_with_the_plan_that_nereus_plan_prints(
    host: None, run: Callable[..., Any], write_job: WriteJob, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(plan="auto", cluster={"devices": 4}, steps=2, changes=[{"step": 1, "devices": 2}])
    plans = {}
    for devices in (4, 2):
        assert main(["plan", str(job), "--gpus", str(devices), "--json"]) == 0
        plans[devices] = Plan.from_json(json.loads(capsys.readouterr().out)["plans"][0]["plan"])
    summary = run(job)
    first, second = chosen(Path(summary["run"]))
    assert (first.step, first.devices, first.plan) == (0, (0, 1, 2, 3), plans[4])
    assert (second.step, second.devices) == (1, (0, 1))
    assert {_cut(p) for p in second.plan.placements} == {_cut(p) for p in plans[2].placements}
    assert summary["transitions"][0]["after"] == second.plan.to_json() and summary["transitions"][0]["state_equal"]


def _cut(p: Any) -> tuple[Any, ...]:
    return p.model_stage, p.layout, p.dp, p.micro_batch, p.recompute


def test_a_job_is_not_planned_as_if_its_engine_had_cuda_graphs(host: None, write_job: WriteJob) -> None:
    job = load_job(write_job())
    for device in ("H200", "cpu"):
        calibration = scenario_of(job, device=device, gpus=2).cost.calibration
        assert calibration.efficiency("decode_launch") == pytest.approx(0.5)
        assert calibration.efficiency("decode_message") == pytest.approx(calibration.efficiency("message/intra"))
    assert describe().cost.calibration.efficiency("decode_launch") > 1


def test_a_run_says_in_one_line_what_was_chosen(
    host: None, write_job: WriteJob, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(write_job(plan="auto", steps=1))]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("plan: auto chose")]
    assert "actor/training" in line and "predicted" in line and "slower" in line and "cpu: measured" in line


def test_a_resumed_run_keeps_what_was_chosen(
    host: None, run: Callable[..., Any], write_job: WriteJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(plan="auto", steps=1, changes=[{"step": 1, "devices": 1}])
    before = run(job)
    monkeypatch.setattr("nereus.api.jobs.scenario_of", _no_planning)
    after = run(None, "steps=2", resume=Path(before["run"]))
    assert after["transitions"][0]["after"] == chosen(Path(before["run"]))[-1].plan.to_json()
    assert len(chosen(Path(before["run"]))) == 2


def _no_planning(*_: Any, **__: Any) -> Any:
    raise AssertionError("planned again")


def test_what_was_recorded_is_used_only_where_the_job_can_have_it(host: None, write_job: WriteJob) -> None:
    job = load_job(write_job(plan="auto"))
    first = AutoPlanner(job)
    plan = first(0, (0, 1), None)
    kept = AutoPlanner(job, {(0, (0, 1)): plan})
    assert kept(0, (0, 1), None) == plan and not kept.chosen
    smaller = load_job(write_job(plan="auto", algorithm={"name": "grpo"}, batch={"samples_per_prompt": 2}))
    again = AutoPlanner(smaller, {(0, (0, 1)): plan})
    assert {p.model_stage for p in again(0, (0, 1), None).placements} == set(smaller.model_stages)
    assert len(again.chosen) == 1


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 8])
def test_the_engine_can_run_every_candidate_and_the_batch_divides(
    host: None, write_job: WriteJob, devices: int, tmp_path: Path
) -> None:
    from nereus.rl.setup import check_layouts, prepare

    job = load_job(write_job(plan="auto", cluster={"devices": devices}))
    prepared, scenario = prepare(job, tmp_path), scenario_of(job)
    for name in scenario.model_stages:
        table = scenario.candidates(name)
        for row in range(len(table)):
            prepared.architectures[name].check(table.candidate(row).layout)
    for planned in scenario.choose().plans:
        check_plan(job, planned.plan, range(devices))
        check_layouts(prepared, planned.plan, scenario.device_kind.memory_bytes)


def test_state_is_that_of_the_engine(host: None, write_job: WriteJob, tmp_path: Path) -> None:
    """Resident bytes of the cost model are the bytes that units hold: float32 parameters, and two moments to train."""
    from nereus.rl.setup import prepare

    job = load_job(write_job(plan="auto"))
    prepared, scenario = prepare(job, tmp_path), scenario_of(job)
    for name in scenario.model_stages:
        table = scenario.candidates(name, max_gpus=1)
        spec = prepared.specs[name]
        held = sum(4 * math.prod(t.shape) for t in spec.tensors if t.name != "counters")
        assert table.resident_bytes[0] == pytest.approx(held, rel=1e-3)


def test_lengths_come_from_the_job(host: None, write_job: WriteJob) -> None:
    load = scenario_of(load_job(write_job(sampling={"max_new_tokens": 48}))).workload
    assert (load.response_length, load.longest_response, load.prompt_length) == (16, 48, 2)


def test_what_does_not_fit_names_the_plan(host: None, write_job: WriteJob, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(write_job(plan="auto", cluster={"memory_gib": 0.0001}))]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("nereus: error: plan: ") and "does not fit" in said


def test_a_kind_of_decoder_that_is_not_known_by_name_is_planned_by_its_widths(tmp_path: Path) -> None:
    config = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "vocab_size": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = jobs.shape_of(str(tmp_path))
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (2, 4, 8)


def test_measuring_is_quick_and_leaves_the_threads_alone() -> None:
    import time

    import torch

    threads, began = torch.get_num_threads(), time.perf_counter()
    host = cpu_host()
    assert time.perf_counter() - began < 2
    assert torch.get_num_threads() == threads
    assert host.cores >= 1 and 1e8 < host.flops < 1e13 and 1e8 < host.memory_bandwidth_bytes_s < 1e12


def test_figures_are_rounded_so_that_noise_hardly_shows() -> None:
    for value in (3.3e9, 8e10, 1.1e11):
        assert abs(rounded(value) / value - 1) < 0.1
        assert value * 7 / 8 < rounded_down(value) <= value
    assert len({rounded(value) for value in (9.6e10, 1.0e11, 1.04e11)}) == 1
