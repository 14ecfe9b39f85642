"""Random states and placements, and what every GPU must hold of them.

What must be held is found here head by head and layer by layer, as lists of indices; nothing of it uses the interval
code of `nereus.core.sharding`, which these cases are there to test.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from nereus.core.plan import ACTOR_TRAINING, Layout, Placement
from nereus.core.sharding import Cut, Segment, StateSpec, TensorSpec

ITEM_SIZE = {"float32": 4, "bfloat16": 2, "int64": 8}


def dealt_to(item: int, num_items: int, num_ranks: int) -> int:
    """The rank that gets an item when items are dealt out evenly, in order."""
    return ((item + 1) * num_ranks - 1) // num_items


@dataclass(frozen=True)
class Rows:
    """Rows of a plain dimension."""

    size: int

    def segment(self) -> Segment:
        return Segment.rows(self.size)

    def held(self, tp: int, tp_rank: int) -> set[int]:
        return {row for row in range(self.size) if dealt_to(row, self.size, tp) == tp_rank}


@dataclass(frozen=True)
class Heads:
    """`kv` heads of `dim` rows that are read by `heads` query heads; query heads themselves have kv == heads."""

    heads: int
    kv: int
    dim: int

    @property
    def size(self) -> int:
        return self.kv * self.dim

    def segment(self) -> Segment:
        return Segment(self.size, self.kv, self.heads)

    def held(self, tp: int, tp_rank: int) -> set[int]:
        rows: set[int] = set()
        for head in range(self.heads):
            if dealt_to(head, self.heads, tp) == tp_rank:
                kv_head = head // (self.heads // self.kv)
                rows |= {kv_head * self.dim + d for d in range(self.dim)}
        return rows


@dataclass(frozen=True)
class Tensor:
    """A logical tensor; parts: what its cut dimension is made of, none where it is whole on every tp rank."""

    spec: TensorSpec
    parts: tuple[Rows | Heads, ...] = ()

    def held(self, num_layers: int, layout: Layout, rank: int) -> list[int] | None:
        """Indices along the cut dimension that a rank of a unit holds; None where its pp_stage has no such tensor."""
        tp_rank, pp_stage = rank % layout.tp, rank // layout.tp
        homes = {
            "layer": {dealt_to(self.spec.layer, num_layers, layout.pp)},
            "first": {0},
            "last": {layout.pp - 1},
            "ends": {0, layout.pp - 1},
            "everywhere": set(range(layout.pp)),
        }
        if pp_stage not in homes[self.spec.where]:
            return None
        if not self.parts:
            return list(range(self.spec.shape[0]))
        found: set[int] = set()
        offset = 0
        for part in self.parts:
            found |= {offset + row for row in part.held(layout.tp, tp_rank)}
            offset += part.size
        return sorted(found)


@dataclass(frozen=True)
class State:
    """A model-stage's logical state."""

    tensors: tuple[Tensor, ...]
    num_layers: int

    @property
    def spec(self) -> StateSpec:
        return StateSpec(tuple(t.spec for t in self.tensors), self.num_layers)

    def held(self, placement: Placement) -> dict[int, dict[str, list[int]]]:
        """By GPU and tensor, the indices that must be there."""
        size = placement.layout.tp * placement.layout.pp
        found: dict[int, dict[str, list[int]]] = {}
        for i, gpu in enumerate(placement.gpus):
            rows = {t.spec.name: t.held(self.num_layers, placement.layout, i % size) for t in self.tensors}
            found[gpu] = {name: held for name, held in rows.items() if held is not None}
        return found

    def logical(self) -> dict[str, np.ndarray]:
        """Whole tensors in which no value occurs twice."""
        found, first = {}, 1
        for t in self.tensors:
            count = int(np.prod(t.spec.shape))
            found[t.spec.name] = np.arange(first, first + count).reshape(t.spec.shape)
            first += count
        return found


def axis(tensor: Tensor) -> int:
    return tensor.spec.cut.dim if tensor.spec.cut is not None else 0


def index_bytes(tensor: Tensor) -> int:
    """Bytes of one index along the cut dimension."""
    others = [n for dim, n in enumerate(tensor.spec.shape) if dim != axis(tensor)]
    return ITEM_SIZE[tensor.spec.dtype] * int(np.prod(others))


