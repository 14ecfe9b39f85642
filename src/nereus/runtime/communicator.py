"""All traffic between ranks: one class, built from a store, a list of ranks and a timeout; no global world.

    Communicator.create(store, name, ranks, rank, ...)   blocks until all ranks have come, or abort, or timeout
      all_reduce / all_gather / broadcast                collectives, in one order on all members
      isend / irecv -> Pending                           point to point, by tag
      abort flag                                         ends every wait above at once
      close()                                            never blocks, whatever the peers are doing

How a wait can be ended while a peer is dead or stopped:

* Gloo collectives run in Gloo's own threads; the caller polls for completion beside the flag, yielding the core
  first (many processes share few cores) and sleeping shortly when it takes longer.
* Gloo sends and receives complete only inside a blocking wait, so one thread per direction waits for them in the order
  of issue, and the caller waits for that thread, beside the flag. When the communicator is given up, its sockets are
  shut down, which ends those threads.
* NCCL waits are on the GPU stream. When the flag goes up the communicator aborts its kernels, so that the next host
  synchronisation returns; the flag is checked after it.

After an abort or an error a communicator is broken: every later call raises. Make a new one under a new name.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

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

ReduceOp = Literal["sum", "max"]
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Pending:
    """A send or receive under way; `wait` returns when the buffer may be read or reused."""

    def __init__(self, owner: Communicator, what: str) -> None:
        self._owner = owner
        self._what = what
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        self._done.set()

    def wait(self) -> None:
        """Raises Aborted or PeerTimeout; the buffer's content is then undefined."""
        deadline = time.monotonic() + self._owner.timeout_s
        while not self._done.wait(0.02):
            self._owner._check(self._what, deadline)
        if self._error is not None:
            self._owner._broken(self._what, self._error)


