"""`nereus bench dag`: how long it takes to plan a transition of a PPO job, and how good its schedule is.

For each pool, pairs of plans as the planner makes them: for responses of random lengths, on pools that have lost random
nodes, any of the five best. A pair is planned warm (what depends only on states and pairs of layouts is kept in the
profiles, as in a running job) and cold (from the list of tensors). Its schedule is held against the best lower bound that
SCIP, CP-SAT or the busiest GPU gives for the same primitives (`bench_dag_solvers`).
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nereus.cli.bench import machine
from nereus.cli.bench_dag_solvers import (
    Bound,
    Instance,
    instances_of,
    solve_with_cp_sat,
    solve_with_scip,
    trivial_bound_s,
)
from nereus.cli.bench_planner import default_problem
from nereus.core.inventory import cluster_of
from nereus.core.plan import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    REFERENCE_INFERENCE,
    REWARD_INFERENCE,
    ModelStage,
    Plan,
)
from nereus.core.shapes import ModelShape, state_spec
from nereus.core.sharding import StateSpec
from nereus.planner.choice import choose
from nereus.planner.problem import GpuPool, Problem
from nereus.transition.dag import InfeasibleTransition, TransitionDag
from nereus.transition.plan import plan_transition
from nereus.transition.profile import StateProfile
from nereus.transition.rates import Rates

POOLS = (32, 64, 128, 256, 512, 1024, 4096, 16384)
AIMS_MS = {1024: 1.2, 16384: 20.0}
AIM_GAP_MEAN_PCT, AIM_GAP_MAX_PCT = 2.0, 6.9
LARGEST_SOLVED = 1024
"""GPUs of the largest pool that SCIP is given; CP-SAT gets larger ones where the optimum is open."""
HORIZON = 1.01
"""Solvers look no further than this times the engine's own schedule."""
PROVEN = 1e-4
"""Relative; solvers work with tolerances, CP-SAT in whole microseconds."""

