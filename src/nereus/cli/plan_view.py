"""Tables of a plan choice for the terminal. What they show is data: `PlanChoice`, `Explanation`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nereus.core.plan import ModelStage, Placement
from nereus.planner.choice import PlanChoice, PlannedPlan
from nereus.planner.explain import Explanation
from nereus.planner.problem import task_seconds

GIB = 2**30


def choice_view(choice: PlanChoice, explanation: Explanation | None = None) -> RenderableType:
    """The best plan, its latency by stage, the alternatives, and why, if an explanation is given."""
    parts: list[RenderableType] = [plan_table(choice.best), stage_line(choice.best), memory_line(choice.best)]
    if choice.alternatives:
        parts.append(alternatives_table(choice))
    if explanation is not None:
        parts.append(reasons_table(explanation))
        parts.append(more_line(choice, explanation))
    return Group(*parts)


def plan_table(planned: PlannedPlan) -> Table:
    """One row a model-stage. GiB: resident and with its working set, of one GPU; the capacity is in the title."""
    problem = planned.problem
    capacity = problem.capacity_bytes / GIB
    table = Table(title=f"step {seconds(planned.step_latency_s)} on {problem.pool.size} GPUs of {capacity:.1f} GiB")
    for name in ("model-stage", "GPUs"):
        table.add_column(name)
    for name in ("TP", "PP", "DP", "micro-batch", "recompute", "seconds", "resident GiB", "peak GiB"):
        table.add_column(name, justify="right")
    for placement in planned.plan.placements:
        m = placement.model_stage
        rows, row = problem.tables[m], planned.selection[m].row
        spent = sum(float(task_seconds(rows, t)[row]) for t in problem.graph if t.model_stage == m)
        table.add_row(
            str(m),
            gpu_ranges(placement.gpus),
            *(str(n) for n in (placement.layout.tp, placement.layout.pp, placement.dp, placement.micro_batch)),
            "yes" if placement.recompute else "no",
            seconds(spent),
            f"{float(rows.resident_bytes[row]) / GIB:.1f}",
            f"{max(planned.memory_bytes[gpu] for gpu in placement.gpus) / GIB:.1f}",
        )
    return table


def gpu_ranges(gpus: Sequence[int], most: int = 4) -> str:
    """`"0-15"`, `"0-3,8-11"`; how many, where the ranges are many."""
    ranges: list[list[int]] = []
    for gpu in sorted(gpus):
        if ranges and gpu == ranges[-1][1] + 1:
            ranges[-1][1] = gpu
        else:
            ranges.append([gpu, gpu])
    if len(ranges) > most:
        return f"{len(gpus)} GPUs in {len(ranges)} ranges"
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def seconds(value: float) -> str:
    """Three digits that matter."""
    return f"{value:.0f} s" if value >= 100 else f"{value:.3g} s" if value >= 0.001 else "0 s"


def stage_line(planned: PlannedPlan) -> Text:
    """The step latency split by stage."""
    total = planned.step_latency_s
    parts = [f"{stage} {seconds(s)} ({s / total:.0%})" for stage, s in planned.stage_seconds.items()]
    return Text("step latency: " + ", ".join(parts))


def memory_line(planned: PlannedPlan) -> Text:
    """How much of the fullest GPU is free."""
    problem, peak = planned.problem, planned.peak_bytes
    free = 1 - peak / problem.capacity_bytes
    line = (
        f"memory: {peak / GIB:.1f} of {problem.capacity_bytes / GIB:.1f} GiB on the fullest GPU, {free:.1%} free "
        f"({problem.headroom:.0%} must be)"
    )
    if planned.current is not None:
        line += f"; {planned.kept_bytes / GIB:.1f} GiB of state stay where they are"
    return Text(line)


def alternatives_table(choice: PlanChoice) -> Table:
    """The chosen plan and the next best; `tpAppBdpC` of each model-stage, bold where it differs from the chosen one."""
    table = Table(title="alternatives (each with other training layouts)")
    table.add_column("")
    table.add_column("step", justify="right")
    table.add_column("slower", justify="right")
    for m in choice.problem.model_stages:
        table.add_column(str(m))
    table.add_column("peak GiB", justify="right")
    best = choice.best
    for planned in choice.plans:
        table.add_row(
            "*" if planned is best else "",
            seconds(planned.step_latency_s),
            f"{planned.step_latency_s / best.step_latency_s - 1:.2%}",
            *(_layout(planned, best, m) for m in choice.problem.model_stages),
            f"{planned.peak_bytes / GIB:.1f}",
        )
    return table


def _layout(planned: PlannedPlan, best: PlannedPlan, model_stage: ModelStage) -> Text:
    def words(placement: Placement) -> str:
        mark = " rc" if placement.recompute else ""
        layout = placement.layout
        return f"tp{layout.tp} pp{layout.pp} dp{placement.dp} mb{placement.micro_batch}{mark}"

    here, chosen = (words(p.plan[model_stage]) for p in (planned, best))
    return Text(here, style="" if here == chosen else "bold")


def reasons_table(explanation: Explanation) -> Table:
    """What keeps each model-stage from being faster, and its frontier: seconds by number of GPUs."""
    table = Table(title="why")
    table.add_column("model-stage")
    table.add_column("held back by")
    table.add_column("could save", justify="right")
    table.add_column("frontier: GPUs: seconds (chosen in brackets)")
    for reason in explanation.reasons:
        points = reason.frontier[-7:]
        steps = [
            f"[{p.gpus}: {p.seconds:.3g}]" if p.chosen else f"{p.gpus}: {p.seconds:.3g}"
            for p in reason.frontier
            if p in points or p.chosen
        ]
        saved = seconds(reason.faster_s) if reason.faster_s > 0 else ""
        table.add_row(str(reason.model_stage), reason.binding, saved, Text("  ".join(steps)))
    return table


def more_line(choice: PlanChoice, explanation: Explanation) -> Text:
    """What one more node would give."""
    more = explanation.one_more_node
    if more is None:
        return Text("one more node would make no plan faster")
    share = explanation.saved_s / choice.best.step_latency_s
    return Text(
        f"one more node ({more.problem.pool.size} GPUs): step {seconds(more.step_latency_s)}, "
        f"{seconds(explanation.saved_s)} less ({share:.1%})"
    )
