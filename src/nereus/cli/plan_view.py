"""Tables of a plan choice for a terminal of 80 columns or more. What they show is data: `PlanChoice`, `Explanation`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nereus.api.scenario import Scenario, SweepPoint
from nereus.core.inventory import CpuHost
from nereus.core.plan import Placement
from nereus.planner.choice import PlanChoice, PlannedPlan
from nereus.planner.explain import Explanation, ModelStageReason
from nereus.planner.problem import task_seconds

GIB = 2**30


def choice_view(scenario: Scenario, choice: PlanChoice, explanation: Explanation, width: int = 80) -> RenderableType:
    """The best plan, its latency by stage, the alternatives, and why."""
    best = choice.best
    parts: list[RenderableType] = [
        setting_line(scenario),
        plan_table(best, "devices" if isinstance(scenario.device, CpuHost) else "GPUs"),
        stage_line(best),
        memory_line(best),
        Text(),
        reasons_table(choice, explanation, num_points=3 if width < 110 else 7),
        more_line(choice, explanation),
    ]
    if choice.alternatives:
        parts += [Text(), alternatives_table(choice)]
    return Group(*parts)


def _table(title: str = "") -> Table:
    return Table(
        title=title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )


def _columns(table: Table, left: Sequence[str], right: Sequence[str]) -> None:
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)


def setting_line(scenario: Scenario) -> Text:
    """What was asked."""
    w, device = scenario.workload, scenario.device_kind
    longest = f"longest {w.longest_response:,.0f}"
    recompute = "" if scenario.recompute == "auto" else f", recomputation {scenario.recompute}"
    return Text(
        f"{scenario.name}, {scenario.algorithm}, {w.sequences:,} sequences of {w.prompt_length:,.0f} + "
        f"{w.response_length:,.0f} tokens ({longest}), {w.dtype}{recompute}; {scenario.gpus} x {device.name} "
        f"({scenario.source})"
    )


def plan_table(planned: PlannedPlan, unit: str = "GPUs") -> Table:
    """One row a model-stage. GiB of one GPU: held while idle; at the peak of all that lies on it."""
    problem = planned.problem
    capacity = problem.capacity_bytes / GIB
    table = _table(f"step {seconds(planned.step_latency_s)} on {problem.pool.size} {unit} of {capacity:.3g} GiB")
    _columns(table, ["model-stage", unit], ["TP", "PP", "DP", "mb", "rc", "seconds", "held", "peak GiB"])
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
            gib(float(rows.resident_bytes[row])),
            gib(max(planned.memory_bytes[gpu] for gpu in placement.gpus)),
        )
    return table


def gpu_ranges(gpus: Sequence[int], most: int = 2) -> str:
    """`"0-15"`, `"0-3,8-11"`; how many, where the ranges are many."""
    ranges: list[list[int]] = []
    for gpu in sorted(gpus):
        if ranges and gpu == ranges[-1][1] + 1:
            ranges[-1][1] = gpu
        else:
            ranges.append([gpu, gpu])
    if len(ranges) > most:
        return f"{len(gpus)} of them"
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def seconds(value: float) -> str:
    """Three digits that matter."""
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s" if value >= 0.001 else "0 s"


def gib(num_bytes: float) -> str:
    """A size in GiB, without its unit."""
    value = num_bytes / GIB
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def stage_line(planned: PlannedPlan) -> Text:
    """The step latency split by stage."""
    total = planned.step_latency_s
    parts = [f"{stage} {seconds(s)} ({s / total:.0%})" for stage, s in planned.stage_seconds.items()]
    return Text(", ".join(parts))


def memory_line(planned: PlannedPlan) -> Text:
    """How much of the fullest GPU is free."""
    problem, peak = planned.problem, planned.peak_bytes
    free = 1 - peak / problem.capacity_bytes
    line = (
        f"memory: {gib(peak)} of {gib(problem.capacity_bytes)} GiB on the fullest GPU, {free:.1%} free "
        f"({problem.headroom:.0%} must be)"
    )
    if planned.current is not None:
        line += f"; {gib(planned.kept_bytes)} GiB of state stay where they are"
    return Text(line)


def alternatives_table(choice: PlanChoice) -> Table:
    """The next best plans: how much slower, and each model-stage that is placed otherwise than in the best."""
    table = _table("alternatives, each with another layout of actor/training")
    _columns(table, [], ["step", "slower", "peak GiB"])
    table.add_column("what differs from the best plan")
    best = choice.best
    for planned in choice.alternatives:
        table.add_row(
            seconds(planned.step_latency_s),
            f"{planned.step_latency_s / best.step_latency_s - 1:.1%}",
            gib(planned.peak_bytes),
            "\n".join(_differences(planned, best)),
        )
    return table


def _differences(planned: PlannedPlan, best: PlannedPlan) -> Iterator[str]:
    for p in planned.plan.placements:
        here, chosen = (_words(x) for x in (p, best.plan[p.model_stage]))
        if here != chosen:
            yield f"{p.model_stage} {here}"


def _words(p: Placement) -> str:
    return f"{p.layout} dp{p.dp} mb{p.micro_batch}{' rc' if p.recompute else ''}"


NEXT_TO_NOTHING = 0.001
"""Share of a step below which no saving is worth a word."""


def reasons_table(choice: PlanChoice, explanation: Explanation, num_points: int = 7) -> Table:
    """What keeps each model-stage from being faster, and its frontier: seconds by number of GPUs."""
    table = _table()
    _columns(table, ["model-stage", "held back by"], ["could save"])
    table.add_column(Text("seconds by GPUs [chosen]"))
    for reason in explanation.reasons:
        worth = reason.faster_s > NEXT_TO_NOTHING * choice.best.step_latency_s
        held = _BINDINGS.get(reason.binding, reason.binding) if worth else "-"
        saved = seconds(reason.faster_s) if worth else ""
        table.add_row(str(reason.model_stage), held, saved, _steps(reason, num_points))
    return table


_BINDINGS = {"the other model-stages": "the others"}


def _steps(reason: ModelStageReason, num_points: int) -> Text:
    """The frontier around the chosen point."""
    chosen = next(i for i, p in enumerate(reason.frontier) if p.chosen)
    first = max(0, min(chosen - num_points // 2, len(reason.frontier) - num_points))
    points = reason.frontier[first : first + num_points]
    words = (f"[{p.gpus}:{_number(p.seconds)}]" if p.chosen else f"{p.gpus}:{_number(p.seconds)}" for p in points)
    return Text("  ".join(words))


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def more_line(choice: PlanChoice, explanation: Explanation) -> Text:
    """What one more node would give, or the next pool that helps."""
    one_more, larger = explanation.one_more_node, explanation.larger
    more = one_more or larger
    if more is None:
        return Text("one more node would make no plan faster")
    share = explanation.saved_s / choice.best.step_latency_s
    step = f"step {seconds(more.step_latency_s)}, {seconds(explanation.saved_s)} less ({share:.1%})"
    gpus = more.problem.pool.size
    if one_more:
        return Text(f"one more node ({gpus} GPUs): {step}")
    return Text(f"one more node would make no plan faster, as dp must divide the batch; with {gpus} GPUs: {step}")


def sweep_view(points: Sequence[SweepPoint]) -> RenderableType:
    """A row for every pool and length, a column for every model-stage: `tp x pp x dp`, micro-batch, recomputation."""
    names = list(dict.fromkeys(p.model_stage for x in points if x.best for p in x.best.plan.placements))
    table = _table("tp x pp x dp, micro-batch, rc: recomputation")
    _columns(table, [], ["GPUs", "length", "step"])
    for name in names:
        table.add_column(str(name).replace("/", "/\n"), no_wrap=True)
    for point in points:
        if point.best is None:
            table.add_row(str(point.gpus), f"{point.response_length:g}", "-", "does not fit")
            continue
        cells = [_cell(point.best.plan[name]) for name in names]
        table.add_row(str(point.gpus), f"{point.response_length:g}", seconds(point.best.step_latency_s), *cells)
    return table


def _cell(p: Placement) -> str:
    return f"{p.layout.tp}x{p.layout.pp}x{p.dp}\nmb{p.micro_batch}{' rc' if p.recompute else ''}"
