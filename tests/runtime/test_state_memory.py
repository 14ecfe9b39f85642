"""What is present of a state, whose bytes count, when memory goes, and how another process finds it."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import pickle
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moves_for_tests import CPU, as_bits, expected_bits, filled, mapped_files, open_files, random_case, wrong_tensors

from nereus.core.errors import StateError
from nereus.core.sharding import Cut, Segment, StateSpec, TensorSpec
from nereus.runtime.memory import (
    ALIGNMENT,
    Allocator,
    DeviceMemory,
    HostMemory,
    SharedMemory,
    has_shared_memory,
)
from nereus.runtime.state import LocalState, PeerState

needs_shared_memory = pytest.mark.skipif(not has_shared_memory(), reason="needs memfd and /proc")
PAGE = mmap.PAGESIZE
ROWS = Cut(0, (Segment.rows(4096),))
SPEC = StateSpec(
    (
        TensorSpec(name="norm", shape=(64,), dtype="float32", where="layer", layer=0),
        TensorSpec(name="weight", shape=(4096, 256), dtype="bfloat16", where="layer", layer=0, cut=ROWS),
        TensorSpec(name="moment", shape=(4096, 256), dtype="float32", where="layer", layer=0, cut=ROWS),
        TensorSpec(name="next", shape=(4096, 256), dtype="float32", where="layer", layer=1, cut=ROWS),
        TensorSpec(name="count", shape=(3,), dtype="int64", where="everywhere"),
    ),
    2,
)
WHOLE = {t.name: ((0, t.length),) for t in SPEC.tensors}
HALF = {**WHOLE, "weight": ((0, 2048),), "moment": ((0, 2048),)}


def allocators() -> list[Allocator]:
    return [DeviceMemory(CPU), *host_allocators()]


def host_allocators() -> list[HostMemory]:
    return [HostMemory(shared=False), *([SharedMemory()] if has_shared_memory() else [])]


def file_of(state: LocalState, name: str) -> int:
    """A duplicate of the descriptor of a tensor's segment."""
    address = state.address([name])
    return os.dup(address.segments[0].file)


def file_bytes(file: int) -> int:
    """Memory that an anonymous file takes, less a page for serial numbers."""
    return os.fstat(file).st_blocks * 512 - PAGE


# -- what is present -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocator", allocators(), ids=lambda a: type(a).__name__)
def test_tensors_come_and_go_by_name(allocator: Allocator) -> None:
    state = LocalState.empty(SPEC, HALF, allocator)
    assert state.num_bytes == 0
    state.add(["norm", "weight"], zero=True)
    assert set(state.tensors) == {"norm", "weight"}
    assert state.tensors["weight"].shape == (2048, 256)
    assert not state.tensors["weight"].any()
    assert state.num_bytes == state.present_bytes == 64 * 4 + 2048 * 256 * 2
    with pytest.raises(ValueError, match="norm is present already"):
        state.add(["norm"])
    with pytest.raises(ValueError, match="other is not held here"):
        state.add(["other"])
    with pytest.raises(StateError, match="moment is not present"):
        state.region("moment", 0, 1)
    state.drop(["weight"])
    assert set(state.tensors) == {"norm"}
    with pytest.raises(KeyError):
        state.drop(["weight"])
    state.drop()
    assert state.num_bytes == 0


@pytest.mark.parametrize("allocator", allocators(), ids=lambda a: type(a).__name__)
def test_zeros_are_zeros_and_tensors_do_not_overlap(allocator: Allocator) -> None:
    state = LocalState.empty(SPEC, WHOLE, allocator)
    state.add(WHOLE, zero=True)
    assert not any(t.any() for t in state.tensors.values())
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in state.tensors.values())
    assert all(first_end <= start for (_, first_end), (start, _) in itertools.pairwise(spans))
    assert all(start % ALIGNMENT == 0 for start, _ in spans)
    assert all(t.is_contiguous() for t in state.tensors.values())


