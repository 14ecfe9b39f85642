"""What a device measures of itself: seconds by task and operation, traffic by kind; and the pace that it keeps.

    with meter.command("actor_update"):                    a command of the worker
        with meter.operation("forward", flops, bytes):     a computation; collectives inside it are taken off
            ...                                            the communicators tell of their traffic (`starts`, `ended`)
    meter.take()                                           -> what was measured since the last time, by task

Everything is added up in place, so a record costs microseconds (docs/engine.md); only the durations of single calls are
kept, for `core.measurements.summarise` to tell a call's own time from waiting for late peers.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from nereus.core.measurements import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    GRADIENT_REDUCE,
    SEND_RECV,
    TRACED_CALLS,
    TRANSFER,
    Operations,
    TaskMeasurements,
    Trace,
    Traffic,
)
from nereus.engine.pace import Pace
from nereus.runtime.communicator import Transmission

_KIND_OF_PURPOSE = {
    "dp": GRADIENT_REDUCE,
    "ends": GRADIENT_REDUCE,
    "unit": GRADIENT_REDUCE,
    "down": SEND_RECV,
    "up": SEND_RECV,
    "pool": TRANSFER,
}
_KIND_OF_CALL = {"all_reduce": ALL_REDUCE, "all_gather": ALL_GATHER, "broadcast": BROADCAST}
_RECEIVED = "recv"


class Operation:
    """See `Meter.operation`."""

    __slots__ = ("_began_s", "_flops", "_meter", "_name", "_num_bytes", "_taken_off_s")

    def __init__(self, meter: Meter, name: str, flops: float, num_bytes: float) -> None:
        self._meter, self._name, self._flops, self._num_bytes = meter, name, flops, num_bytes

    def __enter__(self) -> None:
        self._taken_off_s = self._meter.elsewhere_s
        self._began_s = self._meter.clock()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            meter = self._meter
            seconds = meter.clock() - self._began_s - (meter.elsewhere_s - self._taken_off_s)
            meter.computed(self._name, seconds, self._flops, self._num_bytes)


class Meter:
    """See the module; a `Watcher` of device `me`'s communicators. pace: None takes the time that it takes."""

    def __init__(self, me: int, pace: Pace | None = None, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.me, self.pace, self.clock = me, pace, clock
        self._tasks: dict[str, _Task] = {}
        self._task: _Task | None = None
        self._held_s = 0.0

    @property
    def elsewhere_s(self) -> float:
        """Seconds so far that were not this process's own computing: in traffic, and slept."""
        return self._held_s + (self.pace.slept_s if self.pace is not None else 0.0)

    @contextmanager
    def command(self, task: str) -> Iterator[None]:
        """A command that is a part of a task, from its beginning until it may answer."""
        self._task = self._tasks.setdefault(task, _Task())
        began = self.clock()
        try:
            yield
            if self.pace is not None:
                self.pace.settle()
        except BaseException:
            if self.pace is not None:
                self.pace.forgive()
            raise
        finally:
            self._task.commands += 1
            self._task.seconds += self.clock() - began
            self._task = None

    def operation(self, name: str, flops: float, num_bytes: float) -> Operation:
        """A computation of a class, a context: so many FLOPs, and bytes through memory."""
        return Operation(self, name, flops, num_bytes)

    def computed(self, name: str, seconds: float, flops: float, num_bytes: float) -> None:
        """A computation has ended that took so long; the rest of what the declared device takes is owed."""
        if self.pace is not None:
            declared_s = self.pace.compute_seconds(flops, num_bytes)
            if declared_s > seconds:
                self.pace.owe(declared_s - seconds)
                seconds = declared_s
        if self._task is not None:
            self._task.operations.setdefault(name, _Sum()).add(seconds, flops, num_bytes)

    # -- traffic -------------------------------------------------------------------------------------------------

    def starts(self, call: Transmission) -> None:
        """Pay what is owed, before a peer can see; a sender keeps the link busy before the receiver gets anything."""
        if self.pace is None:
            return
        self.pace.settle()
        if call.kind == "send":
            self._hold(_kind(call), self.pace.wait(self.pace.link_seconds(call.num_bytes)))

    def ended(self, call: Transmission, seconds: float, held_s: float) -> None:
        """Count a call. None takes less than on the declared links."""
        if self.pace is not None:
            declared_s = self.pace.link_seconds(call.num_bytes)
            if call.kind == "send":
                seconds += declared_s
            elif call.kind == _RECEIVED:
                seconds = max(seconds, declared_s)
            elif declared_s > seconds:
                held_s += self.pace.wait(declared_s - seconds)
                seconds = held_s
        kind = _kind(call)
        self._hold(kind, held_s)
        if self._task is not None:
            self._task.count(kind, call, seconds)

    def transferred(self, num_bytes: int, seconds: float) -> None:
        """Count what was copied out of other devices' memory."""
        if self.pace is not None and num_bytes:
            self.pace.settle()
            declared_s = self.pace.link_seconds(num_bytes)
            if declared_s > seconds:
                seconds += self.pace.wait(declared_s - seconds)
        self._hold(TRANSFER, seconds)
        if self._task is not None and num_bytes:
            self._task.count(TRANSFER, Transmission("pool", _RECEIVED, (self.me,), num_bytes), seconds)

    def _hold(self, kind: str, seconds: float) -> None:
        self._held_s += seconds
        if self._task is not None:
            self._task.held_s[kind] = self._task.held_s.get(kind, 0.0) + seconds

    # -- results -------------------------------------------------------------------------------------------------

    def take(self, memory: Callable[[str], dict[str, int]] = lambda task: {}) -> dict[str, TaskMeasurements]:
        """By task, what was measured since the last time. memory: of a task, its peak by kind."""
        tasks, self._tasks = self._tasks, {}
        return {name: task.frozen(memory(name)) for name, task in tasks.items()}


def _kind(call: Transmission) -> str:
    return _KIND_OF_PURPOSE.get(call.purpose) or _KIND_OF_CALL.get(call.kind, TRANSFER)


@dataclass(slots=True)
class _Sum:
    count: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    num_bytes: float = 0.0

    def add(self, seconds: float, flops: float, num_bytes: float) -> None:
        self.count += 1
        self.seconds += seconds
        self.flops += flops
        self.num_bytes += num_bytes


@dataclass(slots=True)
class _Calls:
    """Of one kind and the same ranks."""

    count: int = 0
    sizes: array[int] = field(default_factory=lambda: array("q"))
    seconds: array[float] = field(default_factory=lambda: array("d"))


@dataclass(slots=True)
class _Task:
    commands: int = 0
    seconds: float = 0.0
    operations: dict[str, _Sum] = field(default_factory=dict)
    held_s: dict[str, float] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)
    calls: dict[tuple[str, tuple[int, ...]], _Calls] = field(default_factory=dict)

    def count(self, kind: str, call: Transmission, seconds: float) -> None:
        calls = self.calls.setdefault((kind, call.ranks), _Calls())
        calls.count += 1
        if calls.count <= TRACED_CALLS:
            calls.sizes.append(call.num_bytes)
            calls.seconds.append(seconds)
        if (call.kind == _RECEIVED) == (kind == TRANSFER):
            self.num_bytes[kind] = self.num_bytes.get(kind, 0) + call.num_bytes

    def frozen(self, memory: dict[str, int]) -> TaskMeasurements:
        counts: dict[str, int] = {}
        for (kind, _), calls in self.calls.items():
            counts[kind] = counts.get(kind, 0) + calls.count
        return TaskMeasurements(
            commands=self.commands,
            seconds=self.seconds,
            operations={
                name: Operations(count=o.count, seconds=o.seconds, flops=o.flops, num_bytes=o.num_bytes)
                for name, o in self.operations.items()
            },
            traffic={
                kind: Traffic(count=counts.get(kind, 0), num_bytes=self.num_bytes.get(kind, 0), seconds=held_s)
                for kind, held_s in self.held_s.items()
            },
            traces=tuple(
                Trace(kind=kind, ranks=ranks, count=calls.count, sizes=calls.sizes, seconds=calls.seconds)
                for (kind, ranks), calls in self.calls.items()
            ),
            memory=memory,
        )
