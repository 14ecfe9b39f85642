"""A cluster of devices as the controller sees it: start and stop them, call them, learn of deaths.

`Cluster` is the port; `LocalCluster` the embedded default: one process per device on this machine, from a fork server
that has torch and the models loaded already. Calls to one device run in the order in which they were made; calls that
belong together (a collective) are made to all of their devices at once, so every rank sees one global order.
"""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch.distributed as dist

from nereus.core import errors
from nereus.runtime.worker import Command, Failure, Reply, WorkerSettings, receive, send, worker_main


class WorkerFailed(RuntimeError):
    """A command raised in a worker. Carries the device, what was running, and the worker's traceback."""

    def __init__(self, device: int, running: str, failure: Failure) -> None:
        super().__init__(
            f"device {device}, running {running}: {failure.kind}: {failure.message}\n"
            f"--- traceback of device {device} ---\n{failure.traceback}"
        )
        self.device, self.running, self.failure = device, running, failure


class WorkerDied(RuntimeError):
    """A worker process ended by itself."""

    def __init__(self, device: int, running: str, exit_code: int | None) -> None:
        super().__init__(f"device {device} died (exit code {exit_code}) while running {running or 'nothing'}")
        self.device, self.running, self.exit_code = device, running, exit_code


class Call(Protocol):
    """A method running on a set of devices."""

    def results(self) -> dict[int, Any]:
        """By device, what the method returned. Raises the first cause: WorkerDied, WorkerFailed or a UserError."""
        ...


class Cluster(Protocol):
    """The port that every backend fills."""

    @property
    def devices(self) -> tuple[int, ...]:
        """Live device ids, ascending."""
        ...

    def incarnation(self, device: int) -> int:
        """How often this id was started before; a name made of ids and incarnations is never used twice."""
        ...

    def start(self, devices: Sequence[int]) -> None:
        """Start devices under these ids and return when they answer."""
        ...

    def stop(self, devices: Sequence[int]) -> None:
        """Stop devices; what they hold is gone."""
        ...

    def call(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> Call:
        """Run `method` on each device with its own arguments, after all that was called on it before."""
        ...

    def abort(self, reason: str) -> None:
        """End every wait of every running or queued command; later calls run."""
        ...

    def close(self) -> None:
        """Stop everything."""
        ...


@dataclass(slots=True, eq=False)
class _Worker:
    process: Any
    commands: Connection
    control: Connection
    pending: dict[int, _Waiting] = field(default_factory=dict)


@dataclass(slots=True)
class _Waiting:
    """A command without an answer yet; on a device `reply` or `death` ends it."""

    method: str
    reply: Reply | None = None
    death: WorkerDied | None = None

    @property
    def ended(self) -> bool:
        return self.reply is not None or self.death is not None

    @property
    def failed(self) -> bool:
        return self.death is not None or (self.reply is not None and self.reply.failure is not None)


class LocalCall:
    """See `Call`."""

    def __init__(self, cluster: LocalCluster, waiting: dict[int, _Waiting]) -> None:
        self._cluster = cluster
        self._waiting = waiting

    def results(self) -> dict[int, Any]:
        while not all(w.ended for w in self._waiting.values()):
            if any(w.failed for w in self._waiting.values()):
                # The others may wait for the one that failed: end their waits, then collect their answers.
                self._cluster.abort("another rank of the same call failed")
                self._cluster.pump_until(lambda: all(w.ended for w in self._waiting.values()))
                break
            self._cluster.pump(None)
        causes = [(device, w) for device, w in self._waiting.items() if w.failed]
        if causes:
            self._cluster.abort("a call failed")
            raise min((_cause(device, w) for device, w in causes), key=_is_consequence)
        return {device: w.reply.value for device, w in self._waiting.items() if w.reply is not None}


def _cause(device: int, waiting: _Waiting) -> Exception:
    if waiting.death is not None:
        return waiting.death
    assert waiting.reply is not None and waiting.reply.failure is not None
    failure = waiting.reply.failure
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, errors.UserError):
        return kind(failure.message)
    return WorkerFailed(device, waiting.method, failure)


def _is_consequence(error: Exception) -> int:
    """0 for what may be a cause, 1 for waits that ended because of something else."""
    return int(isinstance(error, WorkerFailed) and error.failure.kind in ("Aborted", "PeerTimeout"))


