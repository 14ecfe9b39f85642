"""Kept pages: no two live tensors share a byte, a stale address is refused, zeros are zeros, limits hold."""

from __future__ import annotations

import itertools
import mmap
import os
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moves_for_tests import filled, room, wrong_tensors

from nereus.core.errors import StateError
from nereus.core.sharding import Cut, Holding, Move, Segment, StateSpec, TensorSpec
from nereus.runtime.abort import AbortFlag
from nereus.runtime.memory import Block, HostMemory, Ranges, SharedMemory, Space, has_shared_memory
from nereus.runtime.state import LocalState, PeerState, StateAddress
from nereus.runtime.transport import CHECK_BYTES, SharedMemoryCopy

needs_shared_memory = pytest.mark.skipif(not has_shared_memory(), reason="needs memfd and /proc")
PAGE = mmap.PAGESIZE
SIZES = (1, 5, 64, 1000, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 10 * PAGE)


# -- what is free ----------------------------------------------------------------------------------------------------


@given(draw=st.randoms(use_true_random=False))
def test_ranges_are_sets(draw: random.Random) -> None:
    ranges, elements = Ranges(), set[int]()
    for _ in range(30):
        start = draw.randrange(40)
        stop = start + draw.randint(1, 8)
        if draw.random() < 0.6 and elements.isdisjoint(range(start, stop)):
            ranges.add(start, stop)
            elements |= set(range(start, stop))
        elif elements.issuperset(range(start, stop)):
            ranges.remove(start, stop)
            elements -= set(range(start, stop))
        listed = list(ranges)
        assert {i for a, b in listed for i in range(a, b)} == elements
        assert ranges.total == len(elements)
        assert all(b < a for (_, b), (a, _) in itertools.pairwise(listed)), "those that touch are one"
        size = draw.randint(1, 10)
        fitting = [b - a for a, b in listed if b - a >= size]
        at = ranges.best_fit(size)
        assert (at is None) == (not fitting)
        if at is not None:
            end = ranges.at(at)
            assert end is not None and end - at == min(fitting)


