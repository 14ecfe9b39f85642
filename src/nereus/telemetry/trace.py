"""The run as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open: TRACE in the run folder.

Process "run" has the stages of the steps, and as instants decisions, changes of the pool, recoveries; process "devices" a
row for each device with the primitives of its transitions, and its failure.
The file is a JSON array that is never closed, which both readers accept; so every line is on disk when it is written, and a
kill loses none of them. Format: "Trace Event Format", JSON array, complete events ("X") and instants ("i"),
microseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Self

from nereus.core.events import (
    DecisionMade,
    DeviceFailed,
    Event,
    OutcomeMeasured,
    PoolChanged,
    PrimitiveFinished,
    Recovered,
    RunFinished,
    StageStarted,
    StepFinished,
)
from nereus.telemetry import decisions, describe
from nereus.telemetry.strict_json import strict

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
            case DecisionMade():
                facts = {"decision": decisions.line(event, None), **event.to_json()}
                self._instant(f"decision {event.number}: {event.verdict}", RUN, 0, now_s, facts)
            case OutcomeMeasured():
                self._instant(f"outcome of decision {event.number}", RUN, 0, now_s, event.to_json())
            case PoolChanged():
                self._instant(f"pool: {len(event.devices)} devices", RUN, 0, now_s, {"pool": describe.pool(event)})
                for device in (*event.joined, *event.leaving, *event.lost):
                    word = "joined" if device in event.joined else "leaving" if device in event.leaving else "lost"
                    self._instant(word, DEVICES, device, now_s, {"why": event.why})
            case DeviceFailed():
                self._instant(f"failed: {event.kind}", DEVICES, event.device, now_s, event.to_json())
            case Recovered():
                self._instant("recovered", RUN, 0, now_s, {"recovery": describe.recovery(event), **event.to_json()})

    def _instant(self, name: str, process: int, row: int, now_s: float, facts: dict[str, Any]) -> None:
        """A mark on a row; on one of the run it goes through all of that process."""
        scope = "p" if process == RUN else "t"
        self._write({"name": name, "ph": "i", "s": scope, "pid": process, "tid": row, "ts": _us(now_s), "args": facts})

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
        when = {"ts": _us(start_s), "dur": max(1, _us(seconds))}
        self._write({"name": name, "ph": "X", "pid": process, "tid": row, **when, "args": facts})

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(strict(row), allow_nan=False) + ",\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
