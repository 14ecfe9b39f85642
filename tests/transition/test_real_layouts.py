"""The layouts of real systems: what our cuts say of them, what needs a map of rows, and state that goes between them."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_maps import (
    PADDING,
    held_intervals,
    local_rows,
    padded_rows,
    qkv_rows_by_group,
    rows_of,
    stage_layers,
)
from safetensors.torch import load_file, save_file
from systems_of_layouts import (
    DIM,
    HALVES,
    HEADS,
    KV,
    LAYERS,
    MLP,
    QKV,
    SPEC,
    SPECS,
    Megatron,
    Ours,
    System,
    Tensors,
    Vllm,
    local_shape,
    whole_tensors,
)

from nereus.core.errors import StateError
from nereus.core.plan import ACTOR_TRAINING, Layout, Placement
from nereus.core.sharding import Cut, Segment, layers_of, plan_moves
from nereus.engine.architecture import Architecture

WHOLE = whole_tensors()
UNTOUCHED = -7.0
DEGREES = (1, 2, 4, 8)


def ours(tp: int, pp: int) -> Ours:
    return Ours(tp, tuple(layers_of(LAYERS, pp, stage) for stage in range(pp)))


SYSTEMS: list[System] = [
    ours(1, 1),
    ours(3, 2),
    ours(8, 1),
    ours(2, 5),
    ours(24, 1),  # more ranks than heads, and than rows of the MLP
    Megatron(1, stage_layers(LAYERS, 1)),
    Megatron(2, stage_layers(LAYERS, 3, first=1, last=2)),
    Megatron(4, stage_layers(LAYERS, 4, first=2)),
    Megatron(8, stage_layers(LAYERS, 2, last=1)),
    Vllm(1, (range(5),)),
    Vllm(2, (range(3), range(3, 5))),
    Vllm(4, (range(1), range(1, 4), range(4, 5))),
    Vllm(8, (range(5),)),
]


# -- what a cut says ------------------------------------------------------------------------------------------------


def pieces(whole: torch.Tensor, cut: Cut | None, tp: int, rank: int) -> torch.Tensor:
    """The local tensor that a cut describes."""
    if cut is None:
        return whole
    return torch.cat([whole.narrow(cut.dim, a, b - a) for a, b in cut.intervals(tp, rank)], cut.dim)


@pytest.mark.parametrize("tp", DEGREES)
def test_cuts_are_the_layouts_of_fused_tensors_that_are_cut_part_by_part(tp: int) -> None:
    megatron, vllm = Megatron(tp, (range(LAYERS),)), Vllm(tp, (range(LAYERS),))
    for rank in range(tp):
        local = megatron.shards(WHOLE, 0, rank)
        assert torch.equal(pieces(WHOLE["3.gate_up"], HALVES, tp, rank), local["decoder.layers.3.linear_fc1"])
        assert torch.equal(pieces(WHOLE["3.norm"], None, tp, rank), local["decoder.layers.3.input_layernorm"])
        local = vllm.shards(WHOLE, 0, rank)
        assert torch.equal(pieces(WHOLE["3.qkv"], QKV, tp, rank), local["3.qkv_proj"])
        assert torch.equal(pieces(WHOLE["3.gate_up"], HALVES, tp, rank), local["3.gate_up_proj"])


@pytest.mark.parametrize("tp", DEGREES)
def test_a_cut_is_the_layout_of_qkv_by_groups_if_the_logical_tensor_is_in_that_order(tp: int) -> None:
    """A group is a block; with more ranks than groups megatron-core deals out single rows."""
    in_groups = WHOLE["3.qkv"][torch.from_numpy(qkv_rows_by_group(HEADS, KV, DIM, 1, 0))]
    rows = len(in_groups)
    cut = Cut(0, (Segment(rows, KV, KV) if tp <= KV else Segment.rows(rows),))
    for rank in range(tp):
        local = Megatron(tp, (range(LAYERS),)).shards(WHOLE, 0, rank)
        assert torch.equal(pieces(in_groups, cut, tp, rank), local["decoder.layers.3.linear_qkv"])


# -- maps of rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", SYSTEMS, ids=str)
def test_maps_say_where_the_loader_of_the_system_puts_every_row(system: System) -> None:
    for at in system.positions():
        shards, maps = system.shards(WHOLE, *at), system.maps(*at)
        assert shards.keys() == maps.keys()
        for local, (name, rows) in maps.items():
            dim, held = SPECS[name].dim, torch.from_numpy(rows)
            assert shards[local].shape == local_shape(name, rows), local
            there = shards[local].index_select(dim, (held != PADDING).nonzero()[:, 0])
            assert torch.equal(there, WHOLE[name].index_select(dim, held[held != PADDING])), local
            assert not shards[local].index_select(dim, (held == PADDING).nonzero()[:, 0]).any(), "padding is zeros"


@pytest.mark.parametrize("system", SYSTEMS, ids=str)
def test_together_the_ranks_of_a_system_hold_every_row_of_every_tensor(system: System) -> None:
    held: dict[str, set[int]] = {name: set() for name in SPECS}
    for at in system.positions():
        for name, rows in system.maps(*at).values():
            held[name] |= set(rows.tolist()) - {PADDING}
    assert held == {name: set(range(spec.length)) for name, spec in SPECS.items()}


rows_maps = st.lists(st.integers(0, 20), unique=True, max_size=12).map(lambda rows: np.array(rows, dtype=np.int64))


@settings(max_examples=100, derandomize=True, deadline=None)
@given(rows_maps, st.lists(st.integers(0, 12), max_size=4))
def test_intervals_and_places_of_rows_are_those_of_a_search(rows: np.ndarray, padded: list[int]) -> None:
    for place in padded:
        rows = np.insert(rows, min(place, len(rows)), PADDING)
    held = held_intervals(rows)
    assert sorted(set(rows.tolist()) - {PADDING}) == rows_of(held).tolist()
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(held)), "touching intervals are one"
    for start, stop in held:
        assert local_rows(rows, start, stop).tolist() == [rows.tolist().index(row) for row in range(start, stop)]
    for row in set(range(22)) - set(rows.tolist()):
        with pytest.raises(StateError, match=f"rows {row} to {row} are not all held"):
            local_rows(rows, row, row + 1)


@pytest.mark.parametrize(
    ("length", "multiple", "tp"), [(131, 128, 1), (131, 256, 2), (131, 1024, 8), (131, 64, 8), (3, 8, 8)]
)
def test_a_padded_vocabulary_smaller_than_the_ranks_or_not(length: int, multiple: int, tp: int) -> None:
    ranks = [padded_rows(length, multiple, tp, rank) for rank in range(tp)]
    assert [r for rank in ranks for r in rank.tolist() if r != PADDING] == list(range(length))
    whole = torch.arange(1.0, length + 1)
    padded = torch.nn.functional.pad(whole, (0, -length % multiple))
    for rank, part in zip(ranks, padded.chunk(tp), strict=True):
        assert [r + 1 for r in rank.tolist()] == part.tolist()


def test_what_does_not_come_out_even_is_refused() -> None:
    with pytest.raises(ValueError, match="tp=5 does not divide the 48 rows"):
        qkv_rows_by_group(8, 4, 3, 5, 0)
    with pytest.raises(ValueError, match="tp=7 does not divide 131 rows padded to 192"):
        padded_rows(131, 64, 7, 0)
    for pp, first, last in ((2, None, None), (2, 2, 2), (2, 4, 2), (1, 4, None), (4, None, 3)):
        with pytest.raises(ValueError, match=rf"5 layers.* do not divide over pp={pp}"):
            stage_layers(5, pp, first, last)


def test_layers_given_to_the_first_and_last_stage_shift_the_others() -> None:
    assert stage_layers(7, 3, first=1, last=2) == (range(0, 1), range(1, 5), range(5, 7))
    assert stage_layers(7, 3, last=1) == (range(0, 3), range(3, 6), range(6, 7))
    assert stage_layers(7, 3, first=1) == (range(0, 1), range(1, 4), range(4, 7))
    assert stage_layers(7, 2, first=3, last=4) == (range(0, 3), range(3, 7))
    assert stage_layers(6, 3) == (range(0, 2), range(2, 4), range(4, 6))


# -- from system to system ------------------------------------------------------------------------------------------


def empty(system: System) -> list[Tensors]:
    """Local tensors that nobody has written."""
    return [
        {local: torch.full(local_shape(name, rows), UNTOUCHED) for local, (name, rows) in system.maps(*at).items()}
        for at in system.positions()
    ]


def carry(source: System, has: list[Tensors], target: System) -> list[Tensors]:
    """The planner's moves, on both systems' local tensors. A logical tensor that a rank has twice is written twice."""
    into = empty(target)
    places = {s: [by_logical(s, at) for at in s.positions()] for s in (source, target)}
    for move in plan_moves(SPEC, source.holdings(), target.holdings()).moves:
        dim = SPECS[move.tensor].dim
        local, rows = places[source][move.source][move.tensor][0]
        read = has[move.source][local].index_select(dim, torch.from_numpy(local_rows(rows, move.start, move.stop)))
        for name, wanted in places[target][move.target][move.tensor]:
            at = torch.from_numpy(local_rows(wanted, move.start, move.stop))
            assert bool((into[move.target][name].index_select(dim, at) == UNTOUCHED).all()), f"{move} writes again"
            into[move.target][name].index_copy_(dim, at, read)
    return into


def by_logical(system: System, at: tuple[int, int]) -> dict[str, list[tuple[str, np.ndarray]]]:
    found: dict[str, list[tuple[str, np.ndarray]]] = {}
    for local, (name, rows) in system.maps(*at).items():
        found.setdefault(name, []).append((local, rows))
    return found


def with_padding_as(value: float, system: System, tensors: list[Tensors]) -> list[Tensors]:
    found = []
    for at, shards in zip(system.positions(), tensors, strict=True):
        copied = {name: tensor.clone() for name, tensor in shards.items()}
        for local, (name, rows) in system.maps(*at).items():
            copied[local].index_fill_(SPECS[name].dim, torch.from_numpy(np.flatnonzero(rows == PADDING)), value)
        found.append(copied)
    return found


@pytest.mark.parametrize("first", SYSTEMS, ids=str)
def test_state_goes_from_logical_to_a_system_to_any_other_and_back(first: System) -> None:
    """Every element is written once and padding never; ranks have then what the system's own loader would give them."""
    logical = ours(1, 1)
    start = [first.shards(WHOLE, *at) for at in first.positions()]
    assert same(with_padding_as(0.0, first, carry(logical, [WHOLE], first)), start)
    for second in SYSTEMS:
        wanted = [second.shards(WHOLE, *at) for at in second.positions()]
        found = carry(first, start, second)
        assert same(found, with_padding_as(UNTOUCHED, second, wanted)), f"{first} -> {second}"
    assert same(carry(first, start, logical), [WHOLE])


