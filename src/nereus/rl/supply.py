"""Devices come and go: by the job file, a trace file, the scale command, or the cluster's own news.

`Supply.poll` is asked at every step boundary and answers with what has changed since. A reclaim with notice is carried out:
when its time is over the devices are killed, whether the plan has left them or not; so is a death that the job file plans
for a stage of a step. Both are for trying things out; on a real cluster devices vanish by themselves.
"""

from __future__ import annotations

import csv
import json
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereus.controller.pool import joining
from nereus.core.errors import UserError
from nereus.core.job import SupplyPoint

SCALE = "scale.jsonl"
"""In a run folder: one line for each request of `nereus scale`, appended, never rewritten."""

COLUMNS = ("step", "time_s", "devices", "notice_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """The pool is to be another one: so many devices from now on, or with `joined` and without `gone`.

    notice_s: until they vanish; None: they wait for the boundary. why: who says so.
    """

    devices: int | None = None
    joined: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    notice_s: float | None = None
    why: str


def read_trace(path: Path) -> tuple[SupplyPoint, ...]:
    """A supply trace: CSV with a header of step or time_s, devices and perhaps notice_s. Raises UserError."""
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cluster.supply_trace: {path} cannot be read: {error}") from error
    names = set(rows[0]) if rows else set()
    if not {"devices"} < names or not names <= set(COLUMNS) or len(names & {"step", "time_s"}) != 1:
        raise UserError(
            f"cluster.supply_trace: {path} must have a header line with the columns step or time_s, and devices, "
            f"and perhaps notice_s; it has {', '.join(sorted(map(str, names))) or 'no rows'}"
        )
    return tuple(_point(path, line, row) for line, row in enumerate(rows, start=2))


def _point(path: Path, line: int, row: Mapping[str, str]) -> SupplyPoint:
    values: dict[str, Any] = {}
    for name, text in row.items():
        if text is None or (name == "notice_s" and not text.strip()):
            continue
        try:
            values[name] = float(text) if name.endswith("_s") else int(text)
        except ValueError as error:
            raise UserError(f"cluster.supply_trace: {path}, line {line}: {name}: {text!r} is not a number") from error
        if not values[name] >= (1 if name == "devices" else 0):
            least = "at least 1" if name == "devices" else "0 or more"
            raise UserError(f"cluster.supply_trace: {path}, line {line}: {name}: {text!r} must be {least}")
    return SupplyPoint(**values)


class Supply:
    """See the module.

    points: of the job and its trace. elapsed_s: the run's seconds so far, resumed sessions included. kill: ends a device's
    process at once; None where devices are not ours to kill. requests: the file of `nereus scale`. startable: ids that new
    devices can have; None: any.
    """

    def __init__(
        self,
        points: Sequence[SupplyPoint],
        *,
        elapsed_s: Callable[[], float],
        requests: Path | None = None,
        kill: Callable[[int], None] | None = None,
        cluster_news: Callable[[], Sequence[News]] = tuple,
        startable: Callable[[], Sequence[int]] | None = None,
        first_step: int = 0,
    ) -> None:
        self._elapsed_s, self._requests, self._kill, self._cluster_news = elapsed_s, requests, kill, cluster_news
        self._startable = startable
        began = elapsed_s()
        self._by_step = sorted((p for p in points if p.step is not None and p.during is None), key=_step)
        self._by_step = [p for p in self._by_step if _step(p) >= first_step]
        self._by_time = sorted((p for p in points if p.time_s is not None and p.time_s >= began), key=_time)
        self._deaths = [p for p in points if p.during is not None and _step(p) >= first_step]
        self._read_bytes = requests.stat().st_size if requests is not None and requests.exists() else 0
        self._timers: list[threading.Timer] = []

    def poll(self, step: int) -> list[News]:
        """What has changed since the last time, oldest first."""
        found = [*self._due(step), *self._asked(), *self._cluster_news()]
        for news in found:
            if news.notice_s is not None and news.gone:
                self._vanish_in(news.notice_s, news.gone)
        return found

    def new_devices(self, known: Collection[int], count: int) -> tuple[int, ...]:
        """Ids for so many more devices, or for as many as there can be."""
        if self._startable is None:
            return joining(known, count)
        return tuple(sorted(set(self._startable()) - set(known)))[:count]

    def vanish_in(self, notice_s: float, devices: Sequence[int]) -> None:
        """Devices of a reclaim that named none, now that they are chosen."""
        self._vanish_in(notice_s, devices)

    def stage_began(self, step: int, stage: str) -> None:
        """Carry out the deaths that the job plans for this moment."""
        for point in [p for p in self._deaths if p.step == step and p.during == stage]:
            self._deaths.remove(point)
            self._end(*(point.gone or ()))

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _due(self, step: int) -> list[News]:
        found = []
        while self._by_step and _step(self._by_step[0]) <= step:
            found.append(_news(self._by_step.pop(0)))
        now = self._elapsed_s()
        while self._by_time and _time(self._by_time[0]) <= now:
            found.append(_news(self._by_time.pop(0)))
        return found

    def _asked(self) -> list[News]:
        if self._requests is None or not self._requests.exists():
            return []
        with self._requests.open("rb") as file:
            file.seek(self._read_bytes)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        return [news for line in whole.splitlines() if (news := request(line)) is not None]

    def _vanish_in(self, notice_s: float, devices: Sequence[int]) -> None:
        if self._kill is None:
            return
        timer = threading.Timer(notice_s, self._end, devices)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _end(self, *devices: int) -> None:
        for device in devices:
            if self._kill is not None:
                self._kill(device)


def request(line: bytes) -> News | None:
    """A line that `scale_request` wrote; None for anything else, which must not end a run."""
    try:
        row = json.loads(line)
        gone = tuple(int(device) for device in row["gone"] or ())
        return News(devices=row["devices"], gone=gone, notice_s=row["notice_s"], why="nereus scale")
    except (ValueError, KeyError, TypeError):
        return None


def scale_request(devices: int | None, gone: Sequence[int], notice_s: float | None) -> bytes:
    """A line for the file of requests."""
    return json.dumps({"devices": devices, "gone": list(gone) or None, "notice_s": notice_s}).encode() + b"\n"


def _news(point: SupplyPoint) -> News:
    gone = tuple(point.gone or ())
    return News(devices=point.devices, gone=gone, notice_s=point.notice_s, why="supply")


def _step(point: SupplyPoint) -> float:
    return math.inf if point.step is None else point.step


def _time(point: SupplyPoint) -> float:
    return math.inf if point.time_s is None else point.time_s
