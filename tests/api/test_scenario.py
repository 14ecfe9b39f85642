"""A scenario's answers agree with each other: the plan that is chosen costs what `estimate` says of it, and so on."""

from __future__ import annotations

import subprocess
import sys

import pytest

import nereus
from nereus.core.inventory import CpuHost, reported_device
from nereus.core.plan import ACTOR_GENERATION, ACTOR_TRAINING

HOST = CpuHost(cores=4, flops=1e11, memory_bandwidth_bytes_s=2e10, memory_bytes=16 * 2**30)
GIB = 2**30


def scenario(**changed: object) -> nereus.Scenario:
    given = {"model": "Qwen2.5-0.5B", "device": "H200", "gpus": 8, "prompts": 64, "response_length": 256}
    return nereus.describe(**{**given, **changed})


def test_import_is_fast_and_pulls_in_nothing() -> None:
    code = "import sys, nereus; print([m for m in ('torch', 'numpy', 'scipy', 'pydantic', 'yaml') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    assert set(nereus.__all__) <= set(dir(nereus))
    for name in nereus.__all__:
        assert getattr(nereus, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        nereus.nothing  # noqa: B018


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "remax"])
def test_every_plan_of_a_choice_costs_what_its_estimate_says(algorithm: str) -> None:
    asked = scenario(algorithm=algorithm, samples_per_prompt=2)
    for planned in asked.choose().plans:
        found = asked.estimate(planned.plan)
        assert found.step_latency_s == pytest.approx(planned.step_latency_s)
        assert found.peak_bytes == pytest.approx(planned.memory_bytes)
        assert {name: t.seconds for name, t in found.tasks.items()} == pytest.approx(dict(planned.task_seconds))
        for task in found.tasks.values():
            # kernels and the host's launches overlap, so classes may add up to more than the seconds, never to less
            assert sum(task.by_class.values()) == pytest.approx(task.seconds)
        for model_stage, kinds in found.memory_bytes.items():
            gpus = planned.plan[model_stage].gpus
            assert sum(kinds.values()) <= max(found.peak_bytes[gpu] for gpu in gpus) * (1 + 1e-9)


def test_the_best_plan_is_the_fastest_and_the_others_train_the_actor_otherwise() -> None:
    choice = scenario().choose(k=4)
    actors = [p.plan[ACTOR_TRAINING] for p in choice.plans]
    assert len({(a.layout, a.dp) for a in actors}) == len(actors) == 4
    seconds = [p.step_latency_s for p in choice.plans]
    assert min(seconds) == pytest.approx(seconds[0])


def test_recompute_holds_for_every_model_stage_that_trains() -> None:
    for recompute, allowed in (("on", {True}), ("off", {False}), ("auto", {True, False})):
        table = scenario(recompute=recompute).candidates("actor/training")
        assert set(table.recompute.tolist()) == allowed
    with pytest.raises(nereus.UserError, match="sometimes"):
        scenario(recompute="sometimes")


def test_without_recomputation_longer_responses_are_cut_over_more_gpus() -> None:
    """Paper, figure 4: on 16 GPUs the best layout of 2K does not fit at 4K."""
    llama = nereus.describe("Llama-3.1-8B", gpus=16, recompute="off")
    units = []
    for point in llama.sweep(response_lengths=[1024, 4096, 8192]):
        assert point.best is not None
        actor = point.best.plan[ACTOR_TRAINING]
        units.append(actor.layout.size)
    assert units == sorted(units) and units[0] < units[-1]


def test_devices_keep_their_names_and_state_its_place() -> None:
    devices = [3, 5, 8, 13, 21, 34, 55, 89]
    first = scenario().choose(devices=devices).best
    assert set(first.plan.gpus) <= set(devices)
    again = scenario().choose(devices=devices, current=first.plan).best
    assert again.plan == first.plan


