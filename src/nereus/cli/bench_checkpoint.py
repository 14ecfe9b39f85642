"""`nereus bench checkpoint`: how long a run waits for the files of a checkpoint.

Four devices (tp 2, dp 2) hold a model's parameters and moments. In turns, all of it is written

    waiting       file by file: gathered, written, forced to disk, hashed, summed for the digest
    background    copies of everything are gathered; the rest is the devices' threads' work

The first turn finds no kept pages: copies go into memory that is touched for the first time.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from nereus.cli.bench import machine
from nereus.cli.bench_reshard_cases import decoder
from nereus.cli.bench_reshard_worker import PROGRAM
from nereus.core.plan import ACTOR_TRAINING, Layout, Placement, Plan
from nereus.core.shapes import state_spec
from nereus.runtime.cluster import LocalCluster
from nereus.runtime.file_batch import FileBatch
from nereus.runtime.fleet import Fleet
from nereus.runtime.tensor_files import Part

WAYS = {"waiting": "for comparison", "background": ""}


def bench_checkpoint(parameters: float, *, repeats: int, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """The bench: {bench, machine, rows, summary}; a row for each way and turn, in seconds."""
    spec = state_spec(decoder(parameters), dtype="float32")
    devices = tuple(range(4))
    plan = Plan((Placement(model_stage=ACTOR_TRAINING, layout=Layout(2, 1), dp=2, gpus=devices),))
    cluster = LocalCluster(PROGRAM, ())
    rows: list[dict[str, Any]] = []
    try:
        cluster.start(devices)
        fleet = Fleet(cluster, {ACTOR_TRAINING: spec})
        cluster.call("reset", dict.fromkeys(devices, (fleet.specs,))).results()
        fleet.create(plan, {})
        cluster.call("fill", dict.fromkeys(devices, ())).results()
        for turn in range(repeats):
            for way, wait in WAYS.items():
                files = folder / "checkpoint-files"
                shutil.rmtree(files, ignore_errors=True)
                files.mkdir(parents=True)
                part = Part(model_stage=ACTOR_TRAINING, spec=spec, folder=files, stem="state", writers=devices)
                row = {"turn": turn, "way": way, "state_mb": spec.num_bytes / 1e6, **_write(fleet, part, wait)}
                shutil.rmtree(files)
                rows.append(row)
                say(f"{way}: waited {row['blocked_s']:.3f} s, on disk after {row['total_s']:.3f} s")
    finally:
        cluster.close()
    summary = {
        f"{way}_{figure}": median(row[figure] for row in rows if row["way"] == way)
        for way in WAYS
        for figure in ("blocked_s", "total_s")
    }
    return {"bench": "checkpoint", "machine": machine(), "rows": rows, "summary": summary}


def _write(fleet: Fleet, part: Part, wait: str) -> dict[str, float]:
    began = time.monotonic()
    batch = FileBatch(fleet, [part], wait=wait)
    batch.start()
    blocked = time.monotonic()
    batch.look(wait=True)
    return {"blocked_s": blocked - began, "total_s": time.monotonic() - began}
