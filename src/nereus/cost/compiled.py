"""The tasks of many candidates, ready for any lengths and any calibration.

Work is linear in a few sums of lengths, and seconds are linear in work:

    seconds [n] = (lengths [F] x 1 / efficiency [C]) @ matrix [F x C, n]

so all that depends on layouts is computed once, and what a replan needs is a product of a short vector with a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from nereus.cost import memory as mem
from nereus.cost.tasks import Cut, Lengths, TaskWork
from nereus.cost.work import PART, PARTS, Array, Work, joined

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LinearTask:
    """Rows of the matrix that are not zero, in the order of `PART`. feature, index [R]: which length and class each is of.
    bounds: where each part begins, and the end."""

    matrix: Array
    feature: Ints
    index: Ints
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, parts: Sequence[Work]) -> LinearTask:
        """parts: for each feature the work [C, n] of one unit of it."""
        stacked = np.stack(parts)
        feature, index = np.nonzero((stacked != 0).any(-1))
        order = np.argsort(PART[index], kind="stable")
        feature, index = feature[order], index[order]
        bounds = tuple(np.searchsorted(PART[index], np.arange(len(PARTS) + 1)).tolist())
        return cls(np.ascontiguousarray(stacked[feature, index]), feature, index, bounds)

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
    def of(cls, at: Callable[[float, float], tuple[mem.Footprint, mem.Footprint]], n: int) -> LinearMemory:
        def kinds(first: float, second: float) -> Array:
            """[kind, 2, n]"""
            ends = at(first, second)
            return np.stack([[np.broadcast_to(getattr(end, k), n) for end in ends] for k in mem.WORKING_KINDS])

        constant = kinds(0.0, 0.0)
        parts = np.stack([constant, kinds(1.0, 0.0) - constant, kinds(0.0, 1.0) - constant])
        feature, kind = np.nonzero((parts != 0).any((-1, -2)))
        resident = np.stack([np.broadcast_to(end.resident, n) for end in at(0.0, 0.0)])
        return cls(resident, parts[feature, kind].reshape(len(feature), 2 * n), feature, kind)

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
    def of(cls, work: TaskWork, cut: Cut) -> _Generation:
        waves, _, rows = work.rows(cut)
        tp, tp_at = np.unique(cut.tp, return_inverse=True)
        kinds, rows_at = np.unique(rows, return_inverse=True)
        layers, heads = work.token_period(cut)
        nothing = work.prefill(cut, 0.0, 0.0)
        tokens = work.prefill(cut, 1.0, 0.0) - nothing
        pairs = work.prefill(cut, 1.0, 1.0) - tokens - nothing
        rest = LinearTask.of([nothing, tokens, pairs, *work.decode_boundaries(cut)])
        return cls(work, tp[:, None], kinds[None, :], (tp_at, rows_at), waves * layers, waves * heads, rest)

    def seconds(self, lengths: Lengths, cost: Array) -> list[Array]:
        prompt, going = lengths.prompt, float(lengths.going.mean())
        features = np.array([1.0, prompt, prompt * prompt / 2, lengths.steps, lengths.steps * going])
        device, host, *others = self.rest.seconds(features, cost)
        both = PARTS[:2] * cost
        layer, head = (np.tensordot(both, part, axes=1) for part in self.work.decode(self.tp, self.rows, lengths))
        layer, head = layer[:, self.at[0], self.at[1]], head[:, self.at[0], self.at[1]]
        return [
            device + self.layers * layer[0] + self.heads * head[0],
            host + self.layers * layer[1] + self.heads * head[1],
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
    def of(cls, work: TaskWork, cut: Cut, tasks: Sequence[str], max_gpus: int) -> CompiledTable:
        """cut: flat columns, [n]."""
        memory = LinearMemory.of(lambda first, second: work.memory_ends(cut, first, second), len(cut.tp))
        found: dict[str, LinearTask | _Generation] = {}
        for task in tasks:
            found[task] = _Generation.of(work, cut) if task == "generation" else _passes(work, cut, task)
        sync = LinearTask.of([work.weight_sync(cut)]) if work.stage == "generation" else None
        columns = {
            "tp": cut.tp,
            "pp": cut.pp,
            "dp": cut.dp,
            "micro_batch": cut.micro_batch,
            "recompute": cut.recompute.astype(bool),
            "gpus": cut.tp * cut.pp * cut.dp,
        }
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


def _passes(work: TaskWork, cut: Cut, task: str) -> LinearTask:
    """Features: 1, mean length, mean length x keys, mean response."""
    training = task.endswith("_update")

    def at(tokens: float, keys: float, logit_tokens: float) -> Work:
        return work.passes(cut, tokens, keys, logit_tokens, training=training)

    nothing = at(0.0, 0.0, 0.0)
    tokens = at(1.0, 0.0, 0.0) - nothing
    pairs = at(1.0, 1.0, 0.0) - tokens - nothing
    logits = at(0.0, 0.0, 1.0) - nothing
    fixed = nothing + work.updates(cut) if training else nothing
    return LinearTask.of([fixed, tokens, pairs, logits])