def make_tensor(
    name: str, where: str, layer: int, parts: tuple[Rows | Heads, ...], dim: int, other: int, dtype: str
) -> Tensor:
    """A tensor of one or two dimensions: `parts` along `dim` (whole: six rows), `other` along the other."""
    size = sum(p.size for p in parts) or 6
    dim = dim if other and parts else 0
    shape = (size,) if not other else (size, other) if dim == 0 else (other, size)
    cut = Cut(dim, tuple(p.segment() for p in parts)) if parts else None
    return Tensor(TensorSpec(name=name, shape=shape, dtype=dtype, where=where, layer=layer, cut=cut), parts)


PARTS = st.one_of(
    st.integers(1, 9).map(Rows),
    st.builds(lambda heads, dim: Heads(heads, heads, dim), st.integers(1, 8), st.integers(1, 3)),
    st.builds(lambda kv, group, dim: Heads(kv * group, kv, dim), *[st.integers(1, 4)] * 2, st.integers(1, 3)),
)


@st.composite
def tensors(draw: st.DrawFn, name: str, num_layers: int) -> Tensor:
    where = draw(st.sampled_from(("layer", "layer", "first", "last", "ends", "everywhere")))
    layer = draw(st.integers(0, num_layers - 1)) if where == "layer" else -1
    parts = tuple(draw(st.lists(PARTS, max_size=3)))
    dtype = draw(st.sampled_from(sorted(ITEM_SIZE)))
    return make_tensor(name, where, layer, parts, draw(st.integers(0, 1)), draw(st.integers(0, 2)), dtype)


@st.composite
def states(draw: st.DrawFn, max_tensors: int = 6) -> State:
    num_layers = draw(st.integers(1, 6))
    count = draw(st.integers(1, max_tensors))
    return State(tuple(draw(tensors(f"t{i}", num_layers)) for i in range(count)), num_layers)


@st.composite
def placements(draw: st.DrawFn, pool: int = 24) -> Placement:
    """Any layout and dp that fit into devices 0..pool-1, in rank order (shuffle 0) or in any order."""
    tp = draw(st.integers(1, min(6, pool)))
    pp = draw(st.integers(1, min(4, pool // tp)))
    dp = draw(st.integers(1, min(3, pool // (tp * pp))))
    order = list(range(pool))
    if shuffle := draw(st.integers(0, 999)):
        random.Random(shuffle).shuffle(order)
    return Placement(model_stage=ACTOR_TRAINING, layout=Layout(tp, pp), dp=dp, gpus=tuple(order[: tp * pp * dp]))


def rank_order(tp: int, pp: int, dp: int, first_gpu: int = 0) -> Placement:
    gpus = tuple(range(first_gpu, first_gpu + tp * pp * dp))
    return Placement(model_stage=ACTOR_TRAINING, layout=Layout(tp, pp), dp=dp, gpus=gpus)


def transformer(
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv: int,
    head_dim: int,
    mlp: int,
    vocab: int,
    fused: bool = False,
    tied: bool = False,
) -> State:
    """Parameters of a decoder in bfloat16, master weights and both moments in float32, update counters."""
    q, k = Heads(heads, heads, head_dim), Heads(heads, kv, head_dim)
    found = [make_tensor("embed", "ends" if tied else "first", -1, (Rows(vocab),), 0, hidden, "bfloat16")]
    if not tied:
        found.append(make_tensor("lm_head", "last", -1, (Rows(vocab),), 0, hidden, "bfloat16"))
    in_layer = {"q": ((q,), 0), "k": ((k,), 0), "v": ((k,), 0), "gate": ((Rows(mlp),), 0), "up": ((Rows(mlp),), 0)}
    if fused:
        in_layer = {"qkv": ((q, k, k), 0), "gate_up": ((Rows(mlp), Rows(mlp)), 0)}
    in_layer.update({"o": ((q,), 1), "down": ((Rows(mlp),), 1)})
    for layer in range(layers):
        for name, (parts, dim) in in_layer.items():
            found.append(make_tensor(f"{layer}.{name}", "layer", layer, parts, dim, hidden, "bfloat16"))
    moments = [
        replace(t, spec=replace(t.spec, name=f"{kind}/{t.spec.name}", dtype="float32"))
        for kind in ("master", "exp_avg", "exp_avg_sq")
        for t in found
    ]
    counters = make_tensor("counters", "everywhere", -1, (), 0, 0, "int64")
    return State((*found, *moments, counters), layers)
