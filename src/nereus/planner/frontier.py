"""Which candidates of a model-stage can be part of a best plan at all.

    Layouts      what follows from layouts and pool alone, of all model-stages; kept between replans
    Candidates   those that fit the memory, with their seconds and bytes
    Frontier     what is left of one model-stage

A candidate dominates another when it is no worse in GPUs, in alignment, in the seconds of every task and in bytes: put in
the other's place it takes a prefix of the same GPUs, so nothing else gets worse. For one best plan the Pareto frontier
is enough; for the k best with different layouts a candidate stays while fewer than k other layouts dominate it, the
k-skyband (Papadias et al., "Progressive skyline computation in database systems", 2005).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus.core.plan import ACTOR_GENERATION, ModelStage
from nereus.cost.model import CandidateTable
from nereus.planner.problem import TIE, GpuPool, Problem, task_seconds

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
BLOCK = 32
"""Rows compared with all others at a time: those with the lowest scores, which dominate the most."""

LATER = np.tri(BLOCK, k=-1, dtype=bool).T
"""Within a block a row may strike out only rows after it; so never itself, nor each other."""

GPUS = 0
NEEDED, RESIDENT, INFERENCE, GENERATION, EXTRA, INFERENCE_SHARE, TRAINING_SHARE, WORKING, TRAINING, SYNC = range(-10, 0)
"""Rows of `figures`. Before NEEDED: room taken in each kind of `Layouts.slots`, the first of which is single GPUs.
NEEDED: resident and working bytes. TRAINING: and, unless asynchronous, weight_sync, which SYNC is. EXTRA: TIE times all
seconds (asynchronous: and weight_sync). *_SHARE: GPU-seconds of the stage by pool size."""
FIGURES = 10
SUMS = slice(GENERATION, WORKING)
"""The rows that add up over model-stages: GENERATION, EXTRA, INFERENCE_SHARE, TRAINING_SHARE."""
ROW, LAYOUT, ALIGN, REACH = range(4)
"""Rows of `integers`: where in the table; number of the (tp, pp, dp); alignment and reach (see GpuPool)."""
STAGE_FIGURE = {"generation": GENERATION, "inference": INFERENCE, "training": TRAINING, "weight_sync": SYNC}


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """What is left of one model-stage's table. integers: [4, n]. figures: [kinds of slots + 10, n]; see above."""

    model_stage: ModelStage
    integers: Ints
    figures: Floats

    def __len__(self) -> int:
        return int(self.figures.shape[1])

    @property
    def rows(self) -> Ints:
        rows: Ints = self.integers[ROW]
        return rows

    @property
    def layouts(self) -> Ints:
        layouts: Ints = self.integers[LAYOUT]
        return layouts

    @property
    def align(self) -> Ints:
        align: Ints = self.integers[ALIGN]
        return align

    @property
    def reach(self) -> Ints:
        reach: Ints = self.integers[REACH]
        return reach

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

    def take(self, which: NDArray[Any]) -> Frontier:
        """Some of the rows."""
        integers, figures = self.integers.take(which, axis=1), self.figures.take(which, axis=1)
        return Frontier(model_stage=self.model_stage, integers=integers, figures=figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """The layouts of all candidates that the pool has room for, model-stage after model-stage: what no cost model changes.

    columns: the tables' (tp, pp, dp), from which all else follows. rows: which of each table. ends: [m + 1] where each
    model-stage begins, and the end. integers: [4, n]. slots: [s, 2] slot size and reach: sets that are aligned to it or
    more, and must end there, are counted in such slots. taken: [s, n] how many of them a set takes.
    """

    pool: GpuPool
    columns: Mapping[ModelStage, tuple[Ints, Ints, Ints]]
    rows: Mapping[ModelStage, Ints]
    ends: Ints
    integers: Ints
    slots: Ints
    taken: Floats

    @classmethod
    def of(cls, tables: Mapping[ModelStage, CandidateTable], pool: GpuPool) -> Layouts:
        """Of the tables' candidates: those that fit the pool."""
        columns = {m: (t.tp, t.pp, t.dp) for m, t in tables.items()}
        parts, rows = [], {}
        for m, t in tables.items():
            align, reach = _geometry(pool, t.gpus, t.tp)
            inside = np.flatnonzero(t.gpus <= reach)
            packed = (t.tp << 42) | (t.pp << 21) | t.dp
            parts.append(np.stack([packed, align, reach, t.gpus])[:, inside])
            rows[m] = inside
        ends = np.cumsum([0, *map(len, rows.values())])
        packed, align, reach, gpus = np.concatenate(parts, axis=1)
        integers = np.stack([np.concatenate(list(rows.values())), packed, align, reach])
        slots = _slots(pool, gpus, align, reach)
        size, limit = slots[:, :1], slots[:, 1:]
        taken = np.where((align >= size) & (reach <= limit), -(-gpus // size), 0.0)
        return cls(pool=pool, columns=columns, rows=rows, ends=ends, integers=integers, slots=slots, taken=taken)

    def still_hold(self, tables: Mapping[ModelStage, CandidateTable], pool: GpuPool) -> bool:
        """Whether these are the layouts of these tables and this pool too."""
        if list(tables) != list(self.columns) or (pool is not self.pool and pool != self.pool):
            return False
        pairs = (
            (old, new)
            for (m, t) in tables.items()
            for old, new in zip(self.columns[m], (t.tp, t.pp, t.dp), strict=True)
        )
        return all(old is new or np.array_equal(old, new) for old, new in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The candidates of all model-stages, one after another. ends, integers, figures: as in Layouts and Frontier."""

    model_stages: tuple[ModelStage, ...]
    ends: Ints
    integers: Ints
    figures: Floats

    @classmethod
    def fitting(cls, problem: Problem, layouts: Layouts) -> Candidates:
        """Those that, alone on their GPUs, fit the memory."""
        figures = np.zeros((len(layouts.slots) + FIGURES, int(layouts.ends[-1])))
        figures[: len(layouts.slots)] = layouts.taken
        parts, ends = {}, layouts.ends.tolist()
        for (m, rows), low, high in zip(layouts.rows.items(), ends, ends[1:], strict=False):
            table, part = problem.tables[m], figures[:, low:high]
            which = slice(None) if len(rows) == len(table) else rows
            part[RESIDENT], part[WORKING] = table.resident_bytes[which], table.working_bytes[which]
            parts[m] = table, part, which
        for task in problem.graph:
            if task.model_stage in parts:
                table, part, which = parts[task.model_stage]
                part[STAGE_FIGURE[task.stage]] += task_seconds(table, task)[which]
        _derive(figures, problem)
        found = cls(model_stages=tuple(layouts.rows), ends=layouts.ends, integers=layouts.integers, figures=figures)
        return found.where(figures[NEEDED] <= problem.usable_bytes)

    def where(self, which: Bools) -> Candidates:
        if which.all():
            return self
        return self.take(which.nonzero()[0])

    def take(self, which: Ints) -> Candidates:
        """Some of the rows, in ascending order."""
        integers, figures = self.integers.take(which, axis=1), self.figures.take(which, axis=1)
        ends = which.searchsorted(self.ends)
        return Candidates(model_stages=self.model_stages, ends=ends, integers=integers, figures=figures)

    @property
    def counts(self) -> Ints:
        """[m]: how many of each model-stage."""
        return np.asarray(self.ends[1:] - self.ends[:-1])

    def frontiers(self) -> dict[ModelStage, Frontier]:
        """Each model-stage's."""
        ends, found = self.ends.tolist(), {}
        for m, low, high in zip(self.model_stages, ends, ends[1:], strict=False):
            found[m] = Frontier(model_stage=m, integers=self.integers[:, low:high], figures=self.figures[:, low:high])
        return found

    def sample(self, usable_bytes: float, several: Collection[ModelStage] = (), each: int = 3) -> Candidates:
        """The fastest of each number of GPUs and memory need: few, but enough for a good first plan.

        several: model-stages of which not one but `each` is taken.
        """
        tiers, figures, counts = 3, self.figures, self.counts
        stage = np.arange(len(counts)).repeat(counts)
        tier = (figures[NEEDED] * (tiers / usable_bytes)).astype(np.int64)
        group = (stage * (1 << 40)) + figures[GPUS].astype(np.int64) * (tiers + 1) + tier
        order = np.lexsort((figures[[GENERATION, INFERENCE, TRAINING]].sum(axis=0), group))
        ordered = group[order]
        early, more = np.ones((2, len(order)), dtype=bool)
        early[1:] = ordered[1:] != ordered[:-1]
        more[each:] = ordered[each:] != ordered[:-each]
        wide = np.array([m in several for m in self.model_stages])[stage]
        return self.take(np.sort(order[early | (more & wide)]))

    def bound(self, asynchronous: bool) -> float:
        """Below which no plan's objective can be."""
        least: Floats = np.minimum.reduceat(self.figures[NEEDED:], self.ends[:-1], axis=1)
        sums = least[SUMS].sum(axis=1)
        return float(objective(sums, least[INFERENCE].max(), least[TRAINING].max(), asynchronous))

    def below(self, cutoff: float, problem: Problem) -> Candidates:
        """Those that some plan below an objective may use, whatever the other candidates are."""
        figures, left = self.figures, None
        least: Floats = np.minimum.reduceat(figures[NEEDED:], self.ends[:-1], axis=1)
        total = least[SUMS]
        sums = (total.sum(axis=1, keepdims=True) - total).repeat(self.counts, axis=1) + figures[SUMS]
        if problem.asynchronous:
            left = self._left(problem.pool.size)
            sums[2:] *= problem.pool.size / np.maximum(left, 1)
        inference = np.maximum(figures[INFERENCE], least[INFERENCE].max())
        training = np.maximum(figures[TRAINING], least[TRAINING].max())
        which: Bools = objective(sums, inference, training, problem.asynchronous) < cutoff
        if left is None:
            return self.where(which)
        found = self.where(which & (left >= 1))
        settled = found is self or not found.counts.all()
        return found if settled else found.below(cutoff, problem)  # fewer candidates bound the others more tightly

    def _left(self, size: int) -> Floats:
        """[n]: GPUs for inference and training beside this candidate, if generation has GPUs of its own; < 1: too few."""
        gpus, starts = self.figures[GPUS], self.ends[:-1]
        generation = self.model_stages.index(ACTOR_GENERATION)
        fewest = np.minimum.reduceat(gpus, starts)
        left = np.full(len(gpus), size - fewest[generation])
        left[gpus > left] = 0
        own = slice(self.ends[generation], self.ends[generation + 1])
        left[own] = size - gpus[own]
        left[own][left[own] < np.delete(fewest, generation).max()] = 0
        return left


def objective(sums: Floats, inference: Floats, training: Floats, asynchronous: bool) -> Floats:
    """From sums (`SUMS`) and the longest chains; no stage is shorter than its share of GPU-seconds."""
    generation, extra, inference_share, training_share = sums
    others = np.maximum(inference, inference_share) + np.maximum(training, training_share)
    step: Floats = np.maximum(generation, others) if asynchronous else generation + others
    return np.asarray(step + extra)


def _derive(figures: Floats, problem: Problem) -> None:
    """Fill the rows that follow from the others."""
    size, sync = problem.pool.size, figures[SYNC]
    np.add(figures[RESIDENT], figures[WORKING], out=figures[NEEDED])
    share = figures[GPUS] / size
    np.multiply(share, figures[INFERENCE], out=figures[INFERENCE_SHARE])
    np.multiply(share, figures[TRAINING], out=figures[TRAINING_SHARE])
    np.multiply(figures[GENERATION] + figures[INFERENCE] + figures[TRAINING] + sync, TIE, out=figures[EXTRA])
    figures[EXTRA if problem.asynchronous else TRAINING] += sync


def fitting(problem: Problem, model_stage: ModelStage) -> Frontier:
    """The candidates of a model-stage that fit the pool and, alone on their GPUs, the memory."""
    layouts = Layouts.of({model_stage: problem.tables[model_stage]}, problem.pool)
    return Candidates.fitting(problem, layouts).frontiers()[model_stage]


def _geometry(pool: GpuPool, gpus: Ints, tp: Ints) -> tuple[Ints, Ints]:
    """Alignment and reach."""
    per_node = pool.gpus_per_node
    if pool.is_regular:
        # the least power of two that holds the set; never more than a node
        by_gpus = np.array([1 << max(0, n - 1).bit_length() for n in range(per_node + 1)], dtype=np.int64)
        return by_gpus[np.minimum(gpus, per_node)], np.full(len(gpus), pool.size, dtype=np.int64)
    pairs, where = np.unique(gpus * (1 << 20) + tp, return_inverse=True)
    known = [(int(p) >> 20, int(p) & ((1 << 20) - 1)) for p in pairs]
    align = np.array([pool.alignment(g, t) for g, t in known], dtype=np.int64)[where]
    return align, np.array([pool.reach(t) for _, t in known], dtype=np.int64)[where]


def _slots(pool: GpuPool, gpus: Ints, align: Ints, reach: Ints) -> Ints:
    """[s, 2] slot size and reach, the first of them a single GPU of the whole pool.

    Two disjoint sets that are aligned to a slot size do not share a slot. Without this, sets that only alignment or
    reach keeps from fitting, as 12 + 12 GPUs on three nodes of 8, would be found out one plan at a time.
    """
    uneven = [slot for slot in pool.divisors[:-1] if ((align >= slot) & (gpus % slot != 0)).any()]
    reaches = sorted(set(np.unique(reach).tolist()) - {pool.size})
    kinds = [(1, pool.size), *((slot, pool.size) for slot in uneven), *((1, least) for least in reaches)]
    kinds += [(slot, least) for slot in uneven[:1] for least in reaches]
    return np.array(kinds, dtype=np.int64)


def costs(frontier: Frontier, regular: bool) -> Floats:
    """[d, n]: everything in which a candidate can be better or worse; lower is better."""
    stages = [row for row in (GENERATION, INFERENCE, TRAINING, SYNC) if frontier.figures[row].any()]
    figures = frontier.figures[[GPUS, RESIDENT, WORKING, *stages]]
    if regular:
        return figures
    return np.concatenate([figures, frontier.align[None], -frontier.reach[None]])


def skyband(values: Floats, layouts: Ints, k: int, blocks: int | None = None) -> Ints:
    """Indices of the rows that fewer than k other layouts dominate, and no row of their own layout.

    values: [d, n], lower is better; of equal rows of one layout the first stays. Sort-filter-skyline (Chomicki et al.,
    2003): a row can only be dominated by rows of a lower score, so blocks of ascending score strike out what follows.
    blocks: after so many the rest stays unexamined.
    """
    spread = np.maximum(values.max(axis=1, initial=0.0), -values.min(axis=1, initial=0.0))
    alive = np.argsort((1 / np.where(spread > 0, spread, 1)) @ values, kind="stable")
    columns = values.take(alive, axis=1)
    seen = _Dominated(layouts[alive]) if k > 1 else None
    kept: list[Ints] = []
    while len(alive) and len(kept) != blocks:
        size = min(BLOCK, len(alive))
        better: Bools = np.logical_and.reduce(columns[:, :size, None] <= columns[:, None], axis=0)
        better[:, :size] &= LATER[:size, :size]
        struck = seen.by(better, k) if seen else np.asarray(np.logical_or.reduce(better, axis=0))
        kept.append(alive[:size][~struck[:size]])
        rest = (~struck[size:]).nonzero()[0] + size
        alive, columns = alive[rest], columns.take(rest, axis=1)
        if seen:
            seen.keep(rest)
    return np.sort(np.concatenate([*kept, alive]))


class _Dominated:
    """Which layouts dominate which of the rows that are left."""

    def __init__(self, layouts: Ints) -> None:
        names, self.layout = np.unique(layouts, return_inverse=True)
        self.by_layout = np.zeros((len(names), len(layouts)), dtype=bool)

    def by(self, better: Bools, k: int) -> Bools:
        """[n]: what is struck out once the first rows, `better` [size, n], are known to dominate too."""
        first = self.layout[: len(better)]
        order = np.argsort(first, kind="stable")
        present, starts = np.unique(first[order], return_index=True)
        self.by_layout[present] |= np.logical_or.reduceat(better[order], starts, axis=0)
        own = self.by_layout[self.layout, np.arange(len(self.layout))]
        return np.asarray(own | (self.by_layout.sum(axis=0) >= k))

    def keep(self, rest: Ints) -> None:
        self.layout, self.by_layout = self.layout[rest], self.by_layout[:, rest]


def frontier(problem: Problem, model_stage: ModelStage, k: int = 1) -> Frontier:
    """The k-skyband of a model-stage's candidates (k=1: the Pareto frontier)."""
    found = fitting(problem, model_stage)
    if not len(found):
        return found
    return found.take(skyband(costs(found, problem.pool.is_regular), found.layouts, k))
