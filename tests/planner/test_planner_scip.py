"""The mixed-integer program that SCIP gets is the planner's problem: both find the same optimum."""

from __future__ import annotations

import random

import pytest
from planner_cases import random_problem

from nereus.cli.bench_planner import solve_with_scip
from nereus.planner.search import solve

pytest.importorskip("pyscipopt", reason="SCIP is an extra: pip install 'nereus-rl[bench]'")


@pytest.mark.parametrize("seed", range(4))
def test_scip_finds_the_same_optimum(seed: int) -> None:
    rng, compared = random.Random(50 + seed), 0
    while compared < 6:
        problem = random_problem(rng, rows=5)
        found = solve(problem, 1)
        if not found:
            continue
        compared += 1
        solved = solve_with_scip(problem, limit_s=30)
        assert solved.status == "optimal"
        assert solved.objective_s == pytest.approx(found[0].objective_s, rel=1e-6)
