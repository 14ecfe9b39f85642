"""A decision of the controller in words: what triggered it, what was weighed, how it came out. Plain ASCII.

refused, admitted     cost / savings <= margin x horizon    (paper Eq. 2), with the numbers put in
urgent                why the current plan cannot stay
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nereus.core.events import DecisionMade, OutcomeMeasured
from nereus.core.plan import Plan
from nereus.telemetry import describe
from nereus.telemetry.describe import known

POOL, EVERY, BANDWIDTH, COMPUTE = "pool", "every", "bandwidth", "compute"
"""Signals that are told otherwise: the number of devices, that it is time again, bytes a second, FLOP/s."""


def line(event: DecisionMade, current: Plan | None, unit: str = "s") -> str:
    """A decision in one line. current: the plan that was in force, so that the difference can be told.

    unit: of seconds, "emulated s" for those of a paced run.
    """
    option = event.chosen or best(event)
    words = [f"step {event.step}: decision {event.number}, {reason(event)}"]
    if event.urgent:
        words.append(f"urgent: {urgency(event)}")
    if option is not None:
        words.append(_numbers(event, option, unit))
    words.append(verdict(event))
    if event.chosen is not None:
        words.append("; ".join(differences(current, event.chosen)) or "the plan as it is")
    return "; ".join(words)


def verdict(event: DecisionMade) -> str:
    """`ADMITTED`, `refused`, `RESTART from a checkpoint`."""
    return {"admitted": "ADMITTED", "restart": "RESTART from a checkpoint"}.get(event.verdict, event.verdict)


def best(event: DecisionMade) -> Mapping[str, Any] | None:
    """What a decision that admitted nothing came nearest to: the option that would have been repaid soonest."""
    paying = [option for option in event.considered if known(option.get("payback_steps"))]
    if paying:
        return min(paying, key=lambda option: float(option["payback_steps"]))
    return event.considered[0] if event.considered else None


def reason(event: DecisionMade, *, short: bool = False) -> str:
    """The signals that triggered, each with its change; short: without the values."""
    words = [trigger(t, short=short) for t in event.triggers]
    return ", ".join(words) or ("the plan is invalid" if event.urgent else "asked")


def trigger(row: Mapping[str, Any], *, short: bool = False) -> str:
    """`length_mean +34% (512.0 -> 686.0)`, `pool 8 -> 6 devices`, `10 steps have passed`."""
    signal, value, reference = str(row.get("signal", "?")), row.get("value"), row.get("reference")
    if signal == POOL:
        return f"pool {count_words(reference)} -> {count_words(value)} devices"
    if signal == EVERY:
        return f"{count_words(row.get('horizon_steps'))} steps have passed"
    if short:
        return f"{signal} {change(value, reference)}"
    return f"{signal} {change(value, reference)} ({value_words(signal, reference)} -> {value_words(signal, value)})"


def count_words(value: Any) -> str:
    """A whole number, or `?`."""
    return f"{value:g}" if known(value) else "?"


def value_words(signal: str, value: Any) -> str:
    """A signal's value: `686.0`, `250.0 MB/s` of a bandwidth, `2.8 GFLOP/s` of computing."""
    if not known(value):
        return "?"
    if signal == BANDWIDTH:
        return f"{describe.data_size(value)}/s"
    return f"{describe.count(value)}FLOP/s" if signal == COMPUTE and abs(value) >= 1000 else describe.number(value)


def change(value: Any, reference: Any) -> str:
    """Relative, `+34%`."""
    return f"{value / reference - 1:+.0%}" if known(value) and known(reference) and reference else "changed"


