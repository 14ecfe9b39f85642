"""Which part of every logical tensor each GPU holds under a placement, and what must move to get to another one.

A logical tensor (`TensorSpec`) is cut over pp by the layer that it belongs to and over tp along one dimension.
Cuts are described by the thing that is dealt out, not by sizes: a `Segment` is a run of equal `blocks` (heads, or
single rows) that are read by `readers` (query heads, or the same rows). Readers are dealt out evenly; a rank holds
every block that one of its readers reads. One rule thus covers plain dimensions (also where tp does not divide
them, or is larger), whole heads, KV heads shared by several ranks, and fused tensors (one segment per part):

    q_proj   Segment(size=12*64, blocks=12, readers=12)     tp 4: heads 0-2 | 3-5 | 6-8 | 9-11
    k_proj   Segment(size= 2*64, blocks= 2, readers=12)     tp 4: head  0   | 0   | 1   | 1      (replicated)
    up_proj  Segment(size=1536,  blocks=1536, readers=1536) tp 4: rows 0-383 | ...

`plan_moves` compares two sets of holdings. Each GPU receives exactly the regions it needs and does not hold, each
element once, from the nearest holder that has least to send; what it holds already is copied in place.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Literal

from nereus.core.errors import StateError
from nereus.core.plan import Layout, Placement

Interval = tuple[int, int]
"""Half-open [start, stop) along a tensor's cut dimension, in logical indices."""

Holding = Mapping[str, tuple[Interval, ...]]
"""What one GPU has of every tensor, by tensor name: ascending intervals, laid out one after the other locally."""

Holdings = Mapping[int, Holding]
"""What every GPU has, by device id."""

SMALL = 8
"""What is this many times less than the largest thing that a GPU receives does not decide from whom."""

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4}


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a dimension that is dealt out over tp on its own.

    size: indices along the dimension. blocks: equal blocks in it, never cut inside. readers: the consumers that are
    dealt out evenly over the tp ranks, a multiple of blocks; reader i reads block i * blocks // readers.
    """

    size: int
    blocks: int
    readers: int

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.size % self.blocks or self.readers % self.blocks:
            raise ValueError(f"{self}: blocks must divide size and readers")

    @classmethod
    def rows(cls, size: int) -> Segment:
        """Every index on its own."""
        return cls(size, size, size)

    def interval(self, tp: int, tp_rank: int) -> Interval:
        """Indices that a rank holds, relative to the segment's start; empty where there are fewer readers than ranks."""
        first, last = self.readers * tp_rank // tp, self.readers * (tp_rank + 1) // tp
        if first == last:
            return 0, 0
        per_block, block_size = self.readers // self.blocks, self.size // self.blocks
        return first // per_block * block_size, -(-last // per_block) * block_size


@dataclass(frozen=True, slots=True)
class Cut:
    """How tp divides a tensor: along `dim`, each segment on its own."""

    dim: int
    segments: tuple[Segment, ...]

    def intervals(self, tp: int, tp_rank: int) -> tuple[Interval, ...]:
        """What a rank holds along `dim`: ascending, empty pieces left out, touching pieces merged."""
        found: list[Interval] = []
        offset = 0
        for segment in self.segments:
            start, stop = segment.interval(tp, tp_rank)
            if start < stop:
                found.append((offset + start, offset + stop))
            offset += segment.size
        return merge_intervals(found)


