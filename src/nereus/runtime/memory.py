"""Where the tensors of a state lie: ordinary memory of a device, or memory that other processes can map.

    Allocator.allocate({name: shape and dtype})  -> {name: Block}     one group of tensors, as a rule freed together
    Block.hold(state) ... Block.release(state)                        freed by the last state that explicitly lets go

On a CPU a tensor may outlive its release: models form reference cycles, and those keep parameters alive until the next
garbage collection. So a release gives the pages back and leaves the mapping: whoever still reads such a tensor finds
zeros, never a fault. The mapping itself goes with the last tensor in it. A block that nobody releases is freed when its last
reference goes, like any tensor.

Shared memory is anonymous files (memfd), not files in /dev/shm: no small tmpfs limits it, and a killed process leaves
nothing behind. Another process of the machine opens /proc/PID/fd/FILE; what it has mapped stays whatever the owner does.
"""

from __future__ import annotations

import mmap
import os
import resource
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Protocol

import torch

from nereus.core.errors import Aborted, StateError

ALIGNMENT = 64
"""Bytes: where a tensor may begin in a segment. A cache line, and more than any dtype or vector load asks for."""

MAPPED_BYTES = 2**20
"""From this size on, ordinary CPU memory is a mapping of its own, which can be given back while a tensor lives.

Huge pages are not asked for. In a virtual machine (measured here) the first touch of 2 MiB pages runs at 6 GB/s where
the hypervisor has memory behind them and at 0.5 where it has not, and they are mostly the latter; 4 KiB pages: 2 GB/s.
"""

OPEN_FILES = 65536
"""The soft limit of open files that shared memory asks for, if the hard one allows: two for every group of tensors."""

