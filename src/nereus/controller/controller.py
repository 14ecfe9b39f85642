"""The controller: events in, instructions out. It does nothing itself, and what it is told is all it knows.

    StepMeasured     ┐                 ┌ StartReplan         to the planner, beside the training
    PoolChanged      ├─> Controller ──>┤ StartTransition     to the executor, at the next safe boundary
    ReplanFinished   │    .handle      └ Restart             from a checkpoint: nothing else is left
    TransitionEnded  ┘

    state           event                          next state
    idle            trigger                        replanning
    replanning      ReplanFinished, refused        idle, or replanning for what was triggered meanwhile
                    ReplanFinished, admitted       transitioning
                    PoolChanged with fewer         replanning, anew: the answer to the old question is ignored
    transitioning   TransitionEnded                idle, or replanning as above
                    PoolChanged with losses        replanning, urgent

The same events in the same order give the same instructions; so a run can be replayed from its log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from nereus.controller.admission import Decision, Option, Payback, Policy, decide
from nereus.controller.monitor import Crossing, Monitor

State = Literal["idle", "replanning", "transitioning"]

LEGAL: Mapping[State, tuple[State, ...]] = {
    "idle": ("replanning",),
    "replanning": ("idle", "replanning", "transitioning"),
    "transitioning": ("idle", "replanning"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasured:
    """A step is done. signals: by name (`monitor.THRESHOLDS`). fits: whether the plan will fit, as lengths are now."""

    step: int
    signals: Mapping[str, float]
    fits: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolChanged:
    """The devices from now on. lost: some that the plan uses are gone, or will be before the next boundary."""

    step: int
    devices: tuple[int, ...]
    lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanFinished:
    """The planner's answer to request `number`. options: best first. step_latency_s: of the current plan, by the same
    model; None where it does not fit or lacks devices."""

    number: int
    step_latency_s: float | None
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionEnded:
    """The executor is done, or has failed with everything that was not lost intact."""

    number: int
    succeeded: bool = True


Event = StepMeasured | PoolChanged | ReplanFinished | TransitionEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReplan:
    """Plan for the present pool and signals. triggers: why. urgent: the current plan is invalid."""

    number: int
    step: int
    devices: tuple[int, ...]
    urgent: bool
    triggers: tuple[Crossing, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTransition:
    """Go to the admitted option at the next safe boundary."""

    number: int
    option: Option


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """No plan can be reached from here: write a checkpoint if the state allows it, and start again from one."""

    number: int


Instruction = StartReplan | StartTransition | Restart


class Controller:
    """See the module. devices: the pool at the start. every: also replan every so many steps (0: on triggers alone).

    decided: decisions of the run so far, in earlier sessions; numbers go on from there.
    """

    def __init__(
        self,
        devices: tuple[int, ...],
        *,
        policy: Policy | None = None,
        monitor: Monitor | None = None,
        every: int = 0,
        decided: int = 0,
    ) -> None:
        self.devices = devices
        self.monitor = Monitor() if monitor is None else monitor
        self.state: State = "idle"
        self.decisions: list[tuple[StartReplan, Decision]] = []
        self._policy: Policy = Payback() if policy is None else policy
        self._every = every
        self._step = 0
        self._number = decided
        self._request: StartReplan | None = None
        self._waiting: dict[str, Crossing] = {}
        self._urgent = False

    def handle(self, event: Event) -> list[Instruction]:
        """What to do because of an event. Raises ValueError for one that cannot come in this state."""
        match event:
            case StepMeasured():
                self._measured(event)
            case PoolChanged():
                self._pool_changed(event)
            case ReplanFinished():
                return self._answered(event)
            case TransitionEnded():
                self._ended(event)
        return self._replan_if_due()

    # -- events ------------------------------------------------------------------------------------------------------

    def _measured(self, event: StepMeasured) -> None:
        self._step = event.step
        self._trigger(*self.monitor.observe(event.step, event.signals))
        self._urgent |= not event.fits
        if self._every and event.step % self._every == 0:
            self._trigger(Crossing(signal="every", value=event.step, reference=0.0, horizon_steps=self._every))

    def _pool_changed(self, event: PoolChanged) -> None:
        self._step = event.step
        if event.devices != self.devices:
            self._trigger(self.monitor.pool_changed(event.step, len(self.devices), len(event.devices)))
            self.devices = event.devices
        self._urgent |= event.lost
        asked = set(self._request.devices) if self._request is not None else set()
        if self.state == "replanning" and (event.lost or not asked <= set(event.devices)):
            self._carry_over()  # the question was about devices that there are no more
            self._go("idle")
        elif self.state == "transitioning" and event.lost:
            self._go("idle")

    def _answered(self, event: ReplanFinished) -> list[Instruction]:
        request = self._request
        if request is None or event.number != request.number:
            return []  # to a question that is no longer asked
        decision = decide(
            event.options,
            step_latency_s=event.step_latency_s,
            horizon_steps=min((t.horizon_steps for t in request.triggers), default=1.0),
            urgent=request.urgent or event.step_latency_s is None,
            policy=self._policy,
        )
        self.decisions.append((request, decision))
        self._request = None
        if decision.chosen is not None:
            self._go("transitioning")
            return [StartTransition(number=request.number, option=decision.chosen.option)]
        self._go("idle")
        return [Restart(number=request.number)] if decision.verdict == "restart" else self._replan_if_due()

    def _ended(self, event: TransitionEnded) -> None:
        if self.state != "transitioning":
            return  # it was overtaken by a loss of devices
        self._urgent |= not event.succeeded
        self.monitor.plan_changed()
        self._go("idle")

    # -- inside ------------------------------------------------------------------------------------------------------

    def _trigger(self, *crossings: Crossing) -> None:
        self._waiting.update({c.signal: c for c in crossings})

    def _carry_over(self) -> None:
        """What the abandoned question was asked for is still a reason."""
        if self._request is not None:
            self._waiting = {**{t.signal: t for t in self._request.triggers}, **self._waiting}
        self._request = None

    def _replan_if_due(self) -> list[Instruction]:
        if self.state != "idle" or not (self._waiting or self._urgent):
            return []
        self._number += 1
        self._request = StartReplan(
            number=self._number,
            step=self._step,
            devices=self.devices,
            urgent=self._urgent,
            triggers=tuple(self._waiting.values()),
        )
        self._waiting, self._urgent = {}, False
        self.monitor.reset()
        self._go("replanning")
        return [self._request]

    def _go(self, state: State) -> None:
        if state not in LEGAL[self.state]:
            raise ValueError(f"the controller cannot go from {self.state} to {state}")
        self.state = state
