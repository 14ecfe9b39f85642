"""`nereus bench planner`: how long a whole replan takes, and what SCIP makes of the very same problem.

A replan goes from candidate tables to a plan on concrete GPUs: which candidates matter, the five best plans, and the best
one laid over a current plan (the best for responses half as long). It is measured twice: first, with nothing known; and
later, after a choice for responses a tenth shorter, which is handed to `choose` as `previous`. That saves what follows from
layouts and pool alone (alignment, reach, numbers of GPUs) and the dive. The tables themselves are given either way.

SCIP gets the same problem as a mixed-integer program (docs/planner.md), already reduced to the undominated candidates, and
the first dive's objective as a bound to beat.
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from nereus.cli.bench import machine
from nereus.core.inventory import cluster_of
from nereus.core.plan import ACTOR_GENERATION, ModelStage, Plan
from nereus.core.shapes import ModelShape
from nereus.core.workload import Workload
from nereus.cost.model import CandidateTable, CostModel
from nereus.planner.choice import PlanChoice, choose
from nereus.planner.frontier import Frontier, frontier
from nereus.planner.problem import STAGE_ORDER, TIE, GpuPool, Problem, task_seconds
from nereus.planner.search import rough

POOLS = (8, 32, 64, 128, 256, 512, 1024, 4096, 16384)
AIMS_MS = {32: 1.0, 1024: 5.0, 16384: 50.0}
MIB = 2**20

Say = Callable[[str], None]


def default_problem(
    gpus: int, *, device: str = "A100-80GB", model: str = "Llama-3.1-8B", response_length: float = 2048
) -> Problem:
    """PPO with a reward model, 1,024 prompts a step; every model of the given shape."""
    return problem_of(default_cost_model(gpus, device, model), gpus, response_length)


def default_cost_model(gpus: int, device: str, model: str) -> CostModel:
    """Of `default_problem`, for some length."""
    shapes: dict[Any, ModelShape] = dict.fromkeys(("actor", "reference", "reward", "critic"), ModelShape.named(model))
    return CostModel(shapes, cluster_of(device, gpus), default_workload(2048), "ppo", True)


def default_workload(response_length: float) -> Workload:
    """1,024 prompts a step."""
    return Workload(
        prompts=1024,
        prompt_length=512,
        response_length=response_length,
        response_p95=2 * response_length,
        response_max=3 * response_length,
    )


def problem_of(cost: CostModel, gpus: int, response_length: float) -> Problem:
    """The problem for responses of this length."""
    cost = cost.updated(workload=default_workload(response_length))
    stages = {task.model_stage for task in cost.graph}
    tables: dict[ModelStage, CandidateTable] = {m: cost.table(m, max_gpus=gpus) for m in stages}
    return Problem(
        tables=tables,
        pool=GpuPool.regular(gpus, cost.cluster.gpus_per_node),
        graph=cost.graph,
        capacity_bytes=cost.cluster.device.memory_bytes,
    )


def replan(problem: Problem, current: Plan | None, k: int = 5, previous: PlanChoice | None = None) -> PlanChoice:
    """Candidate tables to placed plan."""
    choice = choose(
        problem.tables,
        problem.pool,
        problem.graph,
        capacity_bytes=problem.capacity_bytes,
        current=current,
        k=k,
        previous=previous,
    )
    assert choice.best.plan is not None  # it is worked out when asked for
    return choice


def bench_planner(
    pools: Sequence[int] = POOLS,
    *,
    device: str = "A100-80GB",
    model: str = "Llama-3.1-8B",
    repeats: int = 9,
    scip_limit_s: float = 60.0,
    scip: bool = True,
    say: Say = print,
) -> dict[str, Any]:
    """The bench: {bench, machine, rows, summary}. scip_limit_s: SCIP's time limit on each problem."""
    note = "" if not scip else _scip_missing()
    if note:
        say(note)
    rows = []
    for gpus in pools:
        cost = default_cost_model(gpus, device, model)
        half, shorter, problem = (problem_of(cost, gpus, length) for length in (1024, 1843, 2048))
        row = {"gpus": gpus, **_measure(problem, shorter, replan(half, None).best.plan, repeats)}
        if scip and not note:
            solved = solve_with_scip(problem, scip_limit_s)
            row |= {
                "scip_ms": solved.seconds * 1e3,
                "scip_cpu_ms": solved.cpu_s * 1e3,
                "scip_objective_s": solved.objective_s,
                "scip_status": solved.status,
            }
        rows.append(row)
        say(
            "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
    return {"bench": "planner", "machine": machine(), "rows": rows, "summary": _summary(rows, note)}


def _measure(problem: Problem, shorter: Problem, current: Plan, repeats: int) -> dict[str, Any]:
    previous = replan(shorter, current)
    first, first_cpu = _times(lambda: replan(problem, current), repeats)
    later, later_cpu = _times(lambda: replan(problem, current, previous=previous), repeats)
    tracemalloc.start()
    choice = replan(problem, current)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    again = replan(problem, current, previous=previous)
    assert [p.objective_s for p in again.plans] == [p.objective_s for p in choice.plans]
    return {
        "candidates": sum(len(t) for t in problem.tables.values()),
        "first_ms": statistics.median(first) * 1e3,
        "first_cpu_ms": min(first_cpu) * 1e3,
        "replan_ms": statistics.median(later) * 1e3,
        "replan_least_ms": min(later) * 1e3,
        "replan_cpu_ms": min(later_cpu) * 1e3,
        "peak_mib": peak / MIB,
        "objective_s": choice.best.objective_s,
    }


def _times(replanned: Callable[[], object], repeats: int) -> tuple[list[float], list[float]]:
    """Seconds by the clock and of the processor, each time; the first is left out."""
    times, cpu = [], []
    for _ in range(repeats + 1):
        gc.collect()
        before, before_cpu = time.perf_counter(), time.process_time()
        replanned()
        times.append(time.perf_counter() - before)
        cpu.append(time.process_time() - before_cpu)
    return times[1:], cpu[1:]


def _summary(rows: Sequence[Mapping[str, Any]], note: str) -> dict[str, Any]:
    by_gpus = {row["gpus"]: row for row in rows}
    solved = [row for row in rows if row.get("scip_objective_s") is not None]
    return {
        "aims_ms": {
            str(g): {"aim": aim} | {name: by_gpus[g][name] for name in ("first_ms", "replan_ms", "replan_cpu_ms")}
            for g, aim in AIMS_MS.items()
            if g in by_gpus
        },
        "peak_mib": max(row["peak_mib"] for row in rows),
        "times_faster_than_scip": {str(r["gpus"]): r["scip_ms"] / r["replan_ms"] for r in rows if r.get("scip_ms")},
        "times_less_cpu_than_scip": {
            str(r["gpus"]): r["scip_cpu_ms"] / r["replan_cpu_ms"] for r in rows if r.get("scip_cpu_ms")
        },
        "never_worse_than_scip": all(r["objective_s"] <= r["scip_objective_s"] * (1 + 1e-6) for r in solved),
        "note": note,
    }


# -- SCIP ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """objective_s: None where SCIP found no plan in time. cpu_s: what the process used of the processor."""

    seconds: float
    cpu_s: float
    objective_s: float | None
    status: str


def _scip_missing() -> str:
    try:
        import pyscipopt  # noqa: F401
    except ImportError:
        return "SCIP is left out: PySCIPOpt is not installed (pip install 'nereus-rl[bench]')"
    return ""


def solve_with_scip(problem: Problem, limit_s: float) -> Solved:
    """The planner's problem as a mixed-integer program. Model building is not counted."""
    program = _Program.of(problem)
    program.model.setParam("limits/time", limit_s)
    before, before_cpu = time.perf_counter(), time.process_time()
    program.model.optimize()
    seconds, cpu = time.perf_counter() - before, time.process_time() - before_cpu
    found = program.model.getObjVal() if program.model.getNSols() else None
    return Solved(seconds=seconds, cpu_s=cpu, objective_s=found, status=str(program.model.getStatus()))


@dataclass(slots=True, kw_only=True)
class _Program:
    """One binary variable a candidate, an integer start a model-stage, two binary variables a pair: who is left of whom."""

    problem: Problem
    model: Any
    frontiers: dict[ModelStage, Frontier]
    picks: dict[ModelStage, list[Any]]
    starts: dict[ModelStage, Any]
    apart: dict[tuple[ModelStage, ModelStage], Any]
    horizon_s: float

    @classmethod
    def of(cls, problem: Problem) -> _Program:
        from pyscipopt import Model

        model = Model("planner")
        model.hideOutput()
        program = cls(
            problem=problem,
            model=model,
            frontiers={m: frontier(problem, m) for m in problem.model_stages},
            picks={},
            starts={},
            apart={},
            horizon_s=min((f.objective_s for f in rough(problem)), default=1e5) * (1 + 1e-6),
        )
        program.choose_candidates()
        program.lay_out()
        program.limit_memory()
        program.time()
        return program

    def value(self, m: ModelStage, column: Any) -> Any:
        """What a column of the frontier is for the candidate that is picked."""
        from pyscipopt import quicksum

        return quicksum(float(c) * y for c, y in zip(column, self.picks[m], strict=True))

    def choose_candidates(self) -> None:
        from pyscipopt import quicksum

        for m, f in self.frontiers.items():
            self.picks[m] = [self.model.addVar(vtype="B") for _ in range(len(f))]
            self.model.addCons(quicksum(self.picks[m]) == 1)

    def lay_out(self) -> None:
        from pyscipopt import quicksum

        size = self.problem.pool.size
        for m, f in self.frontiers.items():
            start = self.starts[m] = self.model.addVar(vtype="I", lb=0, ub=size)
            multiples = []
            for align in sorted(set(f.align.tolist())):
                number = self.model.addVar(vtype="I", lb=0, ub=size // align)
                here = quicksum(y for y, a in zip(self.picks[m], f.align, strict=True) if a == align)
                self.model.addCons(number <= size // align * here)
                multiples.append(align * number)
            self.model.addCons(start == quicksum(multiples))
            self.model.addCons(start + self.value(m, f.gpus) <= self.value(m, f.reach))
        for a, b in combinations(self.frontiers, 2):
            left, right = self.model.addVar(vtype="B"), self.model.addVar(vtype="B")
            gpus_a, gpus_b = (self.value(m, self.frontiers[m].gpus) for m in (a, b))
            self.model.addCons(self.starts[a] + gpus_a <= self.starts[b] + size * (1 - left))
            self.model.addCons(self.starts[b] + gpus_b <= self.starts[a] + size * (1 - right))
            self.model.addCons(left + right <= 1)
            if self.problem.asynchronous and ACTOR_GENERATION in (a, b):
                self.model.addCons(left + right == 1)
            self.apart[a, b] = self.apart[b, a] = left + right
            if a.stage == b.stage:
                self.model.addCons(self.starts[a] - self.starts[b] <= size * (left + right))
                self.model.addCons(self.starts[b] - self.starts[a] <= size * (left + right))

    def limit_memory(self) -> None:
        """Intervals that overlap pairwise have a GPU in common, so every set without a pair that is apart must fit."""
        from pyscipopt import quicksum

        cap, scale = 1.0, self.problem.usable_bytes  # in shares of a GPU, for the solver's tolerances
        resident = {m: self.value(m, f.resident / scale) for m, f in self.frontiers.items()}
        working = {m: self.value(m, f.working / scale) for m, f in self.frontiers.items()}
        for count in range(1, len(self.frontiers) + 1):
            for group in combinations(self.frontiers, count):
                excess = quicksum(cap * self.apart[pair] for pair in combinations(group, 2)) * count
                for m in group:
                    self.model.addCons(quicksum(resident[n] for n in group) + working[m] <= cap + excess)

    def time(self) -> None:
        from pyscipopt import quicksum

        tables, horizon = self.problem.tables, self.horizon_s
        tasks = sorted(self.problem.graph, key=lambda t: STAGE_ORDER.index(t.stage))
        seconds = {
            t.name: self.value(
                t.model_stage, task_seconds(tables[t.model_stage], t)[self.frontiers[t.model_stage].rows]
            )
            for t in tasks
        }
        begin = {t.name: self.model.addVar(lb=0, ub=horizon) for t in tasks}
        step = self.model.addVar(lb=0, ub=horizon)
        for i, task in enumerate(tasks):
            self.model.addCons(begin[task.name] + seconds[task.name] <= step)
            for earlier in tasks[:i]:
                if self.problem.asynchronous and earlier.stage == "generation" and task.stage != "weight_sync":
                    continue
                done = begin[earlier.name] + seconds[earlier.name]
                last = self.problem.asynchronous and task.stage == "weight_sync"
                if last or earlier.name in task.after or earlier.model_stage == task.model_stage:
                    self.model.addCons(begin[task.name] >= done)
                else:
                    slack = horizon * self.apart[earlier.model_stage, task.model_stage]
                    self.model.addCons(begin[task.name] >= done - slack)
        self.model.setObjective(step + TIE * quicksum(seconds.values()), "minimize")
