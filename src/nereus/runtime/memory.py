"""Where the tensors of a state lie: ordinary memory of a device, or pages that are kept, which other processes can map.

    Allocator.allocate({name: shape and dtype})  -> {name: Block}     a group of tensors
    Block.hold(state) ... Block.release(state)                        freed by the last state that explicitly lets go

`HostMemory`, that of CPU devices, keeps the pages of what is freed for what is allocated next: the first touch of a page
costs several times what a copy into it does (measured here: 1.2 GB/s against 9).

    reserved addresses   | serials | live | kept | live |   kept   |            holes, to the end            |
                                                               never had pages, or were given back to the system

Live and kept pages together are never more than the live ones were at their most, nor more than `capacity_bytes`: what is
above that is given back, before anything is written to what was allocated. Kept pages hold what they held, so whoever wants
zeros says so.

A tensor may outlive its release: models form reference cycles, and those keep parameters alive until the next garbage
collection. Nothing is then allocated in its place: its pages are given back, and it reads as zeros, never a fault. A block
that nobody releases is freed when its last reference goes, like any tensor.

Shared memory is one anonymous file (memfd), not files in /dev/shm: no small tmpfs limits it, and a killed process leaves
nothing behind. Another process of the machine opens /proc/PID/fd/FILE; what it has mapped stays whatever the owner does.
Every tensor has a slot in the file, with a serial number that no other tensor ever has and that is cleared before its memory
can become another's: a reader compares it before it reads, and again when it has read everything. Sources are freed only
when all readers of a primitive have answered (`executor`), so a serial that has changed is an error, not a reason to wait.
"""

from __future__ import annotations

import itertools
import mmap
import os
import resource
import sys
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from nereus.core.errors import Aborted, StateError

ALIGNMENT = 64
"""Bytes: where a tensor may begin in a page. A cache line, and more than any dtype or vector load asks for."""

RESERVED_SHARE = 4
"""Addresses that are reserved, over the machine's memory: enough for holes between what is live. They cost nothing."""

SLOTS = 2**20
"""Tensors that shared memory holds at most at a time."""

OPEN_FILES = 65536
"""The soft limit of open files that shared memory asks for, if the hard one allows: peers' files are held while read."""

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE, which the mmap module lacks
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14; the mmap module lacks it too
_PAGE = mmap.PAGESIZE
_NOTHING = torch.empty(0)

Wanted = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Tensors to allocate: by name, shape and dtype."""


# -- what is free ------------------------------------------------------------------------------------------------------


class Ranges:
    """Disjoint ranges of numbers, ascending; those that touch are one."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.total = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._stops, strict=True)

    def add(self, start: int, stop: int) -> None:
        """A range of which nothing is here yet."""
        self.total += stop - start
        i, j = bisect_left(self._stops, start), bisect_right(self._starts, stop)
        if i < j:  # touches one before, one after, or both
            start, stop = min(start, self._starts[i]), max(stop, self._stops[j - 1])
        self._starts[i:j], self._stops[i:j] = [start], [stop]

    def remove(self, start: int, stop: int) -> None:
        """A part of one range."""
        if start == stop:
            return
        i = bisect_right(self._starts, start) - 1
        first, last = self._starts[i], self._stops[i]
        assert first <= start < stop <= last, f"{start} to {stop} is not all here"
        left = [(a, b) for a, b in ((first, start), (stop, last)) if a < b]
        self._starts[i : i + 1], self._stops[i : i + 1] = [a for a, _ in left], [b for _, b in left]
        self.total -= stop - start

    def best_fit(self, size: int) -> int | None:
        """Where the shortest range begins that is at least so long."""
        fitting = [(b - a, a) for a, b in self if b - a >= size]
        return min(fitting)[1] if fitting else None

    def at(self, start: int) -> int | None:
        """The end of the range that begins there."""
        i = bisect_left(self._starts, start)
        return self._stops[i] if i < len(self._starts) and self._starts[i] == start else None


