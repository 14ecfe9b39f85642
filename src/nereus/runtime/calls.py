"""Calls on workers, from the controller's side: what is asked, what comes back, who has died.

    call ──> outbox ──> writer thread ──> worker          of each worker: no call waits for a worker that is stopped, or
    results <── inbox <── reader thread <── worker        that takes no command before it has got rid of a large reply

A worker is a process somewhere (`WorkerProcess`) with two connections, whatever started it.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from nereus.core import errors
from nereus.runtime.heartbeat import Limits, Look, Pulse, after, is_dead
from nereus.runtime.worker import ALIVE_QUESTION, Command, Failure, Reply, pack, unpack


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

    exit_code: None where the backend does not tell; how: what it tells instead. deaf_s: it was killed, since it had not
    answered an abort for so long. silent_s: it was killed, since it had given no sign of life for so long. None: for
    another reason.
    """

    def __init__(
        self,
        device: int,
        running: str,
        exit_code: int | None,
        *,
        how: str = "",
        deaf_s: float | None = None,
        silent_s: float | None = None,
    ) -> None:
        what = f"died ({how or f'exit code {exit_code}'})"
        if silent_s is not None:
            what = f"did not answer for {silent_s:.1f} s and was killed"
        why = "" if deaf_s is None else f": no answer to an abort in {deaf_s} s"
        super().__init__(f"device {device} {what} while running {running or 'nothing'}{why}")
        self.device, self.running, self.exit_code = device, running, exit_code
        self.deaf_s, self.silent_s = deaf_s, silent_s


class Call(Protocol):
    """A method running on a set of devices."""

    def results(self) -> dict[int, Any]:
        """By device, what the method returned. Raises the first cause: WorkerDied, WorkerFailed or a UserError."""
        ...

    def within(self, timeout_s: float) -> bool:
        """Wait, but no longer than that; whether `results` has nothing to wait for any more."""
        ...


class WorkerProcess(Protocol):
    """The process of a worker, on whatever machine."""

    @property
    def sentinel(self) -> int:
        """A file descriptor that can be read once the process has ended."""
        ...

    @property
    def pid(self) -> int:
        """The operating system's id, on its machine."""
        ...

    @property
    def exit_code(self) -> int | None:
        """None: not known."""
        ...

    @property
    def how(self) -> str:
        """How it ended, where there is more to say than an exit code."""
        ...

    def look(self) -> Look | None:
        """What it does; None where that cannot be seen."""
        ...

    def kill(self) -> None:
        """End it at once; it has ended when `join` says so. Safe from any thread."""
        ...

    def join(self, timeout_s: float | None) -> bool:
        """Wait until it has ended; whether it has."""
        ...

    def release(self) -> None:
        """It has ended: give back what was reserved for it."""
        ...


@dataclass(slots=True, eq=False)
class Waiting:
    """A command without an answer yet; `reply` or `death` ends it."""

    worker: Worker
    method: str
    reply: Reply | None = None
    death: WorkerDied | None = None

    @property
    def ended(self) -> bool:
        return self.reply is not None or self.death is not None

    @property
    def failed(self) -> bool:
        return self.death is not None or (self.reply is not None and self.reply.failure is not None)


Inbox = queue.SimpleQueue[tuple["Worker", Reply | None]]
"""What arrives from all workers of a cluster, in order; None for the end of a worker."""