def same(found: list[Tensors], wanted: list[Tensors]) -> bool:
    """Names, shapes and values, rank by rank."""
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(found, wanted, strict=True)
    )


# -- the systems themselves -----------------------------------------------------------------------------------------


def run_peer(*arguments: object) -> None:
    """In a process of its own; its output is shown when it fails."""
    script = Path(__file__).with_name("peers_on_cpu.py")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *map(str, arguments)], check=True, timeout=240, env=environment
    )


def llama(**changed: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": HEADS * DIM,
        "intermediate_size": MLP,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**{**sizes, **changed}))


def test_transformers_cuts_its_model_as_our_specs_say(tmp_path: Path) -> None:
    """Its own plan, applied by itself. With more ranks than KV heads it cuts inside a head, where we share whole heads."""
    pytest.importorskip("transformers.distributed.configuration_utils")
    pytest.importorskip("accelerate")  # which transformers needs to cut a model
    model = llama()
    model.save_pretrained(tmp_path / "model")
    degrees = (2, 4)
    run_peer("transformers", tmp_path / "model", tmp_path, *degrees)
    whole, spec = dict(model.named_parameters()), Architecture(model.config, "policy").parameters
    for tp in degrees:
        for rank in range(tp):
            found = load_file(tmp_path / f"{tp}-{rank}.safetensors")
            assert found.keys() == {t.name for t in spec.tensors}
            for t in spec.tensors:
                assert torch.equal(found[t.name], pieces(whole[t.name].data, t.cut, tp, rank)), (t.name, tp, rank)
    assert sum(t.cut is not None for t in spec.tensors) == 2 * 7 + 2


