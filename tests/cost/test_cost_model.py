"""Whole tasks: the table against the explained estimate of one candidate, and what must grow with what."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from nereus.core.errors import UserError
from nereus.core.inventory import GIB, cluster_of, cpu_device
from nereus.core.plan import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    REFERENCE_INFERENCE,
    REWARD_INFERENCE,
    Layout,
)
from nereus.core.shapes import ModelShape
from nereus.core.workload import Workload
from nereus.cost.calibration import Calibration
from nereus.cost.lengths import LengthDistribution
from nereus.cost.model import Candidate, CostModel

SHAPE = ModelShape.named("Llama-3.1-8B")
SHAPES = dict.fromkeys(("actor", "critic", "reference", "reward"), SHAPE)
LOAD = Workload(
    prompts=256,
    prompt_length=512,
    response_length=1000,
    response_p95=2200,
    response_max=4096,
    mini_batches=4,
)
STAGES = (ACTOR_GENERATION, REFERENCE_INFERENCE, REWARD_INFERENCE, ACTOR_TRAINING, CRITIC_TRAINING)


def model(
    load: Workload = LOAD, gpus: int = 32, calibration: Calibration | None = None, algorithm: str = "ppo"
) -> CostModel:
    return CostModel(SHAPES, cluster_of("H100", gpus), load, algorithm, True, calibration)


@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_table_and_estimate_agree(stage) -> None:
    cost = model()
    table = cost.table(stage, max_gpus=32)
    rng = np.random.default_rng(0)
    for row in rng.choice(len(table), 12, replace=False):
        candidate = table.candidate(row)
        estimates = cost.estimate(candidate)
        for task, column in table.seconds.items():
            assert estimates[task].seconds == pytest.approx(column[row], rel=1e-9)
            assert sum(estimates[task].by_class.values()) == pytest.approx(column[row], rel=1e-9)
        kinds = cost.memory(candidate)
        assert sum(kinds.values()) == pytest.approx(table.resident_bytes[row] + table.working_bytes[row], rel=1e-9)
        assert candidate.num_gpus == table.gpus[row]


@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_candidates_are_possible_and_cost_something(stage) -> None:
    table = model().table(stage, max_gpus=32)
    batch = LOAD.mini_batch if stage.stage == "training" else LOAD.sequences
    assert len(table) > 50
    assert (table.tp * table.pp * table.dp == table.gpus).all() and table.gpus.max() == 32
    assert (batch % table.dp == 0).all()
    assert len({table.candidate(i) for i in range(len(table))}) == len(table)
    for seconds in table.seconds.values():
        assert (seconds > 0).all() and np.isfinite(seconds).all()
    assert (table.working_bytes > 0).all() and (table.resident_bytes > 0).all()
    assert table.recompute.any() == (stage.stage == "training")


def test_tasks_are_those_of_the_graph() -> None:
    cost = model()
    tasks = {stage: set(cost.table(stage, max_gpus=8).seconds) for stage in STAGES}
    assert tasks[ACTOR_TRAINING] == {"old_logprobs", "actor_update"}
    assert tasks[CRITIC_TRAINING] == {"values", "critic_update"}
    assert tasks[ACTOR_GENERATION] == {"generation"}
    assert tasks[REWARD_INFERENCE] == {"scores"}
    assert (cost.table(ACTOR_GENERATION, max_gpus=8).weight_sync_seconds > 0).all()


def test_remax_generates_once_more_for_each_prompt() -> None:
    grouped = replace(LOAD, samples_per_prompt=2, prompts=128)
    candidate = Candidate(model_stage=ACTOR_GENERATION, layout=Layout(1, 1), dp=1, micro_batch=64)
    alone = model(grouped, algorithm="grpo").estimate(candidate)["generation"].seconds
    remax = model(grouped, algorithm="remax").estimate(candidate)["generation"].seconds
    assert remax == pytest.approx(1.5 * alone, rel=0.05)


@pytest.mark.parametrize("prompts", [3, 48, 1000, 1536, 5120])
@pytest.mark.parametrize("algorithm", ["grpo", "remax"])
def test_a_unit_of_any_batch_may_generate_in_one_wave(prompts: int, algorithm: str) -> None:
    table = model(replace(LOAD, prompts=prompts, mini_batches=1), algorithm=algorithm).table(
        ACTOR_GENERATION, max_gpus=32
    )
    sequences = prompts * (2 if algorithm == "remax" else 1)
    for dp in np.unique(table.dp):
        sizes = np.unique(table.micro_batch[table.dp == dp])
        rows = sequences / dp
        assert (sizes >= rows).sum() == 1, "a size that holds all rows, and none that holds more"


@pytest.mark.parametrize(
    ("name", "gpu", "tp", "batch", "prompt", "published_ms"),
    [
        ("Llama-3.1-8B", "H100", 1, 1, 128, 7.37),  # SGLang, sgl-project/sglang#1008
        ("Llama-3.1-8B", "H100", 1, 128, 128, 11.84),
        ("Llama-3.1-8B", "H100", 8, 1, 128, 3.35),
        ("Llama-3.1-8B", "H200", 1, 8, 32, 6.51),  # vLLM, performance-benchmark build 9515: 833 ms for 128 tokens
        ("Llama-3.1-70B", "H200", 4, 8, 32, 16.2),
        ("Llama-3.1-8B", "A100-40GB", 1, 1, 1024, 13.3),  # vLLM, johnmusgrave.com: 75 tokens a second
    ],
)
def test_priors_decode_about_as_fast_as_engines_do(
    name: str, gpu: str, tp: int, batch: int, prompt: int, published_ms: float
) -> None:
    shape, tokens = ModelShape.named(name), 128
    load = Workload(prompts=batch, prompt_length=prompt, response_length=tokens, response_max=tokens)
    cost = CostModel({"actor": shape, "reference": shape}, cluster_of(gpu, 8), load, "grpo", False)
    candidate = Candidate(model_stage=ACTOR_GENERATION, layout=Layout(tp, 1), dp=1, micro_batch=batch)
    seconds = cost.estimate(candidate)["generation"].seconds
    assert seconds / tokens * 1e3 == pytest.approx(published_ms, rel=0.3)


def test_the_loss_holds_its_logits_in_the_precision_of_the_job_and_twice_in_float32() -> None:
    candidate = Candidate(model_stage=ACTOR_TRAINING, layout=Layout(1, 1), dp=1, micro_batch=1)
    for dtype, bytes_each in (("bfloat16", 10), ("float32", 12)):
        logits = model(replace(LOAD, dtype=dtype)).memory(candidate)["logits"]
        scale = Calibration().memory_scale("logits")
        assert logits == pytest.approx(LOAD.longest_response * SHAPE.vocab * bytes_each * scale)


def test_longer_takes_longer_and_needs_more() -> None:
    found = []
    for factor in (1, 2, 4):
        load = replace(LOAD, response_length=500 * factor, response_p95=1100 * factor, response_max=2048 * factor)
        tables = [model(load).table(stage, max_gpus=32) for stage in STAGES]
        found.append(tables)
    for shorter, longer in pairwise(found):
        for a, b in zip(shorter, longer, strict=True):
            assert all((b.seconds[task] > a.seconds[task]).all() for task in a.seconds)
            assert (b.working_bytes >= a.working_bytes).all()
            np.testing.assert_allclose(b.resident_bytes, a.resident_bytes)


def test_a_long_tail_costs_decode_steps_without_tokens() -> None:
    candidate = Candidate(model_stage=ACTOR_GENERATION, layout=Layout(1, 1), dp=8, micro_batch=64)
    short = model(replace(LOAD, response_p95=1400, response_max=1600)).estimate(candidate)["generation"].seconds
    long = model(replace(LOAD, response_p95=2800, response_max=8192)).estimate(candidate)["generation"].seconds
    assert long > 2 * short


def test_recomputing_trades_time_for_memory() -> None:
    table = model().table(ACTOR_TRAINING, max_gpus=32)
    rows = {table.candidate(i): i for i in range(len(table))}
    for candidate, i in rows.items():
        if not candidate.recompute and candidate.layout.pp <= 8:  # beyond, a pp_stage has a layer or two
            j = rows[replace(candidate, recompute=True)]
            assert table.seconds["actor_update"][j] > table.seconds["actor_update"][i]
            assert table.working_bytes[j] <= table.working_bytes[i]


def test_cutting_a_unit_shrinks_what_is_resident() -> None:
    table = model().table(ACTOR_TRAINING, max_gpus=32)
    by_layout: dict[tuple[int, int], set[float]] = {}
    for tp, pp, resident in zip(table.tp, table.pp, table.resident_bytes, strict=True):
        by_layout.setdefault((int(tp), int(pp)), set()).add(round(float(resident), 3))
    whole = max(by_layout[1, 1])
    assert whole == pytest.approx(SHAPE.num_params * 14, rel=1e-3)
    for (tp, pp), values in by_layout.items():
        ends = (
            SHAPE.embedding_params * 14 / tp
        )  # besides layers the first pp_stage has the embeddings, the last the head
        assert max(values) <= whole / tp / pp * 1.01 + ends * (pp > 1)
    grown = model(replace(LOAD, zero=1)).table(ACTOR_TRAINING, max_gpus=32)
    assert (grown.resident_bytes <= table.resident_bytes * (1 + 1e-9)).all()


def test_seconds_of_a_class_are_linear_in_its_inverse_efficiency() -> None:
    candidate = Candidate(model_stage=ACTOR_TRAINING, layout=Layout(2, 2), dp=2, micro_batch=4)
    base = model()
    for name in ("gemm", "elementwise", "all_reduce/intra", "gradient_reduce/intra"):
        halved = Calibration(log_cost={name: -np.log(base.calibration.efficiency(name) / 2)})
        before = base.estimate(candidate)["actor_update"].by_class
        after = model(calibration=halved).estimate(candidate)["actor_update"].by_class
        assert after[name] == pytest.approx(2 * before[name])
        assert all(after[c] == pytest.approx(before[c]) for c in before if c != name and "launch" not in c)


def test_no_candidate_is_an_empty_table() -> None:
    table = model().table(ACTOR_TRAINING, max_gpus=32, tp=(5,))
    assert len(table) == 0 and all(len(seconds) == 0 for seconds in table.seconds.values())


def test_a_cpu_has_no_workspace() -> None:
    cluster = cluster_of(cpu_device(5e10, 1e10, 4 * GIB), 8)
    cost = CostModel({"actor": SHAPE, "reference": SHAPE}, cluster, LOAD, "grpo", False)
    candidate = Candidate(model_stage=ACTOR_TRAINING, layout=Layout(1, 1), dp=1, micro_batch=1)
    assert cost.memory(candidate)["workspace"] == 0
    assert sum(cost.memory(candidate).values()) > 100 * GIB


def test_a_missing_shape_is_named() -> None:
    with pytest.raises(UserError, match="critic"):
        CostModel({"actor": SHAPE, "reference": SHAPE}, cluster_of("H100", 8), LOAD, "ppo", False)


@pytest.mark.parametrize(
    ("mean", "p95", "longest"), [(1000, 2200, 4096), (300, 500, 600), (900, 2000, 2048), (100, 100, 100)]
)
def test_lengths_have_the_given_mean_and_percentile(mean: float, p95: float, longest: float) -> None:
    load = replace(LOAD, response_length=mean, response_p95=p95, response_max=longest)
    lengths = LengthDistribution.of(load)
    assert lengths.mean == pytest.approx(mean, rel=0.02)
    if p95 < longest:
        assert float(lengths.quantile(np.array(0.95))) == pytest.approx(p95, rel=0.05)
    steps = (np.arange(20000) + 0.5) / 20000 * longest
    assert lengths.survival(steps).mean() * longest == pytest.approx(mean, rel=0.03)
    draws = np.minimum(longest, np.exp(lengths.mu + lengths.sigma * np.random.default_rng(0).standard_normal(200_000)))
    assert lengths.second_moment == pytest.approx((draws**2).mean(), rel=0.03)


def test_an_updated_model_is_as_a_new_one() -> None:
    longer = replace(LOAD, response_length=1500, response_p95=3000)
    better = Calibration(log_cost={"gemm": -np.log(0.9), "launch": -np.log(2.0)}, log_memory={"activations": 0.4})
    old = model(gpus=64)
    for stage in STAGES:
        old.table(stage, max_gpus=64)
    updated = old.updated(workload=longer, cluster=cluster_of("H100", 24), calibration=better)
    fresh = model(longer, gpus=24, calibration=better)
    for stage in STAGES:
        a, b = updated.table(stage, max_gpus=24), fresh.table(stage, max_gpus=24)
        assert [a.candidate(i) for i in range(len(a))] == [b.candidate(i) for i in range(len(b))]
        for task in a.seconds:
            np.testing.assert_allclose(a.seconds[task], b.seconds[task], rtol=1e-12)
        np.testing.assert_allclose(a.working_bytes, b.working_bytes, rtol=1e-12)
        np.testing.assert_allclose(a.weight_sync_seconds, b.weight_sync_seconds, rtol=1e-12)