@settings(max_examples=200)
@given(draw=st.randoms(use_true_random=False))
def test_what_is_taken_is_disjoint_and_limits_hold(draw: random.Random) -> None:
    """Against a dictionary of pages: live, kept, or without memory."""
    pages = 64
    space, live, kept = Space(0, pages * PAGE), dict[int, int](), set[int]()
    most = 0
    for _ in range(40):
        if draw.random() < 0.2:
            space.capacity_bytes = draw.choice(
                [float("inf"), draw.randrange(pages) * PAGE, draw.randrange(pages) * 1000]
            )
        if live and draw.random() < 0.5:
            start = draw.choice(sorted(live))
            space.free(start * PAGE, live[start] * PAGE)
            kept |= set(range(start, live.pop(start)))
        else:
            size = draw.randint(1, 8)
            try:
                at, reused = space.take(size * PAGE)
            except MemoryError:
                continue
            start = at // PAGE
            taken = set(range(start, start + size))
            assert at % PAGE == 0 and start >= 0 and start + size <= pages
            assert all(taken.isdisjoint(range(a, b)) for a, b in live.items())
            assert len(taken & kept) * PAGE == reused
            longest = max((b - a for a, b in _runs(kept)), default=0)
            assert reused == size * PAGE or longest < size, "no fresh pages where kept ones are enough"
            kept -= taken
            live[start] = start + size
        most = max(most, sum(b - a for a, b in live.items()))
        for a, b in space.surplus():
            assert set(range(a // PAGE, b // PAGE)) <= kept
            kept -= set(range(a // PAGE, b // PAGE))
        in_use = sum(b - a for a, b in live.items())
        assert (space.live_bytes, space.kept.total) == (in_use * PAGE, len(kept) * PAGE)
        assert in_use + len(kept) <= most, "never more than was needed at once"
        assert not kept or (in_use + len(kept)) * PAGE <= space.capacity_bytes


def _runs(numbers: set[int]) -> Iterator[tuple[int, int]]:
    for a in sorted(numbers):
        if a - 1 not in numbers:
            b = a
            while b in numbers:
                b += 1
            yield a, b


# -- tensors -----------------------------------------------------------------------------------------------------------


class Holder:
    """Stands for a state."""


def content(block: Block) -> set[int]:
    return set(block.tensor.view(torch.uint8).tolist())


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=needs_shared_memory)])
@settings(max_examples=60, deadline=None)
@given(draw=st.randoms(use_true_random=False))
def test_live_tensors_share_no_byte_whatever_is_freed_forgotten_or_still_had(shared: bool, draw: random.Random) -> None:
    memory, holder = HostMemory(shared=shared), Holder()
    live: dict[int, Block] = {}
    stale: list[torch.Tensor] = []
    number = 0
    for _ in range(25):
        action = draw.choice(["allocate", "allocate", "release", "release", "forget", "let go", "trim", "limit"])
        if action == "allocate":
            zero = draw.random() < 0.3
            wanted = {str(i): ((draw.choice(SIZES),), torch.uint8) for i in range(draw.randint(1, 4))}
            for block in memory.allocate(wanted, zero=zero).values():
                assert not zero or content(block) == {0}
                number += 1
                block.tensor.fill_(number % 255 + 1)
                block.hold(holder)
                live[number] = block
                del block
        elif live and action in ("release", "forget"):
            block = live.pop(draw.choice(sorted(live)))
            if action == "release":
                if draw.random() < 0.3:
                    stale.append(block.tensor)
                block.release(holder)
            del block
        elif action == "let go":
            stale.clear()
        elif action == "trim":
            memory.trim(draw.choice([0, 5 * PAGE]))
        elif action == "limit":
            memory.limit(draw.choice([float("inf"), 20 * PAGE, 50 * PAGE]))
        for written, block in live.items():
            assert content(block) == {written % 255 + 1}
        for tensor in stale:
            tensor.fill_(0)  # of no use, and no harm: seen by the next round
        spans = sorted((b.tensor.data_ptr(), b.tensor.data_ptr() + b.num_bytes) for b in live.values())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert memory.live_bytes >= sum(b.num_bytes for b in live.values())


@needs_shared_memory
@settings(max_examples=40, deadline=None)
@given(draw=st.randoms(use_true_random=False))
def test_a_stale_address_is_refused_and_a_good_one_reads_what_is_there(draw: random.Random) -> None:
    lengths = [draw.choice(SIZES) for _ in range(6)]
    spec = StateSpec(
        tuple(TensorSpec(name=f"t{i}", shape=(n,), dtype="int32", where="everywhere") for i, n in enumerate(lengths)),
        1,
    )
    holding: Holding = {t.name: ((0, t.length),) for t in spec.tensors}
    memory = SharedMemory()
    state = LocalState.empty(spec, holding, memory)
    known: list[tuple[str, int, StateAddress]] = []
    value: dict[str, int] = {}
    for turn in range(12):
        name = draw.choice(sorted(holding))
        if name in state.tensors:
            state.drop([name])
            del value[name]
        else:
            state.add([name])
            state.tensors[name].fill_(turn)
            value[name] = turn
            known.append((name, turn, state.address([name])))
        for name, written, address in known:
            peer = PeerState(7, address, spec.by_name())
            if value.get(name) == written:
                assert set(peer.region(name, 0, spec.by_name()[name].length).tolist()) == {written}
                peer.check()
            else:
                with pytest.raises(StateError, match=r"device 7 .* given memory back"):
                    peer.region(name, 0, spec.by_name()[name].length)


@needs_shared_memory
def test_memory_that_is_given_back_while_it_is_read_is_an_error() -> None:
    """Even when all has been copied, and whatever has come in its place."""
    length = CHECK_BYTES // 4
    spec = StateSpec((TensorSpec(name="t", shape=(2 * length,), dtype="float32", where="everywhere"),), 1)
    holding: Holding = {"t": ((0, 2 * length),)}
    memory = SharedMemory()
    source, target = filled(spec, holding, memory), room(spec, holding, SharedMemory())
    address = source.address()

    class Releases(AbortFlag):
        """Has the source overwritten between two pieces."""

        looks = 0

        def check(self) -> None:
            self.looks += 1
            if self.looks == 2:
                source.drop()
                later = LocalState.empty(spec, holding, memory)
                later.add(holding)
                later.tensors["t"].fill_(1)

    transfer = SharedMemoryCopy(1, Releases()).transfer
    with pytest.raises(StateError, match=r"device 0 .* given memory back"):
        transfer([Move("t", 0, 1, 0, 2 * length)], source=None, target=target, addresses={0: address})


@needs_shared_memory
def test_going_back_and_forth_takes_no_new_pages() -> None:
    """Shards of half the tensors' length, in the place of whole ones, and the other way round."""
    rows = Cut(0, (Segment.rows(4096),))
    spec = StateSpec(
        tuple(
            TensorSpec(name=f"t{i}", shape=(4096, 16), dtype="float32", where="layer", layer=i, cut=rows)
            for i in range(6)
        ),
        6,
    )
    whole: Holding = {t.name: ((0, 4096),) for t in spec.tensors}
    half: Holding = {t.name: ((0, 2048),) for t in spec.tensors}
    memory = SharedMemory()
    state = filled(spec, whole, memory)
    file = os.dup(state.address().segments[0].file)
    pages = []
    for holding in (half, whole) * 3:
        new = LocalState.empty(spec, holding, memory)
        new.add(holding)
        for name in holding:
            new.region(name, 0, 2048).copy_(state.region(name, 0, 2048))
        if holding == half:
            assert wrong_tensors(new) == []
        state.drop()
        state = new
        pages.append(os.fstat(file).st_blocks * 512)
        assert memory.live_bytes == state.num_bytes
        assert memory.live_bytes + memory.kept_bytes == spec.num_bytes * 3 // 2
    assert len(set(pages)) == 1
    memory.trim()
    assert memory.kept_bytes == 0
    assert os.fstat(file).st_blocks * 512 == state.num_bytes + PAGE
    os.close(file)


@needs_shared_memory
def test_above_the_limit_pages_are_given_back_before_new_ones_are_taken() -> None:
    memory, holder = SharedMemory(), Holder()
    small = memory.allocate({str(i): ((PAGE,), torch.uint8) for i in range(8)})
    for i, block in small.items():
        block.hold(holder)
        block.touch()
        if int(i) % 2:
            block.release(holder)
    del block
    assert (memory.live_bytes, memory.kept_bytes) == (4 * PAGE, 4 * PAGE)
    memory.limit(9 * PAGE)
    memory.allocate({"large": ((4 * PAGE,), torch.uint8)})["large"].hold(holder)  # forgotten at once
    assert memory.live_bytes + memory.kept_bytes <= 9 * PAGE
    memory.limit(5 * PAGE)
    assert (memory.live_bytes, memory.kept_bytes) == (4 * PAGE, PAGE)
