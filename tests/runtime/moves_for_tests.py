"""States cut and placed at random, what every rank has and is to get, and a device that carries it out.

Contents are random bits, NaNs with payloads and -0.0 among them, and are compared as bits.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import signal
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from states_for_tests import random_spec

from nereus.core.sharding import ITEM_BYTES, Holding, Interval, Move, StateSpec, TensorSpec, merge_intervals
from nereus.runtime.abort import AbortFlag
from nereus.runtime.communicator import Communicator, Pending
from nereus.runtime.memory import Allocator, DeviceMemory, SharedMemory
from nereus.runtime.state import LocalState, PeerState, StateAddress
from nereus.runtime.transport import PeerToPeer, SharedMemoryCopy
from nereus.runtime.worker import WorkerContext

CPU = torch.device("cpu")
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
AWKWARD = {  # a signalling NaN, a negative NaN with a payload, -0.0
    2: (0x7F81, -0x31, -0x8000),
    4: (0x7F800001, -0x1234, -0x80000000),
    8: (0x7FF0000000000001, -0x12345, -0x8000000000000000),
}


@dataclass(frozen=True)
class Case:
    """before, after: what every device has and is to get. received_bytes: from others, by device."""

    spec: StateSpec
    before: Mapping[int, Holding]
    after: Mapping[int, Holding]
    moves: tuple[Move, ...]
    received_bytes: Mapping[int, int]


def random_case(draw: random.Random, devices: Sequence[int]) -> Case:
    """Any cuts, not only those of layouts; every region comes from any device that has it, in any order of tensors."""
    spec = random_spec(draw)
    dtypes = sorted(ITEM_BYTES)
    spec = StateSpec(tuple(dataclasses.replace(t, dtype=draw.choice(dtypes)) for t in spec.tensors), spec.num_layers)
    before: dict[int, dict[str, tuple[Interval, ...]]] = {device: {} for device in devices}
    after: dict[int, dict[str, tuple[Interval, ...]]] = {device: {} for device in devices}
    moves, received = [], dict.fromkeys(devices, 0)
    for tensor in draw.sample(spec.tensors, len(spec.tensors)):
        ends = sorted({0, tensor.length, *(draw.randint(0, tensor.length) for _ in range(4))})
        pieces = list(itertools.pairwise(ends))
        holders = {piece: draw.sample(devices, draw.randint(1, len(devices))) for piece in pieces}
        takers = {piece: draw.sample(devices, draw.randint(0, len(devices))) for piece in pieces}
        for device in devices:
            held = merge_intervals(p for p in pieces if device in holders[p])
            if held or draw.random() < 0.5:  # with no indices, or not at all
                before[device][tensor.name] = held
            needed = merge_intervals(p for p in pieces if device in takers[p])
            if needed or draw.random() < 0.5:
                after[device][tensor.name] = needed
        for start, stop in draw.sample(pieces, len(pieces)):
            for target in takers[start, stop]:
                source = target if target in holders[start, stop] else draw.choice(holders[start, stop])
                moves.append(Move(tensor.name, source, target, start, stop))
                received[target] += tensor.index_bytes * (stop - start) if source != target else 0
    return Case(spec, before, after, tuple(moves), received)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(INTEGERS[tensor.element_size()])


def logical_bits(tensor: TensorSpec) -> torch.Tensor:
    """What a logical tensor contains."""
    generator = torch.Generator().manual_seed(zlib.crc32(tensor.name.encode()))
    item = ITEM_BYTES[tensor.dtype]
    random_bytes = torch.randint(0, 256, (tensor.num_bytes,), dtype=torch.uint8, generator=generator)
    bits = random_bytes.view(INTEGERS[item])
    for i, pattern in enumerate(AWKWARD[item][: bits.numel()]):
        bits[i] = pattern
    return bits.view(tensor.shape)


def expected_bits(tensor: TensorSpec, intervals: Sequence[Interval]) -> torch.Tensor:
    """The local tensor of a rank that holds `intervals`, by plain slicing."""
    whole = logical_bits(tensor)
    pieces = [whole.narrow(tensor.dim, start, stop - start) for start, stop in intervals]
    return torch.cat(pieces, tensor.dim) if pieces else whole.narrow(tensor.dim, 0, 0)


def filled(spec: StateSpec, holding: Holding, allocator: Allocator) -> LocalState:
    """A source."""
    state = LocalState.empty(spec, holding, allocator)
    state.add(holding)
    for name, tensor in state.tensors.items():
        tensor.view(INTEGERS[tensor.element_size()]).copy_(expected_bits(state.specs[name], holding[name]))
    return state


def room(spec: StateSpec, holding: Holding, allocator: Allocator) -> LocalState:
    """A target, every bit of it wrong."""
    state = LocalState.empty(spec, holding, allocator)
    state.add(holding)
    for name, tensor in state.tensors.items():
        tensor.view(INTEGERS[tensor.element_size()]).copy_(~expected_bits(state.specs[name], holding[name]))
    return state


def wrong_tensors(state: LocalState) -> list[str]:
    """Names of the tensors that are not what slicing gives."""
    return [
        name
        for name, intervals in state.holding.items()
        if not torch.equal(as_bits(state.tensors[name]), expected_bits(state.specs[name], intervals))
    ]


def mapped_files() -> int:
    """Anonymous files that this process has mapped."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:nereus" in line for line in maps)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class FlagAfter(AbortFlag):
    """Goes up when it has been looked at `looks` times."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    def check(self) -> None:
        self.looks -= 1
        if self.looks == 0:
            self.raise_flag("looked at often enough")
        super().check()


class Accountant(Communicator):
    """Counts messages, and the memory that they are sent from or received into which is not a state's."""

    states: Sequence[LocalState | None] = ()
    messages: int = 0
    at: tuple[int, Callable[[], None]] = (-1, lambda: None)

    def isend(self, tensor: torch.Tensor, target: int, tag: int = 0) -> Pending:
        self._count(tensor)
        return super().isend(tensor, target, tag)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Pending:
        self._count(tensor)
        return super().irecv(tensor, source, tag)

    def watch(self, *states: LocalState | None) -> None:
        self.states, self.messages, self.staging = states, 0, dict[int, int]()

    def _count(self, buffer: torch.Tensor) -> None:
        storage = buffer.untyped_storage()
        own = {t.untyped_storage().data_ptr() for s in self.states if s is not None for t in s.tensors.values()}
        if storage.data_ptr() not in own:
            self.staging[storage.data_ptr()] = storage.nbytes()
        self.messages += 1
        if self.messages == self.at[0]:
            self.at[1]()