class Space:
    """Which of the reserved addresses are live, which are free and have pages, and which are holes. Whole pages only.

    capacity_bytes: the most that live and kept ones may be together.
    """

    def __init__(self, start: int, stop: int) -> None:
        self.kept, self._holes = Ranges(), Ranges()
        self._holes.add(start, stop)
        self.live_bytes, self.peak_bytes, self.end = 0, 0, start
        self.capacity_bytes = float("inf")

    def take(self, size: int) -> tuple[int, int]:
        """(where it begins, of how many bytes there are pages). Raises MemoryError.

        The shortest kept range that is long enough, its rest stays; or the longest that a hole follows; or a hole.
        """
        start = self.kept.best_fit(size)
        reused = size
        if start is None:
            grown = [(b - a, a) for a, b in self.kept if (self._holes.at(b) or b) - a >= size]
            reused, start = max(grown) if grown else (0, self._holes.best_fit(size))
        if start is None:
            raise MemoryError(f"no {size} bytes of addresses are left: {self.live_bytes} are in use")
        self.kept.remove(start, start + reused)
        self._holes.remove(start + reused, start + size)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.end = max(self.end, start + size)
        return start, reused

    def free(self, start: int, stop: int) -> None:
        """Live addresses are free, their pages are kept."""
        self.live_bytes -= stop - start
        self.kept.add(start, stop)

    def lose(self, start: int, stop: int) -> None:
        """The pages of live addresses have been given back; they count no longer, but are in use until `restore`."""
        self.live_bytes -= stop - start

    def restore(self, start: int, stop: int) -> None:
        """Addresses without pages are free."""
        self._holes.add(start, stop)

    def surplus(self, most_kept_bytes: float = float("inf")) -> list[tuple[int, int]]:
        """Kept ranges whose pages are to be given back, holes from now on: the shortest first, they are of the least use."""
        most = min(most_kept_bytes, min(self.peak_bytes, self.capacity_bytes) - self.live_bytes)
        over = self.kept.total - max(0.0, most)
        found: list[tuple[int, int]] = []
        for a, b in sorted(self.kept, key=lambda r: r[1] - r[0]) if over > 0 else ():
            if over <= 0:
                break
            size = min(b - a, -int(-over // _PAGE) * _PAGE)
            found.append((b - size, b))
            over -= size
        for a, b in found:
            self.kept.remove(a, b)
            self._holes.add(a, b)
        return found


# -- mapped memory -----------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Extent:
    """Live addresses of a segment; there were pages for the first `reused` bytes.

    view: gone with the last tensor in it. slots: of its tensors that are not released.
    """

    start: int
    stop: int
    reused: int
    view: weakref.ref[memoryview]
    slots: set[int] = field(default_factory=set)
    in_use: int = 0
    lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor lies in a segment. number: of its extent; offset: bytes; slot, serial: see the module."""

    segment: Segment
    number: int
    offset: int
    slot: int
    serial: int


class Segment:
    """The reserved addresses of one allocator: of an anonymous file (shared), or of this process alone.

    Tensors keep the pages mapped, not the file open: that is closed with the last reference to this object.
    """

    def __init__(self, *, shared: bool) -> None:
        self.file = os.memfd_create("nereus") if shared else None
        if self.file is not None:
            weakref.finalize(self, os.close, self.file)
        table_bytes = SLOTS * 8
        self._mapping = _reserve(self.file, table_bytes)
        self._serials: NDArray[np.uint64] = np.frombuffer(self._mapping, dtype=np.uint64, count=SLOTS)
        self.space = Space(table_bytes, len(self._mapping))
        self._extents: dict[int, _Extent] = {}
        self._numbers, self._serial = itertools.count(), itertools.count(1)
        self._free_slots: list[int] = []
        self._next_slot = 0
        self._gone: deque[int] = deque()  # from garbage collection, at any time: taken note of by `_settle`

    def take(self, num_bytes: int) -> tuple[int, memoryview]:
        """A new extent's number, and its bytes. Raises MemoryError."""
        self._settle()
        size = -(-num_bytes // _PAGE) * _PAGE
        start, reused = self.space.take(size)
        self.trim()
        number = next(self._numbers)
        view = memoryview(self._mapping)[start : start + size]
        gone = weakref.ref(view, partial(_note, self._gone, number))
        self._extents[number] = _Extent(start, start + size, reused, gone)
        return number, view

    def place(
        self, number: int, view: memoryview, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[torch.Tensor, Place]:
        """A tensor at a byte offset of an extent."""
        extent = self._extents[number]
        slot, serial = self._free_slots.pop() if self._free_slots else self._next_slot, next(self._serial)
        if slot == self._next_slot:
            if slot == SLOTS:
                raise MemoryError(f"there are more than {SLOTS} tensors")
            self._next_slot += 1
        if self.file is not None:
            self._serials[slot] = serial
        extent.slots.add(slot)
        extent.in_use += 1
        place = Place(segment=self, number=number, offset=extent.start + offset, slot=slot, serial=serial)
        return _tensor(view, offset, shape, dtype), place

    def reused(self, number: int) -> bool:
        """Whether an extent has pages that held something before."""
        return self._extents[number].reused > 0

    def touch(self, place: Place) -> None:
        """Have the system find the pages of a tensor's extent that are new, all at once.

        That takes 3/4 of the time that one by one does, when they are written (measured here); nothing where it cannot.
        """
        extent = self._extents[place.number]
        start, num_bytes = extent.start + extent.reused, extent.stop - extent.start - extent.reused
        if num_bytes:
            with suppress(OSError):
                if self.file is not None:
                    os.posix_fallocate(self.file, start, num_bytes)
                self._mapping.madvise(_POPULATE_WRITE, start, num_bytes)

    def release(self, place: Place) -> None:
        """A tensor is no longer needed. With the last of its extent the pages are kept, or given back if anybody has it."""
        extent = self._extents.get(place.number)
        if extent is not None:
            self._clear(extent, place.slot)
            extent.in_use -= 1
        self._settle()
        if extent is not None and not extent.in_use and place.number in self._extents:
            extent.lost = True
            self.space.lose(extent.start, extent.stop)
            self._give_back(extent.start, extent.stop)

    def trim(self, most_kept_bytes: float = float("inf")) -> None:
        """Give back pages of what is free: all above so many bytes, and above the limits."""
        self._settle()
        for start, stop in self.space.surplus(most_kept_bytes):
            self._give_back(start, stop)

    def _settle(self) -> None:
        """Free the extents of which no tensor is left."""
        while self._gone:
            extent = self._extents.pop(self._gone.popleft())
            for slot in list(extent.slots):
                self._clear(extent, slot)
            (self.space.restore if extent.lost else self.space.free)(extent.start, extent.stop)

    def _clear(self, extent: _Extent, slot: int) -> None:
        if self.file is not None:
            self._serials[slot] = 0
        extent.slots.discard(slot)
        self._free_slots.append(slot)

    def _give_back(self, start: int, stop: int) -> None:
        advice = mmap.MADV_DONTNEED if self.file is None else mmap.MADV_REMOVE
        self._mapping.madvise(advice, start, stop - start)


def _note(gone: deque[int], number: int, _: object) -> None:
    gone.append(number)


def _reserve(file: int | None, least_bytes: int) -> mmap.mmap:
    """Addresses, as many as the system lets a process have: a multiple of the machine's memory, or a fraction."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * _PAGE
    size = max(RESERVED_SHARE * memory_bytes, 2 * least_bytes)
    while True:
        try:
            if file is None:
                return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
            os.ftruncate(file, size)
            return mmap.mmap(file, size)
        except OSError:
            size = size // 2 // _PAGE * _PAGE
            if size < 2 * least_bytes:
                raise


def _tensor(buffer: memoryview | mmap.mmap, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """It keeps the buffer, which keeps the pages mapped."""
    return torch.frombuffer(buffer, dtype=dtype, count=prod(shape), offset=offset).view(shape)


# -- blocks ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Block:
    """The memory of one tensor, and which states have it.

    Its bytes count for the state that has had it longest, so that a sum over states has every block once.
    place: where it lies, for memory that is kept.
    """

    tensor: torch.Tensor
    place: Place | None = None
    _holders: list[weakref.ref[object]] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def touch(self) -> None:
        """Have the system find the pages, where they can be kept; the content is any, or what it was."""
        if self.place is not None:
            self.place.segment.touch(self.place)

    def hold(self, state: object) -> None:
        self._holders.append(weakref.ref(state))

    def release(self, state: object) -> None:
        """Let go; the last one frees the memory, also while somebody has the tensor (see the module)."""
        self._holders = [held for held in self._holders if held() not in (None, state)]
        if not self._holders and self.place is not None:
            place, self.place, self.tensor = self.place, None, _NOTHING
            place.segment.release(place)

    def counts_for(self, state: object) -> bool:
        """Whether `state` is, of those that still have this block, the one that has had it longest."""
        return next((held() for held in self._holders if held() is not None), None) is state


class Allocator(Protocol):
    """Makes the memory of a state's tensors."""

    @property
    def device(self) -> torch.device: ...

    def allocate(self, wanted: Wanted, *, zero: bool = False) -> dict[str, Block]:
        """Memory for a group of tensors; any content, or zeros."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Ordinary memory of a device: freed with the last reference to a tensor."""

    device: torch.device

    def allocate(self, wanted: Wanted, *, zero: bool = False) -> dict[str, Block]:
        """See `Allocator`."""
        return {name: self._block(shape, dtype, zero) for name, (shape, dtype) in wanted.items()}

    def _block(self, shape: tuple[int, ...], dtype: torch.dtype, zero: bool) -> Block:
        make = torch.zeros if zero else torch.empty
        return Block(make(shape, dtype=dtype, device=self.device))


class HostMemory:
    """CPU memory whose pages are kept when it is freed (see the module). shared: other processes can map it.

    A tensor of a page or more has pages of its own; the smaller ones of a group lie side by side, freed together.
    """

    def __init__(self, *, shared: bool) -> None:
        """Shared, it raises the process's soft limit of open files."""
        self._segment = Segment(shared=shared)
        if shared:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            wish = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
            if soft != resource.RLIM_INFINITY and soft < wish:
                resource.setrlimit(resource.RLIMIT_NOFILE, (wish, hard))

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def live_bytes(self) -> int:
        """Pages in use."""
        return self._segment.space.live_bytes

    @property
    def kept_bytes(self) -> int:
        """Pages that are in no use, kept for what comes next."""
        return self._segment.space.kept.total

    @property
    def spare_bytes(self) -> float:
        """What pages in use leave of the limit."""
        return max(0.0, self._segment.space.capacity_bytes - self._segment.space.live_bytes)

    def limit(self, capacity_bytes: float) -> None:
        """From now on pages, in use and kept, are at most so many bytes, as far as it is for the kept ones."""
        self._segment.space.capacity_bytes = capacity_bytes
        self._segment.trim()

    def trim(self, most_kept_bytes: float = 0) -> None:
        """Give the kept pages back, but for so many bytes."""
        self._segment.trim(most_kept_bytes)

    def allocate(self, wanted: Wanted, *, zero: bool = False) -> dict[str, Block]:
        """See `Allocator`. Tensors without elements lie nowhere."""
        sizes = {name: prod(shape) * dtype.itemsize for name, (shape, dtype) in wanted.items()}
        blocks = {
            name: Block(torch.empty(shape, dtype=dtype)) for name, (shape, dtype) in wanted.items() if not sizes[name]
        }
        for name, size in sizes.items():
            if size >= _PAGE:
                self._extent({name: 0}, size, wanted, zero, blocks)
        small, end = {}, 0
        for name, size in sizes.items():
            if 0 < size < _PAGE:
                small[name] = end
                end += -(-size // ALIGNMENT) * ALIGNMENT
        if small:
            self._extent(small, end, wanted, zero, blocks)
        return blocks

    def _extent(
        self, offsets: Mapping[str, int], num_bytes: int, wanted: Wanted, zero: bool, blocks: dict[str, Block]
    ) -> None:
        segment = self._segment
        number, view = segment.take(num_bytes)
        for name, offset in offsets.items():
            tensor, place = segment.place(number, view, offset, *wanted[name])
            if zero and segment.reused(number):
                tensor.zero_()
            blocks[name] = Block(tensor, place)


class SharedMemory(HostMemory):
    """CPU memory that other processes of this machine can map."""

    def __init__(self) -> None:
        super().__init__(shared=True)


def has_shared_memory() -> bool:
    """Whether `SharedMemory` works on this system (Linux, with /proc)."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


# -- other processes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessAddress:
    """A process of this machine. started: when, in clock ticks since boot: a process id may be used again."""

    pid: int
    started: int

    @classmethod
    def own(cls) -> ProcessAddress:
        return cls(pid=os.getpid(), started=_start_time(os.getpid()))

    @property
    def alive(self) -> bool:
        try:
            return _start_time(self.pid) == self.started
        except OSError:
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentAddress:
    """A segment, for other processes. file: its descriptor in the owner; inode: which file that was; end: of its tensors."""

    file: int
    inode: int
    end: int

    @classmethod
    def of(cls, segment: Segment) -> SegmentAddress:
        """Raises ValueError where the segment is this process's alone."""
        if segment.file is None:
            raise ValueError("memory of one process has no address for others")
        return cls(file=segment.file, inode=os.fstat(segment.file).st_ino, end=segment.space.end)


class PeerSegment:
    """Another process's segment, mapped here; what is written to it here stays here. Unmapped with the last tensor.

    Raises Aborted when `owner` has ended, StateError when the segment is no more. device: its id, for the message.
    """

    def __init__(self, device: int, owner: ProcessAddress, address: SegmentAddress) -> None:
        self._device, self._owner = device, owner
        table, self._mapping = _map(device, owner, address)
        self._serials: NDArray[np.uint64] = np.frombuffer(table, dtype=np.uint64, count=SLOTS)
        self._read: dict[int, int] = {}

    def tensor(self, place: tuple[int, int, int], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """place: slot, serial, offset. Raises StateError when the owner has given it back."""
        slot, serial, offset = place
        self._read[slot] = serial
        self._check(slot, serial)
        return _tensor(self._mapping, offset, shape, dtype)

    def check(self) -> None:
        """Raise StateError if the owner has given back any tensor since it was asked for here: what was read may be any."""
        for slot, serial in self._read.items():
            self._check(slot, serial)

    def _check(self, slot: int, serial: int) -> None:
        if int(self._serials[slot]) != serial:
            raise _lost(self._device, self._owner, "another tensor may lie there by now")


def _map(device: int, owner: ProcessAddress, address: SegmentAddress) -> tuple[mmap.mmap, mmap.mmap]:
    """The serials, as they are at any time, and all that has ever been in the segment."""
    try:
        file = os.open(f"/proc/{owner.pid}/fd/{address.file}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _lost(device, owner, str(error)) from error
    try:
        if not owner.alive or os.fstat(file).st_ino != address.inode:
            raise _lost(device, owner, "it is another file by now")
        table = mmap.mmap(file, SLOTS * 8, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        private = mmap.MAP_PRIVATE | _NO_RESERVE
        return table, mmap.mmap(file, address.end, flags=private, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(file)


def _lost(device: int, owner: ProcessAddress, why: str) -> Exception:
    if not owner.alive:
        return Aborted(f"device {device} has ended (process {owner.pid}): its state cannot be read")
    return StateError(f"device {device} (process {owner.pid}) has given memory back that was to be read: {why}")


def _start_time(pid: int) -> int:
    """Field 22 of /proc/PID/stat, -1 for a process that has ended and is not reaped. Raises OSError where there is none.

    The name, field 2, may hold anything, blanks and parentheses too.
    """
    state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return -1 if state in "ZX" else int(others[18])
