"""The trace file: what Perfetto reads, complete after every event."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from nereus.core.events import DecisionMade, Event, PrimitiveFinished, RunFinished, StageStarted
from nereus.telemetry.trace import TraceFile


def read(path: Path) -> list[dict[str, Any]]:
    """As the readers of traces do: an array that may lack its end."""
    rows: list[dict[str, Any]] = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    return rows


def primitive(kind: str, devices: tuple[int, ...], seconds: float) -> PrimitiveFinished:
    received = {str(device): 100 * device for device in devices}
    return PrimitiveFinished(
        step=3,
        model_stage="actor/training",
        kind=kind,
        devices=devices,
        seconds=seconds,
        received_bytes=received,
        number=1,
        total=2,
    )


def test_spans_of_stages_and_of_primitives_by_device(tmp_path: Path) -> None:
    now = [100.0]
    path = tmp_path / "trace.json"
    with TraceFile(path, lambda: now[0]) as trace:
        trace.handle(StageStarted(step=3, stage="transition"))
        now[0] = 101.0
        trace.handle(primitive("reshard", (1, 2), 0.75))
        assert [row["name"] for row in read(path)][-1] == "reshard actor/training"  # before the file is closed
        trace.handle(StageStarted(step=3, stage="generation"))
        now[0] = 103.5
        trace.handle(RunFinished(summary={}, interrupted=False))
    with path.open("a") as file:
        file.write('{"name": "cut sho')  # by a kill
    with TraceFile(path, lambda: now[0]) as trace:  # a resume goes on with the same file
        trace.handle(primitive("destroy", (0,), 0.0))
    spans = {(row["name"], row["tid"]): row for row in read(path) if row["ph"] == "X"}
    assert spans["reshard actor/training", 1]["ts"] == 100_250_000
    assert spans["reshard actor/training", 2]["dur"] == 750_000
    assert spans["reshard actor/training", 2]["args"] == {
        "devices": [1, 2],
        "received_bytes": 300,
        "received_here_bytes": 200,
    }
    assert (spans["transition", 0]["ts"], spans["transition", 0]["dur"]) == (100_000_000, 1_000_000)
    assert (spans["generation", 0]["ts"], spans["generation", 0]["dur"]) == (101_000_000, 2_500_000)
    assert spans["destroy actor/training", 0]["dur"] >= 1


def test_decisions_pool_changes_failures_and_recoveries_are_instants(tmp_path: Path, adaptive: list[Event]) -> None:
    path = tmp_path / "trace.json"
    with TraceFile(path, lambda: 7.0) as trace:
        for event in adaptive:
            trace.handle(replace(event, margin=math.nan) if isinstance(event, DecisionMade) else event)
    marks = [row for row in read(path) if row["ph"] == "i"]
    assert all(row["ts"] == 7_000_000 and row["s"] in "pt" for row in marks)
    names = Counter(row["name"] for row in marks)
    assert names["decision 1: refused"] == 1 and names["decision 7: admitted"] == 1
    assert names["failed: died"] == 3 and names["recovered"] == 2 and names["joined"] == 2
    assert {row["tid"] for row in marks if row["name"] == "failed: died"} == {0, 1, 3}, "on the device's row"
    assert "NaN" not in path.read_text()
