"""`nereus plan`: flags in, the answers of `nereus.api` out, as tables and pictures. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from nereus.api.job_file import load_job
from nereus.api.jobs import AutoPlanner
from nereus.api.scenario import Scenario, SweepPoint
from nereus.api.transitions import Transitions
from nereus.cli.plan_view import choice_view
from nereus.cli.transition_view import plot_transition, transition_view
from nereus.core.errors import UserError
from nereus.core.job import initial_plan
from nereus.core.plan import ACTOR_TRAINING, Plan
from nereus.cost.calibration import Calibration


def read_calibration(path: Path | None) -> Calibration | None:
    """A calibration from its JSON file. Raises UserError."""
    if path is None:
        return None
    try:
        return Calibration.from_json(path.read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--calibration {path} cannot be read: {error!r}") from error


def show(console: Console, scenario: Scenario) -> dict[str, Any]:
    """Print the best plan and why; returns it as JSON."""
    choice = scenario.choose()
    why = scenario.explain(choice)
    console.print(choice_view(scenario, choice, why, console.width))
    return {
        "scenario": scenario.to_json(),
        **choice.to_json(),
        "estimate": scenario.estimate(choice.best.plan).to_json(),
        "why": why.to_json(),
    }


def show_transition(
    console: Console, scenario: Scenario, current: Plan, to: Sequence[str], picture: Path | None
) -> dict[str, Any]:
    """Print what a change from the current plan would take; returns it as JSON. to: see `_other_plan`."""
    target = _other_plan(scenario, current, to)
    found = Transitions(scenario).estimate(current, target)
    console.print(transition_view(found))
    if picture is not None:
        title = f"{scenario.name} on {len(target.gpus)} {scenario.device_kind.name}: transition, predicted"
        plot_transition(found, picture, title)
    return found.to_json()


def _other_plan(scenario: Scenario, current: Plan, to: Sequence[str]) -> Plan:
    """The plan of a job file, or the best one with length=TOKENS or gpus=NUMBER changed. Raises UserError."""
    if len(to) == 1 and "=" not in to[0]:
        job = load_job(Path(to[0]))
        return initial_plan(job, AutoPlanner(job, scenario=scenario.at(gpus=job.cluster.devices), current=current))
    figures = {}
    for text in to:
        name, _, value = text.partition("=")
        if name not in ("length", "gpus") or not value.isdigit() or not int(value):
            raise UserError(f"--transition-to {text!r} must be a job file, or length=TOKENS or gpus=NUMBER")
        figures["response_length" if name == "length" else name] = int(value)
    return scenario.at(**figures).choose(k=1, current=current).best.plan


def sweep_axes(texts: Sequence[str], scenario: Scenario) -> tuple[list[int], list[int]]:
    """`lengths=1024..16384 gpus=8..1024` -> lengths and GPUs, doubling. Raises UserError."""
    axes = {"lengths": [round(scenario.workload.response_length)], "gpus": [scenario.gpus]}
    for text in texts:
        name, _, span = text.partition("=")
        first, dots, last = span.partition("..")
        if name not in axes or not first.isdigit() or (dots and not last.isdigit()):
            raise UserError(f"--sweep {text!r} is not of the form lengths=1024..16384 or gpus=8..1024")
        axes[name] = list(_doubling(int(first), int(last or first)))
        if not axes[name]:
            raise UserError(f"--sweep {text!r} is empty: it must go from 1 or more upwards, as in gpus=8..1024")
    return axes["lengths"], axes["gpus"]


def _doubling(first: int, last: int) -> Iterator[int]:
    while 0 < first <= last:
        yield first
        first *= 2


def plot(points: Sequence[SweepPoint], path: Path, title: str) -> None:
    """Predicted step latency over length, one line a pool, each point labelled with the training layout of the actor."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("--plot needs matplotlib: pip install 'nereus-rl[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for gpus in dict.fromkeys(point.gpus for point in points):
        found = [(p.response_length, p.best) for p in points if p.gpus == gpus and p.best is not None]
        axes.plot([length for length, _ in found], [b.step_latency_s for _, b in found], "o-", label=f"{gpus} GPUs")
        for length, best in found:
            actor = best.plan[ACTOR_TRAINING]
            label = f"tp{actor.layout.tp} pp{actor.layout.pp} dp{actor.dp}{' rc' if actor.recompute else ''}"
            place = (length, best.step_latency_s)
            axes.annotate(label, place, fontsize=7, xytext=(3, 5), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="mean response length, tokens", title=title)
    axes.set_ylabel("predicted step latency, s")
    lengths = sorted({point.response_length for point in points})
    axes.set_xticks(lengths, [f"{length:g}" for length in lengths])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.legend()
    try:
        figure.savefig(path, dpi=110, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)
