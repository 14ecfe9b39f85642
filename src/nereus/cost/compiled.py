"""The tasks of many candidates, ready for any lengths and any calibration.

Work is linear in a few sums of lengths, and seconds are linear in work:

    seconds [n] = (lengths [F] x 1 / efficiency [C]) @ matrix [F x C, n]

so all that depends on layouts is computed once, and what a replan needs is a product of a short vector with a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from nereus.cost import memory as mem
from nereus.cost.tasks import Cut, Lengths, TaskWork
from nereus.cost.work import PART, PARTS, Array, Work, joined

Ints = npt.NDArray[np.int64]
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates to compile. cut: their degrees along axes that broadcast to `shape`. rows [n]: which of the flattened
    product of the axes are possible."""

    cut: Cut
    shape: tuple[int, ...]
    rows: Ints

    def lengths(self, *values: float) -> Array:
        """Several lengths at once, along an axis before the others."""
        return np.array(values).reshape(-1, *(1 for _ in self.shape))

    def linear(self, found: Mapping[K, Any], bases: Sequence[int]) -> list[dict[K, Any]]:
        """What was computed for `lengths` -> the part at the first of them, which are all zero, and what one unit of each
        other adds.

        bases: for each of the others, which of the lengths it is counted from. What depends on no length adds nothing.
        """
        long = {key: values for key, values in found.items() if np.ndim(values) > len(self.shape)}
        constant = {key: long[key][0] if key in long else values for key, values in found.items()}
        grown = [{key: v[i] - v[base] for key, v in long.items()} for i, base in enumerate(bases, 1)]
        return [constant, *grown]

    def columns(self, found: Sequence[Any]) -> Any:
        """Things that broadcast to the axes -> [how many, n]."""
        whole = np.empty((len(found), *self.shape), dtype=np.result_type(*found, np.int64))
        for row, values in zip(whole, found, strict=True):
            row[...] = values
        return whole.reshape(len(found), -1)[:, self.rows]


@dataclass(frozen=True, slots=True)
class LinearTask:
    """Rows of the matrix that are not zero, in the order of `PART`. feature, index [R]: which length and class each is of.
    bounds: where each part begins, and the end."""

    matrix: Array
    feature: Ints
    index: Ints
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, parts: Sequence[Mapping[int, Any]], candidates: Candidates) -> LinearTask:
        """parts: for each feature the work of one unit of it."""
        rows = [(f, c) for f, part in enumerate(parts) for c in part]
        matrix = candidates.columns([parts[f][c] for f, c in rows])
        feature, index = np.array(rows, dtype=np.int64).T
        kept = np.flatnonzero(matrix.any(1))
        order = kept[np.argsort(PART[index[kept]], kind="stable")]
        matrix, feature, index = matrix[order], feature[order], index[order]
        bounds = tuple(np.searchsorted(PART[index], np.arange(len(PARTS) + 1)).tolist())
        return cls(matrix, feature, index, bounds)

    def seconds(self, features: Array, cost: Array) -> list[Array]:
        """Of each part of a task, [n] each."""
        weights = features[self.feature] * cost[self.index]
        return [weights[a:b] @ self.matrix[a:b] for a, b in pairwise(self.bounds)]


@dataclass(frozen=True, slots=True)
class LinearMemory:
    """Both ends of a unit. resident [2, n]; matrix [R, 2 n]: rows of (length, working kind) that are not zero."""

    resident: Array
    matrix: Array
    feature: Ints
    kind: Ints

    @classmethod
    def of(
        cls, at: Callable[[Array, Array], tuple[mem.Footprint, mem.Footprint]], candidates: Candidates
    ) -> LinearMemory:
        """at: lengths -> the two ends, for all of the axes."""
        ends = at(candidates.lengths(0, 1, 0), candidates.lengths(0, 0, 1))
        first, last = (
            candidates.linear({kind: getattr(end, name) for kind, name in enumerate(mem.WORKING_KINDS)}, (0, 0))
            for end in ends
        )
        rows = [(f, kind) for f in range(3) for kind in first[f].keys() | last[f].keys()]
        matrix = np.hstack([candidates.columns([end[f].get(kind, 0.0) for f, kind in rows]) for end in (first, last)])
        kept = matrix.any(1)
        feature, kind = np.array(rows, dtype=np.int64)[kept].T
        return cls(candidates.columns([end.resident for end in ends]), matrix[kept], feature, kind)

    def peak(self, lengths: tuple[float, float], scale: Array) -> Array:
        """Bytes on the fullest GPU, [n]. scale: of each working kind."""
        weights = np.array([1.0, *lengths])[self.feature] * scale[self.kind]
        total = self.resident + (weights @ self.matrix).reshape(self.resident.shape)
        found: Array = np.maximum(total[0], total[1])
        return found


