"""The scheduling problem of a transition as SCIP and OR-tools CP-SAT get it: a lower bound on any schedule's seconds.

One activity a primitive, with the duration, the GPUs and the memory that the engine gives it. GPUs are exclusive, a
primitive follows those of its model-stage that share a GPU with it, and on every GPU

    held + taken by what has begun - freed by what has ended <= usable        at every moment.

Reduced without changing the optimum: primitives without duration that only free go first, those that only take go last
(the target fits), GPUs on which the same happens are one, and what shares no GPU is a problem of its own.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from nereus.transition.dag import TransitionDag

TICK_S = 1e-6
GRAINS = 2**20
"""What the solvers divide a GPU's memory into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """A primitive. take_bytes, free_bytes: by GPU, at its start and at its end. after: numbers of activities."""

    number: int
    seconds: float
    take_bytes: Mapping[int, float]
    free_bytes: Mapping[int, float]
    after: tuple[int, ...]

    @property
    def gpus(self) -> frozenset[int]:
        return frozenset(self.take_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One connected problem. held_bytes: by GPU, before any of the activities."""

    activities: tuple[Activity, ...]
    held_bytes: Mapping[int, float]
    usable_bytes: float

    @property
    def pairs(self) -> list[tuple[Activity, Activity]]:
        """Activities that share a GPU, in the order of issue."""
        return [(a, b) for a, b in combinations(self.activities, 2) if a.gpus & b.gpus]

    @property
    def grain_bytes(self) -> float:
        return self.usable_bytes / GRAINS

    def tight_gpus(self) -> list[int]:
        """GPUs on which the order matters for memory."""
        most: dict[int, float] = dict(self.held_bytes)
        for activity in self.activities:
            for gpu, size in activity.take_bytes.items():
                most[gpu] += size
        return [gpu for gpu, size in most.items() if size > self.usable_bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What a solver proved in `seconds`: no schedule is shorter than bound_s; found_s: its best one, None without one."""

    bound_s: float
    found_s: float | None
    seconds: float


def instances_of(dag: TransitionDag, usable_bytes: float) -> list[Instance]:
    """The reduced problems of a transition; its own schedule and its resource edges are not part of them."""
    held = dag.held_bytes.copy()
    listed = _activities(dag)
    waited_for = {number for a in listed for number in a.after}
    activities = []
    for activity in listed:
        if activity.seconds > 0:
            activities.append(activity)
        elif not any(activity.take_bytes.values()) and not activity.after:
            for gpu, size in activity.free_bytes.items():
                held[gpu] -= size
        elif any(activity.free_bytes.values()) or activity.number in waited_for:
            activities.append(activity)
    return [_one_gpu_a_kind(part, held, usable_bytes) for part in _apart(activities)]


def _activities(dag: TransitionDag) -> list[Activity]:
    found = []
    numbers = iter(replace(dag, edges=()).primitives())
    for group in dag.groups:
        take, free = (
            dict(zip(group.gpus.tolist(), a.tolist(), strict=True)) for a in (group.take_bytes, group.free_bytes)
        )
        for _ in range(group.num_parts):
            p = next(numbers)
            mine = {gpu: take[gpu] for gpu in p.gpus}, {gpu: free[gpu] for gpu in p.gpus}
            found.append(
                Activity(number=p.number, seconds=p.seconds, take_bytes=mine[0], free_bytes=mine[1], after=p.after)
            )
    return found


def _apart(activities: Sequence[Activity]) -> list[list[Activity]]:
    """Connected by GPUs, directly or through others."""
    of_gpu: dict[int, int] = {}
    parts: dict[int, list[Activity]] = {}
    for activity in activities:
        joined = {of_gpu[gpu] for gpu in activity.gpus if gpu in of_gpu}
        merged = sorted((a for number in joined for a in parts.pop(number)), key=lambda a: a.number)
        parts[activity.number] = [*merged, activity]
        of_gpu |= {gpu: activity.number for a in parts[activity.number] for gpu in a.gpus}
    return list(parts.values())


def _one_gpu_a_kind(activities: Sequence[Activity], held: Any, usable_bytes: float) -> Instance:
    kinds: dict[object, int] = {}
    happens: dict[int, list[object]] = defaultdict(list)
    for a in activities:
        for gpu in a.gpus:
            happens[gpu].append((a.number, a.take_bytes[gpu], a.free_bytes[gpu]))
    for gpu, what in happens.items():
        kinds.setdefault((*what, float(held[gpu])), gpu)
    kept = set(kinds.values())
    numbers = {a.number for a in activities}
    return Instance(
        activities=tuple(
            replace(
                a,
                take_bytes={g: size for g, size in a.take_bytes.items() if g in kept},
                free_bytes={g: size for g, size in a.free_bytes.items() if g in kept},
                after=tuple(n for n in a.after if n in numbers),
            )
            for a in activities
        ),
        held_bytes={gpu: float(held[gpu]) for gpu in kept},
        usable_bytes=usable_bytes,
    )


def trivial_bound_s(dag: TransitionDag) -> float:
    """The busiest GPU, or the longest chain of a model-stage, without the set-up that every schedule has."""
    busy = np.zeros(len(dag.held_bytes))
    ends: dict[Any, Any] = {}
    for g in dag.groups:
        busy[g.gpus] += g.seconds[g.part]
        end = ends.setdefault(g.model_stage, np.zeros(len(busy)))
        start = np.zeros(g.num_parts)
        np.maximum.at(start, g.part, end[g.gpus])
        end[g.gpus] = (start + g.seconds)[g.part]
    return float(max(busy.max(initial=0.0), *(end.max() for end in ends.values()), 0.0))


def solve_with_scip(instance: Instance, horizon_s: float, limit_s: float) -> Bound:
    """A start an activity, a binary variable a pair that shares a GPU; building the model is not counted."""
    from pyscipopt import Model, quicksum

    model = Model("dag")
    model.hideOutput()
    model.setParam("limits/time", limit_s)
    model.setParam("parallel/maxnthreads", 1)
    starts = {a.number: model.addVar(lb=0, ub=horizon_s) for a in instance.activities}
    end = model.addVar(lb=0, ub=horizon_s)
    before: dict[tuple[int, int], Any] = {}
    for a in instance.activities:
        model.addCons(starts[a.number] + a.seconds <= end)
    for a, b in instance.pairs:
        first = 1 if a.number in b.after else model.addVar(vtype="B")
        before[a.number, b.number], before[b.number, a.number] = first, 1 - first
        model.addCons(starts[b.number] >= starts[a.number] + a.seconds - horizon_s * (1 - first))
        model.addCons(starts[a.number] >= starts[b.number] + b.seconds - horizon_s * first)
    grain = instance.grain_bytes
    for gpu in instance.tight_gpus():
        here = [a for a in instance.activities if gpu in a.gpus]
        for a in (a for a in here if a.take_bytes[gpu] > 0):
            room = instance.usable_bytes - instance.held_bytes[gpu] - a.take_bytes[gpu]
            model.addCons(
                quicksum(
                    before[b.number, a.number] * ((b.take_bytes[gpu] - b.free_bytes[gpu]) / grain)
                    for b in here
                    if b is not a
                )
                <= room / grain + 1e-6
            )
    model.setObjective(end, "minimize")
    began = time.perf_counter()
    model.optimize()
    seconds = time.perf_counter() - began
    found = float(model.getObjVal()) if model.getNSols() else None
    return Bound(bound_s=max(0.0, float(model.getDualbound())), found_s=found, seconds=seconds)


def solve_with_cp_sat(instance: Instance, horizon_s: float, limit_s: float) -> Bound:
    """Intervals without overlap on each GPU, memory as reservoirs. Rounded so that the bound stays one."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    horizon = int(np.ceil(horizon_s / TICK_S)) + 1
    length = {a.number: int(a.seconds / TICK_S) for a in instance.activities}
    starts = {a.number: model.new_int_var(0, horizon, "") for a in instance.activities}
    intervals = {n: model.new_fixed_size_interval_var(starts[n], length[n], "") for n in starts}
    end = model.new_int_var(0, horizon, "")
    for a in instance.activities:
        model.add(end >= starts[a.number] + length[a.number])
        for earlier in a.after:
            model.add(starts[a.number] >= starts[earlier] + length[earlier])
    for gpu in instance.held_bytes:
        model.add_no_overlap([intervals[a.number] for a in instance.activities if gpu in a.gpus])
    grain = instance.grain_bytes
    for gpu in instance.tight_gpus():
        here = [a for a in instance.activities if gpu in a.gpus]
        times = [starts[a.number] for a in here] + [starts[a.number] + length[a.number] for a in here]
        takes = [int(a.take_bytes[gpu] // grain) for a in here]
        frees = [-int(-(-a.free_bytes[gpu] // grain)) for a in here]
        room = int((instance.usable_bytes - instance.held_bytes[gpu]) // grain) + 1
        model.add_reservoir_constraint(times, takes + frees, -(2**40), room)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 1
    began = time.perf_counter()
    status = solver.solve(model)
    seconds = time.perf_counter() - began
    found = solver.objective_value * TICK_S if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    return Bound(bound_s=max(0.0, solver.best_objective_bound) * TICK_S, found_s=found, seconds=seconds)
