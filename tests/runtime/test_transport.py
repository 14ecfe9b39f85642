"""All transports: what arrives, bit for bit, how much of it crosses, and what staging, aborts and deaths leave."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter

import pytest
import torch
from devices_for_tests import DEVICES, error_of, kind_of
from hypothesis import given, settings
from hypothesis import strategies as st
from moves_for_tests import (
    CPU,
    Case,
    FlagAfter,
    as_bits,
    filled,
    mapped_files,
    open_files,
    random_case,
    room,
    wrong_tensors,
)

from nereus.core.errors import Aborted, StateError
from nereus.core.sharding import Cut, Holding, Move, Segment, StateSpec, TensorSpec
from nereus.runtime.abort import AbortFlag
from nereus.runtime.cluster import LocalCluster, WorkerFailed
from nereus.runtime.memory import DeviceMemory, SharedMemory, has_shared_memory
from nereus.runtime.state import LocalState, StateAddress
from nereus.runtime.transport import CHECK_BYTES, DIRECT_BYTES, InProcess, PeerToPeer, SharedMemoryCopy

needs_shared_memory = pytest.mark.skipif(not has_shared_memory(), reason="needs memfd and /proc")
KINDS = ["peer to peer", pytest.param("shared memory", marks=needs_shared_memory)]


class Carriers:
    """Four devices that hold sources and targets."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self._names = itertools.count()
        self.addresses: dict[int, StateAddress] = {}

    def heal(self) -> None:
        self.cluster.abort("between tests")
        if dead := [device for device in DEVICES if device not in self.cluster.devices]:
            self.cluster.start(dead)
        self.open()

    def open(self) -> None:
        self.cluster.call("open", dict.fromkeys(DEVICES, (f"pool {next(self._names)}", DEVICES))).results()

    def hold(self, case: Case, *, shared: bool) -> None:
        arguments = {d: (case.spec, case.before.get(d), case.after.get(d), shared) for d in DEVICES}
        found = self.cluster.call("hold", arguments).results()
        self.addresses = {device: address for device, address in found.items() if address is not None}

    def all(self, method: str, *arguments: object) -> dict[int, object]:
        return self.cluster.call(method, dict.fromkeys(DEVICES, arguments)).results()

    def transfer(self, kind: str, case: Case, message_bytes: int = 4096, messages: int = 4) -> dict[int, int]:
        """Bytes received, by device. Only ranks with a part in the moves take part. messages: that staging memory holds."""
        if kind == "shared memory":
            receivers = sorted({m.target for m in case.moves})
            arguments = dict.fromkeys(receivers, (case.moves, self.addresses))
            return self.cluster.call("copy", arguments).results()
        involved = sorted({d for m in case.moves for d in (m.source, m.target)})
        arguments = dict.fromkeys(involved, (case.moves, messages * message_bytes, message_bytes))
        found = self.cluster.call("send_and_receive", arguments).results()
        return {device: report["received"] for device, report in found.items()}


@pytest.fixture(scope="module")
def all_carriers() -> Iterator[Carriers]:
    cluster = LocalCluster("moves_for_tests:Carrier", preload=("nereus.runtime.unit_store",), timeout_s=120.0)
    cluster.start(DEVICES)
    yield Carriers(cluster)
    cluster.close()


@pytest.fixture
def carriers(all_carriers: Carriers) -> Carriers:
    all_carriers.heal()
    return all_carriers


# -- conformance ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["in process", *KINDS[1:]])
@settings(max_examples=60, deadline=None)
@given(draw=st.randoms(use_true_random=False))
def test_one_process_random_moves_arrive_bit_for_bit(kind: str, draw: random.Random) -> None:
    case, shared = random_case(draw, DEVICES), kind == "shared memory"
    allocator = SharedMemory() if shared else DeviceMemory(CPU)
    sources = {d: filled(case.spec, case.before[d], allocator) for d in DEVICES}
    targets = {d: room(case.spec, case.after[d], allocator) for d in DEVICES}
    addresses = {d: state.address() for d, state in sources.items()} if shared else {}
    for device in draw.sample(DEVICES, len(DEVICES)):
        transport = SharedMemoryCopy(device, AbortFlag()) if shared else InProcess(device, sources)
        received = transport.transfer(case.moves, source=sources[device], target=targets[device], addresses=addresses)
        assert received == case.received_bytes[device]
    for device in DEVICES:
        assert wrong_tensors(targets[device]) == []
        assert wrong_tensors(sources[device]) == []
        sources[device].drop()
        targets[device].drop()


