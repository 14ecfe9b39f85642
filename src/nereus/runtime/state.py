"""The tensors that one rank holds of one model-stage.

A state has a holding, fixed, and the tensors of it that are present, which a change of plan adds, takes over from the old
state and drops, group by group:

    new = LocalState.empty(spec, holding, allocator)
    new.adopt(old)           what stays as it is: shared, not copied
    new.add(names)           room for what is written next
    old.drop(names)          what has been copied away
    new.address()            where other processes of this machine can read it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from nereus.core.errors import StateError
from nereus.core.randomness import hash_words
from nereus.core.sharding import Holding, Interval, StateSpec, TensorSpec, local_offset
from nereus.runtime.memory import (
    Allocator,
    Block,
    DeviceMemory,
    PeerSegment,
    ProcessAddress,
    Segment,
    SegmentAddress,
)

_MIX = 0x1B03738712FAD5C9  # odd
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(eq=False)
class LocalState:
    """One rank's part of a model-stage: by tensor name, its intervals of the logical tensor and the local tensor.

    holding: all that this rank is to have. tensors: what is present of it, to be read; `add`, `adopt` and `drop` change it.
    allocator: where `add` takes memory.
    """

    spec: StateSpec
    holding: Holding
    tensors: dict[str, torch.Tensor]
    allocator: Allocator = field(default_factory=lambda: DeviceMemory(torch.device("cpu")))

    def __post_init__(self) -> None:
        self.specs: dict[str, TensorSpec] = self.spec.by_name()
        self._blocks: dict[str, Block] = {}
        for name, tensor in self.tensors.items():
            self._keep(name, Block(tensor))

    @classmethod
    def empty(cls, spec: StateSpec, holding: Holding, allocator: Allocator) -> LocalState:
        """Nothing present yet."""
        return cls(spec, holding, {}, allocator)

    @classmethod
    def zeros(cls, spec: StateSpec, holding: Holding, device: torch.device) -> LocalState:
        """All of a holding, in ordinary memory."""
        state = cls.empty(spec, holding, DeviceMemory(device))
        state.add(holding, zero=True)
        return state

    # -- what is present -----------------------------------------------------------------------------------------

    def add(self, names: Iterable[str], *, zero: bool = False, touch: bool = False) -> None:
        """Memory for tensors of the holding, of any content unless `zero`: one group a layer and one for the rest.

        touch: have the system find the pages now and together, not one by one when they are first written.
        Raises ValueError for a tensor that is not held or is present already.
        """
        groups: dict[int, dict[str, tuple[tuple[int, ...], torch.dtype]]] = defaultdict(dict)
        for name in names:
            if name not in self.holding or name in self.tensors:
                raise ValueError(f"{name} is {'present already' if name in self.tensors else 'not held here'}")
            spec = self.specs[name]
            groups[spec.layer][name] = spec.local_shape(self.holding[name]), getattr(torch, spec.dtype)
        for wanted in groups.values():
            for name, block in self.allocator.allocate(wanted, zero=zero).items():
                self._keep(name, block)
                if touch:
                    block.touch()

    def adopt(self, other: LocalState, names: Iterable[str] | None = None) -> tuple[str, ...]:
        """Share, without a copy, the tensors of `other` that are held here with the same intervals and not present yet.

        names: only of these. Returns which. Either state may drop them first; writing to one writes to both.
        """
        among = other.tensors if names is None else [name for name in names if name in other.tensors]
        taken = tuple(name for name in among if name not in self.tensors and self._same(other, name))
        for name in taken:
            self._keep(name, other._blocks[name])
        return taken

    def drop(self, names: Iterable[str] | None = None) -> None:
        """Let go of tensors (None: of all). What no other state shares is freed: kept memory at once, whoever still has
        the tensor reads zeros then; other memory with its last reference. Raises KeyError for what is not present."""
        for name in list(self.tensors if names is None else names):
            del self.tensors[name]
            self._blocks.pop(name).release(self)

    @property
    def num_bytes(self) -> int:
        """Bytes present that count for this state.

        Of the states that share a tensor, it counts for the one that has had it longest. So the sum over all states is the
        memory in use, at any time: `adopt` does not change it, and when the old state drops a tensor, or is forgotten, the
        new one counts it.
        """
        return sum(block.num_bytes for block in self._blocks.values() if block.counts_for(self))

    @property
    def present_bytes(self) -> int:
        """Bytes present, shared or not."""
        return sum(block.num_bytes for block in self._blocks.values())

    def region(self, name: str, start: int, stop: int) -> torch.Tensor:
        """A view of logical indices [start, stop) along the cut dimension. Raises StateError if it is not present."""
        if name not in self.tensors:
            raise StateError(f"{name} is not present: nothing can be read from it or written to it")
        return _region(self.tensors[name], self.specs[name], self.holding[name], start, stop)

    def address(self, names: Iterable[str] | None = None) -> StateAddress:
        """Where other processes can read what is present (names: only these), until it is dropped.

        Raises ValueError for a tensor that is not in shared memory.
        """
        segments: dict[Segment, int] = {}
        tensors = {name: self._tensor_address(name, segments) for name in (self.tensors if names is None else names)}
        return StateAddress(
            process=ProcessAddress.own(),
            segments=tuple(SegmentAddress.of(segment) for segment in segments),
            tensors=tensors,
        )

    def _keep(self, name: str, block: Block) -> None:
        block.hold(self)
        self._blocks[name] = block
        self.tensors[name] = block.tensor

    def _same(self, other: LocalState, name: str) -> bool:
        mine = self.holding.get(name)
        return mine is not None and mine == other.holding[name] and self.specs[name] == other.specs[name]

    def _tensor_address(self, name: str, segments: dict[Segment, int]) -> TensorAddress:
        place, tensor = self._blocks[name].place, self.tensors[name]
        if tensor.numel() and (place is None or place.segment.file is None):
            raise ValueError(f"{name} is not in shared memory: it has no address")
        return TensorAddress(
            segment=-1 if place is None else segments.setdefault(place.segment, len(segments)),
            place=(0, 0, 0) if place is None else (place.slot, place.serial, place.offset),
            shape=tuple(tensor.shape),
            dtype=self.specs[name].dtype,
            intervals=self.holding[name],
        )

    # -- digest --------------------------------------------------------------------------------------------------

    def digest_sums(self, regions: Mapping[str, Sequence[Interval]]) -> dict[str, list[int]]:
        """For `core.digest.combine`: the weighted sum, modulo 2^64, of every region."""
        return {name: [self._digest_sum(name, *region) for region in pieces] for name, pieces in regions.items()}

    def _digest_sum(self, name: str, start: int, stop: int) -> int:
        spec = self.specs[name]
        bits = self.region(name, start, stop).contiguous()
        wide = bits.element_size() == 8
        bits = bits.view(_BITS[bits.element_size()]).to(torch.int64)
        if wide:  # sums are modulo 2^64: without mixing, changes of two top bits would cancel
            bits = (bits ^ ((bits >> 32) & 0xFFFFFFFF)) * _MIX
            bits = bits ^ ((bits >> 29) & 0x7FFFFFFFF)
        for dim in reversed(range(bits.dim())):
            first = start if dim == spec.dim else 0
            bits = (bits * _weights(name, dim, first, bits.shape[dim], bits.device)).sum(-1)
        return int(bits) & (2**64 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorAddress:
    """One tensor in shared memory. segment: which of the state's (-1: no elements); place: slot, serial number and offset
    in bytes (`runtime.memory`); shape: the local one."""

    segment: int
    place: tuple[int, int, int]
    shape: tuple[int, ...]
    dtype: str
    intervals: tuple[Interval, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateAddress:
    """Where another process of this machine finds a state's tensors; plain data."""

    process: ProcessAddress
    segments: tuple[SegmentAddress, ...]
    tensors: Mapping[str, TensorAddress]


