"""All traffic between ranks: one class, built from a store, a list of ranks and a timeout; no global world.

    Communicator.create(store, name, ranks, rank, ...)   blocks until all ranks have come, or abort, or timeout
      all_reduce / all_gather / broadcast                collectives, in one order on all members
      isend / irecv -> Pending                           point to point, by tag
      abort flag                                         ends every wait above at once
      close()                                            never blocks, whatever the peers are doing

How a wait can be ended while a peer is dead or stopped:

* Gloo collectives run in Gloo's own threads; the caller polls for completion beside the flag, yielding the core
  first (many processes share few cores) and sleeping shortly when it takes longer.
* Gloo sends and receives complete only inside a blocking wait, so one thread per peer and direction waits for them in
  the order of issue, and the caller waits for that thread, beside the flag. When the communicator is given up, its
  sockets are shut down, which ends those threads.
* NCCL waits are on the GPU stream. When the flag goes up the communicator aborts its kernels, so that the next host
  synchronisation (`settle`) returns; the flag is checked after it.
* The constructor of a group cannot be interrupted. The ranks meet first, by a counter in the store, so that it begins
  when all are there and takes milliseconds. It runs in a thread, which is left behind when the wait is ended; such a
  thread may keep the connection to the store to itself, so the next communicator takes a connection of its own.

After an abort or an error a communicator is broken: every later call raises. Make a new one under a new name.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from nereus.core.errors import Aborted, PeerTimeout
from nereus.runtime.abort import AbortFlag

YIELD_S = 0.005
"""A wait yields its core for this long before it starts to sleep: small collectives of 8 processes on 2 cores take
about 3 ms, and sleeping from the start doubles that (measured here)."""
SLEEP_S = 0.0002

ONE_HOP_BYTES = 256 * 2**10
"""Up to this many bytes over all ranks, Gloo ranks send everything to everybody: one hop. Gloo's own ring takes
2 (size - 1) hops, and where processes share cores a hop waits for the scheduler: with 8 on 2 cores, 10 ms against 2.5 ms
for 4 KB; from about 1 MB on the ring is the faster one (measured here)."""

NEVER = timedelta(days=30)
"""For timeouts inside torch: ours end a wait before, and name the devices."""

CONNECT_S = 30.0
"""The most that a group's constructor may take; it takes about 10 ms, or seconds where the look-up of a name is slow."""

MEET_S = (0.0005, 0.02)
"""Between two looks at how many ranks have come: at first, and at last."""

CONNECTING = "connect"
"""How the names of threads begin that run a group's constructor."""

ReduceOp = Literal["sum", "max"]
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass(frozen=True, slots=True)
class Transmission:
    """A call that a communicator is about to make, or has made. kind: all_reduce, all_gather, broadcast, send, recv.

    num_bytes: on the wire, as this rank sends or receives them; of an all-reduce, those of a ring. ranks: all that take
    part; for a send or receive (sender, receiver).
    """

    purpose: str
    kind: str
    ranks: tuple[int, ...]
    num_bytes: int


class Watcher(Protocol):
    """Is told of all traffic of a rank, on the thread that makes the calls. It may delay them."""

    def starts(self, call: Transmission) -> None:
        """`call` will be made when this returns."""
        ...

    def ended(self, call: Transmission, seconds: float, held_s: float) -> None:
        """`call` is complete, `seconds` after it was made; the caller was held up for `held_s` of them.

        Called before the caller goes on. Not called for what fails, nor on a GPU, where calls are not waited for.
        """
        ...


