"""The digest sees every bit of the logical state and nothing of the layout. Ranks are CPU tensors of this process."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from state_cases import Heads, Rows, State, Tensor, axis, make_tensor, placements, rank_order, states, transformer

from nereus.core.digest import combine, digest_regions
from nereus.core.errors import StateError
from nereus.core.plan import Placement
from nereus.runtime.state import LocalState

examples = settings(max_examples=25, derandomize=True, deadline=None)

BITS = {"bfloat16": torch.int16, "float32": torch.int32, "int64": torch.int64}
SMALL = transformer(layers=2, hidden=4, heads=4, kv=2, head_dim=2, mlp=6, vocab=5, fused=True, tied=True)
WHOLE = rank_order(1, 1, 1)

Logical = dict[str, torch.Tensor]


def random_logical(state: State, seed: int = 0) -> Logical:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for t in state.tensors:
        values = torch.randn(t.spec.shape, generator=generator) * 100
        found[t.spec.name] = values.to(getattr(torch, t.spec.dtype))
    return found


def distribute(state: State, logical: Logical, placement: Placement) -> dict[int, LocalState]:
    """What every rank holds of a logical state, cut by the indices worked out in `state_cases`."""
    held, local = state.held(placement), {}
    for gpu, holding in state.spec.holdings(placement).items():
        tensors = {
            t.spec.name: logical[t.spec.name].index_select(axis(t), torch.tensor(held[gpu][t.spec.name]).long())
            for t in state.tensors
            if t.spec.name in holding
        }
        local[gpu] = LocalState(state.spec, holding, tensors)
    return local


def digest_of(state: State, local: dict[int, LocalState]) -> str:
    regions = digest_regions(state.spec, {gpu: rank.holding for gpu, rank in local.items()})
    return combine(state.spec, regions, {gpu: rank.digest_sums(regions[gpu]) for gpu, rank in local.items()})


def digest(state: State, logical: Logical, placement: Placement = WHOLE) -> str:
    return digest_of(state, distribute(state, logical, placement))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers of their width, one-dimensional, sharing memory."""
    return tensor.view(-1).view(BITS[str(tensor.dtype).removeprefix("torch.")])


def changed(logical: Logical, **tensors: torch.Tensor) -> Logical:
    return {**logical, **tensors}


def one_tensor(parts: Sequence[Rows | Heads], dtype: str, other: int = 5, dim: int = 0) -> State:
    return State((make_tensor("w", "first", -1, tuple(parts), dim, other, dtype),), 1)


def parts_of(t: Tensor, state: State, placement: Placement) -> dict[int, list[int]]:
    held = state.held(placement)
    return {gpu: rows[t.spec.name] for gpu, rows in held.items() if rows.get(t.spec.name)}


@examples
@given(states(4), placements(8), st.integers(0, 99))
def test_every_layout_of_a_state_has_the_same_digest(state: State, placement: Placement, seed: int):
    logical = random_logical(state, seed)
    assert digest(state, logical, placement) == digest(state, logical)


@settings(examples, max_examples=10)
@given(placements(8))
def test_every_layout_of_a_training_state_has_the_same_digest(placement: Placement):
    logical = random_logical(SMALL)
    assert digest(SMALL, logical, placement) == digest(SMALL, logical)


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("dim", [0, 1])
def test_each_single_bit_counts(dtype: str, dim: int):
    state = one_tensor([Heads(2, 2, 2)], dtype, other=3, dim=dim)
    logical = random_logical(state)
    before = digest(state, logical)
    width = torch.iinfo(BITS[dtype]).bits
    for element in range(logical["w"].numel()):
        for bit in range(width):
            flipped = logical["w"].clone()
            bits(flipped)[element] ^= (1 << bit) - (1 << width if bit == width - 1 else 0)
            assert digest(state, changed(logical, w=flipped)) != before, (element, bit)


@examples
@given(states(3), placements(6), st.data())
def test_one_bit_of_any_tensor_counts_under_any_layout(state: State, placement: Placement, data: st.DataObject):
    logical = random_logical(state)
    name = data.draw(st.sampled_from(sorted(logical)))
    flipped = logical[name].clone()
    bits(flipped)[data.draw(st.integers(0, flipped.numel() - 1))] ^= 1
    assert digest(state, changed(logical, **{name: flipped}), placement) != digest(state, logical, placement)


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("dim", [0, 1])
def test_two_rows_or_columns_that_change_places_count(dtype: str, dim: int):
    state = one_tensor([Rows(4)], dtype, other=4)
    logical = random_logical(state)
    seen = {digest(state, logical)}
    for a in range(4):
        for b in range(a):
            order = list(range(4))
            order[a], order[b] = b, a
            seen.add(digest(state, changed(logical, w=logical["w"].index_select(dim, torch.tensor(order)))))
    assert len(seen) == 7


