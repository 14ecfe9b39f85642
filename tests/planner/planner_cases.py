"""Random planner problems, and the answer by trying everything: every candidate on every allowed set of GPUs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from nereus.core.graph import job_graph, model_stages
from nereus.core.plan import ModelStage
from nereus.cost.model import CandidateTable
from nereus.planner.problem import GpuPool, Problem

TIE = 1e-6


def table(model_stage: ModelStage, rows: list[dict[str, float]], tasks: list[str]) -> CandidateTable:
    """A table from rows of tp, pp, dp, micro_batch, resident, working, sync and seconds by task name."""

    def column(name: str, kind: type = np.int64) -> np.ndarray:
        return np.array([row.get(name, 0) for row in rows], dtype=kind)

    return CandidateTable(
        model_stage=model_stage,
        tp=column("tp"),
        pp=column("pp"),
        dp=column("dp"),
        micro_batch=column("micro_batch"),
        recompute=column("recompute").astype(bool),
        gpus=column("tp") * column("pp") * column("dp"),
        resident_bytes=column("resident", float),
        working_bytes=column("working", float),
        seconds={name: column(name, float) for name in tasks},
        weight_sync_seconds=column("weight_sync", float),
    )


def random_problem(rng: random.Random, *, stages: int | None = None, rows: int = 3) -> Problem:
    """Small enough to try everything. Seconds and bytes are random or, as often, fall with the number of GPUs."""
    algorithm = rng.choice(["ppo", "grpo"]) if stages is None else {3: "grpo", 4: "ppo", 5: "ppo"}[stages]
    reward = rng.random() < 0.5 if stages is None else stages == 5
    graph = job_graph(algorithm, reward_model=reward)
    wanted = model_stages(graph)
    node = rng.choice([1, 2, 4, 8, 3, 6])
    full = [rng.choice([node, node, rng.randint(1, node)]) for _ in range(rng.randint(1, 3))]
    counts, total = [], 0
    for count in full:
        count = min(count, (8 if len(wanted) < 5 else 5) - total)
        if count > 0:
            counts.append(count)
            total += count
    ids = iter(rng.sample(range(40), total))
    pool = GpuPool(nodes=tuple(tuple(next(ids) for _ in range(c)) for c in counts), gpus_per_node=node)
    tables = {m: _random_table(rng, m, graph, total, rows) for m in wanted}
    tight = rng.choice([1.2, 1.5, 1.8, 2.2, 3.0, 100.0])
    return Problem(
        tables=tables, pool=pool, graph=graph, capacity_bytes=tight, headroom=0.1, asynchronous=rng.random() < 0.25
    )


def _random_table(rng: random.Random, model_stage: ModelStage, graph: tuple, total: int, rows: int) -> CandidateTable:
    cuts = [(tp, pp, dp) for tp in (1, 2, 4) for pp in (1, 2, 3) for dp in range(1, 9) if tp * pp * dp <= total]
    tasks = [t.name for t in graph if t.model_stage == model_stage and t.stage != "weight_sync"]
    smooth, found = rng.random() < 0.5, []
    for _ in range(rng.randint(1, rows)):
        tp, pp, dp = rng.choice(cuts)
        gpus = tp * pp * dp
        scale = 1 / gpus * rng.uniform(0.9, 1.2) if smooth else rng.choice([0.0, 0.5, rng.uniform(0.1, 1)])
        row = {"tp": tp, "pp": pp, "dp": dp, "micro_batch": rng.choice([1, 2, 4]), "recompute": rng.random() < 0.3}
        row |= {name: scale * rng.choice([1, 2, 5]) for name in tasks}
        row |= {"resident": rng.uniform(0.05, 0.5), "working": rng.uniform(0.05, 0.5)}
        row["weight_sync"] = rng.uniform(0, 0.3) if "generation" in tasks else 0
        found.append(row)
    return table(model_stage, found, tasks)


def allowed_sets(pool: GpuPool, gpus: int, tp: int) -> list[range]:
    """Ranges of the canonical line on which a candidate may stand, from the words of docs/planner.md."""
    sizes = [pool.gpus_per_node]
    while sizes[-1] > 1:
        sizes.append(max(d for d in range(1, sizes[-1]) if sizes[-1] % d == 0))
    chunks = []
    for node in pool.nodes:
        left = len(node)
        for size in sizes:
            chunks += [size] * (left // size)
            left %= size
    chunks.sort(reverse=True)
    inside = tp <= pool.gpus_per_node and pool.gpus_per_node % tp == 0
    end = sum(c for c in chunks if c % tp == 0) if inside else sum(chunks)
    holding = [s for s in sizes if s >= gpus and s % tp == 0]
    step = min(holding) if holding else pool.gpus_per_node
    return [range(start, start + gpus) for start in range(0, end - gpus + 1, step)]


@dataclass(frozen=True)
class Tried:
    latency_s: float
    objective_s: float
    rows: Mapping[ModelStage, int]


def try_everything(problem: Problem) -> Iterator[Tried]:
    """Every valid selection, by laying tasks one after another on explicit GPUs."""
    names = problem.model_stages
    options = []
    for m in names:
        t = problem.tables[m]
        options.append(
            [
                (row, where)
                for row in range(len(t.tp))
                for where in allowed_sets(problem.pool, int(t.gpus[row]), int(t.tp[row]))
            ]
        )
    for combination in itertools.product(*options):
        chosen = dict(zip(names, combination, strict=True))
        if _apart_or_together(problem, chosen) and _fits(problem, chosen):
            yield _run(problem, chosen)


def number_of_tries(problem: Problem) -> int:
    count = 1
    for m in problem.model_stages:
        t = problem.tables[m]
        count *= sum(len(allowed_sets(problem.pool, int(g), int(p))) for g, p in zip(t.gpus, t.tp, strict=True))
    return count


def _apart_or_together(problem: Problem, chosen: dict) -> bool:
    for (a, (_, x)), (b, (_, y)) in itertools.combinations(chosen.items(), 2):
        overlap = x.start < y.stop and y.start < x.stop
        if a.stage == b.stage and overlap and x.start != y.start:
            return False
        if problem.asynchronous and "generation" in (a.stage, b.stage) and overlap:
            return False
    return True


def _fits(problem: Problem, chosen: dict) -> bool:
    for gpu in range(problem.pool.size):
        here = [(problem.tables[m], row) for m, (row, where) in chosen.items() if gpu in where]
        if here:
            resident = sum(t.resident_bytes[row] for t, row in here)
            working = max(t.working_bytes[row] for t, row in here)
            if resident + working > problem.capacity_bytes * 0.9:
                return False
    return True


def _run(problem: Problem, chosen: dict) -> Tried:
    free = [0.0] * problem.pool.size
    end: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for task in problem.graph:  # declared in the order of the stages
        t, (row, where) = problem.tables[task.model_stage], chosen[task.model_stage]
        column = t.weight_sync_seconds if task.stage == "weight_sync" else t.seconds[task.name]
        seconds[task.name] = float(column[row])
        if problem.asynchronous and task.stage in ("generation", "weight_sync"):
            continue
        after = [end[name] for name in task.after if not (problem.asynchronous and name == "generation")]
        start = max([*after, *(free[gpu] for gpu in where)], default=0.0)
        end[task.name] = start + seconds[task.name]
        for gpu in where:
            free[gpu] = end[task.name]
    latency = max(end.values())
    if problem.asynchronous:
        latency = max(latency, seconds["generation"]) + seconds["weight_sync"]
    return Tried(latency, latency + TIE * sum(seconds.values()), {m: row for m, (row, _) in chosen.items()})


def best_by_layout(problem: Problem, distinct_in: Collection[ModelStage] | None = None) -> list[float]:
    """The least objective of each combination of layouts of some model-stages (None: the training ones), ascending."""
    best: dict[tuple, float] = {}
    for tried in try_everything(problem):
        key = tuple(
            tuple(int(column[row]) for column in (t.tp, t.pp, t.dp))
            for m, row in tried.rows.items()
            if (m.stage == "training" if distinct_in is None else m in distinct_in)
            for t in [problem.tables[m]]
        )
        best[key] = min(best.get(key, float("inf")), tried.objective_s)
    return sorted(best.values())