def test_adopting_shares_what_has_the_same_intervals() -> None:
    old, new = filled(SPEC, WHOLE, DeviceMemory(CPU)), LocalState.empty(SPEC, HALF, DeviceMemory(CPU))
    assert set(new.adopt(old, ["norm", "weight"])) == {"norm"}
    assert set(new.adopt(old)) == {"next", "count"}
    assert new.adopt(old) == ()
    assert all(new.tensors[name].data_ptr() == old.tensors[name].data_ptr() for name in new.tensors)
    other = StateSpec(tuple(t for t in SPEC.tensors if t.name == "norm"), 2)
    assert LocalState.empty(other, {"norm": ()}, DeviceMemory(CPU)).adopt(old) == ()


@settings(max_examples=100, deadline=None)
@given(draw=st.randoms(use_true_random=False))
def test_the_sum_over_states_is_the_memory_in_use(draw: random.Random) -> None:
    """Any sequence of adding, adopting, dropping and forgetting: each tensor's memory counts once, for one that has it."""
    allocator = draw.choice(allocators())
    states = [LocalState.empty(SPEC, draw.choice([WHOLE, HALF]), allocator) for _ in range(3)]
    for _ in range(12):
        number = draw.randrange(len(states))
        state = states[number]
        match draw.choice(["add", "adopt", "adopt", "drop", "forget"]):
            case "add":
                absent = sorted(set(SPEC.by_name()) - set(state.tensors))
                state.add(draw.sample(absent, draw.randint(0, len(absent))))
            case "adopt":
                state.adopt(draw.choice(states))
            case "drop":
                state.drop(draw.sample(sorted(state.tensors), draw.randint(0, len(state.tensors))))
            case "forget":
                states[number] = LocalState.empty(SPEC, draw.choice([WHOLE, HALF]), allocator)
        del state
        in_use = {t.data_ptr(): t.numel() * t.element_size() for s in states for t in s.tensors.values()}
        assert sum(s.num_bytes for s in states) == sum(in_use.values())
        assert all(s.num_bytes <= s.present_bytes for s in states)


@needs_shared_memory
def test_touching_takes_the_pages_at_once_and_a_plain_add_does_not() -> None:
    for touch in (False, True):
        state = LocalState.empty(SPEC, WHOLE, SharedMemory())
        state.add(["norm", "weight"], touch=touch, zero=touch)
        file = file_of(state, "weight")
        assert file_bytes(file) == touch * (4096 * 256 * 2 + PAGE)
        assert not touch or not state.tensors["weight"].any()
        state.drop()
        os.close(file)


@needs_shared_memory
def test_a_change_that_does_not_come_about_leaves_the_old_state_as_it_was() -> None:
    old, new = filled(SPEC, WHOLE, SharedMemory()), LocalState.empty(SPEC, HALF, SharedMemory())
    num_bytes = old.num_bytes
    new.adopt(old)
    new.add(["weight", "moment"])
    new.drop()
    assert (old.num_bytes, new.num_bytes) == (num_bytes, 0)
    assert wrong_tensors(old) == []


# -- when memory goes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocator", host_allocators(), ids=lambda a: type(a).__name__)
def test_what_is_dropped_reads_as_zeros_to_whoever_still_has_it(allocator: HostMemory) -> None:
    """And nothing is allocated in its place as long as anybody has it."""
    length = 2**18
    spec = StateSpec((TensorSpec(name="t", shape=(length,), dtype="float32", where="everywhere"),), 1)
    state = filled(spec, {"t": ((0, length),)}, allocator)
    left_over = state.tensors["t"][1:]
    assert left_over.any()
    state.drop()
    assert not left_over.any()
    later = filled(spec, {"t": ((0, length),)}, allocator)
    left_over.fill_(1)  # of no use, and no harm
    assert wrong_tensors(later) == []
    assert allocator.kept_bytes == 0
    del left_over
    later.drop()
    assert allocator.kept_bytes == length * 4


