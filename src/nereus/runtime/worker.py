"""A worker process: one device, one main thread that runs commands in order, one listener for aborts.

    controller ── commands ──> main thread   runs them one after the other, answers each
               ── control ───> listener      raises the abort flag; says that it is alive, when asked;
                                             ends the process when the controller is gone

Every command carries an epoch. An abort names an epoch: commands of that epoch and before are ended or refused,
later ones run. So an abort that arrives late cannot hit the work that came after it. Communicators do not outlive their
epoch, whether the abort or the next command comes first.

Arguments and results are pickled apart from the messages that carry them: what cannot be sent or read is then the
failure of one command, and the pipe stays in step.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import signal
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from nereus.core.errors import Aborted
from nereus.runtime.abort import AbortFlag

LOST_CONTROLLER_EXIT = 17
"""Exit code of a worker whose controller has gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What a program gets to know about where it runs. shared_memory: state lies where its peers can map it."""

    device_id: int
    device: torch.device
    store: dist.Store
    flag: AbortFlag
    timeout_s: float
    shared_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How to start a worker. program: "module:Class", built with (context, *arguments); its methods are the commands.

    own_gpu: the process sees one GPU, its own; otherwise it sees all of the machine, and device i uses the ith.
    """

    program: str
    store_host: str
    store_port: int
    device_type: str
    timeout_s: float
    shared_memory: bool
    own_gpu: bool = False


ALIVE_QUESTION = None
"""What the controller sends on the control channel to ask for a sign of life; everything else there is an abort."""

ALIVE = b"."
"""The sign of life, written as it is: whoever reads counts bytes, so that none can be read in part."""

START = "start"
"""The first command of every worker: build the program with the command's arguments. Nothing aborts it."""


@dataclass(frozen=True, slots=True)
class Command:
    """arguments: a pickled tuple."""

    number: int
    epoch: int
    method: str
    arguments: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception of a worker, as it reaches the controller."""

    kind: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Reply:
    """value: pickled."""

    number: int
    value: bytes = b""
    failure: Failure | None = None


class _Epochs:
    """Which commands may run; shared by the main thread and the listener."""

    def __init__(self, flag: AbortFlag) -> None:
        self._flag = flag
        self._lock = threading.Lock()
        self._running = 0
        self._aborted = -1
        self._reason = ""

    def enter(self, epoch: int) -> None:
        with self._lock:
            if epoch > self._running:
                # An abort lies between, and may not have arrived yet: what it breaks must not depend on that.
                self._flag.raise_flag("an earlier call was aborted")
            self._running = epoch
            if epoch <= self._aborted:
                raise Aborted(self._reason)
            self._flag.clear()

    def abort(self, epoch: int, reason: str) -> None:
        with self._lock:
            self._aborted, self._reason = max(epoch, self._aborted), reason
            if self._running <= epoch:
                self._flag.raise_flag(reason)


def pack(value: Any) -> bytes:
    """Plain pickling: torch's own reducers would pass tensors as shared-memory files, one descriptor each."""
    return pickle.dumps(value, protocol=5)


def unpack(packed: bytes) -> Any:
    """The inverse of `pack`, between processes that we started ourselves."""
    return pickle.loads(packed)


class _Device:
    """A worker's program and the way that its commands run."""

    def __init__(self, device_id: int, settings: WorkerSettings, epochs: _Epochs, flag: AbortFlag) -> None:
        self._device_id, self._settings, self._epochs, self._flag = device_id, settings, epochs, flag
        self._program: Any = None

    def run(self, command: Command) -> Reply:
        try:
            if command.method == START:
                self._start(*unpack(command.arguments))
                return Reply(command.number, pack(None))
            self._epochs.enter(command.epoch)
            method = getattr(self._program, command.method)
            return Reply(command.number, pack(method(*unpack(command.arguments))))
        except Exception as error:  # whatever it is, it is the controller that must know
            failure = Failure(kind=type(error).__name__, message=str(error), traceback=traceback.format_exc())
            return Reply(command.number, failure=failure)

    def _start(self, *arguments: Any) -> None:
        settings = self._settings
        device = torch.device("cpu")
        if settings.device_type == "cuda":
            device = torch.device("cuda", 0 if settings.own_gpu else self._device_id)
            torch.cuda.set_device(device)
        context = WorkerContext(
            device_id=self._device_id,
            device=device,
            store=dist.TCPStore(settings.store_host, settings.store_port, is_master=False),
            flag=self._flag,
            timeout_s=settings.timeout_s,
            shared_memory=settings.shared_memory,
        )
        module, _, name = settings.program.partition(":")
        self._program = getattr(importlib.import_module(module), name)(context, *arguments)


def worker_main(device_id: int, settings: WorkerSettings, commands: Connection, control: Connection) -> NoReturn:
    """The life of a worker process that is a child of the controller."""
    for number in (signal.SIGINT, signal.SIGTERM):  # to the whole group: for the controller, which lets the step end
        signal.signal(number, signal.SIG_IGN)
    serve(device_id, settings, commands, control)
    os._exit(0)  # not through interpreter shutdown: a helper thread may still sit in a Gloo call


def serve(device_id: int, settings: WorkerSettings, commands: Connection, control: Connection) -> None:
    """Run commands until told to stop. The process ends here when the controller is gone."""
    torch.set_num_threads(1)
    gc.freeze()  # what is imported is no garbage: a collection then takes milliseconds
    flag = AbortFlag()
    epochs = _Epochs(flag)
    threading.Thread(target=_listen, args=(control, epochs), name="control", daemon=True).start()
    device = _Device(device_id, settings, epochs, flag)
    try:
        while (command := unpack(commands.recv_bytes())) is not None:
            commands.send_bytes(pack(device.run(command)))
    except (EOFError, OSError):
        os._exit(LOST_CONTROLLER_EXIT)


def _listen(control: Connection, epochs: _Epochs) -> None:
    while True:
        try:
            if (message := control.recv()) is ALIVE_QUESTION:
                os.write(control.fileno(), ALIVE)
                continue
        except (EOFError, OSError):
            os._exit(LOST_CONTROLLER_EXIT)
        epochs.abort(*message)
