"""What the workers of these tests run. Importable by name in every worker: pytest puts this folder on sys.path, and
workers get the controller's sys.path.

A fault is a rank, a point and an action: `arm` tells a rank what is to happen to it when it reaches the point. A rank
writes every point that it reaches on the board, a store of the test's own, so that a test can wait for it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from states_for_tests import cut_out

from nereus.core.errors import PlanError
from nereus.core.plan import ModelStage, Placement
from nereus.core.sharding import Holding, Move, StateSpec
from nereus.runtime.communicator import Communicator, Pending
from nereus.runtime.state import LocalState
from nereus.runtime.transport import NO_ADDRESSES, PeerToPeer, Transport
from nereus.runtime.unit_store import Addresses, Built, UnitStore
from nereus.runtime.worker import WorkerContext

BIG = 400_003
"""Elements; more than socket buffers hold, and no multiple of any number of ranks."""


def sample(rank: int, numel: int, dtype: str) -> torch.Tensor:
    """What a rank brings to a collective: the same in the worker and in the test."""
    drawn = torch.randn(numel, generator=torch.Generator().manual_seed(1000 * rank + numel % 997)) * 100
    return drawn.to(getattr(torch, dtype))


def sockets_and_threads() -> tuple[int, int]:
    """Open sockets and threads of this process."""
    names = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    sockets = [name for name in names if os.path.lexists(name) and os.readlink(name).startswith("socket:")]
    return len(sockets), len(os.listdir("/proc/self/task"))


class Watched(Communicator):
    """Tells `reach` what it is in the middle of."""

    reach: ClassVar[Callable[[str], None]]

    def _poll(self, what: str, work: Any) -> None:
        self.reach(f"in {what}")
        super()._poll(what, work)

    def _connect(self, store: dist.Store) -> None:
        self.reach("met")
        super()._connect(store)
        self.reach("connected")

    def isend(self, tensor: torch.Tensor, target: int, tag: int = 0) -> Pending:
        self.reach("isend")
        return super().isend(tensor, target, tag)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Pending:
        self.reach("irecv")
        return super().irecv(tensor, source, tag)


class Talker:
    """A device that does what a test tells it. board_port: of the test's own store."""

    def __init__(self, context: WorkerContext, board_port: int) -> None:
        self.context = context
        self.me = context.device_id
        self.board = dist.TCPStore("127.0.0.1", board_port, is_master=False)
        self.log: list[Any] = []
        self.open_ones: dict[str, Communicator] = {}
        self._scene = ""
        self._fault = ("", "", 0)
        self._seen: dict[str, int] = {}
        self.source: LocalState | None = None
        self.target: LocalState | None = None
        Watched.reach = staticmethod(self._reach)
        wish = f"fault at start {self.me}"
        if self.board.check([wish]):
            kind = self.board.get(wish).decode()
            self.board.delete_key(wish)
            if kind == "PlanError":
                raise PlanError(f"device {self.me} is not wanted")
            os._exit(int(kind))

    # -- points ----------------------------------------------------------------------------------------------------

    def arm(self, scene: str, point: str = "", action: str = "", nth: int = 1) -> None:
        """Begin a scene. When this rank reaches `point` the nth time: a signal to itself, or "abort", as if one came."""
        self._scene, self._seen, self._fault = scene, {}, (point, action, nth)

    def _reach(self, point: str) -> None:
        self._seen[point] = self._seen.get(point, 0) + 1
        self.board.set(f"{self._scene} {point} {self.me}", "")
        at, action, nth = self._fault
        if point == at and self._seen[point] == nth:
            if action == "abort":
                self.context.flag.raise_flag("an abort at a point")
            else:
                os.kill(os.getpid(), getattr(signal, action))

    # -- plain commands --------------------------------------------------------------------------------------------

    def echo(self, value: Any) -> Any:
        return value

    def note(self, value: Any) -> list[Any]:
        """Append to this device's log and return it."""
        self.log.append(value)
        return self.log

    def fail(self, kind: str) -> None:
        raise {"PlanError": PlanError, "ZeroDivisionError": ZeroDivisionError}[kind](f"{kind} on purpose")

    def exit(self, code: int) -> None:
        os._exit(code)

    def reach(self, point: str) -> None:
        self._reach(point)

    def hang_or_fail(self, hanging: int) -> None:
        """One device hangs until its process ends, deaf to aborts; then the other ones fail."""
        if self.me != hanging:
            self.board.wait([f"{self._scene} hang {hanging}"])
            raise ZeroDivisionError("on purpose")
        self._reach("hang")
        while True:
            signal.pause()

    def wait_for_abort(self) -> None:
        """In a wait that only an abort ends."""
        self._reach("wait_for_abort")
        while True:
            self.context.flag.check()
            time.sleep(0.0001)

    def stay(self, looks: int) -> str:
        """A wait that an abort would end, but that ends by itself."""
        for _ in range(looks):
            self.context.flag.check()
            time.sleep(0.0001)
        return "stayed"

    def keep_interpreter(self, how: str, seconds: float) -> str:
        """In a call of C that lets no other thread of this process run."""
        self._reach("keep_interpreter")
        if how == "sleeping":
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        else:
            began = time.monotonic()
            sum(range(10**6))
            sum(range(int(10**6 * seconds / (time.monotonic() - began))))
        return "kept"

    def unsendable(self) -> Any:
        return lambda: None

    def unreadable(self) -> Any:
        """Something of a class that no other process knows."""
        return an_object_of_a_module_that_only_this_process_has()

    def resources(self) -> tuple[int, int]:
        return sockets_and_threads()

    # -- communicators ---------------------------------------------------------------------------------------------

    def open(self, name: str, ranks: Sequence[int], timeout_s: float | None = None) -> None:
        self._reach("open")
        self.open_ones[name] = Watched.create(
            store=self.context.store,
            name=name,
            ranks=ranks,
            rank=self.me,
            timeout_s=timeout_s or self.context.timeout_s,
            flag=self.context.flag,
            device=torch.device("cpu"),
        )

    def set_timeout(self, name: str, timeout_s: float) -> None:
        self.open_ones[name].timeout_s = timeout_s

    def close(self, *names: str) -> float:
        """Close these, or all; returns the seconds that it took."""
        began = time.monotonic()
        for name in names or list(self.open_ones):
            self.open_ones.pop(name).close()
        return time.monotonic() - began

    def collectives(self, name: str, dtype: str, sizes: Sequence[int]) -> dict[int, dict[str, torch.Tensor]]:
        """By size, what every collective made of this rank's samples."""
        group, found = self.open_ones[name], {}
        for numel in sizes:
            mine = sample(self.me, numel, dtype)
            found[numel] = {
                "sum": group.all_reduce(mine.clone()),
                "max": group.all_reduce(mine.clone(), "max"),
                "gathered": group.all_gather(mine),
                **{f"from {source}": group.broadcast(mine.clone(), source) for source in group.ranks},
            }
        return found

    def exchange(self, name: str, dtype: str, sizes: Sequence[int], tags: Sequence[int]) -> dict[Any, torch.Tensor]:
        """Everybody sends to everybody, all at once; waited for in the opposite order of issue."""
        group = self.open_ones[name]
        peers = [rank for rank in group.ranks if rank != self.me]
        arriving, leaving = [], []
        for peer in peers:
            for tag in tags:
                for numel in sizes:
                    buffer = torch.empty(numel, dtype=getattr(torch, dtype))
                    arriving.append(((peer, tag, numel), buffer, group.irecv(buffer, peer, tag)))
        for peer in reversed(peers):
            for tag in tags:
                for numel in sizes:
                    leaving.append(group.isend(sample(self.me, numel, dtype) + tag, peer, tag))
        for _, _, pending in reversed(arriving):
            pending.wait()
        for pending in reversed(leaving):
            pending.wait()
        return {key: buffer for key, buffer, _ in arriving}

    def second_first(self, name: str) -> list[float]:
        """The message of one peer is waited for before that of another, which comes only after an answer to the first."""
        group = self.open_ones[name]
        asked, first, second = group.ranks
        one, two = torch.zeros(1), torch.zeros(1)
        if self.me == asked:
            from_first, from_second = group.irecv(one, first), group.irecv(two, second)
            from_second.wait()
            group.isend(two, first).wait()
            from_first.wait()
        elif self.me == first:
            group.irecv(one, asked).wait()
            group.isend(one + 1, asked).wait()
        else:
            group.isend(one + 5, asked).wait()
        return [one.item(), two.item()]

    def overlapping(self, first: str, second: str, both: str) -> list[float]:
        """A receive of each communicator is open while the others are used. Ranks 0-2, 1-3, 0-3."""
        found = []
        boxes = []
        for name in (first, second):
            if name in self.open_ones:
                group = self.open_ones[name]
                before, after = group.ranks[group.index - 1], group.ranks[(group.index + 1) % group.size]
                box = torch.zeros(BIG)
                boxes.append((box, group, after, group.irecv(box, before)))
        found.append(self.open_ones[both].all_reduce(torch.tensor([self.me + 1.0])).item())
        for _, group, after, _ in boxes:
            found.append(group.all_reduce(torch.full((BIG,), self.me + 1.0))[-1].item())
            group.isend(torch.full((BIG,), 10.0 + self.me), after).wait()
        found.append(self.open_ones[both].all_reduce(torch.full((BIG,), self.me + 1.0)).mean().item())
        for box, _, _, pending in boxes:
            pending.wait()
            found.append(box.mean().item())
        return found

    def talk(self, name: str, kind: str, victim: int) -> None:
        """Operations in which the others need the victim, more of them than the victim does if it is struck."""
        self._reach("before")
        if kind == "connect":
            self.open(name, (0, 1, 2, 3))
            return
        group = self.open_ones[name]
        for _ in range(20):
            if kind == "all_reduce":
                group.all_reduce(torch.ones(BIG))
            elif kind == "small all_reduce":
                group.all_reduce(torch.ones(1))
            elif kind == "all_gather":
                group.all_gather(torch.ones(BIG))
            elif kind == "broadcast":
                group.broadcast(torch.ones(BIG), victim)
            elif self.me != victim:
                start = group.isend if kind == "send" else group.irecv
                start(torch.ones(BIG), victim).wait()

    def wait_after_close(self, name: str, peer: int) -> None:
        """A receive that was left open by whoever closed the communicator."""
        group = self.open_ones[name]
        if self.me == peer:
            return
        pending = group.irecv(torch.zeros(1), peer)
        self.close(name)
        pending.wait()

    def sum_or_fail(self, name: str, failing: int) -> float:
        """A collective that one rank does not come to."""
        if self.me == failing:
            raise ZeroDivisionError("on purpose")
        return self.sum_of_ones(name)

    def sum_of_ones(self, name: str, numel: int = 1) -> float:
        return self.open_ones[name].all_reduce(torch.ones(numel))[-1].item()

    def open_and_close(self, name: str, ranks: Sequence[int], times: int) -> None:
        """Make, use and close a communicator, again and again; the last receive of each is left open."""
        for i in range(times):
            self.open(f"{name} {i}", ranks)
            group = self.open_ones[f"{name} {i}"]
            group.irecv(torch.zeros(1), ranks[group.index - 1], tag=7)
            assert group.all_reduce(torch.ones(1)).item() == len(ranks)
            self.close()

    # -- transfers -------------------------------------------------------------------------------------------------

    def hold(self, spec: StateSpec, old: Holding | None, new: Holding | None) -> None:
        """Hold `old`, filled; make room for `new`, every byte of it wrong."""
        self.source = None if old is None else LocalState.zeros(spec, old, torch.device("cpu"))
        self.target = None if new is None else LocalState.zeros(spec, new, torch.device("cpu"))
        if self.source is not None:
            for name, intervals in self.source.holding.items():
                self.source.tensors[name].copy_(cut_out(self.source.specs[name], intervals))
        if self.target is not None:
            for tensor in self.target.tensors.values():
                tensor.fill_(-1)

    def transfer(self, name: str, moves: Sequence[Move], chunk_bytes: int) -> int:
        messages = PeerToPeer(self.open_ones[name], message_bytes=chunk_bytes)
        return messages.transfer(moves, source=self.source, target=self.target)

    def wrong_tensors(self) -> list[str]:
        """Names of the tensors of the target that are not what slicing gives."""
        assert self.target is not None
        return [
            name
            for name, intervals in self.target.holding.items()
            if not torch.equal(self.target.tensors[name], cut_out(self.target.specs[name], intervals))
        ]

    def source_sums(self) -> Mapping[str, list[int]]:
        """The digest sums of all that the source holds."""
        return {} if self.source is None else self.source.digest_sums(self.source.holding)


