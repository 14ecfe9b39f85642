"""Which candidates of a model-stage can be part of a best plan at all.

A candidate dominates another when it is no worse in GPUs, in alignment, in the seconds of every task and in bytes: put in
the other's place it takes a prefix of the same GPUs, so nothing else gets worse. For one best plan the Pareto frontier
is enough; for the k best with different layouts a candidate stays while fewer than k other layouts dominate it, the
k-skyband (Papadias et al., "Progressive skyline computation in database systems", 2005).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus.core.plan import ModelStage
from nereus.planner.problem import STAGE_ORDER, TIE, GpuPool, Problem, task_seconds

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
BLOCK = 48
"""Rows compared with all others at a time: those with the lowest scores, which dominate the most."""


GPUS, RESIDENT, NEEDED, INFERENCE, GENERATION, EXTRA, INFERENCE_SHARE, TRAINING_SHARE, WORKING, TRAINING, SYNC = range(
    11
)
"""Rows of `Frontier.figures`. NEEDED: resident and working bytes. TRAINING: and, unless asynchronous, weight_sync, which
SYNC is. EXTRA: TIE times all seconds (asynchronous: and weight_sync). *_SHARE: GPU-seconds of the stage by pool size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """What is left of one model-stage's table, [n] each.

    rows: where in the table. layouts: number of the (tp, pp, dp), equal for equal ones. geometry: [2, n] alignment and
    reach (see GpuPool). figures: [11, n], see above; seconds are 0 where the model-stage has no task.
    """

    model_stage: ModelStage
    rows: Ints
    layouts: Ints
    geometry: Ints
    figures: Floats

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def gpus(self) -> Floats:
        gpus: Floats = self.figures[GPUS]
        return gpus

    @property
    def resident(self) -> Floats:
        resident: Floats = self.figures[RESIDENT]
        return resident

    @property
    def working(self) -> Floats:
        working: Floats = self.figures[WORKING]
        return working

    @property
    def align(self) -> Ints:
        align: Ints = self.geometry[0]
        return align

    @property
    def reach(self) -> Ints:
        reach: Ints = self.geometry[1]
        return reach

    def take(self, which: NDArray[Any]) -> Frontier:
        """Some of the rows."""
        return Frontier(
            model_stage=self.model_stage,
            rows=self.rows[which],
            layouts=self.layouts[which],
            geometry=self.geometry[:, which],
            figures=self.figures[:, which],
        )


def fitting(problem: Problem, model_stage: ModelStage) -> Frontier:
    """The candidates that fit the pool and, alone on their GPUs, the memory."""
    table, pool = problem.tables[model_stage], problem.pool
    needed = table.resident_bytes + table.working_bytes
    rows = np.flatnonzero((table.gpus <= pool.size) & (needed <= problem.usable_bytes))
    gpus, tp = table.gpus[rows], table.tp[rows]
    geometry = _geometry(pool, gpus, tp)
    if not pool.is_regular:
        inside = gpus <= geometry[1]
        rows, gpus, tp, geometry = rows[inside], gpus[inside], tp[inside], geometry[:, inside]
    seconds = {stage: np.zeros(len(rows)) for stage in STAGE_ORDER}
    for task in problem.graph:
        if task.model_stage == model_stage:
            seconds[task.stage] += task_seconds(table, task)[rows]
    alone = problem.asynchronous
    figures = np.empty((11, len(rows)))
    figures[GPUS], figures[NEEDED] = gpus, needed[rows]
    figures[RESIDENT], figures[WORKING] = table.resident_bytes[rows], table.working_bytes[rows]
    figures[GENERATION], figures[INFERENCE] = seconds["generation"], seconds["inference"]
    figures[SYNC], figures[TRAINING] = seconds["weight_sync"], seconds["training"]
    figures[EXTRA] = TIE * sum(seconds.values())
    figures[EXTRA if alone else TRAINING] += seconds["weight_sync"]
    figures[INFERENCE_SHARE] = gpus * seconds["inference"] / pool.size
    figures[TRAINING_SHARE] = gpus * seconds["training"] / pool.size
    layouts = (tp << 42) | (table.pp[rows] << 21) | table.dp[rows]
    return Frontier(model_stage=model_stage, rows=rows, layouts=layouts, geometry=geometry, figures=figures)