Where = Literal["layer", "first", "last", "ends", "everywhere"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One logical tensor of a model-stage's state.

    where: which pp_stages hold it: that of its `layer`; the "first" (embeddings) or "last" one (final norm, head); both
    "ends" (tied embeddings); or "everywhere" (counters).
    cut: how tp divides it; None keeps it whole on every tp rank.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    where: Where
    layer: int = -1
    cut: Cut | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.name}: dtype {self.dtype} is not one of {', '.join(ITEM_BYTES)}")
        if not self.shape:
            raise ValueError(f"{self.name}: shape () has no dimension to count regions along; a scalar is (1,)")
        if self.where == "layer" and self.layer < 0:
            raise ValueError(f"{self.name}: layer {self.layer} is not a layer")
        if self.cut is not None and self.shape[self.cut.dim] != sum(s.size for s in self.cut.segments):
            raise ValueError(f"{self.name}: segments do not add up to dimension {self.cut.dim} of {self.shape}")

    @property
    def dim(self) -> int:
        """The dimension along which regions of this tensor are counted."""
        return 0 if self.cut is None else self.cut.dim

    @property
    def length(self) -> int:
        """Indices along `dim`."""
        return self.shape[self.dim]

    @property
    def index_bytes(self) -> int:
        """Bytes of one index along `dim`."""
        return ITEM_BYTES[self.dtype] * prod(self.shape) // max(self.length, 1)

    @property
    def num_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * prod(self.shape)

    def local_shape(self, intervals: Sequence[Interval]) -> tuple[int, ...]:
        """Shape of the local tensor that holds `intervals`."""
        held = sum(stop - start for start, stop in intervals)
        return (*self.shape[: self.dim], held, *self.shape[self.dim + 1 :])

    def on_pp_stage(self, num_layers: int, pp: int, pp_stage: int) -> bool:
        """Whether a pp_stage holds this tensor."""
        if self.where == "layer":
            return self.layer in layers_of(num_layers, pp, pp_stage)
        first, last = pp_stage == 0, pp_stage == pp - 1
        return {"first": first, "last": last, "ends": first or last, "everywhere": True}[self.where]

    def intervals(self, tp: int, tp_rank: int) -> tuple[Interval, ...]:
        """What a tp rank of a pp_stage that holds this tensor has of it."""
        return ((0, self.length),) if self.cut is None else self.cut.intervals(tp, tp_rank)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """All logical tensors of a model-stage, in a fixed order, and the number of layers that pp deals out."""

    tensors: tuple[TensorSpec, ...]
    num_layers: int

    def __post_init__(self) -> None:
        twice = [name for name, count in Counter(spec.name for spec in self.tensors).items() if count > 1]
        if twice:
            raise ValueError(f"tensors named twice: {', '.join(twice)}")
        for spec in self.tensors:
            if spec.layer >= self.num_layers:
                raise ValueError(f"{spec.name}: layer {spec.layer} of {self.num_layers} is on no pp_stage")

    def by_name(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.tensors}

    @property
    def num_bytes(self) -> int:
        """Bytes of one whole copy."""
        return sum(spec.num_bytes for spec in self.tensors)

    def position_holding(self, layout: Layout, pp_stage: int, tp_rank: int) -> Holding:
        """What a position of a unit holds. A tensor with fewer readers than ranks may be there with no indices."""
        return {
            spec.name: spec.intervals(layout.tp, tp_rank)
            for spec in self.tensors
            if spec.on_pp_stage(self.num_layers, layout.pp, pp_stage)
        }

    def holdings(self, placement: Placement) -> Holdings:
        """What every GPU of a placement holds."""
        cached: dict[tuple[int, int], Holding] = {}
        found: dict[int, Holding] = {}
        for gpu, at in placement.positions():
            key = (at.pp_stage, at.tp_rank)
            if key not in cached:
                cached[key] = self.position_holding(placement.layout, *key)
            found[gpu] = cached[key]
        return found

    def holding_bytes(self, holding: Holding) -> int:
        specs = self.by_name()
        return sum(specs[n].index_bytes * (b - a) for n, pieces in holding.items() for a, b in pieces)


