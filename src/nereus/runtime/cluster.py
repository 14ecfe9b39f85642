"""A cluster of devices as the controller sees it: start and stop them, call them, learn of deaths.

`Cluster` is the port; `LocalCluster` the embedded default: one process per device on this machine, from a fork server
that has torch and the models loaded already. Calls to one device run in the order in which they were made; calls that
belong together (a collective) are made to all of their devices at once, so every rank sees one global order.

    call ──> outbox ──> writer thread ──> worker          of each device: no call waits for a worker that is stopped, or
    results <── inbox <── reader thread <── worker        that takes no command before it has got rid of a large reply
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch.distributed as dist

from nereus.core import errors
from nereus.runtime.heartbeat import Limits, Pulse, after, is_dead, look_at
from nereus.runtime.memory import has_shared_memory
from nereus.runtime.worker import (
    ALIVE_QUESTION,
    START,
    Command,
    Failure,
    Reply,
    WorkerSettings,
    pack,
    unpack,
    worker_main,
)

STOP_S = 5.0
"""How long a worker that is told to stop may take to finish what it is doing."""


class WorkerFailed(RuntimeError):
    """A command raised in a worker. Carries the device, what was running, and the worker's traceback."""

    def __init__(self, device: int, running: str, failure: Failure) -> None:
        super().__init__(
            f"device {device}, running {running}: {failure.kind}: {failure.message}\n"
            f"--- traceback of device {device} ---\n{failure.traceback}"
        )
        self.device, self.running, self.failure = device, running, failure


class WorkerDied(RuntimeError):
    """A worker process ended: by itself, or because it did not answer.

    deaf_s: it was killed, since it had not answered an abort for so long. silent_s: it was killed, since it had given no
    sign of life for so long. None: for another reason.
    """

    def __init__(
        self,
        device: int,
        running: str,
        exit_code: int | None,
        *,
        deaf_s: float | None = None,
        silent_s: float | None = None,
    ) -> None:
        what = (
            f"died (exit code {exit_code})"
            if silent_s is None
            else f"did not answer for {silent_s:.1f} s and was killed"
        )
        why = "" if deaf_s is None else f": no answer to an abort in {deaf_s} s"
        super().__init__(f"device {device} {what} while running {running or 'nothing'}{why}")
        self.device, self.running, self.exit_code = device, running, exit_code
        self.deaf_s, self.silent_s = deaf_s, silent_s


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

    def close(self) -> None:
        """Stop everything."""
        ...


@dataclass(slots=True, eq=False)
class _Waiting:
    """A command without an answer yet; `reply` or `death` ends it."""

    worker: _Worker
    method: str
    reply: Reply | None = None
    death: WorkerDied | None = None

    @property
    def ended(self) -> bool:
        return self.reply is not None or self.death is not None

    @property
    def failed(self) -> bool:
        return self.death is not None or (self.reply is not None and self.reply.failure is not None)