@needs_shared_memory
def test_shared_memory_goes_at_once_with_the_last_state_that_has_it() -> None:
    """Where somebody still has the tensors; pages that nobody has are kept."""
    old, new = filled(SPEC, WHOLE, SharedMemory()), LocalState.empty(SPEC, HALF, SharedMemory())
    views, file = list(old.tensors.values()), file_of(old, "norm")
    full = file_bytes(file)
    assert full == sum(max(t.numel() * t.element_size(), PAGE) for t in old.tensors.values())
    new.adopt(old, ["norm"])
    old.drop(["norm", "weight"])
    assert file_bytes(file) == full - 4096 * 256 * 2
    old.drop()
    assert file_bytes(file) == PAGE
    assert torch.equal(as_bits(new.tensors["norm"]), expected_bits(new.specs["norm"], WHOLE["norm"]))
    new.drop()
    assert file_bytes(file) == 0
    assert not any(view.any() for view in views)
    os.close(file)


@needs_shared_memory
@settings(max_examples=30, deadline=None)
@given(draw=st.randoms(use_true_random=False))
def test_neighbours_of_what_is_dropped_are_left_alone(draw: random.Random) -> None:
    lengths = [draw.choice([1, 7, 100, 1000, PAGE // 4, 3000]) for _ in range(30)]
    tensors = [
        TensorSpec(name=f"t{i}", shape=(length,), dtype="float32", where="everywhere")
        for i, length in enumerate(lengths)
    ]
    state = filled(StateSpec(tuple(tensors), 1), {t.name: ((0, t.length),) for t in tensors}, SharedMemory())
    while state.tensors:
        state.drop(draw.sample(sorted(state.tensors), min(4, len(state.tensors))))
        for name, tensor in state.tensors.items():
            assert torch.equal(as_bits(tensor), expected_bits(state.specs[name], state.holding[name]))


@needs_shared_memory
def test_a_state_leaves_no_files_and_mappings_dropped_or_forgotten() -> None:
    gc.collect()
    before = open_files(), mapped_files()
    gc.disable()
    try:
        for explicit in (True, False):
            state = filled(SPEC, WHOLE, SharedMemory())
            other = LocalState.empty(SPEC, WHOLE, SharedMemory())
            other.adopt(state)
            assert (open_files(), mapped_files()) != before
            if explicit:
                state.drop()
                other.drop()
            del state, other
            assert (open_files(), mapped_files()) == before
    finally:
        gc.enable()


@needs_shared_memory
def test_a_forgotten_allocator_closes_its_file_though_views_live() -> None:
    before = open_files()
    state = filled(SPEC, WHOLE, SharedMemory())
    views = list(state.tensors.values())
    state.drop()
    del state
    assert open_files() <= before + 1  # a mapping may have a descriptor of its own
    del views
    assert open_files() == before


# -- other processes -----------------------------------------------------------------------------------------------


@needs_shared_memory
@settings(max_examples=30, deadline=None)
@given(draw=st.randoms(use_true_random=False))
def test_a_pickled_address_reads_what_is_there(draw: random.Random) -> None:
    case = random_case(draw, (0, 1))
    state = filled(case.spec, case.before[0], SharedMemory())
    address = pickle.loads(pickle.dumps(state.address()))
    peer = PeerState(0, address, case.spec.by_name())
    for name, intervals in case.before[0].items():
        assert address.tensors[name].intervals == intervals
        for start, stop in intervals:
            there, here = peer.region(name, start, stop), state.region(name, start, stop)
            assert torch.equal(there.contiguous().view(torch.uint8), here.contiguous().view(torch.uint8))
    state.drop()


@needs_shared_memory
def test_a_reader_cannot_change_what_it_reads() -> None:
    state = filled(SPEC, WHOLE, SharedMemory())
    there = PeerState(0, state.address(), SPEC.by_name()).region("moment", 5, 9)
    there.fill_(7)
    assert wrong_tensors(state) == []


def test_ordinary_memory_has_no_address() -> None:
    with pytest.raises(ValueError, match="norm is not in shared memory"):
        filled(SPEC, WHOLE, DeviceMemory(CPU)).address()


@needs_shared_memory
def test_what_was_not_present_has_no_address() -> None:
    state = LocalState.empty(SPEC, WHOLE, SharedMemory())
    state.add(["norm"])
    with pytest.raises(StateError, match="weight was not present on device 3"):
        PeerState(3, state.address(), SPEC.by_name()).region("weight", 0, 1)