def layers_of(num_layers: int, pp: int, pp_stage: int) -> range:
    """The layers of a pp_stage; stages differ by at most one layer where pp does not divide."""
    return range(num_layers * pp_stage // pp, num_layers * (pp_stage + 1) // pp)


def merge_intervals(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Ascending, disjoint intervals that cover the same indices."""
    merged: list[Interval] = []
    for start, stop in sorted(i for i in intervals if i[0] < i[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def intersect(a: Sequence[Interval], b: Sequence[Interval]) -> tuple[Interval, ...]:
    """Indices in both."""
    return merge_intervals((max(s, t), min(e, f)) for s, e in a for t, f in b)


def subtract(a: Sequence[Interval], b: Sequence[Interval]) -> tuple[Interval, ...]:
    """Indices of `a` that are not in `b`."""
    left: list[Interval] = list(a)
    for start, stop in b:
        left = [piece for s, e in left for piece in ((s, min(e, start)), (max(s, stop), e)) if piece[0] < piece[1]]
    return merge_intervals(left)


def local_offset(intervals: Sequence[Interval], index: int) -> int:
    """Where a logical index lies in the local tensor that holds `intervals`."""
    offset = 0
    for start, stop in intervals:
        if start <= index < stop:
            return offset + index - start
        offset += stop - start
    raise StateError(f"index {index} is not held: {intervals}")


def elementary_intervals(pieces: Iterable[Interval]) -> tuple[Interval, ...]:
    """Cut the union of intervals at every end of any of them."""
    listed = list(pieces)
    ends = sorted({end for piece in listed for end in piece})
    covered = merge_intervals(listed)
    return tuple((a, b) for a, b in itertools.pairwise(ends) if any(s <= a and b <= e for s, e in covered))


@dataclass(frozen=True, slots=True)
class Move:
    """Indices [start, stop) of a tensor's cut dimension go from a GPU to another; to itself: a copy in place."""

    tensor: str
    source: int
    target: int
    start: int
    stop: int

    def __reduce__(self) -> tuple[type[Move], tuple[str, int, int, int, int]]:
        """Thousands of them go to devices: three times faster than what a dataclass with slots does by itself."""
        return Move, (self.tensor, self.source, self.target, self.start, self.stop)


@dataclass(frozen=True, slots=True)
class MovePlan:
    """Everything that must be copied, in the one order that all ranks follow."""

    moves: tuple[Move, ...]
    received_bytes: Mapping[int, int]
    kept_bytes: Mapping[int, int]

    @property
    def total_received_bytes(self) -> int:
        return sum(self.received_bytes.values())

    @property
    def total_kept_bytes(self) -> int:
        return sum(self.kept_bytes.values())


def plan_moves(
    spec: StateSpec,
    sources: Holdings,
    targets: Holdings,
    *,
    node_of: Callable[[int], int] = lambda gpu: 0,
    preferred: Set[int] = frozenset(),
) -> MovePlan:
    """What must be copied so that every target GPU has its holding, given what the sources hold.

    Bytes received by a GPU are the bytes that it needs and does not hold: no plan for these holdings can have less. Of
    those that hold a region the `preferred` are read, of these the ones on the reader's node, of these the one that has
    sent least. All that a reader needs of one set of holders comes from one of them, so that few GPUs have to do with each
    other; piece by piece only where the readers of a set cannot be dealt out evenly over it.
    Raises StateError, naming tensor and region, when something needed is held by no source.
    """
    wanted = list(_wanted(spec, sources, targets, preferred))
    chosen = _Sources(node_of, wanted)
    received, kept = dict.fromkeys(targets, 0), dict.fromkeys(targets, 0)
    moves: list[Move] = []
    for piece in wanted:
        source = piece.target if piece.able is None else chosen.source(piece)
        (kept if piece.able is None else received)[piece.target] += piece.num_bytes
        moves.append(Move(piece.tensor, source, piece.target, piece.start, piece.stop))
    return MovePlan(tuple(moves), received, kept)


@dataclass(slots=True)
class _Piece:
    """Something that a target needs. able: who has it; the same object for equal sets; None: the target itself."""

    tensor: str
    target: int
    start: int
    stop: int
    num_bytes: int
    able: tuple[int, ...] | None


def _wanted(spec: StateSpec, sources: Holdings, targets: Holdings, preferred: Set[int]) -> Iterator[_Piece]:
    """Tensor by tensor, target by target."""
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    for tensor in spec.tensors:
        holders = _Holders(tensor, sources, preferred, known)
        for target in sorted(targets):
            needed = targets[target].get(tensor.name, ())
            if not needed:
                continue
            own = intersect(needed, holders.held.get(target, ()))
            for start, stop in own:
                yield _Piece(tensor.name, target, start, stop, tensor.index_bytes * (stop - start), None)
            for start, stop in holders.pieces(subtract(needed, own)):
                able = holders.able(start, stop)
                yield _Piece(tensor.name, target, start, stop, tensor.index_bytes * (stop - start), able)


class _Sources:
    """Who sends what. The largest bundles (all that a reader needs of one set of holders) are dealt out first; a small one
    comes from a GPU that sends to its reader anyway, if one of its holders does."""

    def __init__(self, node_of: Callable[[int], int], wanted: Sequence[_Piece]) -> None:
        self._node_of = node_of
        self._sent: dict[int, int] = defaultdict(int)
        bundles: dict[tuple[int, int], int] = defaultdict(int)
        able: dict[int, tuple[int, ...]] = {}
        for piece in wanted:
            if piece.able is not None:
                able[id(piece.able)] = piece.able
                bundles[(id(piece.able), piece.target)] += piece.num_bytes
        self._near = {key: self._nearest(able[key[0]], key[1]) for key in bundles}
        self._readers = Counter((key[0], self._near[key]) for key in bundles)
        self._whole = self._dealt(bundles)

    def source(self, piece: _Piece) -> int:
        """Who sends a piece to its target."""
        key = (id(piece.able), piece.target)
        if key in self._whole:
            return self._whole[key]
        return self._least(self._near[key], piece.num_bytes)

    def _dealt(self, bundles: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], int]:
        found: dict[tuple[int, int], int] = {}
        senders: dict[int, set[int]] = defaultdict(set)
        most: dict[int, int] = defaultdict(int)
        for (_, target), size in bundles.items():
            most[target] = max(most[target], size)
        for key, size in sorted(bundles.items(), key=lambda item: (-item[1], item[0][1])):
            target, near = key[1], self._near[key]
            already = tuple(gpu for gpu in near if gpu in senders[target]) if size * SMALL <= most[target] else ()
            if already or self._readers[(key[0], near)] % len(near) == 0:
                found[key] = self._least(already or near, size)
                senders[target].add(found[key])
        return found

    def _nearest(self, able: tuple[int, ...], target: int) -> tuple[int, ...]:
        node = self._node_of(target)
        return tuple(gpu for gpu in able if self._node_of(gpu) == node) or able

    def _least(self, among: Sequence[int], num_bytes: int) -> int:
        source = min(among, key=lambda gpu: (self._sent[gpu], gpu))
        self._sent[source] += num_bytes
        return source


class _Holders:
    """Who has which regions of one tensor. known: sets of GPUs, so that equal ones are one object."""

    def __init__(
        self,
        tensor: TensorSpec,
        sources: Holdings,
        preferred: Set[int],
        known: dict[tuple[int, ...], tuple[int, ...]],
    ) -> None:
        self.held = {gpu: held[tensor.name] for gpu, held in sources.items() if tensor.name in held}
        self._name, self._preferred, self._known = tensor.name, preferred, known
        self._ends = sorted({end for held in self.held.values() for piece in held for end in piece})
        self._able: dict[Interval, tuple[int, ...]] = {}

    def pieces(self, missing: Sequence[Interval]) -> list[Interval]:
        """Cut regions so that each piece lies inside or outside of every holder's intervals."""
        found: list[Interval] = []
        for start, stop in missing:
            inner = self._ends[bisect_right(self._ends, start) : bisect_left(self._ends, stop)]
            found += itertools.pairwise([start, *inner, stop])
        return found

    def able(self, start: int, stop: int) -> tuple[int, ...]:
        """The GPUs that a piece can be read from."""
        able = self._able.get((start, stop))
        if able is None:
            holding = [gpu for gpu, held in self.held.items() if any(s <= start and stop <= e for s, e in held)]
            able = tuple(gpu for gpu in holding if gpu in self._preferred) or tuple(holding)
            able = self._able[(start, stop)] = self._known.setdefault(able, able)
        if not able:
            raise StateError(
                f"{self._name}[{start}:{stop}] is held by no device: {sorted(self.held)} hold parts of this tensor"
            )
        return able
