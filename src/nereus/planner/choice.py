"""`choose`: tables and a pool in, placed plans out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from numpy.typing import NDArray

from nereus.core.errors import PlanError
from nereus.core.graph import StepTask
from nereus.core.plan import ModelStage, Plan
from nereus.cost.model import CandidateTable
from nereus.planner.infeasible import TablesFor, shortfall
from nereus.planner.placement import kept_bytes, place, state_bytes
from nereus.planner.problem import HEADROOM, Estimate, GpuPool, Problem, Selection, evaluate
from nereus.planner.search import Solution, solution


@dataclass(frozen=True, kw_only=True)
class PlannedPlan:
    """One plan of a choice. Its GPUs, its figures and what it keeps of the current plan are worked out when asked for.

    objective_s: what plans are ranked by: the step latency, and a millionth of the summed task seconds.
    """

    problem: Problem
    selection: Selection
    objective_s: float
    current: Plan | None

    @cached_property
    def plan(self) -> Plan:
        """On concrete GPUs."""
        return place(self.problem, self.selection, self.current)

    @cached_property
    def estimate(self) -> Estimate:
        return evaluate(self.problem, self.selection)

    @property
    def step_latency_s(self) -> float:
        return self.estimate.step_latency_s

    @property
    def task_seconds(self) -> Mapping[str, float]:
        return self.estimate.task_seconds

    @property
    def stage_seconds(self) -> dict[str, float]:
        """What each stage adds to the step latency."""
        return self.estimate.stage_seconds(self.problem.graph)

    @property
    def peak_bytes(self) -> float:
        """Of the fullest GPU."""
        return float(self.estimate.memory_bytes.max())

    @cached_property
    def memory_bytes(self) -> dict[int, float]:
        """Device id -> predicted peak; GPUs that hold nothing are left out."""
        return gpu_memory(self)

    @property
    def kept_bytes(self) -> float:
        """State that is on its GPUs already."""
        if self.current is None:
            return 0.0
        return kept_bytes(self.plan, self.current, state_bytes(self.problem, self.selection))

    def to_json(self) -> dict[str, Any]:
        return {
            "step_latency_s": self.step_latency_s,
            "stage_seconds": self.stage_seconds,
            "task_seconds": dict(self.task_seconds),
            "peak_bytes": self.peak_bytes,
            "plan": self.plan.to_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
    """The best plan and the next ones, which differ from it and from each other in a layout that was to differ."""

    problem: Problem
    plans: tuple[PlannedPlan, ...]
    solution: Solution

    @property
    def best(self) -> PlannedPlan:
        return self.plans[0]

    @property
    def alternatives(self) -> tuple[PlannedPlan, ...]:
        return self.plans[1:]

    def to_json(self) -> dict[str, Any]:
        return {
            "gpus": self.problem.pool.size,
            "usable_bytes": self.problem.usable_bytes,
            "plans": [plan.to_json() for plan in self.plans],
        }


def gpu_memory(planned: PlannedPlan) -> dict[int, float]:
    """Device id -> resident bytes of all model-stages on it, and the largest working set."""
    resident: dict[int, float] = {}
    working: dict[int, float] = {}
    for placement in planned.plan.placements:
        table, row = planned.problem.tables[placement.model_stage], planned.selection[placement.model_stage].row
        for gpu in placement.gpus:
            resident[gpu] = resident.get(gpu, 0.0) + float(table.resident_bytes[row])
            working[gpu] = max(working.get(gpu, 0.0), float(table.working_bytes[row]))
    return {gpu: resident[gpu] + working[gpu] for gpu in sorted(resident)}


def holding(
    tables: Mapping[ModelStage, CandidateTable], current: Plan, model_stages: Iterable[ModelStage]
) -> dict[ModelStage, CandidateTable]:
    """The tables with the current layout only for some model-stages: what to choose from if these must not be resharded.

    A model-stage whose current layout is not among its candidates keeps them all.
    """
    found = dict(tables)
    for m in model_stages:
        table, placement = tables[m], current[m]
        layout = placement.layout
        same = (table.tp == layout.tp) & (table.pp == layout.pp) & (table.dp == placement.dp)
        if same.any():
            found[m] = table_rows(table, same)
    return found


def table_rows(table: CandidateTable, which: NDArray[Any]) -> CandidateTable:
    """Some rows of a table."""
    columns = {f.name: getattr(table, f.name)[which] for f in fields(table) if f.name not in ("model_stage", "seconds")}
    seconds = {name: column[which] for name, column in table.seconds.items()}
    return CandidateTable(model_stage=table.model_stage, seconds=seconds, **columns)


def choose(
    tables: Mapping[ModelStage, CandidateTable],
    pool: GpuPool,
    graph: tuple[StepTask, ...],
    *,
    capacity_bytes: float,
    headroom: float = HEADROOM,
    asynchronous: bool = False,
    current: Plan | None = None,
    k: int = 5,
    distinct_in: Collection[ModelStage] | None = None,
    previous: PlanChoice | None = None,
    tables_for: TablesFor | None = None,
) -> PlanChoice:
    """The plan of the least predicted step latency, and up to k - 1 runners-up with other layouts.

    tables: the candidates of every model-stage of the graph; those larger than the pool are passed over.
    capacity_bytes: memory of one GPU. current: what the placement keeps as much of as it can.
    distinct_in: model-stages; any two of the plans differ in the layout of one of these. None: those that train. With
    actor/training alone, plans that differ in a critic off the critical path count as one, of which the best is listed.
    previous: an earlier choice for the same job, which changes nothing but the time this takes: what followed from the
    layouts and the pool is not worked out again where these are the same, and how far its plans were from the lower bound
    says where the new ones are to be expected.
    tables_for: gives tables up to a number of GPUs, to find the least pool that would do when this one does not.
    Raises Infeasible (a PlanError) if nothing fits, with which model-stage does not and what is missing; PlanError for a
    model-stage in `distinct_in` that the graph does not have.
    """
    unknown = [m for m in distinct_in or () if m not in tables]
    if unknown:
        raise PlanError(f"plans cannot differ in {', '.join(map(str, unknown))}: the tables have no such model-stage")
    problem = Problem(
        tables=tables,
        pool=pool,
        graph=graph,
        capacity_bytes=capacity_bytes,
        headroom=headroom,
        asynchronous=asynchronous,
    )
    found = solution(problem, k, distinct_in, previous.solution if previous else None)
    if not found.found:
        raise shortfall(problem, tables_for)
    plans = tuple(
        PlannedPlan(problem=problem, selection=f.selection, objective_s=f.objective_s, current=current)
        for f in found.found
    )
    return PlanChoice(problem=problem, plans=plans, solution=found)
