"""The planner against trying everything, on hundreds of small problems; and what must hold of any plan."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest
from planner_cases import allowed_sets, best_by_layout, number_of_tries, random_problem

from nereus.core.errors import PlanError
from nereus.core.plan import ACTOR_TRAINING, CRITIC_TRAINING, ModelStage
from nereus.planner.choice import choose, table_rows
from nereus.planner.frontier import costs, fitting, skyband
from nereus.planner.infeasible import Infeasible
from nereus.planner.problem import GpuPool, Problem, evaluate
from nereus.planner.search import Found, solution, solve

K = 4


def small_problems(seed: int, count: int, tries: int = 8_000) -> list[Problem]:
    rng = random.Random(seed)
    found: list[Problem] = []
    while len(found) < count:
        problem = random_problem(rng)
        if 50 <= number_of_tries(problem) <= tries:
            found.append(problem)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_planner_equals_trying_everything(seed: int) -> None:
    for problem in small_problems(seed, 20):
        expected = best_by_layout(problem)[:K]
        found = [f.objective_s for f in solve(problem, K)]
        assert found == pytest.approx(expected, rel=1e-9), problem


@pytest.mark.parametrize("seed", range(5))
def test_plans_differ_where_they_must(seed: int) -> None:
    rng, fewer = random.Random(100 + seed), 0
    for problem in small_problems(100 + seed, 20):
        for wanted in ((), (ACTOR_TRAINING,), tuple(rng.sample(problem.model_stages, 2))):
            expected = best_by_layout(problem, wanted)
            found = solve(problem, K, wanted)
            assert [f.objective_s for f in found] == pytest.approx(expected[:K], rel=1e-9), (problem, wanted)
            assert len({layouts(problem, f, wanted) for f in found}) == len(found)
            fewer += len(expected) < len(best_by_layout(problem))
    assert fewer > 10


def test_plans_cannot_differ_in_what_the_graph_has_not() -> None:
    problem = next(p for p in small_problems(7, 20) if CRITIC_TRAINING not in p.model_stages)
    with pytest.raises(PlanError, match="critic/training"):
        choose(problem.tables, problem.pool, problem.graph, capacity_bytes=9.0, distinct_in=(CRITIC_TRAINING,))


def drifted(rng: random.Random, problem: Problem) -> Problem:
    """The same job later: other seconds and bytes, and now and then other GPUs or fewer candidates."""
    tables = {}
    for m, t in problem.tables.items():
        factor = np.array([rng.uniform(0.8, 1.25) for _ in range(len(t))])
        seconds = {name: column * factor for name, column in t.seconds.items()}
        tables[m] = replace(t, seconds=seconds, working_bytes=t.working_bytes * factor)
        if rng.random() < 0.1 and len(t) > 1:
            tables[m] = table_rows(tables[m], np.arange(len(t)) > 0)
    fewer = rng.random() < 0.2 and len(problem.pool.nodes) > 1
    pool = replace(problem.pool, nodes=problem.pool.nodes[1:]) if fewer else problem.pool
    return replace(problem, tables=tables, pool=pool, capacity_bytes=problem.capacity_bytes * rng.uniform(0.9, 1.1))


@pytest.mark.parametrize("seed", range(8))
def test_an_earlier_solution_changes_only_how_long_the_search_takes(seed: int) -> None:
    rng, used = random.Random(300 + seed), 0
    for _ in range(25):
        problem = random_problem(rng, rows=12)
        earlier = solution(problem, K)
        for _ in range(3):
            problem = drifted(rng, problem)
            afresh = solve(problem, K)
            earlier = solution(problem, K, None, earlier)
            assert [f.objective_s for f in earlier.found] == pytest.approx([f.objective_s for f in afresh], rel=1e-9)
            used += len(earlier.found) == K
        other = solution(problem, 2, (ACTOR_TRAINING,), earlier)
        assert [f.objective_s for f in other.found] == pytest.approx(
            [f.objective_s for f in solve(problem, 2, (ACTOR_TRAINING,))], rel=1e-9
        )
    assert used > 10


def test_random_problems_cover_what_matters() -> None:
    """The cases above have few and many GPUs, memory that binds and that does not, and some without a solution."""
    problems = [p for seed in range(20) for p in small_problems(seed, 20)]
    answers = [solve(p, 1) for p in problems]
    roomy = [solve(replace(p, capacity_bytes=1e9), 1) for p in problems]
    binding = sum(
        bool(a) and a[0].objective_s > r[0].objective_s * (1 + 1e-9) for a, r in zip(answers, roomy, strict=True)
    )
    assert binding > 40
    assert 20 < sum(not a for a in answers) < 200
    assert {len(p.model_stages) for p in problems} == {3, 4, 5}
    assert {p.pool.size for p in problems} >= set(range(2, 9))
    assert {p.asynchronous for p in problems} == {True, False}


def layouts(
    problem: Problem, found: Found, of: Collection[ModelStage] | None = None
) -> tuple[tuple[int, int, int], ...]:
    chosen = [m for m in problem.model_stages if (m.stage == "training" if of is None else m in of)]
    rows = [(problem.tables[m], found.selection[m].row) for m in chosen]
    return tuple((int(t.tp[r]), int(t.pp[r]), int(t.dp[r])) for t, r in rows)


@pytest.mark.parametrize("seed", range(10))
def test_plans_are_valid_and_cost_what_the_search_says(seed: int) -> None:
    rng = random.Random(1000 + seed)
    for _ in range(20):
        problem = random_problem(rng, rows=12)
        found = solve(problem, K)
        assert [f.objective_s for f in found] == sorted(f.objective_s for f in found)
        assert len({layouts(problem, f) for f in found}) == len(found)
        for f in found:
            estimate = evaluate(problem, f.selection)
            work = sum(estimate.task_seconds.values())
            assert estimate.step_latency_s + 1e-6 * work == pytest.approx(f.objective_s, rel=1e-9)
            assert estimate.memory_bytes.max() <= problem.usable_bytes * (1 + 1e-12)
            assert sum(estimate.stage_seconds(problem.graph).values()) == pytest.approx(estimate.step_latency_s)
            spans = {}
            for m, choice in f.selection.items():
                table = problem.tables[m]
                gpus = int(table.gpus[choice.row])
                spans[m] = range(choice.start, choice.start + gpus)
                assert spans[m] in allowed_sets(problem.pool, gpus, int(table.tp[choice.row]))
            for a in spans:
                for b in spans:
                    if a.stage == b.stage and spans[a].start != spans[b].start:
                        assert not set(spans[a]) & set(spans[b])


@pytest.mark.parametrize("seed", range(10))
def test_more_memory_and_more_gpus_never_make_the_best_plan_slower(seed: int) -> None:
    rng = random.Random(2000 + seed)
    for _ in range(12):
        problem = random_problem(rng, rows=10)
        if problem.pool.gpus_per_node in (3, 6):
            continue
        problem = replace(problem, pool=GpuPool.regular(problem.pool.size, problem.pool.gpus_per_node))

        def best(changed: Problem) -> float:
            found = solve(changed, 1)
            return found[0].objective_s if found else float("inf")

        by_memory = [best(replace(problem, capacity_bytes=c)) for c in (0.7, 1.0, 1.5, 2.0, 3.0, 9.0)]
        assert by_memory == sorted(by_memory, reverse=True)
        pools = [GpuPool.regular(n, problem.pool.gpus_per_node) for n in range(1, 13)]
        by_gpus = [best(replace(problem, pool=pool)) for pool in pools]
        assert by_gpus == sorted(by_gpus, reverse=True)


def test_tensor_parallel_groups_stay_inside_a_node() -> None:
    rng = random.Random(5)
    checked = 0
    for _ in range(150):
        problem = random_problem(rng, rows=6)
        node_of = {gpu: i for i, node in enumerate(problem.pool.nodes) for gpu in node}
        for f in solve(problem, 2):
            line = [gpu for chunk in problem.pool.chunks for gpu in chunk]
            for m, choice in f.selection.items():
                tp, gpus = (int(getattr(problem.tables[m], name)[choice.row]) for name in ("tp", "gpus"))
                if problem.pool.gpus_per_node % tp == 0:
                    devices = line[choice.start : choice.start + gpus]
                    for low in range(0, gpus, tp):
                        assert len({node_of[gpu] for gpu in devices[low : low + tp]}) == 1
                        checked += tp > 1
    assert checked > 100


@pytest.mark.parametrize("k", [1, 3])
def test_skyband_is_what_fewer_than_k_layouts_dominate(k: int) -> None:
    rng = np.random.default_rng(k)
    for n in (1, 7, 60, 200):
        values = rng.integers(0, 5, size=(n, 4)).astype(float)
        layout = rng.integers(0, max(2, n // 4), size=n)
        kept = skyband(values.T, layout, k)
        for i in range(n):
            no_worse = (values <= values[i]).all(axis=1)
            strictly = no_worse & (values < values[i]).any(axis=1)
            if i in kept:
                if k == 1:
                    assert not strictly.any()
                assert not (strictly & (layout == layout[i])).any()
                assert len(set(layout[strictly])) < k
            else:
                same = no_worse & (layout == layout[i])
                assert len(set(layout[no_worse & (layout != layout[i])])) >= k or same.sum() > 1


def test_frontier_of_a_large_table_is_small() -> None:
    problem = random_problem(random.Random(3), rows=400)
    for m in problem.model_stages:
        f = fitting(problem, m)
        assert len(skyband(costs(f, problem.pool.is_regular), f.layouts, 1)) < max(4, len(f))


def test_a_job_that_does_not_fit_says_what_is_missing() -> None:
    rng = random.Random(11)
    seen = 0
    while seen < 25:
        problem = random_problem(rng, rows=4)
        if solve(problem, 1):
            continue
        seen += 1
        with pytest.raises(Infeasible) as caught:
            choose(problem.tables, problem.pool, problem.graph, capacity_bytes=problem.capacity_bytes,
                   asynchronous=problem.asynchronous)  # fmt: skip
        missing, least = caught.value.missing_bytes, caught.value.least_gpus
        if np.isfinite(missing):
            assert solve(replace(problem, capacity_bytes=problem.capacity_bytes + missing), 1)
            assert not solve(replace(problem, capacity_bytes=problem.capacity_bytes + missing * 0.9 - 0.02), 1)
        if least is not None:
            nodes = (least - problem.pool.size) // problem.pool.gpus_per_node
            assert solve(replace(problem, pool=problem.pool.with_nodes(nodes)), 1)
            assert not solve(replace(problem, pool=problem.pool.with_nodes(nodes - 1)), 1)