class Pending:
    """A send or receive under way; `wait` returns when the buffer may be read or reused."""

    def __init__(self, owner: Communicator, what: str, work: Any, call: Transmission) -> None:
        self._owner = owner
        self._what = what
        self._work: Any = work
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._call: Transmission | None = call
        self._began_s = self._ended_s = time.perf_counter()

    def complete(self) -> None:
        """Block until the transfer has ended: for Gloo's waiting threads."""
        try:
            self._work.wait(NEVER)
        except RuntimeError as error:
            self._error = error
        self._work = None  # it holds the buffer
        self._ended_s = time.perf_counter()
        self._done.set()

    @property
    def done(self) -> bool:
        """Whether the buffer is free, without waiting."""
        return bool(self._work.is_completed()) if self._owner.backend == "nccl" else self._done.is_set()

    def wait(self) -> None:
        """Raises Aborted or PeerTimeout; the buffer's content is then undefined."""
        if self._owner.backend == "nccl":
            self._owner._complete(self._what, lambda: self._work)  # orders the stream behind it; the host goes on
            return
        asked_s = time.perf_counter()
        deadline = time.monotonic() + self._owner.timeout_s
        while not self._done.wait(0.02):
            self._owner._check(self._what, deadline)
        if self._error is not None:
            self._owner._broken(self._what, self._error)
        if self._call is not None and self._owner.watcher is not None:
            held_s = time.perf_counter() - asked_s
            self._owner.watcher.ended(self._call, self._ended_s - self._began_s, held_s)
        self._call = None  # told once, however often it is waited for


