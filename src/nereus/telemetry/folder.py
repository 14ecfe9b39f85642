"""The folder of one run: what it was asked to do, what happened, and the right to go on writing.

    RUN/
      job.yaml        the job as it was started
      events.jsonl    every event but StageStarted, one JSON object a line, with the "time" it was written
      metrics.jsonl   one flat row a step, for pandas and the like; a step that was done over stands once
      checkpoints/    made by whoever writes checkpoints
      tensorboard/    made by the tracker
      lock            held by the process that writes the run

`events.jsonl` is the record, only ever appended to; `metrics.jsonl` is made from it. A line is complete when
it ends in a newline: what a kill has left after the last one, the reader skips and the next writer cuts off.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, get_args

from nereus.core.errors import UserError
from nereus.core.events import Event, Moved, PrimitiveFinished, RunStarted, StageStarted, StepFinished
from nereus.core.plan import Plan
from nereus.runtime.files import write_atomically
from nereus.telemetry.strict_json import strict
from nereus.telemetry.trace import TRACE

JOB, EVENTS, METRICS, LOCK = "job.yaml", "events.jsonl", "metrics.jsonl", "lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One event as it was written down, and when (seconds, by the clock of the run that wrote it)."""

    time_s: float
    event: Event


class RunFolder:
    """The files of one run, open for writing by this process alone.

    A context manager; made by `create` or `open`. The lock is the kernel's, so it ends with the process,
    however that ends. Worker processes must be spawned rather than forked, or they would keep it.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float], lock: IO[str]) -> None:
        self.path = path
        self._clock = clock
        self._lock = lock
        self._events = (path / EVENTS).open("ab", buffering=0)
        self._metrics = (path / METRICS).open("ab", buffering=0)

    @classmethod
    def create(cls, path: Path, *, job: str, clock: Callable[[], float]) -> Self:
        """A new run's folder, with the text of its job in it. `clock` gives the "time" of events, in seconds.

        Raises UserError if anything lies at `path` already, or the folder cannot be made.
        """
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            raise UserError(
                f"{path} exists already: give the new run another folder, or resume the run that is there"
            ) from None
        except OSError as error:
            raise UserError(f"cannot make the run folder {path}: {error.strerror}") from None
        lock = _take_lock(path)
        write_atomically(path / JOB, job)
        write_atomically(path / EVENTS, b"")
        return cls(path, clock=clock, lock=lock)

    @classmethod
    def open(cls, path: Path, *, clock: Callable[[], float]) -> Self:
        """The folder of a run that is to go on; a line of its events that a kill cut short is removed.

        Raises UserError if no run lies at `path`, or another process is writing it.
        """
        check_is_run(path)
        lock = _take_lock(path)
        _cut_after_last_newline(path / EVENTS)
        return cls(path, clock=clock, lock=lock)

    @property
    def job_path(self) -> Path:
        return self.path / JOB

    @property
    def trace_path(self) -> Path:
        return self.path / TRACE

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard_path(self) -> Path:
        return self.path / "tensorboard"

    def handle(self, event: Event) -> None:
        """Write the event down; when this returns, a kill of this process can no longer lose it."""
        if isinstance(event, StageStarted | PrimitiveFinished):
            return  # for the trace
        if isinstance(event, RunStarted):
            self._restart_metrics(event.first_step)
        time_s = self._clock()
        _append_line(self._events, {"time": time_s, **event.to_json()})
        if isinstance(event, StepFinished):
            _append_line(self._metrics, _metrics_row(time_s, event))

    def _restart_metrics(self, first_step: int) -> None:
        """Rewrite the metrics from the events, without the steps that are about to be done over."""
        rows = {
            record.event.step: _metrics_row(record.time_s, record.event)
            for record in read_events(self.path)
            if isinstance(record.event, StepFinished) and record.event.step < first_step
        }
        self._metrics.close()
        write_atomically(self.path / METRICS, b"".join(_line(rows[step]) for step in sorted(rows)))
        self._metrics = (self.path / METRICS).open("ab", buffering=0)

    def close(self) -> None:
        """Close the files and let go of the lock."""
        self._events.close()
        self._metrics.close()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def check_is_run(path: Path) -> None:
    """Raises UserError, with what is missing, unless `path` is the folder of a run."""
    if not path.is_dir():
        reason = "it is a file" if path.exists() else "no such folder"
        raise UserError(f"{path} is not the folder of a run: {reason}")
    for name in (JOB, EVENTS):
        if not (path / name).is_file():
            raise UserError(f"{path} is not the folder of a run: it has no {name}")


def read_events(path: Path) -> list[Record]:
    """Everything that the run in folder `path` has written down, oldest first; the run may still be going on.

    After a resume the steps that were done over stand there twice; the later one counts.
    Raises UserError if `path` is not the folder of a run, or a line is not an event.
    """
    check_is_run(path)
    lines = (path / EVENTS).read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline was cut short
        try:
            row = json.loads(line)
            records.append(Record(time_s=row["time"], event=event_from_json(row)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"line {number} of {path / EVENTS} is not an event of a run: {error!r}") from None
    return records


def event_from_json(row: Mapping[str, Any]) -> Event:
    """The inverse of `Event.to_json`; a number that was not finite, and so written as null, is NaN.

    Raises KeyError, TypeError or ValueError if the row is not such an event.
    """
    kind = _KINDS[row["event"]]
    values = {f.name: _READERS.get(f.name, _same)(row[f.name]) for f in fields(kind) if f.name in row}
    event: Event = kind(**values)
    return event


def _numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _numbers(number) for name, number in value.items()}
    return math.nan if value is None else value


def _moved(rows: Mapping[str, Mapping[str, int]]) -> dict[str, Moved]:
    return {name: Moved(**row) for name, row in rows.items()}


def _same(value: Any) -> Any:
    return value


_KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Event)}
_READERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("plan", "before", "after"), Plan.from_json),
    **dict.fromkeys(("devices", "devices_before", "devices_after", "joined", "lost", "leaving"), tuple),
    **dict.fromkeys(("triggers", "considered", "redone"), tuple),
    "moved": _moved,
    **dict.fromkeys(("metrics", "seconds", "digest_seconds", "predicted", "signals", "stage_s", "step_s"), _numbers),
    **dict.fromkeys(
        ("after_s", "predicted_s", "transition_s", "predicted_transition_s", "predicted_seconds"), _numbers
    ),
    **dict.fromkeys(("horizon_steps", "margin", "replan_seconds"), _numbers),
}


def _metrics_row(time_s: float, event: StepFinished) -> dict[str, Any]:
    seconds = {f"{stage}_s": value for stage, value in event.seconds.items()}
    key = {"step": event.step, "time": time_s}
    return {**key, **event.metrics, **seconds, **key}  # first in the row, and no metric may hide it


def _line(row: Mapping[str, Any]) -> bytes:
    text = json.dumps(strict(row), ensure_ascii=False, allow_nan=False)
    return text.encode(errors="backslashreplace") + b"\n"  # a lone surrogate as JSON's own escape


def _append_line(file: IO[bytes], row: Mapping[str, Any]) -> None:
    """All of the line or nothing of it, unless the process is killed on the way."""
    line = memoryview(_line(row))
    end = os.fstat(file.fileno()).st_size
    try:
        while line:
            line = line[file.write(line) :]
    except OSError:
        os.ftruncate(file.fileno(), end)
        raise


def _cut_after_last_newline(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def holder_of(path: Path) -> str | None:
    """Who is writing the run in folder `path` at this moment, as `process 123 on HOST`; None: nobody."""
    if not (path / LOCK).exists():
        return None
    with (path / LOCK).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip() or "another process"
    return None


def _take_lock(path: Path) -> IO[str]:
    file = (path / LOCK).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise UserError(f"the run in {path} is being written by {holder}: stop that one first") from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file