class PeerState:
    """Another process's state, to be read. Segments are mapped when first needed, unmapped with the last view.

    device: whose state it is, for messages.
    """

    def __init__(self, device: int, address: StateAddress, specs: Mapping[str, TensorSpec]) -> None:
        self._device, self._address, self._specs = device, address, specs
        self._segments: dict[int, PeerSegment] = {}

    def region(self, name: str, start: int, stop: int) -> torch.Tensor:
        """As `LocalState.region`. Raises Aborted when the process has ended, StateError when it gave the tensor back."""
        if (at := self._address.tensors.get(name)) is None:
            raise StateError(f"{name} was not present on device {self._device} when its address was taken")
        dtype = getattr(torch, at.dtype)
        if at.segment < 0:
            tensor = torch.empty(at.shape, dtype=dtype)
        else:
            tensor = self._segment(at.segment).tensor(at.place, at.shape, dtype)
        return _region(tensor, self._specs[name], at.intervals, start, stop)

    def check(self) -> None:
        """Raise StateError if anything that was read has been given back since: it may have been overwritten meanwhile."""
        for segment in self._segments.values():
            segment.check()

    def _segment(self, number: int) -> PeerSegment:
        if number not in self._segments:
            address = self._address.segments[number]
            self._segments[number] = PeerSegment(self._device, self._address.process, address)
        return self._segments[number]


def _region(
    tensor: torch.Tensor, spec: TensorSpec, intervals: Sequence[Interval], start: int, stop: int
) -> torch.Tensor:
    return tensor.narrow(spec.dim, local_offset(intervals, start), stop - start)


def _weights(name: str, dim: int, first: int, length: int, device: torch.device) -> torch.Tensor:
    """Odd 64-bit weights of a dimension's logical indices, as int64 (arithmetic is modulo 2^64)."""
    seed = sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**61
    words = hash_words(seed, dim, np.arange(first, first + length)) | np.uint64(1)
    return torch.from_numpy(words.view(np.int64)).to(device)
