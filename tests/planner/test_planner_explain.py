"""What is told of a plan: why it is what it is, what more GPUs would give, what keeps the current layouts."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from planner_cases import random_problem, table
from rich.console import Console

from nereus.api.scenario import describe
from nereus.cli.plan_view import choice_view, gpu_ranges
from nereus.core.graph import job_graph
from nereus.core.plan import ACTOR_GENERATION, ACTOR_TRAINING, REFERENCE_INFERENCE
from nereus.planner.choice import PlanChoice, choose, holding
from nereus.planner.explain import explain
from nereus.planner.problem import GpuPool, Problem
from nereus.planner.search import solve

COLUMNS = ("tp", "pp", "dp", "micro_batch", "recompute", "gpus", "resident_bytes", "weight_sync_seconds")


def two_choices(resident: float, gpus: int = 2) -> Problem:
    """GRPO on two GPUs, where training runs on one GPU or, twice as fast, on two, and holds `resident` bytes on each."""
    graph = job_graph("grpo", reward_model=False)

    def rows(names: list[str], held: float) -> list[dict[str, float]]:
        return [
            {"tp": 1, "pp": 1, "dp": dp, "micro_batch": 1, "resident": held, "working": 0.1}
            | dict.fromkeys(names, 2 / dp)
            for dp in (1, 2)
        ]

    tables = {
        ACTOR_GENERATION: table(ACTOR_GENERATION, rows(["generation"], 0.2), ["generation"]),
        REFERENCE_INFERENCE: table(REFERENCE_INFERENCE, rows(["reference_logprobs"], 0.2), ["reference_logprobs"]),
        ACTOR_TRAINING: table(
            ACTOR_TRAINING, rows(["old_logprobs", "actor_update"], resident), ["old_logprobs", "actor_update"]
        ),
    }
    return Problem(
        tables=tables, pool=GpuPool.regular(gpus, 2), graph=graph, capacity_bytes=1.0, headroom=0.0
    )  # fmt: skip


def chosen(problem: Problem) -> PlanChoice:
    return choose(
        problem.tables,
        problem.pool,
        problem.graph,
        capacity_bytes=problem.capacity_bytes,
        headroom=problem.headroom,
        asynchronous=problem.asynchronous,
    )


def test_binding_names_memory_only_where_memory_binds() -> None:
    roomy = {r.model_stage: r.binding for r in explain(chosen(two_choices(0.4))).reasons}
    assert set(roomy.values()) == {"nothing"}
    # 0.2 + 0.2 + 0.55 + 0.1 is too much for one GPU: something has to stay off one of them
    tight = {r.model_stage: r.binding for r in explain(chosen(two_choices(0.55))).reasons}
    assert "memory" in tight.values()
    # one GPU is all there is, and the fastest candidates that it can run are chosen
    assert {r.binding for r in explain(chosen(two_choices(0.4, gpus=1))).reasons} == {"nothing"}


def test_what_does_not_fit_alone_saves_nothing() -> None:
    problem = two_choices(0.4)
    rows = problem.tables[ACTOR_TRAINING]
    fast = {name: np.append(values, values.min() / 100) for name, values in rows.seconds.items()}
    columns = {name: np.append(getattr(rows, name), getattr(rows, name)[-1]) for name in COLUMNS}
    grown = replace(rows, seconds=fast, **columns | {"working_bytes": np.append(rows.working_bytes, 10.0)})
    choice = chosen(replace(problem, tables=problem.tables | {ACTOR_TRAINING: grown}))
    (training,) = (r for r in explain(choice).reasons if r.model_stage == ACTOR_TRAINING)
    assert (training.binding, training.faster_s) == ("nothing", 0)


def test_where_no_dp_uses_one_more_node_the_next_pool_is_asked() -> None:
    scenario = describe("Llama-3.1-8B", gpus=64)  # 1,024 sequences: nothing runs on 65 to 127 GPUs
    choice = scenario.choose(k=1)
    told = scenario.explain(choice)
    assert told.one_more_node is None and told.larger is not None
    assert told.larger.problem.pool.size == 128
    best = scenario.at(gpus=128).choose(k=1).best
    assert told.saved_s == pytest.approx(choice.best.step_latency_s - best.step_latency_s)
    assert told.saved_s > 0
    even = describe("Llama-3.1-8B", gpus=64, prompts=9 * 128)  # dp 9 fills 72
    assert even.explain(even.choose(k=1)).one_more_node is not None


def test_one_more_node_gives_what_a_larger_pool_gives() -> None:
    rng, better = random.Random(3), 0
    for _ in range(60):
        problem = random_problem(rng, rows=6)
        if not solve(problem, 1):
            continue
        choice = chosen(problem)
        told = explain(choice)
        larger = solve(replace(problem, pool=problem.pool.with_nodes(1)), 1)[0]
        assert told.saved_s == pytest.approx(choice.best.objective_s - larger.objective_s, abs=1e-4)
        better += told.one_more_node is not None
        for reason in told.reasons:
            assert [p.chosen for p in reason.frontier].count(True) == 1
            others = [p.seconds for p in reason.frontier if not p.chosen]
            assert others == sorted(others, reverse=True)
    assert better > 5


def test_holding_keeps_the_current_layout() -> None:
    rng, held = random.Random(4), 0
    for _ in range(40):
        problem = random_problem(rng, rows=8)
        found = solve(problem, 4)
        if len(found) < 2:
            continue
        choice = chosen(problem)
        current = choice.plans[-1].plan
        tables = holding(problem.tables, current, [ACTOR_TRAINING])
        again = chosen(replace(problem, tables=tables)).best
        placement = again.plan[ACTOR_TRAINING]
        assert (placement.layout, placement.dp) == (current[ACTOR_TRAINING].layout, current[ACTOR_TRAINING].dp)
        assert choice.best.objective_s <= again.objective_s <= choice.plans[-1].objective_s
        held += 1
    assert held > 10


def test_the_view_shows_every_model_stage_and_the_alternatives() -> None:
    scenario = describe("SmolLM2-135M", gpus=4, prompts=8, response_length=32)
    choice = scenario.choose()
    console = Console(width=220, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(choice_view(scenario, choice, explain(choice), 220))
    text = console.export_text()
    for m in choice.problem.model_stages:
        assert str(m) in text
    assert "held back by" in text
    assert choice.alternatives
    assert "alternatives" in text
    assert set(choice.to_json()["plans"][0]["plan"]) == {str(m) for m in choice.problem.model_stages}


def test_memory_by_gpu_is_the_memory_by_position() -> None:
    rng = random.Random(6)
    for _ in range(40):
        problem = random_problem(rng, rows=6)
        if solve(problem, 1):
            best = chosen(problem).best
            used = [m for m in best.estimate.memory_bytes if m > 0]
            assert sorted(best.memory_bytes.values()) == pytest.approx(sorted(used))


def test_gpu_ranges_are_short() -> None:
    assert gpu_ranges([3, 0, 1, 2]) == "0-3"
    assert gpu_ranges([0, 2, 3]) == "0,2-3"
    assert gpu_ranges(range(0, 40, 2)) == "20 of them"
