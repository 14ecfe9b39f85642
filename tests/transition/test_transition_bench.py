"""`nereus bench dag`: its bounds are those of brute force on small cases, and its rows say what they must."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest
from transition_cases import RATES, random_case

from nereus.cli.bench_dag import bench_dag
from nereus.cli.bench_dag_solvers import (
    Activity,
    Instance,
    instances_of,
    solve_with_cp_sat,
    solve_with_scip,
    trivial_bound_s,
)
from nereus.transition.dag import InfeasibleTransition
from nereus.transition.plan import plan_transition

LARGEST = 7
"""Activities that are put in every order."""


def shortest(instance: Instance) -> float:
    """Over all orders: each activity as early as its GPUs and predecessors allow, memory looked at GPU by GPU."""
    return min(_seconds(order, instance) for order in permutations(instance.activities))


def _seconds(order: Sequence[Activity], instance: Instance) -> float:
    held, free_at, done = dict(instance.held_bytes), dict.fromkeys(instance.held_bytes, 0.0), set()
    end = 0.0
    for a in order:
        start = max((free_at[gpu] for gpu in a.gpus), default=0.0)
        if not done.issuperset(a.after):
            return float("inf")
        for gpu in a.gpus:
            if a.take_bytes[gpu] > 0 and held[gpu] + a.take_bytes[gpu] > instance.usable_bytes:
                return float("inf")
            held[gpu] += a.take_bytes[gpu] - a.free_bytes[gpu]
            free_at[gpu] = start + a.seconds
        done.add(a.number)
        end = max(end, start + a.seconds)
    return end


def test_bounds_are_optimal_and_never_above_the_schedule() -> None:
    pytest.importorskip("pyscipopt")
    pytest.importorskip("ortools")
    compared = 0
    for seed in range(160):
        rng = random.Random(seed)
        case = random_case(rng, stages=rng.randint(2, 4))
        usable = float(int(case.resting_bytes * (1 + rng.choice([0, 0.05, 0.2, 0.5]))))
        how = {"node_of": case.node_of, "rates": RATES, "usable_bytes": usable}
        try:
            dag = plan_transition(case.profiles, case.current, case.target, **how)
        except InfeasibleTransition:
            continue
        assert trivial_bound_s(dag) <= dag.seconds + 1e-9
        instances = [i for i in instances_of(dag, usable) if len(i.activities) <= LARGEST]
        for instance in instances[:1]:
            best = shortest(instance)
            assert best <= dag.seconds + 1e-9
            for solve in (solve_with_scip, solve_with_cp_sat):
                found = solve(instance, dag.seconds * 1.01, 10.0)
                assert found.bound_s == pytest.approx(best, abs=2e-5)
                assert found.found_s == pytest.approx(best, abs=2e-5)
            compared += 1
    assert compared > 50


def test_solvers_know_memory_and_predecessors() -> None:
    """Random problems in which the order on a GPU is often decided by memory."""
    pytest.importorskip("pyscipopt")
    pytest.importorskip("ortools")
    rng, tight = random.Random(0), 0
    for attempt in range(150):
        activities: list[Activity] = []
        for number in range(rng.randint(4, 6)):
            gpus = rng.sample(range(4), rng.randint(1, 2))
            sharing = [a.number for a in activities if a.gpus & set(gpus)]
            activities.append(
                Activity(
                    number=number,
                    seconds=float(rng.randint(1, 9)),
                    take_bytes={g: float(rng.randint(0, 40)) for g in gpus},
                    free_bytes={g: float(rng.randint(0, 40)) for g in gpus},
                    after=tuple(rng.sample(sharing, min(len(sharing), rng.randint(0, 1)))),
                )
            )
        held = {g: float(rng.randint(40, 80)) for a in activities for g in a.gpus}
        instance = Instance(activities=tuple(activities), held_bytes=held, usable_bytes=100.0)
        best = shortest(instance)
        binding = best > shortest(replace(instance, usable_bytes=1e12))
        if best < float("inf") and (binding or attempt < 40):
            for solve in (solve_with_scip, solve_with_cp_sat):
                assert solve(instance, 60.0, 10.0).bound_s == pytest.approx(best, abs=2e-5)
            tight += binding
    assert tight > 1


def test_rows() -> None:
    pytest.importorskip("pyscipopt")
    found = bench_dag((16, 32), pairs=2, repeats=1, solver_limit_s=5.0, say=lambda line: None)
    for row, gpus in zip(found["rows"], (16, 32), strict=True):
        assert row["gpus"] == gpus and row["pairs"] + row["infeasible"] == 2
        assert 0 <= row["proven"] <= row["pairs"]
        assert 0 <= row["gap_mean_pct"] <= row["gap_max_pct"] <= 6.9
        assert row["plan_least_ms"] <= row["plan_ms"] <= row["plan_max_ms"]
