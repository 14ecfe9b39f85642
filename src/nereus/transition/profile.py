"""The bytes of a state by position, without going through its tensors: what the estimates of a transition are made of.

Tensors that tp cuts alike are one class, and places along pp are slots: the layers, then "first", "last", "ends" and
"everywhere". Of class c, a slot weighs so many bytes an index; two positions have in common

    sum over classes  (bytes an index of the slots that both pp_stages hold)  x  (indices that both tp ranks hold)

which is exact, and a few small matrix products for all pairs of positions of two layouts at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nereus.core.plan import Layout
from nereus.core.sharding import Cut, Interval, StateSpec, TensorSpec, intersect, layers_of, subtract

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PLACES = ("first", "last", "ends", "everywhere")
"""Slots after the layers."""


@dataclass(frozen=True, slots=True)
class Common:
    """What each position of a new layout has in common with each of an old one, [new.size, old.size] bytes, tp fastest.

    held: both have it. adopted: the part of it in tensors of which both have the very same intervals: such a tensor goes
    over to the new unit as it is, without a copy. lacking[:, j]: what old position j is the first to have of it; rows
    add up to the bytes of the new position.
    wants, has: [pairs] the pairs of positions for which `lacking` is not zero.
    """

    held: Floats
    adopted: Floats
    lacking: Floats
    wants: Ints
    has: Ints


@dataclass(frozen=True, eq=False)
class StateProfile:
    """A `StateSpec` in few numbers. weights: [classes, slots] bytes of one index along the cut."""

    num_layers: int
    cuts: tuple[Cut | None, ...]
    lengths: tuple[int, ...]
    weights: Floats
    _pairs: dict[tuple[Layout, Layout], Common] = field(default_factory=dict, repr=False)
    _tp: dict[tuple[int, int], tuple[Floats, Floats, Floats]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, spec: StateSpec) -> StateProfile:
        kinds: dict[tuple[object, int], list[TensorSpec]] = {}
        for tensor in spec.tensors:
            segments = None if tensor.cut is None else tensor.cut.segments
            kinds.setdefault((segments, tensor.length if tensor.cut else 1), []).append(tensor)
        weights = np.zeros((len(kinds), spec.num_layers + len(PLACES)))
        for row, tensors in zip(weights, kinds.values(), strict=True):
            for t in tensors:
                slot = t.layer if t.where == "layer" else spec.num_layers + PLACES.index(t.where)
                row[slot] += t.index_bytes if t.cut else t.num_bytes
        cuts = tuple(tensors[0].cut for tensors in kinds.values())
        return cls(spec.num_layers, cuts, tuple(length for _, length in kinds), weights)

    @cached_property
    def num_bytes(self) -> float:
        """Of one whole copy."""
        return float((self.weights.sum(1) * np.array(self.lengths)).sum())

    def position_bytes(self, layout: Layout) -> Floats:
        """[size]: what a unit's positions hold, tp fastest."""
        return self.common(layout, layout).held.diagonal()

    def slot_bytes(self, layout: Layout) -> Floats:
        """[size, slots] what a unit's positions hold of each layer, and of the places after them."""
        tp = self._along_tp(layout.tp, layout.tp)[0].diagonal(axis1=1, axis2=2)
        found = np.einsum("cs,ps,ct->pts", self.weights, self._slots(layout.pp), tp, optimize=True)
        return np.asarray(found.reshape(layout.size, -1))

    def adopted_slot_bytes(self, new: Layout, old: Layout, new_at: Ints, old_at: Ints) -> Floats:
        """[n, slots]: `Common.adopted` of n pairs of positions, slot by slot."""
        same = self._along_tp(new.tp, old.tp)[1][:, new_at % new.tp, old_at % old.tp]
        both = self._slots(new.pp)[new_at // new.tp] * self._slots(old.pp)[old_at // old.tp]
        return np.asarray(both * (same.T @ self.weights))

    def common(self, new: Layout, old: Layout) -> Common:
        """See `Common`. Kept: there are few pairs of layouts."""
        found = self._pairs.get((new, old))
        if found is None:
            found = self._pairs[(new, old)] = self._common(new, old)
        return found

    def _common(self, new: Layout, old: Layout) -> Common:
        rows, columns, first = self._slots(new.pp), self._slots(old.pp), self._first_slots(old.pp)
        weighted = rows[:, None, :] * self.weights[None]
        both = np.einsum("pcs,qs->cpq", weighted, columns, optimize=True)
        once = np.einsum("pcs,qs->cpq", weighted, first, optimize=True)
        held, same, lacking = self._along_tp(new.tp, old.tp)

        def total(pp: Floats, tp: Floats) -> Floats:
            return np.asarray(np.einsum("cpq,ctu->ptqu", pp, tp, optimize=True).reshape(new.size, old.size))

        first_to_have = total(once, lacking)
        wants, has = np.nonzero(first_to_have)
        return Common(
            held=total(both, held),
            adopted=total(both, same),
            lacking=first_to_have,
            wants=wants,
            has=has,
        )

    def _slots(self, pp: int) -> Floats:
        """[pp, slots]: 1 where a pp_stage has a slot."""
        found = np.zeros((pp, self.num_layers + len(PLACES)))
        for pp_stage in range(pp):
            layers = layers_of(self.num_layers, pp, pp_stage)
            found[pp_stage, layers.start : layers.stop] = 1
        first, last, ends, everywhere = range(self.num_layers, self.num_layers + len(PLACES))
        found[0, first] = found[-1, last] = found[0, ends] = found[-1, ends] = 1
        found[:, everywhere] = 1
        return found

    def _first_slots(self, pp: int) -> Floats:
        """The same, with only the first pp_stage of those that have a slot."""
        slots = self._slots(pp)
        return np.asarray(slots * (np.cumsum(slots, axis=0) == 1))

    def _along_tp(self, new: int, old: int) -> tuple[Floats, Floats, Floats]:
        """[classes, new, old] indices that both have; those in equal intervals; those that `old` is the first to have."""
        found = self._tp.get((new, old))
        if found is None:
            parts = [_overlaps(cut, length, new, old) for cut, length in zip(self.cuts, self.lengths, strict=True)]
            held, same, lacking = (np.stack(part) for part in zip(*parts, strict=True))
            found = self._tp[(new, old)] = (held, same, lacking)
        return found


def _overlaps(cut: Cut | None, length: int, new: int, old: int) -> tuple[Floats, Floats, Floats]:
    def intervals(tp: int) -> list[tuple[Interval, ...]]:
        return [((0, length),) if cut is None else cut.intervals(tp, rank) for rank in range(tp)]

    wanted, sources = intervals(new), intervals(old)
    held, same, lacking = (np.zeros((new, old)) for _ in range(3))
    for i, want in enumerate(wanted):
        left: Sequence[Interval] = want
        for j, have in enumerate(sources):
            held[i, j] = _length(intersect(want, have))
            same[i, j] = held[i, j] if want == have else 0
            lacking[i, j] = _length(intersect(left, have))
            left = subtract(left, have)
    return held, same, lacking


def ordinals(keys: Ints) -> Ints:
    """[n]: how many of the earlier ones are equal. keys: not negative."""
    count = np.bincount(keys)
    found = np.empty_like(keys)
    order = np.argsort(keys.astype(np.uint16) if len(count) < 2**16 else keys, kind="stable")  # 16 bits: radix sort
    found[order] = np.arange(len(keys)) - np.repeat(np.cumsum(count) - count, count)
    return found


def _length(intervals: Sequence[Interval]) -> int:
    return sum(stop - start for start, stop in intervals)