class Carrier:
    """A device that has a source and a target."""

    def __init__(self, context: WorkerContext) -> None:
        self.context, self.me = context, context.device_id
        self.group: Accountant | None = None
        self.source: LocalState | None = None
        self.target: LocalState | None = None
        self.peer: PeerState | None = None

    def open(self, name: str, ranks: Sequence[int]) -> None:
        self.group = Accountant.create(
            store=self.context.store,
            name=name,
            ranks=ranks,
            rank=self.me,
            timeout_s=self.context.timeout_s,
            flag=self.context.flag,
            device=CPU,
        )

    def hold(self, spec: StateSpec, old: Holding | None, new: Holding | None, shared: bool) -> StateAddress | None:
        """Returns the source's address, if it has one."""
        self.peer = None
        for state in (self.source, self.target):
            if state is not None:
                state.drop()
        allocator: Allocator = SharedMemory() if shared else DeviceMemory(CPU)
        self.source = None if old is None else filled(spec, old, allocator)
        self.target = None if new is None else room(spec, new, allocator)
        return self.source.address() if shared and self.source is not None else None

    def send_and_receive(self, moves: Sequence[Move], staging_bytes: int, message_bytes: int) -> dict[str, int]:
        assert self.group is not None
        self.group.watch(self.source, self.target)
        transport = PeerToPeer(self.group, staging_bytes=staging_bytes, message_bytes=message_bytes)
        received = transport.transfer(moves, source=self.source, target=self.target)
        staged = sum(self.group.staging.values())
        return {"received": received, "messages": self.group.messages, "staged": staged}

    def copy(self, moves: Sequence[Move], addresses: Mapping[int, StateAddress]) -> int:
        transport = SharedMemoryCopy(self.me, self.context.flag)
        return transport.transfer(moves, source=self.source, target=self.target, addresses=addresses)

    def map_peer(self, device: int, address: StateAddress, region: tuple[str, int, int]) -> None:
        """Read a region of another device's state, and keep it mapped."""
        assert self.target is not None
        self.peer = PeerState(device, address, self.target.specs)
        self.peer.region(*region)

    def still_reads(self, region: tuple[str, int, int]) -> bool:
        assert self.peer is not None and self.target is not None
        name, *interval = region
        expected = expected_bits(self.target.specs[name], [(interval[0], interval[1])])
        return torch.equal(as_bits(self.peer.region(*region)), expected)

    def copy_again_and_again(
        self, times: int, moves: Sequence[Move], addresses: Mapping[int, StateAddress]
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Into a new target each time. Open files and mapped segments after the first and after the last."""
        assert self.target is not None
        counts = []
        for _ in range(times):
            spec, holding = self.target.spec, self.target.holding
            self.target.drop()
            self.target = LocalState.empty(spec, holding, SharedMemory())
            self.target.add(holding)
            self.copy(moves, addresses)
            counts.append((open_files(), mapped_files()))
        return counts[0], counts[-1]

    def abort_at(self, message: int) -> None:
        """As if an abort came when so many messages have been started."""
        assert self.group is not None
        self.group.at = (message, lambda: self.context.flag.raise_flag("an abort at a message"))

    def wrong(self) -> list[str]:
        return [] if self.target is None else wrong_tensors(self.target)

    def spoilt(self) -> list[str]:
        """Tensors of the source that are not what they were."""
        return [] if self.source is None else wrong_tensors(self.source)

    def die(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