def test_candidates_stop_at_so_many_gpus() -> None:
    table = scenario().candidates(ACTOR_GENERATION, max_gpus=4)
    assert len(table) and table.gpus.max() <= 4
    assert table.candidate(0).num_gpus == table.gpus[0]
    with pytest.raises(nereus.PlanError, match="critic/training is not"):
        scenario(algorithm="grpo").candidates("critic/training")


def test_a_plan_that_cannot_be_is_refused_by_name() -> None:
    asked = scenario()
    plan = asked.choose(k=1).best.plan
    rest = tuple(p for p in plan.placements if p.model_stage != ACTOR_TRAINING)
    with pytest.raises(nereus.PlanError, match="actor/training is not placed"):
        asked.estimate(nereus.Plan(rest))
    uneven = nereus.Placement(model_stage=ACTOR_TRAINING, layout=nereus.Layout(), dp=3, gpus=(0, 1, 2))
    with pytest.raises(nereus.PlanError, match="actor/training: tp1 pp1 dp3"):
        asked.estimate(nereus.Plan((*rest, uneven)))


def test_a_micro_batch_is_the_most_that_runs_at_a_time() -> None:
    """The engine takes any; what is predicted is the largest that divides a unit's sequences."""
    asked = scenario(prompts=48)
    plan = asked.choose(k=1).best.plan

    def with_micro_batch(size: int) -> nereus.PlanEstimate:
        one = {"layout": nereus.Layout(), "dp": 1, "gpus": (0,), "micro_batch": size}
        rest = (p for p in plan.placements if p.model_stage != ACTOR_TRAINING)
        return asked.estimate(nereus.Plan((*rest, nereus.Placement(model_stage=ACTOR_TRAINING, **one))))

    assert with_micro_batch(32) == with_micro_batch(24) != with_micro_batch(16)
    assert with_micro_batch(1000) == with_micro_batch(48)


def test_what_does_not_fit_says_what_would() -> None:
    with pytest.raises(nereus.Infeasible, match="smallest pool") as refused:
        scenario(model="Llama-3.3-70B", gpus=1).choose()
    assert refused.value.least_gpus is not None and refused.value.missing_bytes > 0


def test_devices_of_one_machine_share_its_cores_and_memory() -> None:
    few, many = HOST.device(2), HOST.device(16)
    assert few.flops("float32") == HOST.flops and many.flops("float32") == HOST.flops / 4
    assert (few.memory_bytes, many.memory_bytes) == (8 * GIB, GIB)
    asked = nereus.describe("SmolLM2-135M", device=HOST, gpus=16, prompts=8, response_length=32)
    assert asked.workload.dtype == "float32" and asked.cluster.num_nodes == 1
    assert asked.at(gpus=2).device_kind == few
    launches = [asked.at(gpus=n).cost.calibration.efficiency("launch") for n in (2, 4, 8, 16)]
    assert launches == pytest.approx([launches[0] * share for share in (1, 1, 1 / 2, 1 / 4)])


@pytest.mark.parametrize(
    ("name", "gib", "kind", "known"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.1, "A100-80GB", True),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40GB", True),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100-SXM", True),
        ("NVIDIA H100 PCIe", 79.1, "H100-SXM", False),
        ("NVIDIA H200", 139.8, "H200", True),
        ("NVIDIA H20", 95.1, "H20", True),
        ("NVIDIA B200", 178.0, "B200", True),
        ("AMD Instinct MI250X", 63.9, "MI250X-GCD", True),
        ("NVIDIA GeForce RTX 4090", 23.6, "A100-80GB", False),
    ],
)
def test_gpus_are_known_by_what_their_driver_calls_them(name: str, gib: float, kind: str, known: bool) -> None:
    found, note = reported_device(name, int(gib * GIB))
    assert (found.name, found.memory_bytes) == (kind, int(gib * GIB))
    assert (note == "") == known and (known or (repr(name) in note and kind in note))