Wanted = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Tensors to allocate: by name, shape and dtype."""


class Segment:
    """Mapped pages that hold several tensors, of an anonymous file or (file None) of this process alone.

    The file is closed with the last reference to this object: tensors keep the pages mapped, not the file open.
    """

    def __init__(self, num_bytes: int, file: int | None = None) -> None:
        self.num_bytes = num_bytes
        self.file = file
        self._mapping = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE) if file is None else mmap.mmap(file, num_bytes)
        if file is not None:
            weakref.finalize(self, os.close, file)
        self._in_use = 0

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor at a byte offset; it keeps the pages mapped for as long as it lives."""
        self._in_use += 1
        return _tensor(self._mapping, offset, shape, dtype)

    def give_back(self, offset: int, num_bytes: int) -> None:
        """One tensor's pages, as far as no other tensor lies in them; with the last tensor, all pages."""
        self._in_use -= 1
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (offset + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if not self._in_use:
            start, stop = 0, self.num_bytes
        if start < stop:
            advice = mmap.MADV_DONTNEED if self.file is None else mmap.MADV_REMOVE
            self._mapping.madvise(advice, start, stop - start)


@dataclass(eq=False)
class Block:
    """The memory of one tensor, and which states have it.

    Its bytes count for the state that has had it longest, so that a sum over states has every block once.
    segment, offset: where it lies, for memory that is mapped.
    """

    tensor: torch.Tensor
    segment: Segment | None = None
    offset: int = 0
    _holders: list[weakref.ref[object]] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def touch(self) -> None:
        """Write to every page, so that a later writer does not wait for them. Only while the content is of no account."""
        if self.tensor.device.type == "cpu":
            self.tensor.view(-1).view(torch.uint8)[:: mmap.PAGESIZE] = 0

    def hold(self, state: object) -> None:
        self._holders.append(weakref.ref(state))

    def release(self, state: object) -> None:
        """Let go; the last one frees the memory, also while somebody has the tensor (see the module)."""
        self._holders = [held for held in self._holders if held() not in (None, state)]
        if not self._holders and self.segment is not None:
            self.segment.give_back(self.offset, self.num_bytes)

    def counts_for(self, state: object) -> bool:
        """Whether `state` is, of those that still have this block, the one that has had it longest."""
        return next((held() for held in self._holders if held() is not None), None) is state


class Allocator(Protocol):
    """Makes the memory of a state's tensors."""

    @property
    def device(self) -> torch.device: ...

    def allocate(self, wanted: Wanted, *, zero: bool = False) -> dict[str, Block]:
        """Memory for a group of tensors that are, as a rule, freed together; any content, or zeros."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Ordinary memory of a device. A GPU's is freed with the last reference to a tensor."""

    device: torch.device

    def allocate(self, wanted: Wanted, *, zero: bool = False) -> dict[str, Block]:
        """See `Allocator`."""
        return {name: self._block(shape, dtype, zero) for name, (shape, dtype) in wanted.items()}

    def _block(self, shape: tuple[int, ...], dtype: torch.dtype, zero: bool) -> Block:
        num_bytes = prod(shape) * dtype.itemsize
        if self.device.type == "cpu" and num_bytes >= MAPPED_BYTES:
            segment = Segment(num_bytes)  # zeros as it comes
            return Block(segment.tensor(0, shape, dtype), segment)
        make = torch.zeros if zero else torch.empty
        return Block(make(shape, dtype=dtype, device=self.device))


class SharedMemory:
    """CPU memory that other processes of this machine can map: one segment for each group that is allocated."""

    def __init__(self) -> None:
        """Raises the process's soft limit of open files."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wish = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
        if soft != resource.RLIM_INFINITY and soft < wish:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wish, hard))

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def allocate(self, wanted: Wanted, *, zero: bool = False) -> dict[str, Block]:
        """See `Allocator`: a new segment, zeros as it comes. Tensors without elements are in none."""
        offsets, end = _offsets(wanted)
        blocks = {
            name: Block(torch.empty(shape, dtype=dtype)) for name, (shape, dtype) in wanted.items() if not prod(shape)
        }
        if not offsets:
            return blocks
        file = os.memfd_create("nereus")
        os.ftruncate(file, end)
        segment = Segment(end, file)
        for name, offset in offsets.items():
            blocks[name] = Block(segment.tensor(offset, *wanted[name]), segment, offset)
        return blocks


def has_shared_memory() -> bool:
    """Whether `SharedMemory` works on this system (Linux, with /proc)."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


def _offsets(wanted: Wanted) -> tuple[dict[str, int], int]:
    """Where each tensor that has elements begins, in bytes, and the end rounded up to pages.

    What is a page or larger begins at a page, so that it can be given back before its neighbours.
    """
    offsets, end = {}, 0
    for name, (shape, dtype) in wanted.items():
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes:
            step = mmap.PAGESIZE if num_bytes >= mmap.PAGESIZE else ALIGNMENT
            offsets[name] = -(-end // step) * step
            end = offsets[name] + num_bytes
    return offsets, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE


def _tensor(mapping: mmap.mmap, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(mapping, dtype=dtype, count=prod(shape), offset=offset).view(shape)


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
    """A segment, for other processes. file: its descriptor in the owner; inode: which file that was."""

    file: int
    inode: int
    num_bytes: int

    @classmethod
    def of(cls, segment: Segment) -> SegmentAddress:
        """Raises ValueError where the segment is this process's alone."""
        if segment.file is None:
            raise ValueError("memory of one process has no address for others")
        return cls(file=segment.file, inode=os.fstat(segment.file).st_ino, num_bytes=segment.num_bytes)


class PeerSegment:
    """Another process's segment, mapped here; what is written to it here stays here. Unmapped with the last tensor.

    Raises Aborted when `owner` has ended, StateError when it has given the segment back. device: its id, for the message.
    """

    def __init__(self, device: int, owner: ProcessAddress, address: SegmentAddress) -> None:
        self._mapping = _map(device, owner, address)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return _tensor(self._mapping, offset, shape, dtype)


def _map(device: int, owner: ProcessAddress, address: SegmentAddress) -> mmap.mmap:
    try:
        file = os.open(f"/proc/{owner.pid}/fd/{address.file}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _lost(device, owner, str(error)) from error
    try:
        if not owner.alive or os.fstat(file).st_ino != address.inode:
            raise _lost(device, owner, "it is another file by now")
        return mmap.mmap(file, address.num_bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(file)


def _lost(device: int, owner: ProcessAddress, why: str) -> Exception:
    if not owner.alive:
        return Aborted(f"device {device} has ended (process {owner.pid}): its state cannot be read")
    return StateError(f"device {device} (process {owner.pid}) has given a segment back that was to be read: {why}")


def _start_time(pid: int) -> int:
    """Field 22 of /proc/PID/stat, -1 for a process that has ended and is not reaped. Raises OSError where there is none.

    The name, field 2, may hold anything, blanks and parentheses too.
    """
    state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return -1 if state in "ZX" else int(others[18])