@pytest.mark.parametrize("kind", KINDS)
def test_real_processes_random_moves_arrive_bit_for_bit(carriers: Carriers, kind: str) -> None:
    for seed in range(25):
        draw = random.Random(seed)
        case = random_case(draw, draw.sample(DEVICES, draw.randint(2, 4)))
        carriers.hold(case, shared=kind == "shared memory")
        received = carriers.transfer(kind, case, draw.choice([1, 16, 40, 10_000]), draw.randint(1, 4))
        assert {d: n for d, n in received.items() if n} == {d: n for d, n in case.received_bytes.items() if n}, seed
        assert carriers.all("wrong") == {d: [] for d in DEVICES}, seed
        assert carriers.all("spoilt") == {d: [] for d in DEVICES}, seed


@pytest.mark.parametrize("kind", KINDS)
def test_large_and_strided_regions_arrive_bit_for_bit(carriers: Carriers, kind: str) -> None:
    case = large_case()
    carriers.hold(case, shared=kind == "shared memory")
    assert carriers.transfer(kind, case, 2 * DIRECT_BYTES) == case.received_bytes
    assert carriers.all("wrong") == {d: [] for d in DEVICES}


def large_case() -> Case:
    """Tensors of 6 MB cut on either dimension, thirds to others; each device moves on to the next one's part."""
    rows = Segment.rows(1200)
    spec = StateSpec(
        tuple(
            TensorSpec(
                name=f"t{dim}", shape=(1200, 1250), dtype="float32", where="everywhere", cut=Cut(dim, (segment,))
            )
            for dim, segment in ((0, rows), (1, Segment.rows(1250)))
        ),
        1,
    )
    before: dict[int, Holding] = {
        d: {"t0": ((300 * d, 300 * d + 300),), "t1": ((300 * d, 300 * d + 350),)} for d in DEVICES
    }
    after = {d: before[(d + 1) % 4] for d in DEVICES}
    moves, received = [], dict.fromkeys(DEVICES, 0)
    for tensor in spec.tensors:
        for d in DEVICES:
            ((start, stop),) = after[d][tensor.name]
            moves.append(Move(tensor.name, (d + 1) % 4, d, start, stop))
            received[d] += tensor.index_bytes * (stop - start)
    return Case(spec, before, after, tuple(moves), received)


def test_source_and_target_may_be_the_same_object() -> None:
    spec = StateSpec((TensorSpec(name="t", shape=(8, 3), dtype="bfloat16", where="everywhere"),), 1)
    states = {d: filled(spec, {"t": ((0, 8),)}, DeviceMemory(CPU)) for d in (0, 1)}
    states[1].tensors["t"][:4] = 0
    moves = [Move("t", 0, 1, 0, 4), Move("t", 1, 1, 4, 8)]
    assert InProcess(1, states).transfer(moves, source=states[1], target=states[1]) == 24
    assert wrong_tensors(states[1]) == []


def test_a_rank_without_the_state_that_a_move_needs_is_an_error() -> None:
    spec = StateSpec((TensorSpec(name="t", shape=(8,), dtype="int32", where="everywhere"),), 1)
    target = room(spec, {"t": ((0, 8),)}, DeviceMemory(CPU))
    with pytest.raises(StateError, match="no such state"):
        InProcess(1, {}).transfer([Move("t", 0, 1, 0, 8)], source=None, target=target)
    with pytest.raises(StateError, match="no address of device 0"):
        SharedMemoryCopy(1, AbortFlag()).transfer([Move("t", 0, 1, 0, 8)], source=None, target=target)


# -- staging -------------------------------------------------------------------------------------------------------


def all_to_all_case(length: int, columns: int) -> Case:
    """Everybody has a strip of columns of every tensor and gets a strip of rows: all pieces are strided somewhere."""
    cut = Cut(1, (Segment.rows(4 * columns),))
    names = [f"t{i}" for i in range(4)]
    spec = StateSpec(
        tuple(
            TensorSpec(name=n, shape=(length, 4 * columns), dtype="float32", where="everywhere", cut=cut) for n in names
        ),
        1,
    )
    before = {d: dict.fromkeys(names, ((d * columns, (d + 1) * columns),)) for d in DEVICES}
    after: dict[int, Holding] = {d: {names[d]: ((0, 4 * columns),)} for d in DEVICES}
    moves = [Move(names[d], source, d, source * columns, (source + 1) * columns) for d in DEVICES for source in DEVICES]
    return Case(spec, before, after, tuple(moves), dict.fromkeys(DEVICES, 3 * length * columns * 4))


def test_what_a_rank_stages_is_bounded_over_all_peers_and_directions(carriers: Carriers) -> None:
    case, message_bytes = all_to_all_case(512, 256), 16 * 2**10
    staging_bytes = 5 * message_bytes
    carriers.hold(case, shared=False)
    found = carriers.all("send_and_receive", case.moves, staging_bytes, message_bytes)
    for report in found.values():
        assert isinstance(report, dict)
        assert report["received"] == 3 * 512 * 256 * 4
        assert report["messages"] > 150
        assert message_bytes <= report["staged"] <= staging_bytes
    assert carriers.all("wrong") == {d: [] for d in DEVICES}