@dataclass(eq=False)
class Communicator:
    """Traffic among `ranks` (device ids); `index` is this process's place among them. purpose: for the watcher."""

    name: str
    ranks: tuple[int, ...]
    rank: int
    timeout_s: float
    flag: AbortFlag
    group: Any = None
    backend: str = "gloo"
    purpose: str = ""
    watcher: Watcher | None = None
    _sockets: dict[int, int] = field(default_factory=dict)
    _waiters: dict[tuple[str, int], queue.SimpleQueue[Pending | None]] = field(default_factory=dict)
    _failure: str = ""

    @classmethod
    def create(
        cls,
        *,
        store: dist.Store,
        name: str,
        ranks: Sequence[int],
        rank: int,
        timeout_s: float,
        flag: AbortFlag,
        device: torch.device,
        purpose: str = "",
        watcher: Watcher | None = None,
    ) -> Communicator:
        """Meet the other ranks under `name` (unique in the life of the store) and connect.

        All members call this, each pair of members in the same order of names. A single rank needs no group.
        Raises Aborted when the flag goes up and PeerTimeout when a member does not come.
        """
        backend = "nccl" if device.type == "cuda" else "gloo"
        made = cls(
            name=name,
            ranks=tuple(ranks),
            rank=rank,
            timeout_s=timeout_s,
            flag=flag,
            backend=backend,
            purpose=purpose,
            watcher=watcher,
        )
        if made.size > 1:
            flag.subscribe(made._on_abort)
            try:
                place = dist.PrefixStore(name, _free_connection(store))
                made._meet(place)
                made._connect(place)
                made._usable("connect")  # the flag may have come up, and gone unseen, at the very end
            except BaseException:
                made.close()
                raise
        return made

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def index(self) -> int:
        return self.ranks.index(self.rank)

    # -- collectives ---------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Reduce a contiguous tensor over all ranks, in place. Bitwise the same on every rank."""
        if self.size == 1:
            return tensor
        _require_contiguous("all_reduce", tensor)
        with self._watched("all_reduce", 2 * (self.size - 1) * _num_bytes(tensor) // self.size):
            if self._one_hop(tensor):
                stacked = self._gathered(tensor)
                return tensor.copy_(stacked.sum(0) if op == "sum" else stacked.amax(0))
            options = dist.AllreduceOptions()
            options.reduceOp = _OPS[op]  # type: ignore[assignment]  # the stub knows only one of two names of the type
            self._complete("all_reduce", lambda: self.group.allreduce([tensor], options))
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stack the ranks' equally shaped tensors: [...] -> [size, ...]."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        with self._watched("all_gather", (self.size - 1) * _num_bytes(tensor)):
            return self._gathered(tensor)

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.reshape(-1)
        output = flat.new_empty((self.size * flat.numel(),))
        if self._one_hop(tensor):
            copies = flat.repeat(self.size)
            self._complete("all_gather", lambda: self.group.alltoall_base(output, copies, [], []))
        else:
            self._complete("all_gather", lambda: self.group._allgather_base(output, flat))
        return output.view(self.size, *tensor.shape)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Copy device `source`'s contiguous tensor into everybody's, in place."""
        if self.size > 1:
            _require_contiguous("broadcast", tensor)
            options = dist.BroadcastOptions()
            options.rootRank = self.ranks.index(source)
            with self._watched("broadcast", _num_bytes(tensor)):
                self._complete("broadcast", lambda: self.group.broadcast([tensor], options))
        return tensor

    def barrier(self, device: torch.device | None = None) -> None:
        """Return when all ranks have come."""
        self.all_reduce(torch.zeros(1, device=device))

    # -- point to point ------------------------------------------------------------------------------------------

    def isend(self, tensor: torch.Tensor, target: int, tag: int = 0) -> Pending:
        """Start to send a contiguous tensor to device `target`; it must stay unchanged until `wait` returns."""
        return self._start("send", tensor, target, tag)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Pending:
        """Start to receive into a contiguous tensor from device `source`."""
        return self._start("recv", tensor, source, tag)

    # -- ending --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Return when all that was waited for has happened: on a GPU, waits order the stream and not the host."""
        if self.backend == "nccl":
            torch.cuda.current_stream().synchronize()
            self.flag.check()

    def close(self) -> None:
        """Give the communicator up: never blocks, also while a peer is dead, stopped, or in the middle of a call."""
        self.flag.unsubscribe(self._on_abort)
        self._failure = self._failure or "closed"
        for waiter in self._waiters.values():
            waiter.put(None)
        self._waiters = {}
        # The destructor joins Gloo's threads, which may wait for a dead peer: the last reference goes in a thread.
        last, self.group = [self.group], None
        if self.backend == "gloo":
            self._shut_sockets()
        elif last[0] is not None:
            last[0].abort()
        if last[0] is not None:
            threading.Thread(target=last.clear, name=f"close {self.name}", daemon=True).start()

    def _one_hop(self, tensor: torch.Tensor) -> bool:
        return self.backend == "gloo" and _num_bytes(tensor) * self.size <= ONE_HOP_BYTES

    @contextlib.contextmanager
    def _watched(self, kind: str, num_bytes: int) -> Iterator[None]:
        """Tell the watcher of a collective."""
        if self.watcher is None or self.backend == "nccl":
            yield
            return
        call = Transmission(self.purpose, kind, self.ranks, num_bytes)
        self.watcher.starts(call)
        began_s = time.perf_counter()
        yield
        seconds = time.perf_counter() - began_s
        self.watcher.ended(call, seconds, seconds)

    # -- inside --------------------------------------------------------------------------------------------------

    def _meet(self, store: dist.Store) -> None:
        """Wait until all ranks have come."""
        deadline, (pause_s, longest_s) = time.monotonic() + self.timeout_s, MEET_S
        here = store.add("here", 1)
        while here < self.size:
            self._check("connect", deadline)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
            here = store.add("here", 0)

    def _connect(self, store: dist.Store) -> None:
        """Make the process group."""
        limit_s = min(self.timeout_s, CONNECT_S)
        made: list[Any] = []
        failed: list[BaseException] = []

        def build() -> None:
            try:
                made.append(self._new_group(store, timedelta(seconds=2 * limit_s)))
            except BaseException as error:  # handed to the caller below
                failed.append(error)

        before = _socket_files()
        thread = threading.Thread(target=build, name=f"{CONNECTING} {self.name}", daemon=True)
        thread.start()
        deadline = time.monotonic() + limit_s
        try:
            while thread.is_alive():
                thread.join(0.002)
                if thread.is_alive():
                    self._check("connect", deadline, limit_s)
        finally:
            after = _socket_files()
            self._sockets = {file: inode for file, inode in after.items() if before.get(file) != inode}
        if failed:
            self._broken("connect", failed[0])
        self.group = made.pop()

    def _new_group(self, store: dist.Store, limit: timedelta) -> Any:
        if self.backend == "gloo":
            group = dist.ProcessGroupGloo(store, self.index, self.size, limit)
            group._set_default_timeout(NEVER)
            return group
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self.timeout_s)
        return dist.ProcessGroupNCCL(store, self.index, self.size, options)

    def _complete(self, what: str, start: Callable[[], Any]) -> None:
        """Issue a collective and wait for it beside the flag."""
        self._usable(what)
        try:
            work = start()
            if self.backend == "nccl":
                work.wait()
            else:
                self._poll(what, work)
                work.wait()
        except (Aborted, PeerTimeout):
            raise
        except RuntimeError as error:
            self._broken(what, error)
        if self.backend == "nccl":
            self.flag.check()

    def _poll(self, what: str, work: Any) -> None:
        now = time.monotonic()
        sleep_from, deadline = now + YIELD_S, now + self.timeout_s
        while not work.is_completed():
            if time.monotonic() < sleep_from:
                os.sched_yield()
                if self.flag.is_set:
                    self._check(what, deadline)
            else:
                time.sleep(SLEEP_S)
                self._check(what, deadline)

    def _start(self, what: str, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        self._usable(what)
        if peer == self.rank or peer not in self.ranks:
            raise ValueError(f"{what}: device {peer} is not one of the others of {list(self.ranks)}")
        _require_contiguous(what, tensor)
        ends = (self.rank, peer) if what == "send" else (peer, self.rank)
        call = Transmission(self.purpose, what, ends, _num_bytes(tensor))
        if self.watcher is not None and self.backend == "gloo":
            self.watcher.starts(call)
        issue = self.group.send if what == "send" else self.group.recv
        try:
            work = issue([tensor], self.ranks.index(peer), tag)
        except RuntimeError as error:
            self._broken(what, error)
        pending = Pending(self, f"{what} {self.rank}<->{peer}", work, call)
        if self.backend == "gloo":
            self._waiter(what, peer).put(pending)
        return pending

    def _waiter(self, direction: str, peer: int) -> queue.SimpleQueue[Pending | None]:
        key = (direction, peer)
        if key not in self._waiters:
            waiting: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
            name = f"{direction} {peer} {self.name}"
            threading.Thread(target=_wait_in_order, args=(waiting,), name=name, daemon=True).start()
            self._waiters[key] = waiting
        return self._waiters[key]

    def _usable(self, what: str) -> None:
        self.flag.check()
        if self._failure:
            raise Aborted(f"{what} on communicator {self.name}, which is broken: {self._failure}")

    def _check(self, what: str, deadline: float, limit_s: float | None = None) -> None:
        if self.flag.is_set:
            self._failure = self._failure or "aborted"
        self._usable(what)
        if time.monotonic() > deadline:
            self._failure = "timeout"
            limit_s = limit_s or self.timeout_s
            raise PeerTimeout(f"{what} on {self.name} of devices {list(self.ranks)}: no answer in {limit_s} s")

    def _broken(self, what: str, error: BaseException) -> None:
        self._failure = self._failure or str(error)
        self.flag.check()
        raise Aborted(f"{what} on {self.name} of devices {list(self.ranks)} failed: {error}") from error

    def _on_abort(self) -> None:
        self._failure = self._failure or "aborted"
        if self.backend == "nccl" and (group := self.group) is not None:
            group.abort()

    def _shut_sockets(self) -> None:
        for file, inode in self._sockets.items():
            with contextlib.suppress(OSError):  # closed by now, or not connected
                _shut(file, inode)


def _wait_in_order(waiting: queue.SimpleQueue[Pending | None]) -> None:
    while (pending := waiting.get()) is not None:
        pending.complete()


def _free_connection(store: dist.Store) -> dist.Store:
    """`store`, or a new connection to it (not always: each may cost a reverse look-up of its address)."""
    if any(thread.name.startswith(CONNECTING) for thread in threading.enumerate()):
        other: dist.Store = store.clone()  # type: ignore[attr-defined]  # the stub lacks it
        return other
    return store


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _require_contiguous(what: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{what} needs a contiguous tensor, got strides {tensor.stride()} of {list(tensor.shape)}")


def _shut(file: int, inode: int) -> None:
    """Shut a connected socket down, but neither a listening one nor whatever else has got its number since."""
    duplicate = os.dup(file)  # from here on the number cannot change hands
    found = os.fstat(duplicate)
    if not stat.S_ISSOCK(found.st_mode) or found.st_ino != inode:
        os.close(duplicate)
        return
    with socket.socket(fileno=duplicate) as same:
        same.getpeername()
        same.shutdown(socket.SHUT_RDWR)


def _socket_files() -> dict[int, int]:
    """Open sockets of this process: file descriptor -> inode."""
    found = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            file = os.fstat(int(name))
        except OSError:
            continue  # closed since it was listed
        if stat.S_ISSOCK(file.st_mode):
            found[int(name)] = file.st_ino
    return found