def _numbers(event: DecisionMade, option: Mapping[str, Any], unit: str) -> str:
    """Savings, cost and payback, as far as they were asked for."""
    cost, savings = option.get("transition_cost_s"), option.get("savings_s")
    if cost is None:
        return str(option.get("why") or "no way to get there")
    cost_words = f"costs {describe.precise(cost)} {unit}"
    if event.step_latency_s is None:
        return cost_words
    if not known(savings) or savings <= 0:
        slower = f"{describe.precise(-savings)} {unit} a step slower" if known(savings) and savings else "saves nothing"
        return f"{slower}, {cost_words}"
    saved = f"saves {describe.precise(savings)} {unit} a step, {cost_words}"
    return saved if event.urgent else f"{saved}, {repaid(event, option)}"


def repaid(event: DecisionMade, option: Mapping[str, Any]) -> str:
    """`repaid in 3.7 steps, at most 6 (0.5 x 12)`."""
    payback = option.get("payback_steps")
    if not known(payback):
        return "never repaid"
    return f"repaid in {steps(payback)} steps, {limit_words(event)}"


def steps(value: Any) -> str:
    """A number of steps that need not be whole: three digits that matter."""
    return f"{value:.3g}" if known(value) else "?"


def limit(event: DecisionMade) -> float:
    """The most steps in which a change had to repay itself."""
    return event.margin * event.horizon_steps


def limit_words(event: DecisionMade) -> str:
    if event.policy in ("any-gain", "every-k-steps"):
        return f"any gain will do ({event.policy})"
    return f"at most {steps(limit(event))} ({event.margin:g} x horizon {steps(event.horizon_steps)})"


def equation(event: DecisionMade, option: Mapping[str, Any], unit: str = "s") -> str:
    """Paper Eq. 2 with the numbers put in, and whether it holds; or why it was not asked."""
    cost, savings, payback = option.get("transition_cost_s"), option.get("savings_s"), option.get("payback_steps")
    if event.urgent:
        return f"payback is not asked for, urgent: {urgency(event)}"
    if cost is None:
        return "payback is not asked for: the transition cannot be executed"
    if not known(savings) or savings <= 0 or not known(payback):
        return f"savings {describe.precise(savings)} {unit}: nothing repays the transition"
    left = f"cost / savings = {describe.precise(cost)} {unit} / {describe.precise(savings)} {unit} = {steps(payback)} steps"
    if event.policy in ("any-gain", "every-k-steps"):
        return f"{left}; {limit_words(event)}"
    holds = "<=" if payback <= limit(event) else ">"
    right = f"margin x horizon = {event.margin:g} x {steps(event.horizon_steps)} = {steps(limit(event))} steps"
    return f"{left} {holds} {right}"


def urgency(event: DecisionMade) -> str:
    """Why an urgent decision could not wait."""
    lost = any(t.get("signal") == POOL and _shrank(t) for t in event.triggers)
    if event.step_latency_s is not None:  # it could go on, by what was predicted
        return "devices are lost" if lost else "memory was measured to be nearly full, or a change has failed"
    return "the current plan lacks devices" if lost else "the current plan does not fit"


def _shrank(row: Mapping[str, Any]) -> bool:
    value, reference = row.get("value"), row.get("reference")
    return known(value) and known(reference) and value < reference


def differences(current: Plan | None, option: Mapping[str, Any]) -> list[str]:
    """What an option's plan has that the current one has not, each change once with its model-stages."""
    plan = Plan.from_json(option["plan"])
    if current is None:
        return [describe.placement(p) for p in plan.placements]
    return describe.plan_changes(current, plan)


def outcome(event: OutcomeMeasured, unit: str = "s") -> str:
    """What an admitted change brought, in one line."""
    before = f"{describe.seconds(event.before_s)} -> " if known(event.before_s) else ""
    return (
        f"step {event.step}: decision {event.number} measured over {event.steps} steps: "
        f"{before}{describe.seconds(event.after_s)} {unit} a step, {describe.seconds(event.predicted_s)} predicted"
        f"{describe.error(event.predicted_s, event.after_s)}; transition {describe.seconds(event.transition_s)} {unit}, "
        f"{describe.seconds(event.predicted_transition_s)} predicted"
        f"{describe.error(event.predicted_transition_s, event.transition_s)}"
    )
