"""A plan as a table: a row for each model-stage, a column for each device, in it what that device holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.table import Table
from rich.text import Text

from nereus.core.plan import Placement, Plan, Position
from nereus.telemetry import describe

UNIT_STYLES = tuple(
    f"black on {colour}"
    for colour in ("bright_cyan", "bright_yellow", "bright_magenta", "bright_green", "bright_blue", "white")
)


def plan_table(plan: Plan, devices: Iterable[int], *, width: int = 100) -> Table:
    """A plan as a table: a row for each model-stage, a column for each device, in it what that device holds.

    A cell reads `u0 p1 t0`: unit 0, pp_stage 1, tp_rank 0, the latter two only where the layout has more than
    one; shorter (`u0p1t0`, `0.1.0`, `0`) the less room there is. Devices that do not fit into `width`
    characters at all are one column of ranges, folded if need be.
    """
    columns = sorted({*devices, *plan.gpus})
    for headings, cell in _PLAN_STYLES:
        cell_width = max([len(cell(p, p.position(g))) for p in plan.placements for g in p.gpus], default=1)
        cell_width = max(cell_width, len(str(columns[-1]))) if columns else cell_width
        if _properties_width(plan, headings) + len(columns) * (cell_width + 1) <= width:
            return _device_table(plan, columns, headings, cell, cell_width)
    return _range_table(plan)


_Cell = Callable[[Placement, Position], str]


def _labels(p: Placement, position: Position) -> list[str]:
    labels = [f"u{position.unit}"]
    labels += [f"p{position.pp_stage}"] if p.layout.pp > 1 else []
    labels += [f"t{position.tp_rank}"] if p.layout.tp > 1 else []
    return labels


def _spaced(p: Placement, position: Position) -> str:
    return " ".join(_labels(p, position))


def _joined(p: Placement, position: Position) -> str:
    return "".join(_labels(p, position))


def _dotted(p: Placement, position: Position) -> str:
    return ".".join(label[1:] for label in _labels(p, position))


def _unit_only(p: Placement, position: Position) -> str:
    return str(position.unit)


_LONG = ("plan", "tp", "pp", "dp", "micro-batch", "recompute")
_SHORT = ("plan", "tp", "pp", "dp", "mb", "rc")
_PLAN_STYLES: tuple[tuple[tuple[str, ...], _Cell], ...] = (
    (_LONG, _spaced),
    (_LONG, _joined),
    (_SHORT, _joined),
    (_SHORT, _dotted),
    (_SHORT, _unit_only),
)


def _properties(p: Placement) -> tuple[str, ...]:
    return (
        str(p.model_stage),
        str(p.layout.tp),
        str(p.layout.pp),
        str(p.dp),
        str(p.micro_batch),
        "yes" if p.recompute else "-",
    )


def _properties_width(plan: Plan, headings: tuple[str, ...]) -> int:
    rows = [headings, *(_properties(p) for p in plan.placements)]
    return sum(max(map(len, column)) + 1 for column in zip(*rows, strict=True))


def _plan_table(headings: tuple[str, ...]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    table.add_column(headings[0], no_wrap=True)
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _device_table(plan: Plan, columns: Sequence[int], headings: tuple[str, ...], cell: _Cell, cell_width: int) -> Table:
    table = _plan_table(headings)
    for device in columns:
        table.add_column(str(device), justify="center", no_wrap=True, width=cell_width)
    for p in plan.placements:
        table.add_row(*_properties(p), *(_device_cell(p, device, cell, cell_width) for device in columns))
    return table


def _device_cell(p: Placement, device: int, cell: _Cell, cell_width: int) -> Text:
    if device not in p.gpus:
        return Text(".".center(cell_width), style="dim")
    position = p.position(device)
    style = UNIT_STYLES[position.unit % len(UNIT_STYLES)]
    return Text(cell(p, position).center(cell_width), style=style)


def _range_table(plan: Plan) -> Table:
    table = _plan_table(_SHORT)
    table.add_column("devices", overflow="fold")
    for p in plan.placements:
        table.add_row(*_properties(p), describe.ranges(p.gpus))
    return table