MEGATRON_CASES = [
    (tp, pp, rank, first, last)
    for tp, pp, first, last in (
        *((tp, 1, None, None) for tp in DEGREES),
        (2, 3, 1, 2),
        (1, 4, 2, None),
        (2, 2, None, 1),
        (1, 5, None, None),
    )
    for rank in range(tp * pp)
]


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int, int], Tensors]:
    """megatron-core's local tensors by (tp, pp, rank), and what its first layer computes with `layer_of`'s weights."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed")
    given, found = tmp_path_factory.mktemp("given"), tmp_path_factory.mktemp("found")
    for tp, pp, rank, *_ in MEGATRON_CASES:
        if pp == 1 and tp <= KV:
            save_file({**layer_of(tp, rank), "x": inputs()}, given / f"{tp}-{pp}-{rank}.safetensors")
    sizes = {"num_layers": LAYERS, "hidden_size": HEADS * DIM, "num_attention_heads": HEADS, "num_query_groups": KV}
    told = {"sizes": {**sizes, "ffn_hidden_size": MLP}, "vocab": 1024, "cases": MEGATRON_CASES}
    (given / "cases.json").write_text(json.dumps(told))
    run_peer("megatron", given, found)
    return {(tp, pp, rank): load_file(found / f"{tp}-{pp}-{rank}.safetensors") for tp, pp, rank, *_ in MEGATRON_CASES}


def inputs() -> torch.Tensor:
    """[tokens, 1, hidden]"""
    return torch.linspace(-1, 1, 3 * HEADS * DIM).sin().view(3, 1, -1)


def layer_of(tp: int, rank: int) -> Tensors:
    """The first layer of `llama` as a rank of megatron-core is to hold it."""
    layer = llama().model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    qkv = torch.cat([p.weight.data for p in (attention.q_proj, attention.k_proj, attention.v_proj)])
    return {
        "self_attention.linear_qkv.weight": qkv[torch.from_numpy(qkv_rows_by_group(HEADS, KV, DIM, tp, rank))],
        "mlp.linear_fc1.weight": pieces(
            torch.cat([mlp.gate_proj.weight.data, mlp.up_proj.weight.data]), HALVES, tp, rank
        ),
        "mlp.linear_fc2.weight": pieces(mlp.down_proj.weight.data, SPECS["0.down"].cut, tp, rank).contiguous(),
    }


def numbers(rows: np.ndarray, total: int, dim: int, other: int) -> torch.Tensor:
    """These rows (dim 1: columns) of a matrix whose elements are numbered in order."""
    shape = (total, other) if dim == 0 else (other, total)
    return torch.arange(float(total * other)).view(shape).index_select(dim, torch.from_numpy(rows))


def test_megatron_core_cuts_every_tensor_where_our_maps_say(megatron: dict[tuple[int, int, int], Tensors]) -> None:
    """Whole tensors in its own order: groups of heads for attention, all gates before all ups."""
    hidden, fused = HEADS * DIM, (HEADS + 2 * KV) * DIM
    in_groups = qkv_rows_by_group(HEADS, KV, DIM, 1, 0)
    place_of = np.argsort(in_groups)
    for (tp, pp, rank), found in megatron.items():
        tp_rank = rank % tp
        wanted = {
            "self_attention.linear_qkv": (place_of[qkv_rows_by_group(HEADS, KV, DIM, tp, tp_rank)], fused, 0),
            "self_attention.linear_proj": (rows_of(SPECS["0.o"].intervals(tp, tp_rank)), HEADS * DIM, 1),
            "mlp.linear_fc1": (rows_of(HALVES.intervals(tp, tp_rank)), 2 * MLP, 0),
            "mlp.linear_fc2": (rows_of(SPECS["0.down"].intervals(tp, tp_rank)), MLP, 1),
        }
        for number in range(len(found["layer_numbers"])):
            for name, (rows, total, dim) in wanted.items():
                cut = found[f"decoder.layers.{number}.{name}.weight"]
                assert torch.equal(cut, numbers(rows, total, dim, hidden)), (name, tp, pp, rank)
            assert found[f"decoder.layers.{number}.input_layernorm.weight"].shape == (hidden,)
        if rank < tp:
            rows = padded_rows(1000, 1024, tp, tp_rank)
            assert len(found["embedding.word_embeddings.weight"]) == len(rows)
            real = torch.from_numpy(np.flatnonzero(rows != PADDING))
            cut = found["embedding.word_embeddings.weight"].index_select(0, real)
            assert torch.equal(cut, numbers(rows[rows != PADDING], 1024, 0, hidden))


def test_megatron_core_deals_out_layers_and_tied_embeddings_as_we_say(
    megatron: dict[tuple[int, int, int], Tensors],
) -> None:
    for tp, pp, rank, first, last in MEGATRON_CASES:
        found, stage = megatron[tp, pp, rank], rank // tp
        layers = stage_layers(LAYERS, pp, first, last)[stage]
        assert [number - 1 for number in found["layer_numbers"].tolist()] == list(layers)
        assert {int(n.split(".")[2]) for n in found if n.startswith("decoder.layers.")} == set(range(len(layers)))
        assert ("embedding.word_embeddings.weight" in found) == (stage == 0)
        assert ("output_layer.weight" in found) == (pp > 1 and stage == pp - 1)
        assert ("decoder.final_layernorm.weight" in found) == (stage == pp - 1)


@pytest.mark.parametrize("tp", [tp for tp in DEGREES if tp <= KV])
def test_megatron_core_computes_with_our_shards_what_transformers_computes(
    megatron: dict[tuple[int, int, int], Tensors], tp: int
) -> None:
    layer, x = llama().model.layers[0], inputs()
    ranks = [megatron[tp, 1, rank] for rank in range(tp)]
    with torch.no_grad():
        for name in ("q", "k", "v"):
            wanted = getattr(layer.self_attn, f"{name}_proj")(x)
            torch.testing.assert_close(torch.cat([r[name] for r in ranks], 2).flatten(2), wanted)
        torch.testing.assert_close(torch.stack([r["mlp"] for r in ranks]).sum(0), layer.mlp(x))


def test_our_placements_hold_what_our_maps_say() -> None:
    """The planner is told the same of our own layouts by intervals and by maps."""
    for tp, pp in itertools.product((1, 2, 3, 8), (1, 2, 5)):
        gpus = tuple(range(tp * pp))
        placement = Placement(model_stage=ACTOR_TRAINING, layout=Layout(tp, pp), dp=1, gpus=gpus)
        assert ours(tp, pp).holdings() == SPEC.holdings(placement)
