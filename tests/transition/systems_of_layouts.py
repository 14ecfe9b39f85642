"""A small decoder as three systems lay it out on their ranks, each in two ways that share no code.

    shards(...)    local tensors, made of whole ones as the system's own loader makes them: chunk, view, cat, pad
    maps(...)      what an adapter would say: for every local tensor the logical one, and which of its rows are where

Logical tensors: query, key and value rows one after the other, gate and up rows too; an unpadded vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from row_maps import Rows as RowMap
from row_maps import held_intervals, padded_rows, qkv_rows_by_group, rows_of

from nereus.core.sharding import Cut, Holding, Segment, StateSpec, TensorSpec

Tensors = dict[str, torch.Tensor]
Maps = dict[str, tuple[str, RowMap]]
"""By local name: the logical tensor, and its rows along the cut dimension."""

LAYERS, HIDDEN, HEADS, KV, DIM, MLP, VOCAB = 5, 2, 8, 4, 3, 16, 131
QKV = Cut(0, (Segment(HEADS * DIM, HEADS, HEADS), Segment(KV * DIM, KV, HEADS), Segment(KV * DIM, KV, HEADS)))
HALVES = Cut(0, (Segment.rows(MLP), Segment.rows(MLP)))


def _specs() -> StateSpec:
    found = [_spec("embed", (VOCAB, HIDDEN), "ends", -1, Cut(0, (Segment.rows(VOCAB),)))]
    for layer in range(LAYERS):
        for name, shape, cut in (
            ("norm", (HIDDEN,), None),
            ("qkv", ((HEADS + 2 * KV) * DIM, HIDDEN), QKV),
            ("o", (HIDDEN, HEADS * DIM), Cut(1, (Segment(HEADS * DIM, HEADS, HEADS),))),
            ("gate_up", (2 * MLP, HIDDEN), HALVES),
            ("down", (HIDDEN, MLP), Cut(1, (Segment.rows(MLP),))),
        ):
            found.append(_spec(f"{layer}.{name}", shape, "layer", layer, cut))
    found.append(_spec("final", (HIDDEN,), "last", -1, None))
    return StateSpec(tuple(found), LAYERS)


def _spec(name: str, shape: tuple[int, ...], where: str, layer: int, cut: Cut | None) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype="float32", where=where, layer=layer, cut=cut)  # type: ignore[arg-type]


SPEC = _specs()
SPECS = SPEC.by_name()


def whole_tensors() -> Tensors:
    """No value twice; none is zero, which is what systems pad with."""
    found, first = {}, 1
    for spec in SPEC.tensors:
        count = spec.num_bytes // 4
        found[spec.name] = torch.arange(first, first + count, dtype=torch.float32).view(spec.shape)
        first += count
    return found


def local_shape(name: str, rows: RowMap) -> tuple[int, ...]:
    """Of a local tensor with these rows of a logical one."""
    spec = SPECS[name]
    return (*spec.shape[: spec.dim], len(rows), *spec.shape[spec.dim + 1 :])


@dataclass(frozen=True)
class System(ABC):
    """layers: of every pp_stage."""

    tp: int
    layers: tuple[range, ...]

    @property
    def pp(self) -> int:
        return len(self.layers)

    def positions(self) -> list[tuple[int, int]]:
        """(pp_stage, tp_rank), in rank order."""
        return [(stage, rank) for stage in range(self.pp) for rank in range(self.tp)]

    @abstractmethod
    def shards(self, whole: Mapping[str, torch.Tensor], stage: int, rank: int) -> Tensors: ...

    @abstractmethod
    def maps(self, stage: int, rank: int) -> Maps: ...

    def holdings(self) -> dict[int, Holding]:
        """What the planner is told, by rank."""
        return {
            gpu: {name: held_intervals(rows) for name, rows in self.maps(*at).values()}
            for gpu, at in enumerate(self.positions())
        }

    def __str__(self) -> str:
        return f"{type(self).__name__} tp{self.tp} layers {[len(stage) for stage in self.layers]}"

    def _whole(self, name: str) -> RowMap:
        return rows_of(((0, SPECS[name].length),))

    def _cut(self, name: str, rank: int) -> RowMap:
        return rows_of(SPECS[name].intervals(self.tp, rank))


class Ours(System):
    """Intervals of the logical tensors; embeddings of a vocabulary that tp need not divide."""

    def shards(self, whole: Mapping[str, torch.Tensor], stage: int, rank: int) -> Tensors:
        found = {}
        for name in self.maps(stage, rank):
            dim, held = SPECS[name].dim, SPECS[name].intervals(self.tp, rank)
            parts = [whole[name].narrow(dim, start, stop - start) for start, stop in held]
            found[name] = torch.cat(parts, dim) if parts else whole[name].narrow(dim, 0, 0)
        return found

    def maps(self, stage: int, rank: int) -> Maps:
        held = [s for s in SPEC.tensors if s.on_pp_stage(LAYERS, self.pp, stage)]
        return {s.name: (s.name, self._cut(s.name, rank)) for s in held}


class Megatron(System):
    """megatron-core, Megatron-LM's vocabulary: names count from the pp_stage's first layer; embeddings twice if pp > 1."""

    def shards(self, whole: Mapping[str, torch.Tensor], stage: int, rank: int) -> Tensors:
        def part(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
            return tensor.chunk(self.tp, dim)[rank]

        found = {}
        for number, layer in enumerate(self.layers[stage]):
            at = f"decoder.layers.{number}"
            q, k, v = whole[f"{layer}.qkv"].split([HEADS * DIM, KV * DIM, KV * DIM])
            groups = torch.cat([w.view(KV, -1, DIM, HIDDEN) for w in (q, k, v)], 1)
            gate, up = whole[f"{layer}.gate_up"].chunk(2)
            found[f"{at}.input_layernorm"] = whole[f"{layer}.norm"]
            found[f"{at}.linear_qkv"] = part(groups.reshape(-1, HIDDEN))
            found[f"{at}.linear_proj"] = part(whole[f"{layer}.o"], 1)
            found[f"{at}.linear_fc1"] = torch.cat([part(gate), part(up)])
            found[f"{at}.linear_fc2"] = part(whole[f"{layer}.down"], 1)
        padded = F.pad(whole["embed"], (0, 0, 0, -VOCAB % (128 * self.tp)))
        if stage == 0:
            found["embedding"] = part(padded)
        if stage == self.pp - 1:
            found["final_layernorm"] = whole["final"]
            if self.pp > 1:
                found["output_layer"] = part(padded)
        return found

    def maps(self, stage: int, rank: int) -> Maps:
        found: Maps = {}
        for number, layer in enumerate(self.layers[stage]):
            at = f"decoder.layers.{number}"
            found[f"{at}.input_layernorm"] = f"{layer}.norm", self._whole(f"{layer}.norm")
            found[f"{at}.linear_qkv"] = f"{layer}.qkv", qkv_rows_by_group(HEADS, KV, DIM, self.tp, rank)
            for local, name in (("linear_proj", "o"), ("linear_fc1", "gate_up"), ("linear_fc2", "down")):
                found[f"{at}.{local}"] = f"{layer}.{name}", self._cut(f"{layer}.{name}", rank)
        vocabulary = padded_rows(VOCAB, 128 * self.tp, self.tp, rank)
        if stage == 0:
            found["embedding"] = "embed", vocabulary
        if stage == self.pp - 1:
            found["final_layernorm"] = "final", self._whole("final")
            if self.pp > 1:
                found["output_layer"] = "embed", vocabulary
        return found


class Vllm(System):
    """vLLM: [Q_r | K_r | V_r] with shared KV heads, merged gate and up, a vocabulary padded to 64; global layer names."""

    def shards(self, whole: Mapping[str, torch.Tensor], stage: int, rank: int) -> Tensors:
        def part(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
            return tensor.chunk(self.tp, dim)[rank]

        found = {}
        for layer in self.layers[stage]:
            q, k, v = whole[f"{layer}.qkv"].split([HEADS * DIM, KV * DIM, KV * DIM])
            kv_parts = min(KV, self.tp)
            k, v = (w.chunk(kv_parts)[rank // (self.tp // kv_parts)] for w in (k, v))
            gate, up = whole[f"{layer}.gate_up"].chunk(2)
            found[f"{layer}.input_layernorm"] = whole[f"{layer}.norm"]
            found[f"{layer}.qkv_proj"] = torch.cat([part(q), k, v])
            found[f"{layer}.o_proj"] = part(whole[f"{layer}.o"], 1)
            found[f"{layer}.gate_up_proj"] = torch.cat([part(gate), part(up)])
            found[f"{layer}.down_proj"] = part(whole[f"{layer}.down"], 1)
        if stage in (0, self.pp - 1):
            found["embed_tokens"] = part(F.pad(whole["embed"], (0, 0, 0, -VOCAB % 64)))
        if stage == self.pp - 1:
            found["norm"] = whole["final"]
        return found

    def maps(self, stage: int, rank: int) -> Maps:
        found: Maps = {}
        names = {
            "o_proj": "o",
            "gate_up_proj": "gate_up",
            "down_proj": "down",
            "qkv_proj": "qkv",
            "input_layernorm": "norm",
        }
        for layer in self.layers[stage]:
            for local, name in names.items():
                found[f"{layer}.{local}"] = f"{layer}.{name}", self._cut(f"{layer}.{name}", rank)
        if stage in (0, self.pp - 1):
            found["embed_tokens"] = "embed", padded_rows(VOCAB, 64, self.tp, rank)
        if stage == self.pp - 1:
            found["norm"] = "final", self._whole("final")
        return found
