"""The run as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open: TRACE in the run folder.

Process "run" has the stages of the steps; process "devices" a row for each device with the primitives of its transitions.
The file is a JSON array that is never closed, which both readers accept; so every line is on disk when it is written, and a
kill loses none of them. Format: "Trace Event Format", JSON array, complete events ("X"), microseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Self

from nereus.core.events import Event, PrimitiveFinished, RunFinished, StageStarted, StepFinished

TRACE = "trace.json"
RUN, DEVICES = 1, 2


class TraceFile:
    """Appends to a trace. clock: seconds; of the events, which come as they happen."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
        if whole:
            os.truncate(path, len(whole) + 1)  # a line that a kill cut short would spoil those that follow
        self._file: IO[str] = path.open("a" if whole else "w", buffering=1)
        self._clock = clock
        self._stage: tuple[StageStarted, float] | None = None
        if not whole:
            self._file.write("[\n")
            for process, name in ((RUN, "run"), (DEVICES, "devices")):
                self._write({"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}})

    def handle(self, event: Event) -> None:
        """Write the spans that end with this event."""
        now_s = self._clock()
        match event:
            case StageStarted():
                self._end_stage(now_s)
                self._stage = event, now_s
            case StepFinished() | RunFinished():
                self._end_stage(now_s)
            case PrimitiveFinished():
                self._primitive(event, now_s)

    def _end_stage(self, now_s: float) -> None:
        if self._stage is not None:
            stage, begun_s = self._stage
            self._span(stage.stage, RUN, 0, begun_s, now_s - begun_s, {"step": stage.step})
        self._stage = None

    def _primitive(self, event: PrimitiveFinished, now_s: float) -> None:
        facts = {"devices": list(event.devices), "received_bytes": sum(event.received_bytes.values())}
        for device in event.devices:
            own = {**facts, "received_here_bytes": event.received_bytes.get(str(device), 0)}
            name = f"{event.kind} {event.model_stage}"
            self._span(name, DEVICES, device, now_s - event.seconds, event.seconds, own)

    def _span(self, name: str, process: int, row: int, start_s: float, seconds: float, facts: dict[str, Any]) -> None:
        when = {"ts": round(start_s * 1e6), "dur": max(1, round(seconds * 1e6))}
        self._write({"name": name, "ph": "X", "pid": process, "tid": row, **when, "args": facts})

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + ",\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
