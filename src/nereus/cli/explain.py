"""`nereus explain`: why a run changed its plan, or did not, with all numbers of each decision."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from nereus.core.errors import UserError
from nereus.core.events import DecisionMade
from nereus.telemetry import decisions, describe
from nereus.telemetry.folder import read_events
from nereus.telemetry.history import Decided, History, look_back

VERDICT_STYLES = {"admitted": "bold green", "restart": "bold red", "refused": "yellow"}


def show(console: Console, path: Path, number: int | None) -> dict[str, Any]:
    """Print all decisions and the last one, or decision `number`; returns them as JSON.

    Raises UserError if `path` is no run, it has decided nothing yet, or has no such decision.
    """
    history = look_back(read_events(path))
    if not history.decisions:
        policy = history.progress.run.policy if history.progress.run else "static"
        why = (
            "its policy is static: it changes its plan as its job file says"
            if policy == "static"
            else "nothing was asked"
        )
        raise UserError(f"the run in {path} has decided nothing yet: {why}")
    if number is None:
        console.print(overview(history))
        console.print()
        console.print(explanation(history.decisions[-1], history.unit))
        return {"decisions": [d.to_json() for d in history.decisions]}
    found = history.decision(number)
    if found is None:
        numbers = describe.ranges({d.made.number for d in history.decisions})
        raise UserError(f"--decision {number}: the run in {path} has no such decision, it has {numbers}")
    console.print(explanation(found, history.unit))
    return found.to_json()


def overview(history: History) -> Table:
    """A row for each decision, refused ones too."""
    table = _table(f"decisions; times in {history.unit}")
    for name in ("no", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("triggered by")
    for name in ("saves", "costs", "payback", "at most"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("step, predicted -> measured")
    for decided in history.decisions:
        made = decided.made
        option = made.chosen or decisions.best(made) or {}
        invalid = made.step_latency_s is None
        table.add_row(
            str(made.number),
            str(made.step),
            decisions.reason(made, short=True),
            "-" if invalid else describe.precise(option.get("savings_s")),
            describe.precise(option.get("transition_cost_s")),
            "urgent" if made.urgent else decisions.steps(option.get("payback_steps")).replace("?", "never"),
            "-" if made.urgent else decisions.steps(decisions.limit(made)),
            Text(made.verdict, style=VERDICT_STYLES.get(made.verdict, "")),
            _measured_short(decided),
        )
    return table


def _measured_short(decided: Decided) -> str:
    if decided.outcome is not None:
        o = decided.outcome
        return f"{describe.seconds(o.predicted_s)} -> {describe.seconds(o.after_s)}"
    chosen = decided.made.chosen
    return f"{describe.seconds(chosen.get('step_latency_s'))} -> not yet" if chosen else "-"


def explanation(decided: Decided, unit: str) -> RenderableType:
    """All numbers of one decision."""
    made = decided.made
    option = made.chosen or decisions.best(made)
    title = Text.assemble(
        (f"decision {made.number}", "bold"),
        f", step {made.step}, {len(made.devices)} devices ({describe.ranges(made.devices)}): ",
        (made.verdict, VERDICT_STYLES.get(made.verdict, "")),
        ", urgent" if made.urgent else "",
    )
    parts: list[RenderableType] = [title, Text(), _triggers(made), Text(), _current(decided, unit), Text()]
    if made.considered:
        parts += [_considered(decided, unit), Text()]
    if option is not None:
        parts.append(Text(decisions.equation(made, option, unit)))
    parts.append(Text.assemble(f"policy {made.policy}: ", _why(made, option)))
    parts.append(Text(f"decided in {describe.precise(made.replan_seconds)} {unit}, beside the training", style="dim"))
    if made.chosen is not None or decided.recovery is not None:
        parts += [Text(), _later(decided, unit)]
    return Group(*parts)


def _why(made: DecisionMade, option: Mapping[str, Any] | None) -> str:
    if made.verdict == "restart":
        return "no plan can be reached from here; the job starts again from its checkpoint"
    if option is None:
        return f"{made.verdict}, the planner had nothing to offer"
    return f"{made.verdict}, {option.get('why') or 'no reason given'}"


def _triggers(made: DecisionMade) -> RenderableType:
    if not made.triggers:
        return Text(f"triggered by no signal: {decisions.reason(made)}")
    table = _table("what triggered it")
    table.add_column("signal")
    for name in ("reference", "value", "change", "threshold", "horizon, steps"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in made.triggers:
        signal, reference, value = str(row.get("signal", "?")), row.get("reference"), row.get("value")
        threshold = row.get("threshold")
        counted = signal in (decisions.POOL, decisions.EVERY)
        table.add_row(
            signal,
            *(decisions.count_words(v) if counted else decisions.value_words(signal, v) for v in (reference, value)),
            decisions.change(value, reference) if reference else "-",
            f"{threshold:.0%}" if describe.known(threshold) else "any" if counted else "-",
            decisions.steps(row.get("horizon_steps")),
        )
    return table


def _current(decided: Decided, unit: str) -> Text:
    latency = decided.made.step_latency_s
    plan = describe.plan_words(decided.current) if decided.current else "not known"
    if latency is None:
        return Text(f"current plan: {plan}; not valid any more: {decisions.urgency(decided.made)}")
    return Text(f"current plan: {plan}; predicted {describe.precise(latency)} {unit} a step")


def _considered(decided: Decided, unit: str) -> Table:
    """The options in the order they were tried: what differs from the current plan, and how each was judged."""
    table = _table(f"considered, in this order; times in {unit}")
    table.add_column("", no_wrap=True)
    table.add_column("what differs")
    for name in ("step", "saves", "costs", "payback"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("judged")
    for number, option in enumerate(decided.made.considered, start=1):
        valid = decided.made.step_latency_s is not None
        table.add_row(
            str(number),
            "\n".join(decisions.differences(decided.current, option)) or "nothing",
            describe.precise(option.get("step_latency_s")),
            describe.precise(option.get("savings_s")) if valid else "-",
            describe.precise(option.get("transition_cost_s")),
            decisions.steps(option.get("payback_steps")).replace("?", "never") if valid else "-",
            Text(
                ("admitted: " if option.get("admitted") else "") + str(option.get("why", "")),
                style="bold" if option.get("admitted") else "",
            ),
        )
    return table


def _later(decided: Decided, unit: str) -> RenderableType:
    """Predicted against what came of it, as far as that is known."""
    table = _table(f"predicted and measured; {unit}")
    table.add_column("")
    for name in ("predicted", "measured"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    transition, outcome = decided.transition, decided.outcome
    chosen = decided.made.chosen or {}
    cost, latency = chosen.get("transition_cost_s"), chosen.get("step_latency_s")
    if transition is not None:
        took, alone = transition.seconds, transition.predicted_seconds
        predicted = cost if cost is not None else alone
        words = [describe.error(predicted, took).strip(), f"received {describe.data_size(transition.received_bytes)}"]
        if describe.precise(alone) != describe.precise(predicted):
            words.append(f"{describe.precise(alone)} predicted for its primitives alone")
        table.add_row("transition", describe.seconds(predicted), describe.seconds(took), _joined(words))
    elif (recovery := decided.recovery) is not None:
        words = [f"of all of it; update {recovery.rolled}"]
        table.add_row("recovery", describe.seconds(cost), describe.seconds(recovery.seconds), _joined(words))
    else:
        table.add_row("transition", describe.seconds(cost), "not yet", "")
    if outcome is not None:
        off = describe.error(outcome.predicted_s, outcome.after_s).strip()
        words = [off, f"mean of {outcome.steps} steps"]
        after = describe.seconds(outcome.after_s)
        table.add_row("step after", describe.seconds(outcome.predicted_s), after, _joined(words))
        if describe.known(outcome.before_s):
            gained = outcome.before_s - outcome.after_s
            now_s = decided.made.step_latency_s
            table.add_row("step before", describe.seconds(now_s), describe.seconds(outcome.before_s), "")
            saved = describe.precise(chosen.get("savings_s")) if now_s is not None else "-"
            table.add_row("saved a step", saved, describe.precise(gained), _repaid_really(outcome.transition_s, gained))
    else:
        table.add_row("step after", describe.seconds(latency), "not yet", "")
    return table


def _joined(words: list[str]) -> str:
    return "; ".join(filter(None, words))


def _repaid_really(transition_s: float, gained_s: float) -> str:
    if not (describe.known(transition_s) and describe.known(gained_s)) or gained_s <= 0:
        return "not repaid: lengths and pool may have changed since"
    return f"repaid in {transition_s / gained_s:.3g} steps"


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="dim",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