class _Worker:
    """The controller's end of one worker. What arrives goes into `inbox`, None for the end of the worker.

    killed: why it was, as WorkerDied takes it; empty if it was not.
    """

    def __init__(
        self, device: int, process: Any, commands: Connection, control: Connection, inbox: queue.SimpleQueue[Any]
    ) -> None:
        self.device, self.process = device, process
        self.pending: dict[int, _Waiting] = {}
        self.ready = False
        self.killed: dict[str, float] = {}
        self._pulse, self._asked, self._sending = Pulse(), False, threading.Lock()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._inbox, self._commands, self._control = inbox, commands, control
        os.set_blocking(control.fileno(), False)
        for loop in (self._write, self._read):
            threading.Thread(target=loop, name=f"device {device} {loop.__name__}", daemon=True).start()

    def send(self, command: Command) -> _Waiting:
        waiting = self.pending[command.number] = _Waiting(self, command.method)
        self._outbox.put(pack(command))
        return waiting

    def abort(self, epoch: int, reason: str) -> None:
        """Overtakes the commands. A worker that has not read the last few hundred of them gets no more."""
        self._tell((epoch, reason))

    def look(self, elapsed_s: float, limits: Limits) -> None:
        """Bring what is known of it up to date, `elapsed_s` after the last look; ask again, or kill it."""
        answered = self._answered()
        look = None if answered else look_at(self.process.pid)
        self._pulse = after(self._pulse, elapsed_s, answered=answered, look=look, limits=limits)
        if answered or not self._asked:
            self._asked = self._tell(ALIVE_QUESTION)
        if not self.killed and is_dead(self._pulse, limits):
            self.kill(silent_s=self._pulse.silent_s)

    def _answered(self) -> bool:
        try:
            return len(os.read(self._control.fileno(), 64)) > 0
        except OSError:
            return False  # nothing came, or it is dead: the reader will tell

    def _tell(self, message: Any) -> bool:
        with self._sending:
            try:
                self._control.send(message)
            except OSError:
                return False  # dead: the reader will tell
        return True

    def kill(self, **why: float) -> None:
        """why: deaf_s or silent_s, see WorkerDied."""
        self.killed = why
        self.process.kill()

    def end(self, deadline: float) -> None:
        """Let the worker finish what it does until `deadline`, then kill it."""
        self.dismiss()
        self.process.join(max(0.0, deadline - time.monotonic()))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def dismiss(self) -> None:
        """Tell the worker to end, after its commands, and the writer thread."""
        self._outbox.put(pack(None))
        self._outbox.put(None)

    def _write(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self._commands.send_bytes(message)
        except OSError:
            return  # dead: the reader will tell

    def _read(self) -> None:
        try:
            # The pipe alone does not tell of a death: a process that the worker started may hold its other end.
            while self._commands in wait([self._commands, self.process.sentinel]):
                self._inbox.put((self, unpack(self._commands.recv_bytes())))
        except (EOFError, OSError):
            return
        finally:
            self._inbox.put((self, None))


class _Watch:
    """Looks at all workers again and again, from a thread of its own. See runtime.heartbeat."""

    def __init__(self, limits: Limits, workers: Callable[[], Sequence[_Worker]]) -> None:
        self._limits, self._workers = limits, workers
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(self._limits.look_s):
            now = time.monotonic()
            for worker in self._workers():
                worker.look(now - before, self._limits)
            before = now


class LocalCall:
    """See `Call`."""

    def __init__(self, cluster: LocalCluster, epoch: int, waiting: dict[int, _Waiting]) -> None:
        self._cluster = cluster
        self._epoch = epoch
        self._waiting = waiting

    def results(self) -> dict[int, Any]:
        while not self._ended:
            if any(w.failed for w in self._waiting.values()):
                # The others may wait for the one that failed: end their waits, then collect their answers.
                self._cluster.abort_epoch(self._epoch, "another rank of the same call failed")
                self._collect()
            else:
                self._cluster.take(None)
        if any(w.failed for w in self._waiting.values()):
            self._cluster.abort_epoch(self._epoch, "a call failed")
        return self._values()

    def started(self) -> None:
        """`results` of ranks that cannot wait for each other: one that fails has no consequences for others."""
        while not self._ended:
            self._cluster.take(None)
        self._values()

    @property
    def ended(self) -> bool:
        """All have answered, or one has failed: `results` waits for no answer of a worker that does its work."""
        return self._ended or any(w.failed for w in self._waiting.values())

    @property
    def _ended(self) -> bool:
        return all(w.ended for w in self._waiting.values())

    def _collect(self) -> None:
        """Take the answers of an aborted call; a worker without one after the cluster's timeout is killed."""
        deadline = time.monotonic() + self._cluster.timeout_s
        while not self._ended and self._cluster.take(max(0.0, deadline - time.monotonic())):
            pass
        for waiting in self._waiting.values():
            if not waiting.ended:
                waiting.worker.kill(deaf_s=self._cluster.timeout_s)
        while not self._ended:
            self._cluster.take(None)

    def _values(self) -> dict[int, Any]:
        failed = [_cause(device, w) for device, w in self._waiting.items() if w.failed]
        if failed:
            raise min(failed, key=_distance_from_cause)
        return {device: _value(device, w) for device, w in self._waiting.items()}


def _value(device: int, waiting: _Waiting) -> Any:
    assert waiting.reply is not None
    try:
        return unpack(waiting.reply.value)
    except Exception as error:
        raise TypeError(f"{waiting.method}: the result of device {device} cannot be read here: {error}") from error


def _cause(device: int, waiting: _Waiting) -> Exception:
    if waiting.death is not None:
        return waiting.death
    assert waiting.reply is not None and waiting.reply.failure is not None
    failure = waiting.reply.failure
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, errors.UserError):
        return kind(failure.message)
    return WorkerFailed(device, waiting.method, failure)


def _distance_from_cause(error: Exception) -> int:
    """0 for what may be a cause, 1 for a worker deaf to an abort, 2 for waits that ended because of something else."""
    if isinstance(error, WorkerFailed) and error.failure.kind in ("Aborted", "PeerTimeout"):
        return 2
    return int(isinstance(error, WorkerDied) and error.deaf_s is not None)


