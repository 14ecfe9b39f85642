"""A cluster of devices as the controller sees it: start and stop them, call them, learn of deaths.

`Cluster` is the port. `WorkerCluster` is what all backends have in common, which is nearly all of it: they differ in where a
worker's process comes from and what can be known of it. `LocalCluster` is the embedded default: one process per device on
this machine, from a fork server that has torch and the models loaded already; `runtime.ray_cluster` has the other one.

Calls to one device run in the order in which they were made; calls that belong together (a collective) are made to all of
their devices at once, so every rank sees one global order.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import queue
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist

from nereus.runtime.calls import Call, Inbox, Watch, Worker, WorkerCall, WorkerDied, WorkerFailed, WorkerProcess
from nereus.runtime.heartbeat import Limits, Look, look_at
from nereus.runtime.memory import has_shared_memory
from nereus.runtime.worker import START, Command, WorkerSettings, pack, worker_main

__all__ = ["Call", "Cluster", "LocalCluster", "PoolEvents", "PoolNews", "WorkerCluster", "WorkerDied", "WorkerFailed"]

STOP_S = 5.0
"""How long a worker that is told to stop may take to finish what it is doing."""

LOCALHOST = "127.0.0.1"


class Cluster(Protocol):
    """The port that every backend fills."""

    @property
    def devices(self) -> tuple[int, ...]:
        """Live device ids, ascending."""
        ...

    def incarnation(self, device: int) -> int:
        """How often this id was started before; a name made of ids and incarnations is never used twice."""
        ...

    @property
    def epoch(self) -> int:
        """Grows with every abort, also with one that follows from a failed call or a death. It breaks all communicators."""
        ...

    @property
    def shared_memory(self) -> bool:
        """Whether devices can read each other's state in memory, without messages."""
        ...

    def node_of(self, device: int) -> int:
        """The machine that a device is on."""
        ...

    def wait_any(self, calls: Sequence[Call]) -> int:
        """Return the index of a call of which all devices have answered, or one has failed or died."""
        ...

    def start(self, devices: Sequence[int]) -> None:
        """Start devices under these ids and return when they are ready: all of them, or none and an exception."""
        ...

    def stop(self, devices: Sequence[int]) -> None:
        """Stop devices; what they hold is gone. One that has died already counts as stopped."""
        ...

    def call(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> Call:
        """Run `method` on each device with its own arguments, after all that was called on it before.

        Raises WorkerDied for a device that has died since, ValueError for one that was not running, TypeError for
        arguments that cannot be sent; nothing is called then.
        """
        ...

    def abort(self, reason: str) -> None:
        """End every wait of every running or queued command; later calls run."""
        ...

    def kill(self, device: int) -> None:
        """End a device's process at once, as if it died by itself; one that does not run: nothing. From any thread."""
        ...

    def close(self) -> None:
        """Stop everything."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNews:
    """Device ids that can be started from now on, and such that are gone with their machine, whether they ran or not."""

    appeared: tuple[int, ...] = ()
    vanished: tuple[int, ...] = ()


@runtime_checkable
class PoolEvents(Protocol):
    """What a cluster also fills whose machines come and go. An id that is gone may come back, on another machine."""

    def available(self) -> tuple[int, ...]:
        """Device ids that run or can be started, ascending: with `start` of these, a pool can be grown."""
        ...

    def poll(self) -> tuple[PoolNews, ...]:
        """What has changed since the last time; does not wait."""
        ...


class WorkerCluster(ABC):
    """Workers with two connections each, wherever their processes are. See `Cluster`.

    program, arguments: what a worker runs (`WorkerSettings`). host: the address of this process that workers reach it at;
    nothing listens on another one. timeout_s: how long a rank waits for a peer before it gives up, and the controller for
    an aborted worker. heartbeat_s: a device that is stopped and silent for so long is killed (runtime.heartbeat); infinity:
    none is.
    """

    BURY_S = STOP_S
    """How long a worker whose connection has ended may take to be told dead."""

    def __init__(
        self,
        program: str,
        arguments: tuple[Any, ...] = (),
        *,
        host: str,
        device_type: str,
        timeout_s: float,
        shared_memory: bool,
        heartbeat_s: float,
    ) -> None:
        self.timeout_s = timeout_s
        self.shared_memory = shared_memory
        self._arguments = arguments
        self._store = _store_server(host)
        self._settings = WorkerSettings(
            program=program,
            store_host=host,
            store_port=self._store.port,
            device_type=device_type,
            timeout_s=timeout_s,
            shared_memory=shared_memory,
        )
        self._inbox: Inbox = queue.SimpleQueue()
        self._workers: dict[int, Worker] = {}
        self._deaths: dict[int, WorkerDied] = {}
        self._incarnations: dict[int, int] = {}
        self._numbers = itertools.count()
        self._epoch = 0
        self._limits = Limits.of(heartbeat_s, timeout_s)
        self._watch: Watch | None = None

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted(self._workers))

    def incarnation(self, device: int) -> int:
        return self._incarnations[device]

    @property
    def epoch(self) -> int:
        return self._epoch

    @abstractmethod
    def node_of(self, device: int) -> int:
        """See `Cluster`."""

    def wait_any(self, calls: Sequence[Call]) -> int:
        while True:
            for index, call in enumerate(calls):
                assert isinstance(call, WorkerCall)
                if call.ended:
                    return index
            self.take(None)

    def start(self, devices: Sequence[int]) -> None:
        for device in devices:
            if device in self._workers or list(devices).count(device) > 1:
                raise ValueError(f"device {device} is running already")
        if self._watch is None and math.isfinite(self._limits.heartbeat_s):
            self._watch = Watch(self._limits, lambda: list(self._workers.values()))
        try:
            self._spawn(devices)
            self._call(START, dict.fromkeys(devices, self._arguments)).started()
        except BaseException:  # Ctrl-C too
            self._remove(devices, 0.0)
            raise
        for device in devices:
            self._workers[device].ready = True

    def stop(self, devices: Sequence[int]) -> None:
        self._remove(devices, STOP_S)
        for device in devices:
            self._deaths.pop(device, None)

    def call(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> WorkerCall:
        for device in arguments:
            if device in self._deaths:
                raise self._deaths[device]
        missing = [device for device in arguments if device not in self._workers]
        if missing:
            raise ValueError(f"{method}: no such device: {missing}; running are {list(self.devices)}")
        return self._call(method, arguments)

    def abort(self, reason: str) -> None:
        for worker in self._workers.values():
            worker.abort(self._epoch, reason)
        self._epoch += 1

    def kill(self, device: int) -> None:
        if (worker := self._workers.get(device)) is not None:
            worker.kill()

    def process_id(self, device: int) -> int:
        """The operating system's id of a device's process, on its machine."""
        return self._workers[device].process.pid

    def close(self) -> None:
        self.abort("the cluster is closing")
        self.stop(self.devices)
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    # -- for backends --------------------------------------------------------------------------------------------

    @abstractmethod
    def _spawn(self, devices: Sequence[int]) -> None:
        """Start a process for each device and `_add` it; what it added before an exception is removed by the caller."""

    def _add(self, device: int, process: WorkerProcess, commands: Connection, control: Connection) -> None:
        self._deaths.pop(device, None)
        self._incarnations[device] = self._incarnations.get(device, -1) + 1
        self._workers[device] = Worker(device, process, commands, control, self._inbox)

    # -- for calls -----------------------------------------------------------------------------------------------

    def take(self, timeout_s: float | None) -> bool:
        """See `calls.Mail`."""
        try:
            worker, reply = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return False
        if reply is None:
            self._bury(worker)
        else:
            worker.pending.pop(reply.number).reply = reply
        return True

    def abort_epoch(self, epoch: int, reason: str) -> None:
        """See `calls.Mail`."""
        if epoch == self._epoch:
            self.abort(reason)

    # -- inside --------------------------------------------------------------------------------------------------

    def _call(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> WorkerCall:
        packed: dict[int, bytes] = {}
        for device, values in arguments.items():
            try:
                packed[device] = pack(values)
            except Exception as error:
                raise TypeError(f"{method}: the arguments for device {device} cannot be sent: {error}") from error
        epoch = self._epoch
        waiting = {
            device: self._workers[device].send(Command(next(self._numbers), epoch, method, values))
            for device, values in packed.items()
        }
        return WorkerCall(self, epoch, waiting)

    def _remove(self, devices: Sequence[int], grace_s: float) -> None:
        leaving = [self._workers.pop(device) for device in devices if device in self._workers]
        for worker in leaving:
            worker.dismiss()
        deadline = time.monotonic() + grace_s
        for worker in leaving:
            worker.end(deadline)

    def _bury(self, worker: Worker) -> None:
        """Take note of a worker's end: whatever it was still asked for will not come."""
        worker.end(time.monotonic() + self.BURY_S)
        running = next((w.method for w in worker.pending.values()), "")
        process = worker.process
        death = WorkerDied(worker.device, running, process.exit_code, how=process.how, **worker.killed)
        for waiting in worker.pending.values():
            waiting.death = death
        worker.pending.clear()
        if self._workers.get(worker.device) is not worker:
            return  # it was stopped
        del self._workers[worker.device]
        if worker.ready:
            self._deaths[worker.device] = death
            self.abort(f"device {worker.device} died")


def _store_server(host: str) -> dist.TCPStore:
    """A store that listens on one address: by itself it would on all of them."""
    listening = socket.create_server((host, 0), backlog=128)
    port = listening.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


@dataclass(frozen=True, slots=True)
class _LocalProcess:
    """See `calls.WorkerProcess`."""

    process: Any

    @property
    def sentinel(self) -> int:
        return int(self.process.sentinel)

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    @property
    def exit_code(self) -> int | None:
        code: int | None = self.process.exitcode
        return code

    @property
    def how(self) -> str:
        return ""

    def look(self) -> Look | None:
        return look_at(self.pid)

    def kill(self) -> None:
        self.process.kill()

    def join(self, timeout_s: float | None) -> bool:
        self.process.join(timeout_s)
        return not self.process.is_alive()

    def release(self) -> None:
        """Nothing is reserved."""


class LocalCluster(WorkerCluster):
    """Devices as processes of this machine. See `Cluster`, and `WorkerCluster` for what is not said here.

    preload: modules that the fork server imports once. shared_memory: whether devices read each other's state in memory;
    None: CPU devices do, where the system can.
    """

    def __init__(
        self,
        program: str,
        arguments: tuple[Any, ...] = (),
        *,
        preload: Sequence[str] = (),
        device_type: str = "cpu",
        timeout_s: float = 600.0,
        shared_memory: bool | None = None,
        heartbeat_s: float = 1.5,
    ) -> None:
        super().__init__(
            program,
            arguments,
            host=LOCALHOST,
            device_type=device_type,
            timeout_s=timeout_s,
            shared_memory=device_type == "cpu" and has_shared_memory() if shared_memory is None else shared_memory,
            heartbeat_s=heartbeat_s,
        )
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([worker_main.__module__, program.partition(":")[0], *preload])

    def node_of(self, device: int) -> int:
        return 0

    def _spawn(self, devices: Sequence[int]) -> None:
        _start_fork_server()
        for device in devices:
            commands, remote_commands = self._context.Pipe()
            control, remote_control = self._context.Pipe()
            process = self._context.Process(
                target=worker_main,
                args=(device, self._settings, remote_commands, remote_control),
                name=f"nereus device {device}",
                daemon=True,
            )
            process.start()
            remote_commands.close()
            remote_control.close()
            self._add(device, _LocalProcess(process), commands, control)


def _start_fork_server() -> None:
    """Start it, if there is none, with SIGINT blocked, which workers inherit: Ctrl-C is for the controller alone."""
    multiprocessing.resource_tracker.ensure_running()  # started later, it would unblock SIGINT again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