def test_gate_and_up_halves_that_change_places_count():
    logical = random_logical(SMALL)
    swapped = torch.cat(logical["0.gate_up"].chunk(2)[::-1])
    assert digest(SMALL, changed(logical, **{"0.gate_up": swapped})) != digest(SMALL, logical)


@pytest.mark.parametrize("name", ["exp_avg/0.qkv", "exp_avg_sq/1.down", "master/embed", "counters"])
def test_a_moment_or_counter_that_is_dropped_counts(name: str):
    logical = random_logical(SMALL)
    assert digest(SMALL, changed(logical, **{name: torch.zeros_like(logical[name])})) != digest(SMALL, logical)


@pytest.mark.parametrize(
    ("a", "b"), [("exp_avg/embed", "exp_avg_sq/embed"), ("0.o", "1.o"), ("master/0.qkv", "exp_avg/0.qkv")]
)
def test_two_tensors_that_are_exchanged_count(a: str, b: str):
    logical = random_logical(SMALL)
    assert digest(SMALL, changed(logical, **{a: logical[b], b: logical[a]})) != digest(SMALL, logical)


def test_the_same_bits_under_another_name_type_or_shape_have_another_digest():
    ones = torch.ones(6, dtype=torch.int64)
    seen = set()
    for name, shape in (("w", (6,)), ("v", (6,)), ("w", (2, 3)), ("w", (3, 2))):
        tensor = make_tensor(name, "first", -1, (Rows(shape[0]),), 0, 0 if len(shape) == 1 else shape[1], "int64")
        seen.add(digest(State((tensor,), 1), {name: ones.view(shape)}))
    assert len(seen) == 4


@examples
@given(states(3), placements(8), st.data())
def test_a_copy_that_differs_in_one_bit_is_an_error_and_no_digest(
    state: State, placement: Placement, data: st.DataObject
):
    copies = []
    for t in state.tensors:
        held = parts_of(t, state, placement)
        shared = [(t, gpu, i) for gpu, rows in held.items() for i in rows if sum(i in r for r in held.values()) > 1]
        copies += shared
    assume(copies)
    tensor, gpu, index = data.draw(st.sampled_from(copies))
    local = distribute(state, random_logical(state), placement)
    local[gpu].region(tensor.spec.name, index, index + 1).select(axis(tensor), 0).fill_(3)
    with pytest.raises(StateError, match=rf"replicas differ: {tensor.spec.name}\[") as raised:
        digest_of(state, local)
    assert str(gpu) in str(raised.value).partition("on devices")[2].split()


@pytest.mark.parametrize(
    ("what", "name", "placement", "gpus"),
    [
        ("dp replica", "exp_avg/0.down", rank_order(2, 1, 2), "1 and 3"),
        ("KV head that two tp ranks share", "0.k", rank_order(4, 1, 1), "0 and 1"),
        ("tensor whole on all tp ranks", "counters", rank_order(2, 1, 1), "0 and 1"),
        ("tied embedding at the other end", "embed", rank_order(1, 2, 1), "0 and 1"),
    ],
)
def test_each_kind_of_copy_is_compared(what: str, name: str, placement: Placement, gpus: str):
    state = transformer(layers=2, hidden=4, heads=4, kv=2, head_dim=2, mlp=6, vocab=5, tied=True)
    local = distribute(state, random_logical(state), placement)
    local[int(gpus.split()[-1])].tensors[name].view(-1)[0] += 1
    with pytest.raises(StateError, match=rf"replicas differ: {name}\[.*\] on devices {gpus}"):
        digest_of(state, local)


@examples
@given(states(3), placements(8), st.data())
def test_a_region_that_nobody_holds_is_an_error_and_no_digest(state: State, placement: Placement, data: st.DataObject):
    tensor = data.draw(st.sampled_from(state.tensors))
    held = parts_of(tensor, state, placement)
    index = data.draw(st.integers(0, tensor.spec.length - 1))
    local = distribute(state, random_logical(state), placement)
    for gpu in (gpu for gpu, rows in held.items() if index in rows):
        del local[gpu]
    lost = {
        t.spec.name
        for t in state.tensors
        if {i for gpu in local for i in parts_of(t, state, placement).get(gpu, ())} != set(range(t.spec.length))
    }
    assert tensor.spec.name in lost
    with pytest.raises(StateError, match=rf"({'|'.join(lost)}): no device holds index \d+ of"):
        digest_of(state, local)