@dataclass(eq=False)
class Communicator:
    """Traffic among `ranks` (device ids); `index` is this process's place among them."""

    name: str
    ranks: tuple[int, ...]
    rank: int
    timeout_s: float
    flag: AbortFlag
    group: Any = None
    backend: str = "gloo"
    _sockets: dict[int, str] = field(default_factory=dict)
    _waiters: dict[str, queue.SimpleQueue[tuple[Any, Pending] | None]] = field(default_factory=dict)
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
    ) -> Communicator:
        """Meet the other ranks under `name` (unique in the life of the store) and connect.

        All members call this, each pair of members in the same order of names. A single rank needs no group.
        Raises Aborted when the flag goes up and PeerTimeout when a member does not come.
        """
        backend = "nccl" if device.type == "cuda" else "gloo"
        made = cls(name=name, ranks=tuple(ranks), rank=rank, timeout_s=timeout_s, flag=flag, backend=backend)
        if made.size > 1:
            made._connect(dist.PrefixStore(name, store))
            flag.subscribe(made._on_abort)
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
        if self._one_hop(tensor):
            stacked = self.all_gather(tensor)
            return tensor.copy_(stacked.sum(0) if op == "sum" else stacked.amax(0))
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]  # type: ignore[assignment]  # the stub knows only one of two names of the type
        self._complete("all_reduce", lambda: self.group.allreduce([tensor], options))
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stack the ranks' equally shaped tensors: [...] -> [size, ...]."""
        if self.size == 1:
            return tensor.unsqueeze(0)
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
            options = dist.BroadcastOptions()
            options.rootRank = self.ranks.index(source)
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

    def close(self) -> None:
        """Give the communicator up: never blocks, also while a peer is dead, stopped, or in the middle of a call."""
        self.flag.unsubscribe(self._on_abort)
        self._failure = self._failure or "closed"
        for waiter in self._waiters.values():
            waiter.put(None)
        self._waiters = {}
        group, self.group = self.group, None
        if group is None:
            return
        if self.backend == "nccl":
            group.abort()
        else:
            self._shut_sockets()
            # The destructor joins Gloo's threads, which may wait for a dead peer: let that be nobody's wait.
            threading.Thread(target=_forget, args=([group],), name=f"close {self.name}", daemon=True).start()

    def _one_hop(self, tensor: torch.Tensor) -> bool:
        return self.backend == "gloo" and tensor.numel() * tensor.element_size() * self.size <= ONE_HOP_BYTES

    # -- inside --------------------------------------------------------------------------------------------------

    def _connect(self, store: dist.Store) -> None:
        """Make the process group in a thread of its own, since its constructor cannot be interrupted."""
        made: list[Any] = []
        failed: list[BaseException] = []

        def build() -> None:
            try:
                made.append(self._new_group(store))
            except BaseException as error:  # handed to the caller below
                failed.append(error)

        before = _socket_files()
        thread = threading.Thread(target=build, name=f"connect {self.name}", daemon=True)
        thread.start()
        deadline = time.monotonic() + self.timeout_s
        while thread.is_alive():
            thread.join(0.002)
            if thread.is_alive():
                self._check("connect", deadline)
        if failed:
            self._broken("connect", failed[0])
        self.group = made[0]
        after = _socket_files()
        self._sockets = {file: inode for file, inode in after.items() if before.get(file) != inode}

    def _new_group(self, store: dist.Store) -> Any:
        timeout = timedelta(seconds=self.timeout_s)
        if self.backend == "gloo":
            return dist.ProcessGroupGloo(store, self.index, self.size, timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
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
        if peer == self.rank or not tensor.is_contiguous():
            raise ValueError(f"{what}: needs another device and a contiguous tensor, got {peer} {tensor.stride()}")
        pending = Pending(self, f"{what} {self.rank}<->{peer}")
        call = self.group.send if what == "send" else self.group.recv
        try:
            work = call([tensor], self.ranks.index(peer), tag)
        except RuntimeError as error:
            self._broken(what, error)
        if self.backend == "nccl":
            work.wait()  # orders the current stream behind the transfer; the host goes on
            pending.finish()
        else:
            self._waiter(what).put((work, pending))
        return pending

    def _waiter(self, direction: str) -> queue.SimpleQueue[tuple[Any, Pending] | None]:
        if direction not in self._waiters:
            waiting: queue.SimpleQueue[tuple[Any, Pending] | None] = queue.SimpleQueue()
            name = f"{direction} {self.name}"
            threading.Thread(target=_wait_in_order, args=(waiting,), name=name, daemon=True).start()
            self._waiters[direction] = waiting
        return self._waiters[direction]

    def _usable(self, what: str) -> None:
        self.flag.check()
        if self._failure:
            raise Aborted(f"{what} on communicator {self.name}, which is broken: {self._failure}")

    def _check(self, what: str, deadline: float) -> None:
        if self.flag.is_set:
            self._failure = "aborted"
            self.flag.check()
        if time.monotonic() > deadline:
            self._failure = "timeout"
            raise PeerTimeout(f"{what} on {self.name} of devices {list(self.ranks)}: no answer in {self.timeout_s} s")

    def _broken(self, what: str, error: BaseException) -> None:
        self._failure = self._failure or str(error)
        self.flag.check()
        raise Aborted(f"{what} on {self.name} of devices {list(self.ranks)} failed: {error}") from error

    def _on_abort(self) -> None:
        self._failure = self._failure or "aborted"
        if self.backend == "nccl" and self.group is not None:
            self.group.abort()

    def _shut_sockets(self) -> None:
        now = _socket_files()
        for file, inode in self._sockets.items():
            if now.get(file) != inode:
                continue  # Gloo closed it, and the number may be somebody else's by now
            try:
                duplicate = socket.socket(fileno=os.dup(file))
            except OSError:
                continue  # closed in this very moment
            with duplicate:
                try:
                    duplicate.getpeername()  # only connected ones: shutting a listening one would break Gloo's device
                    duplicate.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # not connected any more


def _wait_in_order(waiting: queue.SimpleQueue[tuple[Any, Pending] | None]) -> None:
    while (item := waiting.get()) is not None:
        work, pending = item
        try:
            work.wait()
        except RuntimeError as error:
            pending.finish(error)
        else:
            pending.finish()


def _forget(holder: list[Any]) -> None:
    holder.clear()


def _socket_files() -> dict[int, str]:
    found = {}
    for file in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            link = os.readlink(f"/proc/self/fd/{file}")
        except OSError:
            continue  # closed since it was listed
        if link.startswith("socket:"):
            found[int(file)] = link
    return found
