"""What the devices of `nereus bench faults` run: RL workers that fail where the campaign says, and nowhere else.

A `Fault` names the device, the step, the phase, the command, how often that has been called there, and where in it. Devices
do not know of steps and phases: the run's process writes both to a file (`Clock`) before it gives the commands of either.
A device writes a line to another file (`Marks`) before it fails: so it is known what happened, and it happens once.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from nereus.core.errors import OutOfMemory
from nereus.core.events import DeviceFailed, Event, Recovered, StageStarted
from nereus.rl.worker import RlWorker
from nereus.runtime.worker import START, WorkerContext

PROGRAM = "nereus.cli.bench_faults_worker:FaultyDevice"

Kind = Literal["SIGKILL", "SIGSTOP", "error", "out of memory", "slow link"]
Phase = Literal["step", "transition", "recovery"]
PHASES: tuple[Phase, ...] = ("step", "transition", "recovery")

ANY = "*"
"""In place of a command: whichever comes."""

SLOW_S = 3.0
"""What a message takes on a slow link; on a whole one it is a millisecond."""

LINKS = ("nereus.runtime.communicator", "nereus.runtime.transport")
COMPUTING = ("nereus.engine.", "torch.nn.", "torch.optim.")
EVERYWHERE = ("nereus.engine.", "nereus.runtime.", "nereus.rl.", "torch.nn.", "torch.optim.")
POLLING = "nereus.runtime.abort"
"""How often this is called is a matter of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """At the nth call of a command in a phase of a step, counted from the start of the phase.

    moment: before, after, or the number of the function call that the command makes then. group: one number for
    those that are meant to come together.
    """

    number: int
    group: int
    kind: Kind
    device: int
    step: int
    phase: Phase
    command: str
    nth: int
    moment: int | Literal["before", "after"]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Campaign:
    """What devices are told: the faults of a run, and where the files are."""

    faults: tuple[Fault, ...]
    clock: Path
    marks: Path


class Clock:
    """The step and phase that a run is in: a listener of its events. Its process writes, devices read."""

    FORMAT = struct.Struct("q")

    def __init__(self, path: Path, *, write: bool = False) -> None:
        if write:
            path.write_bytes(self.FORMAT.pack(-1))
        with path.open("r+b" if write else "rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ)

    def read(self) -> tuple[int, Phase]:
        (value,) = self.FORMAT.unpack_from(self._memory)
        step, phase = divmod(value, len(PHASES))
        return step, PHASES[phase]

    def handle(self, event: Event) -> None:
        match event:
            case StageStarted():
                self._write(event.step, "transition" if event.stage == "transition" else "step")
            case DeviceFailed():
                self._write(event.step, "recovery")
            case Recovered():
                self._write(event.step if event.restored_from is None else event.restored_from, "step")

    def _write(self, step: int, phase: Phase) -> None:
        self.FORMAT.pack_into(self._memory, 0, step * len(PHASES) + PHASES.index(phase))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A fault that happened. time_s: of the system's clock, as in a run's events."""

    fault: int
    time_s: float
    command: str


class Marks:
    """The file of what has happened; lines of several processes, appended whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, mark: Mark) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(file, json.dumps(dataclasses.asdict(mark)).encode() + b"\n")
        os.close(file)

    def read(self) -> list[Mark]:
        if not self._path.exists():
            return []
        return [Mark(**json.loads(line)) for line in self._path.read_text().splitlines()]


class FaultyDevice:
    """See the module. Every command is the RL worker's."""

    def __init__(self, context: WorkerContext, *arguments: Any) -> None:
        *rest, campaign = arguments
        self._worker = RlWorker(context, *rest)
        self._clock, self._marks = Clock(campaign.clock), Marks(campaign.marks)
        happened = {mark.fault for mark in self._marks.read()}
        self._faults = [f for f in campaign.faults if f.device == context.device_id and f.number not in happened]
        self._now: tuple[int, Phase] = (-1, "step")
        self._calls: Counter[str] = Counter()
        self._run(START, lambda: None)

    def __getattr__(self, command: str) -> Callable[..., Any]:
        return partial(self._run, command, getattr(self._worker, command))

    def _run(self, name: str, command: Callable[..., Any], *arguments: Any) -> Any:
        if (now := self._clock.read()) != self._now:
            self._now = now
            self._calls.clear()
        self._calls[name] += 1
        self._calls[ANY] += 1
        due = [f for f in self._faults if self._is_due(f, name)]
        if not due:
            return command(*arguments)
        (fault, *_) = due
        if fault.moment == "before":
            self._strike(fault, name)
        if isinstance(fault.moment, str):
            result = command(*arguments)
        else:
            with _at_call(fault.moment, _modules(fault), lambda: self._strike(fault, name)):
                result = command(*arguments)
        if fault in self._faults and fault.kind != "slow link":  # a command without messages uses no link
            self._strike(fault, name)
        return result

    def _is_due(self, fault: Fault, name: str) -> bool:
        return (
            (fault.step, fault.phase) == self._now
            and fault.command in (name, ANY)
            and fault.nth == self._calls[fault.command]
        )

    def _strike(self, fault: Fault, command: str) -> None:
        self._faults.remove(fault)
        self._marks.add(Mark(fault=fault.number, time_s=time.time(), command=command))
        match fault.kind:
            case "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            case "SIGSTOP":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "out of memory":
                raise OutOfMemory(f"device {fault.device} is full: fault {fault.number}")
            case "error":
                raise ZeroDivisionError(f"fault {fault.number}")
            case "slow link":
                time.sleep(SLOW_S)


def _modules(fault: Fault) -> Sequence[str]:
    """Whose functions count in the middle of a command. Memory runs out where something is computed."""
    return {"slow link": LINKS, "out of memory": COMPUTING}.get(fault.kind, EVERYWHERE)


@contextmanager
def _at_call(number: int, modules: Sequence[str], strike: Callable[[], None]) -> Iterator[None]:
    """Strike when this thread calls a function of these modules for the `number`th time."""
    left = number

    def watch(frame: FrameType, what: str, _: Any) -> None:
        nonlocal left
        name = frame.f_globals.get("__name__", "") if what == "call" else ""
        if name.startswith(tuple(modules)) and name != POLLING:
            left -= 1
            if left == 0:
                sys.setprofile(None)
                strike()

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)