class Worker:
    """The controller's end of one worker.

    pending: by number, commands without an answer. killed: why it was, as WorkerDied takes it; empty if it was not.
    """

    def __init__(
        self, device: int, process: WorkerProcess, commands: Connection, control: Connection, inbox: Inbox
    ) -> None:
        self.device, self.process = device, process
        self.pending: dict[int, Waiting] = {}
        self.ready = False
        self.killed: dict[str, float] = {}
        self._pulse, self._asked, self._sending = Pulse(), False, threading.Lock()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._inbox, self._commands, self._control = inbox, commands, control
        os.set_blocking(control.fileno(), False)
        for loop in (self._write, self._read):
            threading.Thread(target=loop, name=f"device {device} {loop.__name__}", daemon=True).start()

    def send(self, command: Command) -> Waiting:
        waiting = self.pending[command.number] = Waiting(self, command.method)
        self._outbox.put(pack(command))
        return waiting

    def abort(self, epoch: int, reason: str) -> None:
        """Overtakes the commands. A worker that has not read the last few hundred of them gets no more."""
        self._tell((epoch, reason))

    def look(self, elapsed_s: float, limits: Limits) -> None:
        """Bring what is known of it up to date, `elapsed_s` after the last look; ask again, or kill it."""
        answered = self._answered()
        look = None if answered else self.process.look()
        self._pulse = after(self._pulse, elapsed_s, answered=answered, look=look, limits=limits)
        if answered or not self._asked:
            self._asked = self._tell(ALIVE_QUESTION)
        if not self.killed and is_dead(self._pulse, limits):
            self.kill(silent_s=self._pulse.silent_s)

    def kill(self, **why: float) -> None:
        """why: deaf_s or silent_s, see WorkerDied."""
        self.killed = why
        self.process.kill()

    def dismiss(self) -> None:
        """Tell the worker to end, after its commands, and the writer thread."""
        self._outbox.put(pack(None))
        self._outbox.put(None)

    def end(self, deadline: float) -> None:
        """Let the worker finish what it does until `deadline`, then kill it."""
        self.dismiss()
        if not self.process.join(max(0.0, deadline - time.monotonic())):
            self.process.kill()
            self.process.join(None)
        self.process.release()

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


class Watch:
    """Looks at all workers again and again, from a thread of its own. See runtime.heartbeat."""

    def __init__(self, limits: Limits, workers: Callable[[], Sequence[Worker]]) -> None:
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


class Mail(Protocol):
    """What a call needs of its cluster. timeout_s: how long it waits for an aborted worker."""

    timeout_s: float

    def take(self, timeout_s: float | None) -> bool:
        """Wait for one answer or death and take note of it; False when none came in time."""
        ...

    def abort_epoch(self, epoch: int, reason: str) -> None:
        """Abort, unless that was done since: the calls of a later epoch have nothing to do with it."""
        ...


class WorkerCall:
    """See `Call`."""

    def __init__(self, mail: Mail, epoch: int, waiting: dict[int, Waiting]) -> None:
        self._mail = mail
        self._epoch = epoch
        self._waiting = waiting

    def results(self) -> dict[int, Any]:
        while not self._ended:
            if any(w.failed for w in self._waiting.values()):
                # The others may wait for the one that failed: end their waits, then collect their answers.
                self._mail.abort_epoch(self._epoch, "another rank of the same call failed")
                self._collect()
            else:
                self._mail.take(None)
        if any(w.failed for w in self._waiting.values()):
            self._mail.abort_epoch(self._epoch, "a call failed")
        return self._values()

    def within(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self.ended and self._mail.take(max(0.0, deadline - time.monotonic())):
            pass
        return self.ended

    def started(self) -> None:
        """`results` of ranks that cannot wait for each other: one that fails has no consequences for others."""
        while not self._ended:
            self._mail.take(None)
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
        deadline = time.monotonic() + self._mail.timeout_s
        while not self._ended and self._mail.take(max(0.0, deadline - time.monotonic())):
            pass
        for waiting in self._waiting.values():
            if not waiting.ended:
                waiting.worker.kill(deaf_s=self._mail.timeout_s)
        while not self._ended:
            self._mail.take(None)

    def _values(self) -> dict[int, Any]:
        failed = [_cause(device, w) for device, w in self._waiting.items() if w.failed]
        if failed:
            raise min(failed, key=_distance_from_cause)
        return {device: _value(device, w) for device, w in self._waiting.items()}


def _value(device: int, waiting: Waiting) -> Any:
    assert waiting.reply is not None
    try:
        return unpack(waiting.reply.value)
    except Exception as error:
        raise TypeError(f"{waiting.method}: the result of device {device} cannot be read here: {error}") from error


def _cause(device: int, waiting: Waiting) -> Exception:
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
