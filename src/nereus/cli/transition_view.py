"""A transition for people: what each model-stage does, as a table, and when each GPU does it, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nereus.api.transitions import TransitionEstimate
from nereus.cli.plan_view import GIB, _columns, _table
from nereus.core.errors import UserError
from nereus.core.plan import ModelStage, Placement, Plan

COLOURS = ("tab:blue", "tab:green", "tab:olive", "tab:red", "tab:purple")


def transition_view(found: TransitionEstimate) -> RenderableType:
    """All model-stages, then the whole, then what other ways would cost."""
    parts: list[RenderableType] = [_changes_table(found), Text(), _total_line(found)]
    if found.ways:
        parts += [Text(), _ways_table(found)]
    return Group(*parts)


def _changes_table(found: TransitionEstimate) -> Table:
    table = _table()
    _columns(table, ("model-stage", "from", "to", "how"), ("GiB moved", "s"))
    received, seconds = _by_model_stage(found)
    for m, way in found.dag.lowerings.items():
        before, after = (_layout(plan, m) for plan in (found.current, found.target))
        how = way if found.dag.changes(m) else "stays"
        table.add_row(str(m), before, after, how, f"{received.get(m, 0) / GIB:.4g}", f"{seconds.get(m, 0):.3g}")
    return table


def _layout(plan: Plan, m: ModelStage) -> str:
    if m not in plan:
        return "-"
    p: Placement = plan[m]
    return f"tp{p.layout.tp} pp{p.layout.pp} dp{p.dp}"


def _by_model_stage(found: TransitionEstimate) -> tuple[dict[ModelStage, float], dict[ModelStage, float]]:
    """Bytes that GPUs receive, and seconds from the first primitive's start to the last one's end."""
    received: dict[ModelStage, float] = {}
    spans: dict[ModelStage, list[float]] = {}
    for group, starts in zip(found.dag.groups, found.dag.starts, strict=True):
        m = group.model_stage
        received[m] = received.get(m, 0.0) + float(group.received_bytes.sum())
        busy = group.seconds > 0
        if busy.any():
            ends = (starts + group.seconds)[busy]
            spans.setdefault(m, []).extend([float(starts[busy].min()), float(ends.max())])
    return received, {m: max(times) - min(times) for m, times in spans.items()}


def _total_line(found: TransitionEstimate) -> Text:
    dag = found.dag
    busiest = float(dag.received_by_gpu().max(initial=0.0))
    gpu = int(np.argmax(dag.peak_bytes))
    edges = f"{len(dag.edges)} resource edges" if dag.edges else "no resource edges"
    return Text(
        f"predicted: {dag.seconds:.3g} s, {dag.received_bytes / GIB:.4g} GiB in all, {busiest / GIB:.4g} GiB on the "
        f"busiest GPU, {edges}\nmemory at most {dag.peak_bytes[gpu] / GIB:.1f} of {found.usable_bytes / GIB:.1f} GiB "
        f"usable, on GPU {gpu}"
    )


def _ways_table(found: TransitionEstimate) -> Table:
    table = _table("each alone, every way: s (GiB moved)")
    names = list(dict.fromkeys(way for ways in found.ways.values() for way in ways))
    _columns(table, ("model-stage",), names)
    for m, ways in found.ways.items():
        cells = [f"{w.seconds:.3g} ({w.received_bytes / GIB:.4g})" if (w := ways.get(n)) else "-" for n in names]
        table.add_row(str(m), *cells)
    return table


def plot_transition(found: TransitionEstimate, path: Path, title: str) -> None:
    """Which GPU does what when, and the memory that this takes. Raises UserError."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("--plot needs matplotlib: pip install 'nereus-rl[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (schedule, memory) = pyplot.subplots(1, 2, figsize=(11, 4.5), width_ratios=(3, 1), sharey=True)
    _draw_schedule(schedule, found)
    _draw_memory(memory, found)
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=110, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)


def _draw_schedule(axes: Any, found: TransitionEstimate) -> None:
    """A bar for each primitive on each of its GPUs; what takes no time is a mark; an arrow for each resource edge."""
    from matplotlib.patches import Patch

    dag = found.dag
    names = list(dag.lowerings)
    at: list[dict[int, tuple[float, float]]] = []
    for group, starts in zip(dag.groups, dag.starts, strict=True):
        colour = COLOURS[names.index(group.model_stage) % len(COLOURS)]
        start, seconds = starts[group.part], group.seconds[group.part]
        at.append({g: (s, s + d) for g, s, d in zip(group.gpus.tolist(), start, seconds, strict=True)})
        axes.barh(group.gpus, seconds, left=start, height=0.8, color=colour, edgecolor="white", linewidth=0.5)
        still = seconds == 0
        marker = {"destroy": "x", "create": "+"}.get(group.kind, "|")
        axes.scatter(start[still], group.gpus[still], marker=marker, color=colour, zorder=3)
    for edge in dag.edges:
        for gpu in edge.gpus.tolist():
            begin, end = at[edge.release][gpu][1], at[edge.acquire][gpu][0]
            arrow = {"arrowstyle": "->", "color": "black", "connectionstyle": "arc3,rad=0.4"}
            axes.annotate("", (end, gpu + 0.3), xytext=(begin, gpu - 0.3), arrowprops=arrow)
    moving = [m for m in names if dag.changes(m)]
    handles = [Patch(color=COLOURS[names.index(m) % len(COLOURS)], label=f"{m}: {dag.lowerings[m]}") for m in moving]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, fontsize=8)
    axes.set(xlabel="predicted seconds   (x destroyed, + made)", ylabel="GPU")
    axes.invert_yaxis()


def _draw_memory(axes: Any, found: TransitionEstimate) -> None:
    """Before, at most, and what may be used."""
    gpus = np.arange(len(found.dag.peak_bytes))
    axes.barh(gpus, found.dag.peak_bytes / GIB, height=0.8, color="lightgrey", label="at most")
    axes.barh(gpus, found.dag.held_bytes / GIB, height=0.4, color="tab:grey", label="before")
    axes.axvline(found.usable_bytes / GIB, color="black", linestyle="--", label="usable")
    axes.set_xlabel("GiB of state")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