@pytest.mark.parametrize("messages", [1, 2, 3])
def test_ranks_do_not_block_each_other_however_little_they_may_stage(carriers: Carriers, messages: int) -> None:
    case = all_to_all_case(128, 64)
    carriers.hold(case, shared=False)
    assert carriers.transfer("peer to peer", case, 1024, messages) == case.received_bytes
    assert carriers.all("wrong") == {d: [] for d in DEVICES}


class Done:
    """A message that has arrived."""

    done = True

    def wait(self) -> None: ...


class Recorder:
    """A communicator that carries nothing and writes down the messages that a rank starts: (source, target, bytes)."""

    def __init__(self, rank: int) -> None:
        self.rank, self.flag = rank, AbortFlag()
        self.started: list[tuple[int, int, int]] = []

    def isend(self, tensor: torch.Tensor, target: int) -> Done:
        self.started.append((self.rank, target, tensor.numel()))
        return Done()

    def irecv(self, tensor: torch.Tensor, source: int) -> Done:
        self.started.append((source, self.rank, tensor.numel()))
        return Done()

    def settle(self) -> None: ...


@settings(max_examples=60, deadline=None)
@given(draw=st.randoms(use_true_random=False))
def test_all_ranks_start_messages_in_one_order(draw: random.Random) -> None:
    """So no ranks can wait for each other in a circle; and of a pair's messages, both ends start the same one first."""
    case, message_bytes = random_case(draw, DEVICES), draw.choice([8, 40, 1000])
    started = {}
    for device in DEVICES:
        recorder = Recorder(device)
        transport = PeerToPeer(recorder, staging_bytes=2 * message_bytes, message_bytes=message_bytes)  # type: ignore[arg-type]
        source = filled(case.spec, case.before[device], DeviceMemory(CPU))
        target = room(case.spec, case.after[device], DeviceMemory(CPU))
        received = transport.transfer(case.moves, source=source, target=target)
        assert received == case.received_bytes[device]
        assert all(num_bytes <= message_bytes for *_, num_bytes in recorder.started)
        started[device] = numbered(recorder.started)
    before: dict[object, set[object]] = {message: set() for listed in started.values() for message in listed}
    for listed in started.values():
        for one, following in itertools.pairwise(listed):
            before[following].add(one)
    list(TopologicalSorter(before).static_order())  # raises CycleError
    for a, b in itertools.combinations(DEVICES, 2):
        assert between(started[a], a, b) == between(started[b], a, b)


