"""Why this plan: each model-stage's frontier, what keeps it from being faster, and what one more node would give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from nereus.core.plan import ACTOR_GENERATION, ModelStage
from nereus.cost.model import CandidateTable
from nereus.planner.choice import PlanChoice, PlannedPlan
from nereus.planner.frontier import GENERATION, INFERENCE, SYNC, TRAINING, Floats, Frontier, fitting
from nereus.planner.packing import pack
from nereus.planner.problem import Choice, Problem, Selection, evaluate
from nereus.planner.search import solve

Binding = Literal["nothing", "memory", "gpus", "the other model-stages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """The fastest candidate of its number of GPUs, slower ones of more GPUs left out. seconds: of all its tasks."""

    row: int
    tp: int
    pp: int
    dp: int
    micro_batch: int
    recompute: bool
    gpus: int
    seconds: float
    resident_bytes: float
    working_bytes: float
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStageReason:
    """One model-stage's part of an explanation.

    binding: what stands against the fastest candidate of this model-stage, all others as they are. "nothing": it is the
    one chosen. "memory": it does not fit beside what else is on its GPUs. "gpus": it needs GPUs that others use at the same
    time. "the other model-stages": it would fit, but they would be slower for it, or the step is no faster.
    faster_s: seconds that this candidate would save the model-stage. All are such that fit alone on their GPUs.
    """

    model_stage: ModelStage
    frontier: tuple[FrontierPoint, ...]
    binding: Binding
    faster_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """reasons: in the order of the graph. one_more_node: the best plan if the pool had it; None if none is better.

    larger: where none is, the best plan of the next pool that some candidate fills, as dp must divide the batch; None if
    that is no better either. saved_s: of the step by one of the two.
    """

    reasons: tuple[ModelStageReason, ...]
    one_more_node: PlannedPlan | None
    larger: PlannedPlan | None
    saved_s: float

    def to_json(self) -> dict[str, Any]:
        more, larger = self.one_more_node, self.larger
        return {
            "model_stages": {
                str(r.model_stage): {
                    "binding": r.binding,
                    "faster_s": r.faster_s,
                    "frontier": [{f: getattr(p, f) for f in FrontierPoint.__slots__} for p in r.frontier],
                }
                for r in self.reasons
            },
            "one_more_node": None if more is None else {"saved_s": self.saved_s, **more.to_json()},
            "larger": None if larger is None else {"saved_s": self.saved_s, **larger.to_json()},
        }


def explain(choice: PlanChoice, larger: Mapping[ModelStage, CandidateTable] | None = None) -> Explanation:
    """Why the best plan of a choice is what it is.

    larger: tables with candidates up to a larger pool, one node more than it has or, better, twice its GPUs; without them
    the choice's own are used.
    """
    problem, best = choice.problem, choice.best
    reasons = tuple(_reason(problem, best.selection, m) for m in problem.model_stages)
    tables = larger or problem.tables
    one_more = _with_nodes(choice, tables, 1)
    nodes = 0 if one_more else _nodes_to_next(problem, tables)
    several = _with_nodes(choice, tables, nodes) if nodes > 1 else None
    found = one_more or several
    saved = best.step_latency_s - found.step_latency_s if found else 0.0
    return Explanation(reasons=reasons, one_more_node=one_more, larger=several, saved_s=saved)


def _with_nodes(choice: PlanChoice, tables: Mapping[ModelStage, CandidateTable], num_nodes: int) -> PlannedPlan | None:
    """The best plan of a pool with so many nodes more, where it is better."""
    best = choice.best
    grown = replace(choice.problem, pool=choice.problem.pool.with_nodes(num_nodes), tables=tables)
    found = solve(grown, 1)
    if not found or found[0].objective_s >= best.objective_s * (1 - 1e-9):
        return None
    f = found[0]
    return PlannedPlan(problem=grown, selection=f.selection, objective_s=f.objective_s, current=best.plan)


def _nodes_to_next(problem: Problem, tables: Mapping[ModelStage, CandidateTable]) -> int:
    """How many nodes more the smallest candidate needs that is too large for the pool; 0 if none is."""
    size, per_node = problem.pool.size, problem.pool.gpus_per_node
    beyond = [int(gpus.min()) for table in tables.values() if len(gpus := table.gpus[table.gpus > size])]
    return -(-(min(beyond) - size) // per_node) if beyond else 0


def staircase(problem: Problem, model_stage: ModelStage, chosen: int) -> tuple[FrontierPoint, ...]:
    """Seconds against GPUs: the fastest of each number of GPUs that fits alone, as long as more GPUs are faster."""
    f, table = fitting(problem, model_stage), problem.tables[model_stage]
    seconds = _seconds(problem, f)
    points: list[FrontierPoint] = []
    for i in np.lexsort((seconds, f.gpus)):
        row = int(f.rows[i])
        if points and row != chosen and seconds[i] >= min(p.seconds for p in points):
            continue
        points.append(
            FrontierPoint(
                row=row,
                tp=int(table.tp[row]),
                pp=int(table.pp[row]),
                dp=int(table.dp[row]),
                micro_batch=int(table.micro_batch[row]),
                recompute=bool(table.recompute[row]),
                gpus=int(f.gpus[i]),
                seconds=float(seconds[i]),
                resident_bytes=float(f.resident[i]),
                working_bytes=float(f.working[i]),
                chosen=row == chosen,
            )
        )
    return tuple(points)


def _seconds(problem: Problem, f: Frontier) -> Floats:
    rows = [GENERATION, INFERENCE, TRAINING] + [SYNC] * problem.asynchronous
    return np.asarray(f.figures[rows].sum(axis=0))


def _reason(problem: Problem, selection: Selection, model_stage: ModelStage) -> ModelStageReason:
    f = fitting(problem, model_stage)
    seconds = _seconds(problem, f)
    chosen = selection[model_stage].row
    mine = float(seconds[f.rows == chosen][0])
    binding: Binding = "nothing"
    best = int(np.argmin(seconds))
    if seconds[best] < mine * (1 - 1e-9):
        binding = _obstacle(problem, selection, model_stage, int(f.rows[best]))
    return ModelStageReason(
        model_stage=model_stage,
        frontier=staircase(problem, model_stage, chosen),
        binding=binding,
        faster_s=mine - float(seconds[best]),
    )


def _obstacle(problem: Problem, selection: Selection, model_stage: ModelStage, row: int) -> Binding:
    """What stands against another row for one model-stage, the other rows and their relations staying as they are."""
    changed = {**selection, model_stage: Choice(row, selection[model_stage].start)}
    for may_share in (False, True):  # as disjoint from the others as now; or sharing GPUs with any of them
        moved = _packed(problem, selection, changed, model_stage if may_share else None)
        if moved is not None:
            if float(evaluate(problem, moved).memory_bytes.max()) > problem.usable_bytes:
                return "memory"
            return "gpus" if may_share else "the other model-stages"
    return "gpus"


def _packed(
    problem: Problem, before: Selection, after: Selection, sharing: ModelStage | None
) -> dict[ModelStage, Choice] | None:
    """`after` with starts in which whatever was disjoint `before` still is, but for one that may share; or None."""
    names = list(before)
    spans = {m: (c.start, c.start + int(problem.tables[m].gpus[c.row])) for m, c in before.items()}
    sets, disjoint = [], []
    for i, m in enumerate(names):
        table, row = problem.tables[m], after[m].row
        gpus, tp = int(table.gpus[row]), int(table.tp[row])
        sets.append((gpus, problem.pool.alignment(gpus, tp), problem.pool.reach(tp)))
        bits = 0
        for j, other in enumerate(names[:i]):
            apart = spans[m][1] <= spans[other][0] or spans[other][1] <= spans[m][0]
            must = problem.asynchronous and ACTOR_GENERATION in (m, other)
            if must or (apart and sharing not in (m, other)):
                bits |= 1 << j
        disjoint.append(bits)
    starts = pack(sets, disjoint, [m.stage for m in names])
    if starts is None:
        return None
    return {m: Choice(after[m].row, start) for m, start in zip(names, starts, strict=True)}