@dataclass(frozen=True, slots=True)
class _Generation:
    """Decode steps are not linear in lengths: they are computed on the grid of tp degrees and rows, then looked up."""

    work: TaskWork
    tp: Ints
    rows: Array
    at: tuple[Ints, Ints]
    layers: Array
    heads: Array
    rest: LinearTask

    @classmethod
    def of(cls, work: TaskWork, candidates: Candidates) -> _Generation:
        cut = candidates.cut
        waves, _, rows = work.rows(cut)
        layers, heads = work.token_period(cut)
        tp, rows, layers, heads = candidates.columns([cut.tp, rows, waves * layers, waves * heads])
        tp, tp_at = np.unique(tp, return_inverse=True)
        rows, rows_at = np.unique(rows, return_inverse=True)
        prefill = work.prefill(cut, candidates.lengths(0, 1, 1), candidates.lengths(0, 0, 1))
        rest = LinearTask.of([*candidates.linear(prefill, (0, 1)), *work.decode_boundaries(cut)], candidates)
        return cls(work, tp[:, None], rows[None, :], (tp_at, rows_at), layers, heads, rest)

    def seconds(self, lengths: Lengths, cost: Array) -> list[Array]:
        prompt, going = lengths.prompt, float(lengths.going.mean())
        features = np.array([1.0, prompt, prompt * prompt / 2, lengths.steps, lengths.steps * going])
        device, host, *others = self.rest.seconds(features, cost)
        shape = np.broadcast_shapes(self.tp.shape, self.rows.shape)
        layer, head = (part.array(shape) for part in self.work.decode(self.tp, self.rows, lengths))
        both = PARTS[:2] * cost
        layers, heads = (np.tensordot(both, part, axes=1)[:, self.at[0], self.at[1]] for part in (layer, head))
        return [
            device + self.layers * layers[0] + self.heads * heads[0],
            host + self.layers * layers[1] + self.heads * heads[1],
            *others,
        ]


@dataclass(frozen=True, slots=True)
class CompiledTable:
    """All candidates of one model-stage of at most `max_gpus` GPUs."""

    max_gpus: int
    columns: Mapping[str, Any]
    tasks: Mapping[str, LinearTask | _Generation]
    weight_sync: LinearTask | None
    memory: LinearMemory
    most_resident: Array

    @classmethod
    def of(cls, work: TaskWork, candidates: Candidates, tasks: Sequence[str], max_gpus: int) -> CompiledTable:
        cut = candidates.cut
        memory = LinearMemory.of(lambda first, second: work.memory_ends(cut, first, second), candidates)
        found: dict[str, LinearTask | _Generation] = {}
        for task in tasks:
            found[task] = _Generation.of(work, candidates) if task == "generation" else _passes(work, candidates, task)
        sync = LinearTask.of([work.weight_sync(cut)], candidates) if work.stage == "generation" else None
        names = ("tp", "pp", "dp", "micro_batch", "recompute")
        columns = dict(zip(names, candidates.columns([getattr(cut, name) for name in names]), strict=True))
        columns |= {"recompute": columns["recompute"] > 0, "gpus": columns["tp"] * columns["pp"] * columns["dp"]}
        return cls(max_gpus, columns, found, sync, memory, memory.resident.max(0))

    def seconds(self, lengths: Lengths, cost: Array) -> dict[str, Array]:
        """Task name -> [n]."""
        mean, keys = lengths.mean, lengths.keys
        features = np.array([1.0, mean, mean * keys, lengths.response])
        found = {}
        for name, task in self.tasks.items():
            parts = task.seconds(lengths, cost) if isinstance(task, _Generation) else task.seconds(features, cost)
            found[name] = joined(parts)
        return found

    def weight_sync_seconds(self, cost: Array) -> Array:
        if self.weight_sync is None:
            return np.zeros(len(self.most_resident))
        found: Array = joined(self.weight_sync.seconds(np.ones(1), cost))
        return found


def _passes(work: TaskWork, candidates: Candidates, task: str) -> LinearTask:
    """Features: 1, mean length, mean length x keys, mean response."""
    cut, training = candidates.cut, task.endswith("_update")

    lengths = candidates.lengths
    passes = work.passes(cut, lengths(0, 1, 1, 0), lengths(0, 0, 1, 0), lengths(0, 0, 0, 1), training=training)
    parts = [Work(part) for part in candidates.linear(passes, (0, 1, 0))]
    if training:
        parts[0] = parts[0] + work.updates(cut)
    return LinearTask.of(parts, candidates)
