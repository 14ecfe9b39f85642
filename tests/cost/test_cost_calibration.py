"""Learning: planted efficiencies come back from noisy times; stragglers do not count; what is learned carries over."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nereus.core.errors import UserError
from nereus.core.inventory import cluster_of
from nereus.core.plan import ACTOR_GENERATION, ACTOR_TRAINING, CRITIC_TRAINING, REFERENCE_INFERENCE, ModelStage
from nereus.core.shapes import ModelShape
from nereus.core.workload import Workload
from nereus.cost.calibration import MEMORY_KINDS, PRIORS, Calibration, MemoryObservation, Observation, _slopes
from nereus.cost.model import CostModel
from nereus.cost.work import CLASSES, joined

PLANTED = {
    "gemm": 0.72,
    "attention_prefill": 0.31,
    "elementwise": 0.8,
    "logits": 0.35,
    "all_reduce/intra": 0.62,
    "gradient_reduce/intra": 0.33,
    "send_recv/intra": 0.25,
    "launch": 0.12,
}
TRUTH = Calibration(log_cost={name: -float(np.log(value)) for name, value in PLANTED.items()})


def tasks(
    name: str, mini_batch: int = 64, length: int = 1024, gpus: int = 8
) -> tuple[CostModel, list[dict[str, float]]]:
    """The work of every training candidate of a model, class by class."""
    load = Workload(prompts=mini_batch, prompt_length=length / 4, response_length=length * 3 / 4)
    shape = ModelShape.named(name)
    model = CostModel({"actor": shape, "reference": shape}, cluster_of("H100", gpus), load, "grpo", False)
    table = model.table(ACTOR_TRAINING, max_gpus=gpus)
    return model, [
        dict(zip(CLASSES, model.work(table.candidate(i), "actor_update"), strict=True)) for i in range(len(table))
    ]


def measured(rows: list[dict[str, float]], noise: float, seed: int = 0) -> list[Observation]:
    rng = np.random.default_rng(seed)
    work = np.array([[row[c] for c in CLASSES] for row in rows])
    seconds = TRUTH.seconds(work.T) * np.exp(noise * rng.standard_normal(len(rows)))
    return [Observation(work=row, seconds=float(s)) for row, s in zip(rows, seconds, strict=True)]


def predicted(calibration: Calibration, rows: list[dict[str, float]]) -> np.ndarray:
    return calibration.seconds(np.array([[row[c] for c in CLASSES] for row in rows]).T)


def test_single_operations_recover_planted_efficiencies() -> None:
    rng = np.random.default_rng(1)
    found = Calibration().updated(
        [
            Observation(work={name: peak}, seconds=peak / value * np.exp(0.05 * rng.standard_normal()))
            for name, value in PLANTED.items()
            for peak in rng.uniform(1e-3, 1.0, 40)
        ]
    )
    for name, value in PLANTED.items():
        assert found.efficiency(name) == pytest.approx(value, rel=0.05)
    assert found.error is not None and found.error.mean < 0.08
    untouched = set(PRIORS) - set(PLANTED)
    assert all(found.efficiency(name) == pytest.approx(PRIORS[name][0]) for name in untouched)


def test_whole_tasks_recover_what_they_are_made_of() -> None:
    _, rows = tasks("Qwen2.5-7B")
    found = Calibration().fit_whole_tasks(measured(rows, noise=0.02))
    for name in ("gemm", "all_reduce/intra", "launch"):
        assert found.efficiency(name) == pytest.approx(PLANTED[name], rel=0.15), name
    error = np.abs(predicted(found, rows) / predicted(TRUTH, rows) - 1)
    assert error.mean() < 0.015


def test_plans_never_seen_and_models_never_seen_are_predicted() -> None:
    _, rows = tasks("Qwen2.5-7B")
    half = [row for i, row in enumerate(rows) if i % 2]
    found = Calibration().fit_whole_tasks(measured(half, noise=0.03))
    other = [row for i, row in enumerate(rows) if not i % 2]
    before = np.abs(predicted(Calibration(), other) / predicted(TRUTH, other) - 1).mean()
    assert np.abs(predicted(found, other) / predicted(TRUTH, other) - 1).mean() < 0.03 < before
    for name, length in (("Qwen2.5-14B", 1024), ("Llama-3.1-8B", 4096), ("Qwen2.5-1.5B", 2048)):
        _, larger = tasks(name, length=length)
        error = np.abs(predicted(found, larger) / predicted(TRUTH, larger) - 1)
        assert error.mean() < 0.08, name


@pytest.mark.parametrize("whole", [False, True])
def test_a_straggler_hardly_counts(whole: bool) -> None:
    _, rows = tasks("Qwen2.5-7B")
    clean = measured(rows, noise=0.02)
    if not whole:
        clean = [Observation(work={"gemm": 0.1}, seconds=0.1 / 0.7 * f) for f in (0.98, 1.0, 1.01, 1.02, 0.99, 1.0)]
    straggler = replace(clean[0], seconds=clean[0].seconds * 10)
    fit = Calibration().fit_whole_tasks if whole else Calibration().updated
    without, with_it = fit(clean), fit([*clean, straggler])
    for name in CLASSES:
        assert with_it.efficiency(name) == pytest.approx(without.efficiency(name), rel=0.02), name


def test_one_straggler_alone_does_not_move_what_is_known() -> None:
    known = Calibration().updated([Observation(work={"gemm": 0.1}, seconds=0.14)] * 20)
    moved = known.updated([Observation(work={"gemm": 0.1}, seconds=1.4)])
    assert moved.efficiency("gemm") == pytest.approx(known.efficiency("gemm"), rel=0.05)


def test_gradient_sums_under_a_backward_pass_are_told_from_those_after_it() -> None:
    rng = np.random.default_rng(3)
    names = ("gemm", "launch", "gradient_reduce/intra", "optimizer")
    work = np.zeros((300, len(CLASSES)))
    for name in names:
        work[:, CLASSES.index(name)] = rng.uniform(0.01, 0.3, 300)
    overlap = np.where(rng.random(300) < 0.5, rng.uniform(0.05, 0.7, 300), 0.0)
    seconds = TRUTH.seconds(work.T, overlap) * np.exp(0.02 * rng.standard_normal(300))
    found = Calibration().fit_arrays(work, seconds, overlap)
    for name in names[:3]:
        assert found.efficiency(name) == pytest.approx(PLANTED[name], rel=0.05), name
    blind = Calibration().fit_arrays(work, seconds)
    assert blind.error is not None and found.error is not None and found.error.mean < blind.error.mean / 2


def test_slopes_are_those_of_the_predicted_seconds() -> None:
    rng = np.random.default_rng(0)
    parts, overlap, step = rng.uniform(0.1, 1, (4, 50)), rng.uniform(0, 1, 50), 1e-6
    for part, slope in enumerate(_slopes(parts, overlap)):
        moved = parts.copy()
        moved[part] += step
        np.testing.assert_allclose(
            slope, (joined(moved, overlap) - joined(parts, overlap)) / step, rtol=1e-4, atol=1e-6
        )
    nothing_but_gradients = np.array([[0.0], [0.0], [1.0], [0.0]])
    assert np.isfinite(_slopes(nothing_but_gradients, np.zeros(1))).all()


def test_a_lasting_change_is_followed() -> None:
    known = Calibration().updated([Observation(work={"all_reduce/inter": 0.1}, seconds=0.2)] * 200)
    for _ in range(3):
        known = known.updated([Observation(work={"all_reduce/inter": 0.1}, seconds=0.6)] * 30)
    assert known.efficiency("all_reduce/inter") == pytest.approx(1 / 6, rel=0.1)


def test_memory_scales_come_back_from_peaks() -> None:
    rng = np.random.default_rng(0)
    scales = {"gradients": 1.4, "activations": 0.8, "logits": 1.5, "workspace": 0.7}
    rows = []
    for _ in range(120):
        kinds = {k: float(v) for k, v in zip(MEMORY_KINDS, rng.uniform(0.1, 20, len(MEMORY_KINDS)) * 1e9, strict=True)}
        kinds["kv_cache"] = kinds["boundaries"] = 0.0
        peak = sum(v * scales.get(k, 1.0) for k, v in kinds.items())
        rows.append(MemoryObservation(kinds=kinds, peak_bytes=peak * np.exp(0.02 * rng.standard_normal())))
    rows[3] = replace(rows[3], peak_bytes=rows[3].peak_bytes * 5)
    found = Calibration().fit_memory(rows)
    for kind, scale in scales.items():
        assert found.memory_scale(kind) == pytest.approx(scale, rel=0.1), kind
    assert found.memory_scale("resident") == 1


@pytest.mark.parametrize("stage", [ACTOR_GENERATION, REFERENCE_INFERENCE, ACTOR_TRAINING, CRITIC_TRAINING], ids=str)
@pytest.mark.parametrize("log_scale", [-20.0, 0.0, 3.0])
def test_memory_of_a_plan_is_never_below_what_is_resident(stage: ModelStage, log_scale: float) -> None:
    """Whatever was learned: an error in the scales of working sets may not make a plan look smaller than its state."""
    learned = Calibration(log_memory=dict.fromkeys(MEMORY_KINDS, log_scale))
    load = Workload(prompts=64, prompt_length=256, response_length=512)
    shapes = dict.fromkeys(("actor", "critic", "reference"), ModelShape.named("Qwen2.5-7B"))
    model = CostModel(shapes, cluster_of("H100", 8), load, "ppo", False, learned)
    table = model.table(stage, max_gpus=8)
    assert (table.working_bytes >= 0).all() and (table.resident_bytes > 0).all()
    for row in range(0, len(table), 7):
        candidate = table.candidate(row)
        params = shapes["actor"].layer_matmul_params * shapes["actor"].num_layers / candidate.layout.size
        state = params * (14 if stage.stage == "training" else 2)
        assert sum(model.memory(candidate).values()) >= table.resident_bytes[row] >= state * 0.99


def test_usable_memory_separates_what_failed() -> None:
    share = np.array([0.5, 0.7, 0.85, 0.9, 0.95, 1.1])
    failed = np.array([False, False, False, True, True, True])
    assert 0.85 < Calibration().fit_usable_memory(share, failed).usable_memory < 0.9
    assert Calibration().fit_usable_memory(share, failed & False).usable_memory == 1


def test_it_survives_json() -> None:
    _, rows = tasks("Qwen2.5-0.5B")
    found = Calibration().fit_whole_tasks(measured(rows, noise=0.02))
    assert Calibration.from_json(found.to_json()) == found
    with pytest.raises(UserError, match="warp"):
        Calibration.from_json('{"log_cost": {"warp": 1.0}}')
    with pytest.raises(UserError, match="nonsense"):
        Calibration.from_json('{"nonsense": 1}')