def numbered(started: list[tuple[int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Each message with how many of its pair and direction went before it."""
    seen: Counter[tuple[int, int]] = Counter()
    found = []
    for source, target, num_bytes in started:
        found.append((source, target, num_bytes, seen[source, target]))
        seen[source, target] += 1
    return found


def between(messages: list[tuple[int, int, int, int]], a: int, b: int) -> list[tuple[int, int, int, int]]:
    return [message for message in messages if {message[0], message[1]} == {a, b}]


def test_what_is_contiguous_at_both_ends_is_not_staged(carriers: Carriers) -> None:
    spec = StateSpec((TensorSpec(name="t", shape=(400, 1000), dtype="float32", where="everywhere"),), 1)
    strips = {d: (100 * d, 100 * d + 100) for d in DEVICES}
    moves = tuple(Move("t", (d + 1) % 4, d, *strips[(d + 1) % 4]) for d in DEVICES)
    before: dict[int, Holding] = {d: {"t": (strips[d],)} for d in DEVICES}
    case = Case(spec, before, {d: before[(d + 1) % 4] for d in DEVICES}, moves, dict.fromkeys(DEVICES, 400_000))
    carriers.hold(case, shared=False)
    found = carriers.all("send_and_receive", case.moves, 2 * DIRECT_BYTES, DIRECT_BYTES)
    assert all(isinstance(report, dict) and report["staged"] == 0 for report in found.values())
    assert carriers.all("wrong") == {d: [] for d in DEVICES}


@pytest.mark.parametrize("message_bytes", [0, -1, 17])
def test_a_message_must_fit_into_staging_memory(message_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"message_bytes {message_bytes}"):
        PeerToPeer(None, staging_bytes=16, message_bytes=message_bytes)  # type: ignore[arg-type]  # refused before


# -- aborts and deaths ---------------------------------------------------------------------------------------------


@needs_shared_memory
@pytest.mark.parametrize("looks", [1, 2, 4])
def test_an_abort_ends_a_copy_between_pieces_and_unmaps_the_source(looks: int) -> None:
    length = 3 * CHECK_BYTES // 1024
    spec = StateSpec((TensorSpec(name="t", shape=(length, 256), dtype="float32", where="everywhere"),), 1)
    source = filled(spec, {"t": ((0, length),)}, SharedMemory())
    target = LocalState.empty(spec, {"t": ((0, length),)}, SharedMemory())
    target.add(["t"], zero=True)
    before = open_files(), mapped_files()
    with pytest.raises(Aborted, match="looked at often enough") as caught:
        SharedMemoryCopy(1, FlagAfter(looks)).transfer(
            [Move("t", 0, 1, 0, length)], source=None, target=target, addresses={0: source.address()}
        )
    assert (open_files(), mapped_files()) == before, f"still mapped while {caught} is at hand"
    written = as_bits(target.tensors["t"]).view(3, -1).ne(0).any(1).sum()
    assert written == looks - 1
    assert wrong_tensors(source) == []
    source.drop()
    target.drop()


@pytest.mark.parametrize("message", [1, 7, 60])
def test_an_abort_in_mid_transfer_ends_it_on_all_ranks_and_it_can_be_done_again(
    carriers: Carriers, message: int
) -> None:
    case, message_bytes = all_to_all_case(256, 64), 4096
    carriers.hold(case, shared=False)
    carriers.cluster.call("abort_at", {2: (message,)}).results()
    arguments = (case.moves, 4 * message_bytes, message_bytes)
    calls = {d: carriers.cluster.call("send_and_receive", {d: arguments}) for d in DEVICES}
    assert kind_of(calls[2]) == "Aborted"
    carriers.cluster.abort("device 2 has given up")
    assert {kind_of(calls[d]) for d in DEVICES if d != 2} == {"Aborted"}
    assert carriers.all("spoilt") == {d: [] for d in DEVICES}
    carriers.open()
    assert carriers.transfer("peer to peer", case) == case.received_bytes
    assert carriers.all("wrong") == {d: [] for d in DEVICES}


@needs_shared_memory
def test_a_source_that_has_died_is_an_error_that_names_the_device(carriers: Carriers) -> None:
    case = large_case()
    carriers.hold(case, shared=True)
    error_of(carriers.cluster.call("die", {1: ()}))
    error = error_of(carriers.cluster.call("copy", {0: (case.moves, carriers.addresses)}))
    assert isinstance(error, WorkerFailed)
    assert error.failure.kind == "Aborted"
    assert "device 1 has ended" in error.failure.message


@needs_shared_memory
def test_what_is_mapped_outlives_its_owner(carriers: Carriers) -> None:
    case = large_case()
    carriers.hold(case, shared=True)
    region = ("t0", 300, 600)
    carriers.cluster.call("map_peer", {0: (1, carriers.addresses[1], region)}).results()
    error_of(carriers.cluster.call("die", {1: ()}))
    assert carriers.cluster.call("still_reads", {0: (region,)}).results() == {0: True}


@needs_shared_memory
def test_a_later_process_of_the_same_id_and_a_tensor_given_back_are_told_from_the_source() -> None:
    spec = StateSpec((TensorSpec(name="t", shape=(8,), dtype="int32", where="everywhere"),), 1)
    holding = {"t": ((0, 8),)}
    source, target = filled(spec, holding, SharedMemory()), room(spec, holding, SharedMemory())
    address = source.address()
    successor = dataclasses.replace(address.process, started=address.process.started + 1)

    def copy(address: StateAddress) -> None:
        transport = SharedMemoryCopy(1, AbortFlag())
        transport.transfer([Move("t", 0, 1, 0, 8)], source=None, target=target, addresses={0: address})

    with pytest.raises(Aborted, match="device 0 has ended"):
        copy(dataclasses.replace(address, process=successor))
    copy(address)
    assert wrong_tensors(target) == []
    source.drop()
    with pytest.raises(StateError, match=r"device 0 .* given memory back"):
        copy(address)
    (segment,) = address.segments
    later = filled(spec, holding, SharedMemory())
    (later_file,) = later.address().segments
    with pytest.raises(StateError, match="another file"):
        copy(dataclasses.replace(address, segments=(dataclasses.replace(segment, file=later_file.file),)))


@needs_shared_memory
def test_transfers_leave_no_open_files_and_no_mapped_segments(carriers: Carriers) -> None:
    case = large_case()
    carriers.hold(case, shared=True)
    found = carriers.all("copy_again_and_again", 50, case.moves, carriers.addresses)
    for device, counts in found.items():
        assert isinstance(counts, tuple)
        assert counts[0] == counts[1], device
        assert counts[0][1] == 2  # its source and its target
