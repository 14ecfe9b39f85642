"""The planner's problem as data: candidates, a pool of GPUs, a task graph, a memory cap, and what a plan costs.

A selection gives each model-stage one candidate (a row of its table) and one start on the pool's canonical line. The
step latency and the memory of a selection are defined here, once; the search must agree with `evaluate`.
docs/planner.md states the plan space in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from nereus.core.errors import PlanError
from nereus.core.graph import StepStage, StepTask, model_stages
from nereus.core.plan import ModelStage
from nereus.cost.model import CandidateTable

STAGE_ORDER: tuple[str, ...] = get_args(StepStage)
HEADROOM = 0.10
"""Share of a GPU's memory that no plan may count on (paper §4.2)."""
TIE = 1e-6
"""Weight of the summed task seconds in the objective: between plans of equal latency the one that works less wins."""


@dataclass(frozen=True, kw_only=True)
class GpuPool:
    """The GPUs that may be used, by node.

    The canonical line puts whole nodes first. A node that lost GPUs is cut into chunks, each a divisor of the node
    size; chunks follow by descending size. So every aligned range of the line lies inside a node wherever it can.

    nodes: usable device ids of each node. gpus_per_node: how many a whole node has.
    """

    nodes: tuple[tuple[int, ...], ...]
    gpus_per_node: int

    def __post_init__(self) -> None:
        if not any(self.nodes):
            raise PlanError("the pool has no GPU")
        largest = max(map(len, self.nodes))
        if largest > self.gpus_per_node:
            raise PlanError(f"a node of the pool has {largest} GPUs, but gpus_per_node={self.gpus_per_node}")

    @classmethod
    def regular(cls, num_gpus: int, gpus_per_node: int) -> GpuPool:
        """Devices 0..num_gpus-1, node after node; the last node may be incomplete."""
        starts = range(0, num_gpus, gpus_per_node)
        nodes = tuple(tuple(range(s, min(s + gpus_per_node, num_gpus))) for s in starts)
        return cls(nodes=nodes, gpus_per_node=gpus_per_node)

    def with_nodes(self, num_nodes: int) -> GpuPool:
        """This pool and so many whole nodes more, under device ids that it does not use."""
        first, per_node = max(gpu for node in self.nodes for gpu in node) + 1, self.gpus_per_node
        more = (tuple(range(first + i * per_node, first + (i + 1) * per_node)) for i in range(num_nodes))
        return GpuPool(nodes=(*self.nodes, *more), gpus_per_node=per_node)

    @cached_property
    def size(self) -> int:
        return sum(map(len, self.nodes))

    @cached_property
    def divisors(self) -> tuple[int, ...]:
        """The possible alignments, descending from the node size, each a divisor of the one before."""
        chain = [self.gpus_per_node]
        while chain[-1] > 1:
            n = chain[-1]
            chain.append(n // next(p for p in range(2, n + 1) if n % p == 0))
        return tuple(chain)

    @cached_property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """The canonical line, in pieces that lie inside one node, by descending size."""
        pieces: list[tuple[int, ...]] = []
        for node in self.nodes:
            taken = 0
            for size in self.divisors:
                while len(node) - taken >= size:
                    pieces.append(node[taken : taken + size])
                    taken += size
        return tuple(sorted(pieces, key=len, reverse=True))

    @cached_property
    def line(self) -> NDArray[np.int64]:
        """[size]: the device at each position."""
        return np.array([gpu for chunk in self.chunks for gpu in chunk], dtype=np.int64)

    @cached_property
    def is_regular(self) -> bool:
        """Whole nodes of a power of two, and nothing else: alignment then follows from the number of GPUs alone."""
        whole = all(len(node) in (0, self.gpus_per_node) for node in self.nodes)
        return whole and self.gpus_per_node & (self.gpus_per_node - 1) == 0

    def alignment(self, gpus: int, tp: int) -> int:
        """What a set's start must be a multiple of: the node, or for a smaller set the least divisor that holds it."""
        fitting = [d for d in self.divisors if d >= gpus and d % tp == 0]
        return fitting[-1] if fitting else self.gpus_per_node

    def reach(self, tp: int) -> int:
        """Where a set of this tp must end: before the chunks that are too small for a TP group."""
        if self.gpus_per_node % tp:
            return self.size  # no node can hold a TP group evenly
        return sum(len(chunk) for chunk in self.chunks if len(chunk) % tp == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What the planner decides on.

    capacity_bytes: memory of one GPU. headroom: the share of it that must stay free.
    asynchronous: generation runs on GPUs of its own, beside the training of the batch before.
    """

    tables: Mapping[ModelStage, CandidateTable]
    pool: GpuPool
    graph: tuple[StepTask, ...]
    capacity_bytes: float
    headroom: float = HEADROOM
    asynchronous: bool = False

    def __post_init__(self) -> None:
        missing = [m for m in model_stages(self.graph) if m not in self.tables]
        if missing:
            raise PlanError(f"no candidates are given for {', '.join(map(str, missing))}")

    @property
    def usable_bytes(self) -> float:
        """What the planner may fill of each GPU."""
        return self.capacity_bytes * (1 - self.headroom)

    @property
    def model_stages(self) -> tuple[ModelStage, ...]:
        return model_stages(self.graph)


def task_seconds(table: CandidateTable, task: StepTask) -> NDArray[Any]:
    """Seconds of a task, [n] over the candidates of its model-stage."""
    return table.weight_sync_seconds if task.stage == "weight_sync" else table.seconds[task.name]


@dataclass(frozen=True, slots=True)
class Choice:
    """One model-stage's part of a selection: a row of its table, on `start .. start + gpus` of the canonical line."""

    row: int
    start: int


Selection = Mapping[ModelStage, Choice]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a selection costs.

    task_seconds: each task's duration. task_start_s: when it starts within the step.
    memory_bytes: the peak of each GPU, by canonical position.
    """

    step_latency_s: float
    task_seconds: Mapping[str, float]
    task_start_s: Mapping[str, float]
    memory_bytes: NDArray[np.float64]

    def stage_seconds(self, graph: Sequence[StepTask]) -> dict[str, float]:
        """The step latency split by stage: what each stage adds to the end of those before it."""
        ends: dict[str, float] = {}
        for task in graph:
            end = self.task_start_s[task.name] + self.task_seconds[task.name]
            ends[task.stage] = max(ends.get(task.stage, 0.0), end)
        split, before = {}, 0.0
        for stage in (s for s in STAGE_ORDER if s in ends):
            split[stage] = max(0.0, ends[stage] - before)
            before = max(before, ends[stage])
        return split


def evaluate(problem: Problem, selection: Selection) -> Estimate:
    """Latency by the longest path, memory by adding up every GPU: the definition that the search is held to.

    Tasks start after those they depend on and, on every GPU they use, after those that come earlier by stage and then
    by declaration. In asynchronous mode the interval between two weight syncs is the slower side plus the sync.
    """
    spans = {m: _span(problem, m, choice) for m, choice in selection.items()}
    seconds = {
        task.name: float(task_seconds(problem.tables[task.model_stage], task)[selection[task.model_stage].row])
        for task in problem.graph
    }
    starts = _task_starts(problem, spans, seconds)
    return Estimate(
        step_latency_s=max(starts[name] + seconds[name] for name in seconds),
        task_seconds=seconds,
        task_start_s=starts,
        memory_bytes=_memory(problem, selection, spans),
    )


def _span(problem: Problem, model_stage: ModelStage, choice: Choice) -> tuple[int, int]:
    return choice.start, choice.start + int(problem.tables[model_stage].gpus[choice.row])


def _task_starts(
    problem: Problem, spans: Mapping[ModelStage, tuple[int, int]], seconds: Mapping[str, float]
) -> dict[str, float]:
    starts: dict[str, float] = {}
    done: list[StepTask] = []
    for task in sorted(problem.graph, key=lambda t: STAGE_ORDER.index(t.stage)):
        low, high = spans[task.model_stage]
        waits = [0.0]
        for earlier in done:
            if problem.asynchronous and earlier.stage == "generation" and task.stage in ("inference", "training"):
                continue  # these work on the batch before
            shares = low < spans[earlier.model_stage][1] and spans[earlier.model_stage][0] < high
            all_before = problem.asynchronous and task.stage == "weight_sync"
            if shares or all_before or earlier.name in task.after:
                waits.append(starts[earlier.name] + seconds[earlier.name])
        starts[task.name] = max(waits)
        done.append(task)
    return starts


def _memory(problem: Problem, selection: Selection, spans: Mapping[ModelStage, tuple[int, int]]) -> NDArray[np.float64]:
    resident = np.zeros(problem.pool.size)
    working = np.zeros(problem.pool.size)
    for m, choice in selection.items():
        here = slice(*spans[m])
        resident[here] += problem.tables[m].resident_bytes[choice.row]
        np.maximum(working[here], problem.tables[m].working_bytes[choice.row], out=working[here])
    return np.asarray(resident + working)