Say = Callable[[str], None]
Solver = Callable[[Instance, float, float], Bound]
Profiles = Mapping[ModelStage, StateProfile]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A current and a target plan. usable_bytes: of a GPU."""

    current: Plan
    target: Plan
    usable_bytes: float


def job_specs(model: str) -> dict[ModelStage, StateSpec]:
    """The states of a PPO job whose models all have this shape; trained ones with 14 bytes a parameter."""
    shape = ModelShape.named(model)
    scalar = shape.with_scalar_head()
    return {
        ACTOR_GENERATION: state_spec(shape, trained=False),
        REFERENCE_INFERENCE: state_spec(shape, trained=False),
        REWARD_INFERENCE: state_spec(scalar, trained=False),
        ACTOR_TRAINING: state_spec(shape, master_weights=True),
        CRITIC_TRAINING: state_spec(scalar, master_weights=True),
    }


def random_pairs(gpus: int, count: int, *, device: str, model: str, seed: int = 0) -> Iterator[Pair]:
    """Plans that the planner makes one after the other as lengths and nodes change."""
    rng = random.Random(seed + gpus)
    for _ in range(count):
        first = _random_problem(rng, gpus, device, model)
        second = _random_problem(rng, gpus, device, model)
        current = _one_of_the_best(rng, first, None)
        yield Pair(current=current, target=_one_of_the_best(rng, second, current), usable_bytes=second.usable_bytes)


def _random_problem(rng: random.Random, gpus: int, device: str, model: str) -> Problem:
    problem = default_problem(gpus, device=device, model=model, response_length=2 ** rng.uniform(8, 13.5))
    nodes = problem.pool.nodes
    lost = rng.sample(range(len(nodes)), rng.choice([0, 0, min(1, len(nodes) - 1), len(nodes) // 4]))
    kept = tuple(node for i, node in enumerate(nodes) if i not in lost)
    return replace(problem, pool=GpuPool(nodes=kept, gpus_per_node=problem.pool.gpus_per_node))


def _one_of_the_best(rng: random.Random, problem: Problem, current: Plan | None) -> Plan:
    choice = choose(
        problem.tables, problem.pool, problem.graph, capacity_bytes=problem.capacity_bytes, current=current, k=5
    )
    return rng.choice(choice.plans).plan


def bench_dag(
    pools: Sequence[int] = POOLS,
    *,
    device: str = "A100-80GB",
    model: str = "Llama-3.1-8B",
    pairs: int = 10,
    repeats: int = 9,
    solver_limit_s: float = 5.0,
    say: Say = print,
) -> dict[str, Any]:
    """The bench: {bench, machine, rows, summary}. solver_limit_s: of each solver on each pair; 0 leaves them out."""
    specs = job_specs(model)
    solvers, notes = _solvers() if solver_limit_s > 0 else ({}, [])
    for note in notes:
        say(note)
    rows = []
    for gpus in pools:
        cluster = cluster_of(device, gpus)
        bench = _PoolBench(
            specs=specs,
            profiles={m: StateProfile.of(spec) for m, spec in specs.items()},
            node_of=np.arange(gpus) // cluster.gpus_per_node,
            rates=Rates.of(cluster),
            repeats=repeats,
            solvers=solvers,
            limit_s=solver_limit_s,
        )
        row = bench.row(list(random_pairs(gpus, pairs, device=device, model=model)))
        rows.append(row)
        say(
            "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
    return {"bench": "dag", "machine": machine(), "rows": rows, "summary": _summary(rows, notes)}


def _solvers() -> tuple[dict[str, Solver], list[str]]:
    """Those that are installed, and a note on each that is not."""
    found: dict[str, Solver] = {}
    notes = []
    try:
        import pyscipopt  # noqa: F401

        found["scip"] = solve_with_scip
    except ImportError:
        notes.append("SCIP is left out: PySCIPOpt is not installed (pip install 'nereus-rl[bench]')")
    try:
        import ortools  # noqa: F401

        found["cp_sat"] = solve_with_cp_sat
    except ImportError:
        notes.append("CP-SAT is left out: OR-tools is not installed (pip install 'nereus-rl[bench]')")
    return found, notes


@dataclass(frozen=True, slots=True, kw_only=True)
class _PoolBench:
    """All pairs of one pool."""

    specs: Mapping[ModelStage, StateSpec]
    profiles: Profiles
    node_of: Any
    rates: Rates
    repeats: int
    solvers: Mapping[str, Solver]
    limit_s: float

    def row(self, pairs: Sequence[Pair]) -> dict[str, Any]:
        found = [measured for pair in pairs if (measured := self.measure(pair)) is not None]
        row: dict[str, Any] = {
            "gpus": len(self.node_of),
            "pairs": len(found),
            "infeasible": len(pairs) - len(found),
            "proven": sum(m["proven"] for m in found),
        }
        for name in ("plan_ms", "plan_least_ms", "plan_cpu_ms", "cold_ms"):
            row[name] = statistics.median(m[name] for m in found)
        row["plan_max_ms"] = max(m["plan_ms"] for m in found)
        row["gap_mean_pct"] = statistics.mean(m["gap_pct"] for m in found)
        row["gap_max_pct"] = max(m["gap_pct"] for m in found)
        for name in ("solver_ms", *(f"{solver}_ms" for solver in self.solvers)):
            times = [m[name] for m in found if name in m]
            row[name] = statistics.mean(times) if times else None
        row["with_edges"] = sum(m["edges"] > 0 for m in found)
        row["primitives"] = statistics.mean(m["primitives"] for m in found)
        row["transition_s"] = statistics.mean(m["seconds"] for m in found)
        return row

    def measure(self, pair: Pair) -> dict[str, Any] | None:
        """None where the transition does not fit."""
        try:
            dag = self.plan(pair, self.profiles)
        except InfeasibleTransition:
            return None
        times, cpu = zip(*(_timed(lambda: self.plan(pair, self.profiles)) for _ in range(self.repeats)), strict=True)
        cold, _ = _timed(lambda: self.plan(pair, {m: StateProfile.of(spec) for m, spec in self.specs.items()}))
        return {
            "plan_ms": statistics.median(times) * 1e3,
            "plan_least_ms": min(times) * 1e3,
            "plan_cpu_ms": min(cpu) * 1e3,
            "cold_ms": cold * 1e3,
            "edges": len(dag.edges),
            "primitives": sum(g.num_parts for g in dag.groups),
            "seconds": dag.seconds,
            **self.quality(dag, pair.usable_bytes),
        }

    def plan(self, pair: Pair, profiles: Profiles) -> TransitionDag:
        return plan_transition(
            profiles,
            pair.current,
            pair.target,
            node_of=self.node_of,
            rates=self.rates,
            usable_bytes=pair.usable_bytes,
        )

    def quality(self, dag: TransitionDag, usable_bytes: float) -> dict[str, Any]:
        """The schedule against the best bound. solver_ms: of the solver that was quicker."""
        best, shortest, spent = trivial_bound_s(dag), dag.seconds, {}
        open_ = best * (1 + PROVEN) < dag.seconds
        small = len(self.node_of) <= LARGEST_SOLVED
        solvers = {name: solve for name, solve in self.solvers.items() if small or (open_ and name != "scip")}
        instances = instances_of(dag, usable_bytes) if solvers else []
        for name, solve in solvers.items():
            bounds = [solve(instance, dag.seconds * HORIZON, self.limit_s) for instance in instances]
            best = max([best, *(b.bound_s for b in bounds)])
            if all(b.found_s is not None for b in bounds):
                shortest = min(shortest, max((b.found_s or 0.0 for b in bounds), default=0.0))
            spent[f"{name}_ms"] = sum(b.seconds for b in bounds) * 1e3
        best = min(best, shortest)  # within the solvers' tolerances
        return {
            "gap_pct": 100 * (dag.seconds / best - 1) if best > 0 else 0.0,
            "proven": shortest <= best * (1 + PROVEN),
            **({"solver_ms": min(spent.values())} if spent else {}),
            **spent,
        }


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """(seconds, seconds of the processor)"""
    gc.collect()
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - cpu


def _summary(rows: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> dict[str, Any]:
    by_gpus = {row["gpus"]: row for row in rows}
    pairs = sum(row["pairs"] for row in rows)
    return {
        "aims_ms": {
            str(g): {"aim": aim, "plan_ms": by_gpus[g]["plan_ms"]} for g, aim in AIMS_MS.items() if g in by_gpus
        },
        "pairs": pairs,
        "proven": sum(row["proven"] for row in rows),
        "gap_mean_pct": sum(row["gap_mean_pct"] * row["pairs"] for row in rows) / pairs,
        "gap_mean_aim_pct": AIM_GAP_MEAN_PCT,
        "gap_max_pct": max(row["gap_max_pct"] for row in rows),
        "gap_max_aim_pct": AIM_GAP_MAX_PCT,
        "times_faster_than_scip": {str(r["gpus"]): r["scip_ms"] / r["plan_ms"] for r in rows if r.get("scip_ms")},
        "notes": list(notes),
    }