class LocalCluster:
    """Devices as processes of this machine. See `Cluster`.

    program, arguments: what a worker runs (`WorkerSettings`). preload: modules that the fork server imports once.
    timeout_s: how long a rank waits for a peer before it gives up.
    """

    def __init__(
        self,
        program: str,
        arguments: tuple[Any, ...] = (),
        *,
        preload: Sequence[str] = (),
        device_type: str = "cpu",
        timeout_s: float = 600.0,
    ) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([program.partition(":")[0], *preload])
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._settings = WorkerSettings(
            program=program,
            arguments=arguments,
            store_host="127.0.0.1",
            store_port=self._store.port,
            device_type=device_type,
            timeout_s=timeout_s,
        )
        self._workers: dict[int, _Worker] = {}
        self._incarnations: dict[int, int] = {}
        self._numbers = itertools.count()
        self._epoch = 0

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted(self._workers))

    def incarnation(self, device: int) -> int:
        return self._incarnations[device]

    def process_id(self, device: int) -> int:
        """The operating system's id of a device's process."""
        return int(self._workers[device].process.pid)

    def start(self, devices: Sequence[int]) -> None:
        for device in devices:
            if device in self._workers:
                raise ValueError(f"device {device} is running already")
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
            self._workers[device] = _Worker(process, commands, control)
            self._incarnations[device] = self._incarnations.get(device, -1) + 1
        self.call("ping", dict.fromkeys(devices, ())).results()

    def stop(self, devices: Sequence[int]) -> None:
        leaving = [self._workers.pop(device) for device in devices]
        for worker in leaving:
            try:
                send(worker.commands, None)
            except OSError:
                continue  # it died before it could be told to
        deadline = time.monotonic() + 5.0
        for worker in leaving:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.commands.close()
            worker.control.close()

    def call(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> LocalCall:
        missing = [device for device in arguments if device not in self._workers]
        if missing:
            raise ValueError(f"{method}: no such device: {missing}; running are {list(self.devices)}")
        waiting: dict[int, _Waiting] = {}
        for device, values in arguments.items():
            number = next(self._numbers)
            worker = self._workers[device]
            waiting[device] = worker.pending[number] = _Waiting(method)
            try:
                send(worker.commands, Command(number, self._epoch, method, values))
            except OSError:
                self._bury(device)
        return LocalCall(self, waiting)

    def abort(self, reason: str) -> None:
        for worker in self._workers.values():
            try:
                worker.control.send((self._epoch, reason))
            except OSError:
                continue  # dead: the pump will notice
        self._epoch += 1

    def close(self) -> None:
        self.abort("the cluster is closing")
        self.stop(self.devices)

    # -- inside --------------------------------------------------------------------------------------------------

    def pump_until(self, done: Any) -> None:
        while not done():
            self.pump(None)

    def pump(self, timeout_s: float | None) -> None:
        """Wait for answers and deaths, and take note of those that are there."""
        by_channel: dict[Any, int] = {}
        for device, worker in self._workers.items():
            by_channel[worker.commands] = device
            by_channel[worker.process.sentinel] = device
        ready = multiprocessing.connection.wait(list(by_channel), timeout_s)
        for channel in sorted(ready, key=lambda c: isinstance(c, int)):  # answers before deaths
            device = by_channel[channel]
            if device not in self._workers:
                continue
            if isinstance(channel, int):
                self._drain(device)
                self._bury(device)
            else:
                self._read(device)

    def _drain(self, device: int) -> None:
        """Take the answers that a dead worker had still sent."""
        while device in self._workers and self._workers[device].commands.poll(0):
            if not self._read(device):
                return

    def _read(self, device: int) -> bool:
        worker = self._workers[device]
        try:
            reply: Reply = receive(worker.commands)
        except (EOFError, OSError):
            self._bury(device)
            return False
        worker.pending.pop(reply.number).reply = reply
        return True

    def _bury(self, device: int) -> None:
        worker = self._workers.pop(device, None)
        if worker is None:
            return
        worker.process.join(5.0)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        running = next((w.method for w in worker.pending.values()), "")
        for waiting in worker.pending.values():
            waiting.death = WorkerDied(device, running, worker.process.exitcode)
        worker.commands.close()
        worker.control.close()
        self.abort(f"device {device} died")
