"""Who holds what, over the steps: the chart of devices of a report, and its table of plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nereus.core.events import DeviceFailed, PoolChanged, Recovered
from nereus.core.plan import ModelStage, Plan
from nereus.telemetry import describe
from nereus.telemetry.history import History, Period, place
from nereus.telemetry.report_charts import BOTTOM, LEFT, RIGHT, TOP, WIDE, Chart, marks, span, steps_axis
from nereus.telemetry.svg import Drawing, Scale

MODEL_STYLES = {
    "actor/generation": 0,
    "reference/inference": 1,
    "critic/training": 2,
    "actor/training": 3,
    "reward/inference": 4,
}
"""Numbers of the colours `.model-N-fill` of report.css; any other model-stage takes number 5."""

LABEL_WIDTH, LABEL_HEIGHT = 34.0, 9.0
"""A segment that is larger says in words what it holds."""


def model_style(name: ModelStage) -> str:
    return f"model-{MODEL_STYLES.get(str(name), 5)}-fill"


def gantt(history: History) -> Chart | None:
    """A row for each device (or for devices with the same fate), in it a lane for each model-stage, over steps."""
    periods = [p for p in history.periods if p.end > p.start]
    devices = sorted({d for p in periods for d in (*p.devices, *p.plan.gpus)})
    if not devices:
        return None
    names = list(dict.fromkeys(x.model_stage for p in periods for x in p.plan.placements))
    rows = device_rows(devices, periods, history)
    lane = max(2.0, min(11.0, 460.0 / (len(rows) * len(names))))
    row_height = lane * len(names) + 5
    d = Drawing("gantt", WIDE, TOP + row_height * len(rows) + BOTTOM)
    first, end = span(history)
    x = Scale(first, end, LEFT, WIDE - RIGHT)
    bottom = TOP + row_height * len(rows)
    for i, row in enumerate(rows):
        y = TOP + i * row_height
        d.text(LEFT - 8, y + row_height / 2 + 3, describe.ranges(row), "tick", "end")
        _row(d, x, y, lane, row[0], names, periods)
        _happenings(d, x, y, lane * len(names), row, history)
    d.text(6, 13, "device", "tick")
    for mark in marks(history):
        if mark.style == "change":
            d.line(x(mark.at), TOP - 4, x(mark.at), bottom, "mark change-line")
        d.text(x(mark.at), TOP - 8, mark.label, f"label {mark.style}-text", "middle")
    steps_axis(d, x, bottom)
    legend = [(model_style(m), str(m)) for m in names]
    legend += [("pool-fill", "in the pool")]
    shown = _kinds(history)
    legend += [item for kind, item in _MARKS.items() if kind in shown]
    title = "Devices: what each holds"
    words = (
        f"{len(devices)} devices over {len(periods)} periods between changes: "
        + "; ".join(f"step {p.start:g} to {p.end:g} {len(p.devices)} devices" for p in periods)
        + "."
    )
    note = "Light and dark shades are units of the same model-stage; point at a segment to read what it is."
    if any(isinstance(e, Recovered) and e.restored_from is not None for e in history.happenings):
        note += (
            " After a restore from a checkpoint, steps that were done again are shown with the plan of the second time."
        )
    return Chart(title=title, svg=d.svg(title, words), legend=tuple(legend), note=note)


_MARKS = {
    "failed": ("failed-mark", "failed"),
    "lost": ("left-mark", "gone"),
    "joined": ("joined-mark", "joined"),
    "leaving": ("leaving-fill", "will go: notice given"),
}


def _kinds(history: History) -> set[str]:
    """The marks that are drawn. A device that failed is not marked as gone as well."""
    failed = {e.device for e in history.happenings if isinstance(e, DeviceFailed)}
    pool = [e for e in history.happenings if isinstance(e, PoolChanged)]
    found = {
        "failed": bool(failed),
        "lost": any(set(e.lost) - failed for e in pool),
        "joined": any(e.joined for e in pool),
        "leaving": any(e.leaving for e in pool),
    }
    return {kind for kind, there in found.items() if there}


def device_rows(devices: Sequence[int], periods: Sequence[Period], history: History) -> list[list[int]]:
    """Devices row by row. Where they are many, neighbours that hold the same units, or the same model-stages, share one."""
    for key in (_itself, _units, _model_stages):
        rows: list[list[int]] = []
        keys: list[object] = []
        for device in devices:
            found = (key(device, periods), _fate(device, history))
            if keys and keys[-1] == found:
                rows[-1].append(device)
            else:
                rows.append([device])
                keys.append(found)
        if len(rows) <= 40:
            break
    return rows


def _itself(device: int, _: Sequence[Period]) -> object:
    return device


def _units(device: int, periods: Sequence[Period]) -> object:
    return tuple(
        (x.model_stage, x.position(device).unit) for p in periods for x in p.plan.placements if device in x.gpus
    )


def _model_stages(device: int, periods: Sequence[Period]) -> object:
    return tuple(tuple(x.model_stage for x in p.plan.placements if device in x.gpus) for p in periods)


def _fate(device: int, history: History) -> object:
    found: list[object] = [device in p.devices for p in history.periods]
    for e in history.happenings:
        match e:
            case PoolChanged():
                found.append((device in e.joined, device in e.lost, device in e.leaving))
            case DeviceFailed():
                found.append(e.device == device)
            case Recovered():
                pass
    return tuple(found)


def _row(
    d: Drawing, x: Scale, y: float, lane: float, device: int, names: Sequence[ModelStage], periods: Sequence[Period]
) -> None:
    for p in periods:
        if device in p.devices or device in p.plan.gpus:
            d.rect(x(p.start), y, x(p.end) - x(p.start), lane * len(names), "pool-fill")
    for p in _of_one_plan(periods):
        left, right = x(p.start), x(p.end)
        for i, name in enumerate(names):
            if name in p.plan and device in p.plan[name].gpus:
                _segment(d, left, right, y + i * lane, lane, device, p.plan, name, f"steps {p.start:g} to {p.end:g}")


def _of_one_plan(periods: Sequence[Period]) -> list[Period]:
    """The same, those together between which only the pool changed."""
    found: list[Period] = []
    for p in periods:
        if found and found[-1].plan == p.plan and found[-1].end == p.start:
            found[-1] = replace(found[-1], end=p.end)
        else:
            found.append(p)
    return found


def _segment(
    d: Drawing, left: float, right: float, y: float, lane: float, device: int, plan: Plan, name: ModelStage, when: str,
) -> None:  # fmt: skip
    placement = plan[name]
    position = placement.position(device)
    words = (
        f"{name} unit {position.unit}, pp_stage {position.pp_stage}, tp_rank {position.tp_rank} of {placement.layout} "
        f"dp{placement.dp}, device {device}, {when}"
    )
    shade = "" if position.unit % 2 == 0 else " odd"
    d.rect(left + 0.5, y + 0.5, right - left - 1, lane - 1, f"{model_style(name)}{shade}", words)
    if right - left >= LABEL_WIDTH and lane >= LABEL_HEIGHT:
        label = f"u{position.unit}"
        label += f" p{position.pp_stage}" if placement.layout.pp > 1 else ""
        label += f" t{position.tp_rank}" if placement.layout.tp > 1 else ""
        d.text(left + 4, y + lane - 2, label, "inside")


def _happenings(d: Drawing, x: Scale, y: float, height: float, row: Sequence[int], history: History) -> None:
    """Failures, joins, notices and departures of a row's devices."""
    middle = y + height / 2
    for i, e in enumerate(history.happenings):
        match e:
            case DeviceFailed() if e.device in row:
                at = x(place(e.step, e.stage))
                for sign in (-1, 1):
                    d.line(at - 5, middle - 5 * sign, at + 5, middle + 5 * sign, "failed-mark")
            case PoolChanged():
                at = x(e.step)
                if set(row) & set(e.joined):
                    d.polygon([(at, middle - 5), (at + 8, middle), (at, middle + 5)], "joined-mark", describe.pool(e))
                died = any(isinstance(f, DeviceFailed) and f.device in row for f in history.happenings[:i])
                if set(row) & set(e.lost) and not died:
                    d.polygon([(at, middle - 5), (at - 8, middle), (at, middle + 5)], "left-mark", describe.pool(e))
                if set(row) & set(e.leaving):
                    d.rect(at - 4, y, 4, height, "leaving-fill", describe.pool(e))
            case _:
                pass


def plan_rows(history: History) -> tuple[list[str], list[dict[str, str]]]:
    """The plans one after the other: headings, and a row for each period."""
    names = list(dict.fromkeys(str(x.model_stage) for p in history.periods for x in p.plan.placements))
    rows = []
    for p in history.periods:
        row = {"from step": f"{p.start:g}", "devices": f"{len(p.devices)} ({describe.ranges(p.devices)})"}
        for x in p.plan.placements:
            recompute = " rc" if x.recompute else ""
            row[str(x.model_stage)] = f"{x.layout} dp{x.dp} mb{x.micro_batch}{recompute} on {describe.ranges(x.gpus)}"
        rows.append(row)
    return ["from step", "devices", *names], rows