class LocalCluster:
    """Devices as processes of this machine. See `Cluster`.

    program, arguments: what a worker runs (`WorkerSettings`). preload: modules that the fork server imports once.
    timeout_s: how long a rank waits for a peer before it gives up, and the controller for an aborted worker.
    shared_memory: whether devices read each other's state in memory; None: CPU devices do, where the system can.
    heartbeat_s: a device that is stopped and silent for so long is killed (runtime.heartbeat); infinity: none is.
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
        self.timeout_s = timeout_s
        self.shared_memory = device_type == "cpu" and has_shared_memory() if shared_memory is None else shared_memory
        self._arguments = arguments
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([worker_main.__module__, program.partition(":")[0], *preload])
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._settings = WorkerSettings(
            program=program,
            store_host="127.0.0.1",
            store_port=self._store.port,
            device_type=device_type,
            timeout_s=timeout_s,
            shared_memory=self.shared_memory,
        )
        self._inbox: queue.SimpleQueue[tuple[_Worker, Reply | None]] = queue.SimpleQueue()
        self._workers: dict[int, _Worker] = {}
        self._deaths: dict[int, WorkerDied] = {}
        self._incarnations: dict[int, int] = {}
        self._numbers = itertools.count()
        self._epoch = 0
        self._limits = Limits.of(heartbeat_s, timeout_s)
        self._watch: _Watch | None = None

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted(self._workers))

    def incarnation(self, device: int) -> int:
        return self._incarnations[device]

    @property
    def epoch(self) -> int:
        return self._epoch

    def node_of(self, device: int) -> int:
        return 0

    def wait_any(self, calls: Sequence[Call]) -> int:
        while True:
            for index, call in enumerate(calls):
                assert isinstance(call, LocalCall)
                if call.ended:
                    return index
            self.take(None)

    def process_id(self, device: int) -> int:
        """The operating system's id of a device's process."""
        return int(self._workers[device].process.pid)

    def start(self, devices: Sequence[int]) -> None:
        for device in devices:
            if device in self._workers or list(devices).count(device) > 1:
                raise ValueError(f"device {device} is running already")
        _start_fork_server()
        if self._watch is None and math.isfinite(self._limits.heartbeat_s):
            self._watch = _Watch(self._limits, lambda: list(self._workers.values()))
        try:
            for device in devices:
                self._workers[device] = self._spawn(device)
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

    def call(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> LocalCall:
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

    def close(self) -> None:
        self.abort("the cluster is closing")
        self.stop(self.devices)
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    # -- for LocalCall -------------------------------------------------------------------------------------------

    def take(self, timeout_s: float | None) -> bool:
        """Wait for one answer or death and take note of it; False when none came in time."""
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
        """Abort, unless that was done since: the calls of a later epoch have nothing to do with it."""
        if epoch == self._epoch:
            self.abort(reason)

    # -- inside --------------------------------------------------------------------------------------------------

    def _spawn(self, device: int) -> _Worker:
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
        self._deaths.pop(device, None)
        self._incarnations[device] = self._incarnations.get(device, -1) + 1
        return _Worker(device, process, commands, control, self._inbox)

    def _call(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> LocalCall:
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
        return LocalCall(self, epoch, waiting)

    def _remove(self, devices: Sequence[int], grace_s: float) -> None:
        leaving = [self._workers.pop(device) for device in devices if device in self._workers]
        for worker in leaving:
            worker.dismiss()
        deadline = time.monotonic() + grace_s
        for worker in leaving:
            worker.end(deadline)

    def _bury(self, worker: _Worker) -> None:
        """Take note of a worker's end: whatever it was still asked for will not come."""
        worker.end(time.monotonic() + STOP_S)
        running = next((w.method for w in worker.pending.values()), "")
        death = WorkerDied(worker.device, running, worker.process.exitcode, **worker.killed)
        for waiting in worker.pending.values():
            waiting.death = death
        worker.pending.clear()
        if self._workers.get(worker.device) is not worker:
            return  # it was stopped
        del self._workers[worker.device]
        if worker.ready:
            self._deaths[worker.device] = death
            self.abort(f"device {worker.device} died")


def _start_fork_server() -> None:
    """Start it, if there is none, with SIGINT blocked, which workers inherit: Ctrl-C is for the controller alone."""
    multiprocessing.resource_tracker.ensure_running()  # started later, it would unblock SIGINT again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