def _geometry(pool: GpuPool, gpus: Ints, tp: Ints) -> Ints:
    """[2, n]: alignment and reach."""
    found = np.empty((2, len(gpus)), dtype=np.int64)
    if pool.is_regular:
        # the least power of two that holds the set; never more than a node
        found[0] = np.int64(1) << np.ceil(np.log2(np.minimum(gpus, pool.gpus_per_node))).astype(np.int64)
        found[1] = pool.size
        return found
    pairs, where = np.unique(gpus * (1 << 20) + tp, return_inverse=True)
    known = [(int(p) >> 20, int(p) & ((1 << 20) - 1)) for p in pairs]
    found[0] = np.array([pool.alignment(g, t) for g, t in known], dtype=np.int64)[where]
    found[1] = np.array([pool.reach(t) for _, t in known], dtype=np.int64)[where]
    return found


def costs(frontier: Frontier, regular: bool) -> Floats:
    """[d, n]: everything in which a candidate can be better or worse; lower is better."""
    stages = [row for row in (GENERATION, INFERENCE, TRAINING, SYNC) if frontier.figures[row].any()]
    figures = frontier.figures[[GPUS, RESIDENT, WORKING, *stages]]
    if regular:
        return figures
    return np.concatenate([figures, frontier.geometry * np.array([[1], [-1]])])


def skyband(values: Floats, layouts: Ints, k: int) -> Ints:
    """Indices of the rows that fewer than k other layouts dominate, and no row of their own layout.

    values: [d, n], lower is better; of equal rows of one layout the first stays. Sort-filter-skyline (Chomicki et al.,
    2003): a row can only be dominated by rows of a lower score, so blocks of ascending score strike out what follows.
    """
    spread = np.abs(values).max(axis=1, initial=0.0)
    order = np.argsort((1 / np.where(spread > 0, spread, 1)) @ values, kind="stable")
    names, layout = np.unique(layouts, return_inverse=True)
    alive = order
    columns = values[:, alive]
    layout = layout[alive]
    seen = np.zeros((len(names), len(alive)), dtype=bool)  # which layouts dominate which row
    kept: list[Ints] = []
    while len(alive):
        size = min(BLOCK, len(alive))
        better = np.ones((size, len(alive)), dtype=bool)
        for column in columns:
            better &= column[:size, None] <= column
        better[:, :size] &= np.tri(size, k=-1, dtype=bool).T  # only rows before; so never itself, nor each other
        struck: NDArray[np.bool_] = np.asarray(better.any(axis=0))
        if k > 1:
            by_layout = np.argsort(layout[:size], kind="stable")
            present, first = np.unique(layout[:size][by_layout], return_index=True)
            dominating: NDArray[np.bool_] = np.logical_or.reduceat(better[by_layout], first, axis=0)
            seen[present] |= dominating
            struck = seen[layout, np.arange(len(alive))] | (seen.sum(axis=0) >= k)
        kept.append(alive[:size][~struck[:size]])
        rest = np.flatnonzero(~struck[size:]) + size
        alive, columns, layout, seen = alive[rest], columns[:, rest], layout[rest], seen[:, rest]
    return np.sort(np.concatenate(kept)) if kept else np.zeros(0, dtype=np.int64)


def frontier(problem: Problem, model_stage: ModelStage, k: int = 1) -> Frontier:
    """The k-skyband of a model-stage's candidates (k=1: the Pareto frontier)."""
    found = fitting(problem, model_stage)
    if not len(found):
        return found
    return found.take(skyband(costs(found, problem.pool.is_regular), found.layouts, k))


def sample(found: Frontier, usable_bytes: float, each: int = 1, tiers: int = 3) -> Frontier:
    """The fastest candidates of each number of GPUs and memory need: few, but enough for a good first plan."""
    tier = (found.figures[NEEDED] * (tiers / usable_bytes)).astype(np.int64)
    group = found.gpus.astype(np.int64) * (tiers + 1) + tier
    order = np.lexsort((found.figures[[GENERATION, INFERENCE, TRAINING]].sum(axis=0), group))
    ordered = group[order]
    early = np.ones(len(order), dtype=bool)
    early[each:] = ordered[each:] != ordered[:-each]
    return found.take(order[early])
