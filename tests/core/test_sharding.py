"""Holdings and moves against arrays that are cut head by head and layer by layer (`state_cases`)."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from state_cases import (
    Heads,
    Rows,
    State,
    axis,
    index_bytes,
    make_tensor,
    placements,
    rank_order,
    states,
    transformer,
)

from nereus.core.errors import StateError
from nereus.core.plan import Placement
from nereus.core.sharding import (
    Cut,
    Interval,
    MovePlan,
    Segment,
    StateSpec,
    TensorSpec,
    elementary_intervals,
    intersect,
    layers_of,
    local_offset,
    merge_intervals,
    plan_moves,
    subtract,
)

examples = settings(max_examples=40, derandomize=True, deadline=None)

SMALL = transformer(layers=5, hidden=3, heads=12, kv=3, head_dim=2, mlp=10, vocab=7, fused=True, tied=True)
LLAMA_8B = transformer(layers=32, hidden=4096, heads=32, kv=8, head_dim=128, mlp=14336, vocab=128256)


def indices(intervals: Sequence[Interval]) -> list[int]:
    return [i for start, stop in intervals for i in range(start, stop)]


def moves_between(state: State, old: Placement, new: Placement) -> MovePlan:
    return plan_moves(state.spec, state.spec.holdings(old), state.spec.holdings(new))


def sent_bytes(state: State, plan: MovePlan) -> Counter[int]:
    sizes = {t.spec.name: index_bytes(t) for t in state.tensors}
    sent: Counter[int] = Counter()
    for move in plan.moves:
        if move.source != move.target:
            sent[move.source] += sizes[move.tensor] * (move.stop - move.start)
    return sent


# -- who holds what ----------------------------------------------------------------------------------------------------


@examples
@given(states(), placements())
def test_every_gpu_holds_what_its_heads_rows_and_layers_need(state: State, placement: Placement):
    held = state.spec.holdings(placement)
    assert {gpu: {n: indices(pieces) for n, pieces in h.items()} for gpu, h in held.items()} == state.held(placement)


@examples
@given(states(), placements())
def test_each_unit_by_itself_holds_every_index_of_every_tensor(state: State, placement: Placement):
    holdings = state.spec.holdings(placement)
    for unit in range(placement.dp):
        for spec in state.spec.tensors:
            held = {i for gpu in placement.unit_gpus(unit) for i in indices(holdings[gpu].get(spec.name, ()))}
            assert held == set(range(spec.length)), spec.name


@examples
@given(st.integers(1, 40), st.integers(1, 12))
def test_rows_are_dealt_out_once_each_and_evenly(size: int, tp: int):
    ranges = [Segment.rows(size).interval(tp, rank) for rank in range(tp)]
    assert indices(ranges) == list(range(size))
    lengths = [stop - start for start, stop in ranges]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    ("tp", "held"),
    [(1, [{0, 1}]), (2, [{0}, {1}]), (3, [{0}, {0, 1}, {1}]), (4, [{0}, {0}, {1}, {1}]), (12, [{0}] * 6 + [{1}] * 6)],
)
def test_each_rank_has_the_kv_heads_that_its_query_heads_read(tp: int, held: list[set[int]]):
    two_kv_heads = Segment(size=2, blocks=2, readers=12)
    assert [set(indices([two_kv_heads.interval(tp, rank)])) for rank in range(tp)] == held


def test_the_halves_of_a_fused_tensor_are_cut_each_on_its_own():
    gate_up = Cut(0, (Segment.rows(8), Segment.rows(8)))
    assert gate_up.intervals(2, 0) == ((0, 4), (8, 12))
    assert gate_up.intervals(2, 1) == ((4, 8), (12, 16))
    assert gate_up.intervals(1, 0) == ((0, 16),)


@examples
@given(st.integers(1, 40), st.integers(1, 12))
def test_pp_stages_have_all_layers_once_and_evenly(num_layers: int, pp: int):
    stages = [layers_of(num_layers, pp, stage) for stage in range(pp)]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


def test_tied_embeddings_live_on_both_ends_and_counters_on_every_pp_stage():
    holdings = SMALL.spec.holdings(rank_order(1, 4, 1))
    assert [gpu for gpu, held in holdings.items() if "embed" in held] == [0, 3]
    assert [gpu for gpu, held in holdings.items() if "exp_avg/embed" in held] == [0, 3]
    assert [gpu for gpu, held in holdings.items() if "counters" in held] == [0, 1, 2, 3]


@examples
@given(states(), placements())
def test_sizes_are_those_of_the_arrays(state: State, placement: Placement):
    for t in state.tensors:
        assert t.spec.num_bytes == index_bytes(t) * t.spec.length
    logical, held = state.logical(), state.held(placement)
    for gpu, holding in state.spec.holdings(placement).items():
        assert state.spec.holding_bytes(holding) == sum(
            index_bytes(t) * len(held[gpu].get(t.spec.name, ())) for t in state.tensors
        )
        for t in state.tensors:
            if (rows := held[gpu].get(t.spec.name)) is not None:
                local = logical[t.spec.name].take(rows, axis=axis(t))
                assert t.spec.local_shape(holding[t.spec.name]) == local.shape


# -- moving it ---------------------------------------------------------------------------------------------------------


def execute(state: State, plan: MovePlan, old: Placement, new: Placement) -> None:
    """Carry the moves out on numpy arrays, and check that each is possible and that the result is right."""
    logical, had, need = state.logical(), state.held(old), state.held(new)
    moves = defaultdict(list)
    for move in plan.moves:
        moves[move.tensor].append(move)
    for t in state.tensors:
        name, dim = t.spec.name, axis(t)
        before = {gpu: np.moveaxis(logical[name], dim, 0)[held[name]] for gpu, held in had.items() if name in held}
        after = {gpu: np.moveaxis(logical[name], dim, 0)[held[name]] for gpu, held in need.items() if name in held}
        result = {gpu: np.zeros_like(array) for gpu, array in after.items()}
        written = {gpu: np.zeros(len(array), dtype=int) for gpu, array in after.items()}
        for move in moves.pop(name, []):
            for index in range(move.start, move.stop):
                there, here = had[move.source][name].index(index), need[move.target][name].index(index)
                result[move.target][here] = before[move.source][there]
                written[move.target][here] += 1
        for gpu in after:
            assert (written[gpu] == 1).all(), (name, gpu)
            np.testing.assert_array_equal(result[gpu], after[gpu])
    assert not moves, "moves of tensors that do not exist"


@examples
@given(states(), placements(), placements())
def test_moves_turn_every_old_array_into_the_new_one_writing_each_element_once(
    state: State, old: Placement, new: Placement
):
    execute(state, moves_between(state, old, new), old, new)


@settings(examples, max_examples=30)
@given(placements(), placements())
def test_a_whole_training_state_arrives_with_moments_tied_embeddings_and_counters(old: Placement, new: Placement):
    execute(SMALL, moves_between(SMALL, old, new), old, new)


@examples
@given(states(), placements(), placements())
def test_each_gpu_receives_exactly_the_bytes_that_it_needs_and_does_not_hold(
    state: State, old: Placement, new: Placement
):
    plan = moves_between(state, old, new)
    had, need = state.held(old), state.held(new)
    arriving: Counter[int] = Counter()
    for move in plan.moves:
        has = set(had.get(move.target, {}).get(move.tensor, ()))
        moved = set(range(move.start, move.stop))
        assert moved <= has if move.source == move.target else not moved & has
    for gpu, wanted in need.items():
        for t in state.tensors:
            missing = set(wanted.get(t.spec.name, ())) - set(had.get(gpu, {}).get(t.spec.name, ()))
            arriving[gpu] += index_bytes(t) * len(missing)
        assert plan.received_bytes[gpu] == arriving[gpu]
        assert plan.kept_bytes[gpu] + arriving[gpu] == state.spec.holding_bytes(state.spec.holdings(new)[gpu])
    assert plan.total_received_bytes == sum(arriving.values()) == sum(sent_bytes(state, plan).values())


@examples
@given(states(), placements(), placements())
def test_gpus_that_hold_the_same_send_the_same_up_to_one_reader(state: State, old: Placement, new: Placement):
    """What a reader needs of one set of holders may all come from one of them."""
    plan = moves_between(state, old, new)
    sent, held = sent_bytes(state, plan), state.held(old)
    for a in held:
        for b in held:
            if held[a] == held[b]:
                assert sent[a] - sent[b] <= max(plan.received_bytes.values())


@examples
@given(states(), st.integers(1, 6), placements())
def test_with_whole_replicas_the_busiest_sender_is_within_one_reader_of_the_average(
    state: State, dp: int, new: Placement
):
    old = rank_order(1, 1, dp, first_gpu=100)
    plan = moves_between(state, old, new)
    sent = sent_bytes(state, plan)
    assert max(sent.values()) <= plan.total_received_bytes / dp + max(plan.received_bytes.values())


def test_replicas_share_the_sending_when_equal_tensors_go_to_new_gpus():
    tensors = tuple(make_tensor(f"t{i}", "first", -1, (), 0, 0, "float32") for i in range(8))
    state = State(tensors, 1)
    plan = moves_between(state, rank_order(1, 1, 4), rank_order(1, 1, 6))
    assert dict(sent_bytes(state, plan)) == dict.fromkeys(range(4), 2 * 2 * state.spec.num_bytes // 8)


@examples
@given(states(), placements(), placements(), st.data())
def test_lost_gpus_are_survived_exactly_when_the_others_still_hold_everything(
    state: State, old: Placement, new: Placement, data: st.DataObject
):
    lost = data.draw(st.sets(st.sampled_from(old.gpus)))
    sources = {gpu: held for gpu, held in state.spec.holdings(old).items() if gpu not in lost}
    left, need = state.held(old), state.held(new)
    gone = {
        t.spec.name
        for t in state.tensors
        if {i for held in need.values() for i in held.get(t.spec.name, ())}
        - {i for gpu in sources for i in left[gpu].get(t.spec.name, ())}
    }
    targets = state.spec.holdings(new)
    if gone:
        with pytest.raises(StateError, match=rf"({'|'.join(gone)})\[\d+:\d+\] is held by no device"):
            plan_moves(state.spec, sources, targets)
    else:
        assert not {move.source for move in plan_moves(state.spec, sources, targets).moves} & lost


@examples
@given(states(), states(), placements(), placements())
def test_only_the_tensors_of_the_spec_are_moved(state: State, more: State, old: Placement, new: Placement):
    extra = tuple(
        make_tensor(f"more/{t.spec.name}", "everywhere", -1, t.parts, 0, 1, t.spec.dtype) for t in more.tensors
    )
    both = State((*state.tensors, *extra), state.num_layers)
    part, whole = state.spec, both.spec
    assert plan_moves(part, whole.holdings(old), whole.holdings(new)) == moves_between(state, old, new)


@examples
@given(states(), placements(), st.data())
def test_the_same_plan_and_fewer_replicas_move_nothing(state: State, old: Placement, data: st.DataObject):
    units = data.draw(st.lists(st.sampled_from(range(old.dp)), unique=True, min_size=1))
    gpus = tuple(gpu for unit in units for gpu in old.unit_gpus(unit))
    fewer = Placement(model_stage=old.model_stage, layout=old.layout, dp=len(units), gpus=gpus)
    assert moves_between(state, old, fewer).total_received_bytes == 0


@pytest.mark.parametrize(
    ("old", "new", "total_gb", "busiest_gb"),
    [
        ((1, 4, 2), (2, 4, 1), 80.6, 15.9),
        ((4, 1, 1), (1, 4, 1), 84.3, 23.8),
        ((8, 1, 1), (1, 8, 1), 98.4, 17.1),
        ((2, 4, 1), (2, 4, 1), 0.0, 0.0),
    ],
)
def test_llama_8b_moves_the_gigabytes_worked_out_by_hand(
    old: tuple[int, int, int], new: tuple[int, int, int], total_gb: float, busiest_gb: float
):
    """14 bytes a parameter; layers 218 M, embeddings and head 525 M each; (tp, pp, dp), units in rank order."""
    plan = moves_between(LLAMA_8B, rank_order(*old), rank_order(*new))
    assert plan.total_received_bytes / 1e9 == pytest.approx(total_gb, abs=0.1)
    assert max(plan.received_bytes.values()) / 1e9 == pytest.approx(busiest_gb, abs=0.1)


# -- intervals against sets of integers --------------------------------------------------------------------------------

INTERVALS = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)).map(lambda p: (min(p), max(p))), max_size=5)


def is_canonical(intervals: Sequence[Interval]) -> bool:
    """Ascending, none empty, none touching the next."""
    ends = [end for interval in intervals for end in interval]
    return ends == sorted(set(ends))


@examples
@given(INTERVALS, INTERVALS)
def test_interval_helpers_are_set_operations(a: list[Interval], b: list[Interval]):
    in_a, in_b = set(indices(a)), set(indices(b))
    for found, expected in (
        (merge_intervals(a), in_a),
        (intersect(a, b), in_a & in_b),
        (subtract(a, b), in_a - in_b),
    ):
        assert set(indices(found)) == expected
        assert is_canonical(found)


@examples
@given(INTERVALS)
def test_elementary_intervals_cover_the_union_once_and_no_end_lies_inside_one(pieces: list[Interval]):
    found = elementary_intervals(pieces)
    assert indices(found) == sorted(set(indices(pieces)))
    ends = {end for piece in pieces for end in piece}
    assert all(start < stop and not ends & set(range(start + 1, stop)) for start, stop in found)
    assert {end for interval in found for end in interval} <= ends


@examples
@given(INTERVALS)
def test_local_offset_is_the_place_in_the_local_tensor(pieces: list[Interval]):
    held = merge_intervals(pieces)
    assert [local_offset(held, index) for index in indices(held)] == list(range(len(indices(held))))
    for index in set(range(16)) - set(indices(held)):
        with pytest.raises(StateError, match=f"index {index} is not held"):
            local_offset(held, index)


# -- what cannot be -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segment", [(6, 4, 4), (6, 3, 4), (6, 0, 6)])
def test_a_segment_of_broken_blocks_is_refused_with_its_numbers(segment: tuple[int, int, int]):
    size, blocks, readers = segment
    with pytest.raises(ValueError, match=rf"size={size}, blocks={blocks}, readers={readers}"):
        Segment(*segment)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dtype": "float8"}, "w: dtype float8"),
        ({"shape": (5, 2)}, r"w: segments do not add up to dimension 0 of \(5, 2\)"),
        ({"shape": (), "cut": None}, r"w: shape \(\) has no dimension"),
        ({"where": "layer", "layer": -1}, "w: layer -1"),
    ],
)
def test_an_impossible_tensor_is_refused_with_its_name_and_the_bad_value(changed: dict, message: str):
    fields = {"name": "w", "shape": (4, 2), "dtype": "float32", "where": "first", "cut": Cut(0, (Segment.rows(4),))}
    TensorSpec(**fields)
    with pytest.raises(ValueError, match=message):
        TensorSpec(**{**fields, **changed})


def test_a_state_with_a_layer_that_no_pp_stage_has_is_refused():
    tensor = make_tensor("w", "layer", 4, (Rows(2),), 0, 0, "float32")
    StateSpec((tensor.spec,), 5)
    with pytest.raises(ValueError, match="w: layer 4 of 4"):
        StateSpec((tensor.spec,), 4)


def test_a_state_with_two_tensors_of_one_name_is_refused():
    tensor = make_tensor("w", "first", -1, (Heads(4, 2, 1),), 0, 0, "float32")
    with pytest.raises(ValueError, match="named twice: w"):
        StateSpec((tensor.spec, tensor.spec), 1)


@pytest.mark.parametrize(("old", "new"), [((2, 2, 2), (4, 1, 2)), ((1, 2, 4), (2, 1, 4)), ((2, 1, 2), (2, 1, 4))])
def test_readers_that_can_be_dealt_out_evenly_have_one_source_for_each_set_of_holders(
    old: tuple[int, int, int], new: tuple[int, int, int]
):
    tensors = tuple(make_tensor(f"t{layer}", "layer", layer, (Rows(8),), 0, 4, "float32") for layer in range(4))
    before, after = rank_order(*old), rank_order(*new)
    plan = moves_between(State(tensors, 4), before, after)
    for target in plan.received_bytes:
        senders = {m.source for m in plan.moves if m.target == target != m.source}
        assert len(senders) <= before.layout.size
