"""Whether a change of plan is worth it: `decide` takes what the planner offers and says which, if any, and why.

    opportunistic   savings > 0 and transition cost / savings <= margin x horizon             (paper Eq. 2)
    urgent          the current plan is invalid: the first that can be executed

Options are tried in order: the target, then slightly slower plans with perhaps cheaper transitions; on the urgent path then
those with smaller micro-batches and with recomputation. If nothing passes there, the answer is to restart from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from nereus.core.plan import Plan

Verdict = Literal["admitted", "refused", "restart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A plan to go to. transition_cost_s: predicted; None where the transition cannot be executed, for the reason `why`.

    last_resort: only worth considering when the current plan is invalid (smaller micro-batches, recomputation).
    """

    plan: Plan
    step_latency_s: float
    transition_cost_s: float | None
    why: str = ""
    last_resort: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """An option as it was judged. payback_steps: until its savings have repaid the transition; None without savings."""

    option: Option
    savings_s: float
    payback_steps: float | None
    admitted: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was decided, with all numbers. step_latency_s: of the current plan, predicted; None where it is invalid."""

    verdict: Verdict
    urgent: bool
    step_latency_s: float | None
    horizon_steps: float
    considered: tuple[Considered, ...]

    @property
    def chosen(self) -> Considered | None:
        """The one that was admitted."""
        return next((c for c in self.considered if c.admitted), None)

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "urgent": self.urgent,
            "step_latency_s": self.step_latency_s,
            "horizon_steps": self.horizon_steps,
            "considered": [
                {
                    "plan": c.option.plan.to_json(),
                    "step_latency_s": c.option.step_latency_s,
                    "transition_cost_s": c.option.transition_cost_s,
                    "savings_s": c.savings_s,
                    "payback_steps": c.payback_steps,
                    "admitted": c.admitted,
                    "why": c.why,
                }
                for c in self.considered
            ],
        }


class Policy(Protocol):
    """When savings justify an opportunistic transition."""

    def passes(self, savings_s: float, cost_s: float, horizon_steps: float) -> bool: ...


@dataclass(frozen=True, slots=True)
class Payback:
    """Nereus: the savings repay the transition within a share of the horizon. margin: 0 admits only urgent ones."""

    margin: float = 0.5

    def passes(self, savings_s: float, cost_s: float, horizon_steps: float) -> bool:
        return self.margin > 0 and savings_s > 0 and cost_s / savings_s <= self.margin * horizon_steps


@dataclass(frozen=True, slots=True)
class AnyGain:
    """Whatever is faster, at any cost of getting there (as DynaRL)."""

    def passes(self, savings_s: float, cost_s: float, horizon_steps: float) -> bool:
        return savings_s > 0


def decide(
    options: Sequence[Option],
    *,
    step_latency_s: float | None,
    horizon_steps: float,
    urgent: bool,
    policy: Policy,
) -> Decision:
    """Judge options in order until one is admitted. step_latency_s: of the current plan; None: it is invalid."""
    considered: list[Considered] = []
    for option in options:
        if option.last_resort and not urgent:
            continue
        considered.append(_judged(option, step_latency_s, horizon_steps, urgent, policy))
        if considered[-1].admitted:
            break
    admitted = bool(considered) and considered[-1].admitted
    verdict: Verdict = "admitted" if admitted else "restart" if urgent else "refused"
    return Decision(
        verdict=verdict,
        urgent=urgent,
        step_latency_s=step_latency_s,
        horizon_steps=horizon_steps,
        considered=tuple(considered),
    )


def _judged(
    option: Option, step_latency_s: float | None, horizon_steps: float, urgent: bool, policy: Policy
) -> Considered:
    savings = 0.0 if step_latency_s is None else step_latency_s - option.step_latency_s
    cost = option.transition_cost_s
    payback = cost / savings if cost is not None and savings > 0 else None
    if cost is None:
        admitted, why = False, f"cannot be executed: {option.why}"
    elif urgent:
        admitted, why = True, "urgent: the current plan is invalid"
    elif savings <= 0:
        admitted, why = False, f"saves nothing: {-savings:.3g} s a step slower" if savings else "saves nothing"
    else:
        admitted = policy.passes(savings, cost, horizon_steps)
        why = f"repaid in {payback:.3g} steps, horizon {horizon_steps:.3g}"
    return Considered(option=option, savings_s=savings, payback_steps=payback, admitted=admitted, why=why)
