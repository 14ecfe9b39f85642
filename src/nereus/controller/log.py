"""A controller's history as JSON: what it was told and what it answered, line by line, so that it can be asked again.

Every session of a run begins with a line that says what its controller started from. `replay` gives new ones the events of
the log; they must answer what was answered then, or the log is of another version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from nereus.controller.admission import Option
from nereus.controller.controller import (
    Controller,
    Event,
    Instruction,
    PoolChanged,
    ReplanFinished,
    StepMeasured,
    TransitionEnded,
)
from nereus.core.plan import Plan

_EVENTS: Mapping[str, type] = {k.__name__: k for k in (StepMeasured, PoolChanged, ReplanFinished, TransitionEnded)}


def row(event: Event, instructions: Sequence[Instruction]) -> dict[str, Any]:
    """One line of the log."""
    return {"event": _plain(event), "instructions": [_plain(i) for i in instructions]}


def event_from_json(value: Mapping[str, Any]) -> Event:
    """The event of a line. Raises KeyError or TypeError for what is none."""
    kind = _EVENTS[value["kind"]]
    values = {f.name: value[f.name] for f in fields(kind)}
    for name in ("devices",):
        if name in values:
            values[name] = tuple(values[name])
    if "options" in values:
        values["options"] = tuple(_option(option) for option in values["options"])
    event: Event = kind(**values)
    return event


def started(devices: Sequence[int], decided: int) -> dict[str, Any]:
    """The first line of a session. decided: decisions of the run before it."""
    return {"started": {"devices": list(devices), "decided": decided}}


def replay(rows: Iterable[Mapping[str, Any]], make: Callable[[tuple[int, ...], int], Controller]) -> list[int]:
    """Numbers of the lines that are answered otherwise now; none, if it is the same controller.

    make: (devices, decisions before) -> a controller as the run had it. Raises ValueError for a log without a beginning.
    """
    controller: Controller | None = None
    differing = []
    for number, line in enumerate(rows):
        if "started" in line:
            controller = make(tuple(line["started"]["devices"]), line["started"]["decided"])
            continue
        if controller is None:
            raise ValueError("the log of a controller must begin with what it started from")
        if [_plain(i) for i in controller.handle(event_from_json(line["event"]))] != line["instructions"]:
            differing.append(number)
    return differing


def _option(value: Mapping[str, Any]) -> Option:
    given = {f.name: value[f.name] for f in fields(Option)}
    return Option(**{**given, "plan": Plan.from_json(value["plan"])})


def _plain(value: Any) -> Any:
    if isinstance(value, Plan):
        return value.to_json()
    if hasattr(value, "__dataclass_fields__"):
        inside = {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
        return inside if isinstance(value, Option) else {"kind": type(value).__name__, **inside}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return value
