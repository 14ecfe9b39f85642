"""Why nothing fits: which model-stage, by how much, and the least that would do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from nereus.core.errors import PlanError
from nereus.core.plan import ModelStage
from nereus.cost.model import CandidateTable
from nereus.planner.frontier import Candidates, Layouts, fitting
from nereus.planner.problem import Problem
from nereus.planner.search import feasible

TablesFor = Callable[[int], Mapping[ModelStage, CandidateTable]]
"""The tables of a job, with candidates of up to so many GPUs."""
GIB = 2**30
LARGEST_POOL = 65_536
CLOSE = 0.005
"""How closely the memory that would do is found, as a share of it."""


class Infeasible(PlanError):
    """No plan fits the pool.

    model_stages: those that do not fit: alone, or else whose absence alone would let the others fit.
    missing_bytes: what each GPU would need besides (headroom included); infinite if no memory would do.
    least_gpus: the smallest pool, in whole nodes added, that would do; None if none is known.
    """

    def __init__(
        self, message: str, model_stages: tuple[ModelStage, ...], missing_bytes: float, least_gpus: int | None
    ) -> None:
        super().__init__(message)
        self.model_stages, self.missing_bytes, self.least_gpus = model_stages, missing_bytes, least_gpus


def shortfall(problem: Problem, tables_for: TablesFor | None = None) -> Infeasible:
    """What to tell of a problem that has no solution."""
    alone = tuple(m for m in problem.model_stages if not len(fitting(problem, m)))
    guilty = alone or _without_which_it_fits(problem)
    capacity = _least_capacity(problem)
    missing = capacity - problem.capacity_bytes
    gpus = _least_pool(problem, tables_for)
    names = ", ".join(map(str, guilty or problem.model_stages))
    where = f"{problem.pool.size} GPUs of {problem.capacity_bytes / GIB:.1f} GiB ({problem.headroom:.0%} kept free)"
    if missing == float("inf"):
        why = "no number of GPUs that the pool has can run it, whatever the memory"
    elif alone:
        why = f"its smallest candidate lacks {missing / GIB:.2f} GiB on each GPU"
    else:
        why = f"with the other model-stages {missing / GIB:.2f} GiB are lacking on each GPU"
    cure = f"the smallest pool that would do has {gpus} GPUs" if gpus else "no larger pool is known to do"
    return Infeasible(f"{names} does not fit on {where}: {why}; {cure}", guilty, missing, gpus)


def _fits(problem: Problem) -> bool:
    layouts = Layouts.of({m: problem.tables[m] for m in problem.model_stages}, problem.pool)
    fits = Candidates.fitting(problem, layouts)
    return bool(fits.counts.all()) and feasible(problem, layouts, fits)


def _without_which_it_fits(problem: Problem) -> tuple[ModelStage, ...]:
    """Model-stages that would let the rest fit if they took no memory."""
    found = []
    for m in problem.model_stages:
        table = problem.tables[m]
        free = replace(table, resident_bytes=table.resident_bytes * 0, working_bytes=table.working_bytes * 0)
        if _fits(replace(problem, tables={**problem.tables, m: free})):
            found.append(m)
    return tuple(found)


def _least_capacity(problem: Problem) -> float:
    """Bytes of memory a GPU would need, from above and within CLOSE; infinite if none would do."""
    high = problem.capacity_bytes
    total = sum(float((t.resident_bytes + t.working_bytes).max(initial=0)) for t in problem.tables.values())
    while not _fits(replace(problem, capacity_bytes=high)):
        if high * (1 - problem.headroom) > total:
            return float("inf")
        high *= 2
    low = high / 2
    while high - low > CLOSE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(replace(problem, capacity_bytes=middle)) else (middle, high)
    return high


def _least_pool(problem: Problem, tables_for: TablesFor | None) -> int | None:
    """GPUs of the smallest pool that would do, in whole nodes added."""

    def fits(nodes: int) -> bool:
        pool = problem.pool.with_nodes(nodes)
        tables = tables_for(pool.size) if tables_for else problem.tables
        return _fits(replace(problem, pool=pool, tables=tables))

    high = 1
    while not fits(high):
        high *= 2
        if problem.pool.size + high * problem.pool.gpus_per_node > LARGEST_POOL:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return problem.pool.with_nodes(high).size