class Holder(UnitStore[LocalState]):
    """A device whose units are nothing but state."""

    def make_unit(self, placement: Placement, state: LocalState) -> LocalState:
        return state

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def wait_for_abort(self) -> None:
        while True:
            self.context.flag.check()
            time.sleep(0.001)


class Halfway:
    """A transport whose device dies in the middle of a transfer."""

    one_sided = True

    def __init__(self, inner: Transport, victim: Striker) -> None:
        self._inner, self._victim = inner, victim

    def transfer(
        self,
        moves: Sequence[Move],
        *,
        source: LocalState | None,
        target: LocalState | None,
        addresses: Addresses = NO_ADDRESSES,
    ) -> int:
        pulled = [move for move in moves if self._inner.one_sided or move.source == move.target]
        self._inner.transfer(pulled[: len(pulled) // 2], source=source, target=target, addresses=addresses)
        self._victim.die()
        return 0


class Striker(Holder):
    """A holder that kills itself at a point of a transition: at the nth command that changes its shards."""

    _strike: tuple[int, str] | None = None

    def arm(self, nth: int, moment: str) -> None:
        """moment: start, middle (half of the regions have been copied) or end (all of them) of the command."""
        self._strike = nth, moment

    def build(
        self,
        model_stage: ModelStage,
        holding: Holding | None,
        names: Set[str] | None,
        moves: Sequence[Move],
        addresses: Addresses = NO_ADDRESSES,
    ) -> Built:
        self._struck("start")
        built = super().build(model_stage, holding, names, moves, addresses)
        self._struck("end")
        return built

    def _transport(self) -> Transport:
        """On the fatal build of the kind: one that gets halfway through what this rank copies by itself."""
        inner = super()._transport()
        return Halfway(inner, self) if self._strike == (0, "middle") else inner

    def settle(self, model_stage: ModelStage, names: Set[str] | None, last: bool) -> None:
        self._struck("start")
        super().settle(model_stage, names, last)
        self._struck("end")

    def create(self, model_stage: ModelStage, holding: Holding) -> None:
        self._struck("start")
        super().create(model_stage, holding)
        self._struck("end")

    def commit(self, version: int, placements: Mapping[ModelStage, Placement]) -> dict[ModelStage, int]:
        self._struck("start")
        found = super().commit(version, placements)
        self._struck("end")
        return found

    def _struck(self, moment: str) -> None:
        """Count at the start; strike when it is this command's turn."""
        if self._strike is None:
            return
        nth, wanted = self._strike
        if moment == "start":
            nth -= 1
            self._strike = nth, wanted
        if nth == 0 and moment == (wanted if wanted != "middle" else "end"):
            self.die()


def an_object_of_a_module_that_only_this_process_has() -> Any:
    module = types.ModuleType("only_here")
    exec("class Stranger:\n    pass", module.__dict__)
    sys.modules["only_here"] = module
    return module.Stranger()  # type: ignore[attr-defined]
