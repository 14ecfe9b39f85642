"""The director that adapts: it carries what the run measures to the controller, and its instructions to planner and loop.

    boundary   supply ──> PoolChanged ──> controller ──> StartReplan ──> planner, in its own thread
               planner's answer ──> ReplanFinished ──> controller ──> StartTransition ──> the loop changes the plan
    generated  lengths ──> planner, which predicts the step beside the training
    measured   lengths, efficiencies, memory ──> StepMeasured ──> controller
    failed     PoolChanged(lost) ──> controller ──> StartReplan(urgent): the loop waits for the answer
    changed    TransitionEnded ──> controller

An opportunistic replan runs beside the next step, and its answer is taken at the boundary after it; an urgent one is waited
for. All decisions are the controller's (`controller.controller`); nothing is decided here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

import numpy as np

from nereus.controller import log
from nereus.controller.admission import Decision, Option
from nereus.controller.controller import (
    Controller,
    Instruction,
    PoolChanged,
    ReplanFinished,
    Restart,
    StartReplan,
    StartTransition,
    StepMeasured,
    TransitionEnded,
)
from nereus.controller.controller import Event as ControllerEvent
from nereus.controller.pool import giving_up
from nereus.core import events
from nereus.core.job import PlannedChange
from nereus.core.plan import Plan
from nereus.rl.direction import Extra, Unrecoverable, out_of_memory
from nereus.rl.supply import News, Supply
from nereus.runtime.fleet import Fleet, Situation, Transition

OUTCOME_STEPS = 3
"""Steps after (and before) a change whose mean latency is compared with what was predicted."""

LENGTHS = ("length_mean", "length_p95", "length_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Of a step's responses, tokens."""

    mean: float
    p95: float
    max: float

    @classmethod
    def of(cls, metrics: Mapping[str, float]) -> Lengths:
        return cls(mean=metrics["length_mean"], p95=metrics["length_p95"], max=metrics["length_max"])

    @classmethod
    def seen(cls, lengths: Sequence[int]) -> Lengths:
        return cls(mean=fmean(lengths), p95=float(np.quantile(lengths, 0.95)), max=float(max(lengths)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a replan is about. current: the plan in force, which may use devices that are no more.

    after_failure: devices may hold parts of shards that the plan does not describe.
    link_changed: the bandwidth of links, relative to what it was at the last replan.
    """

    number: int
    devices: tuple[int, ...]
    current: Plan
    situation: Situation
    lengths: Lengths
    after_failure: bool
    link_changed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """See `ReplanFinished`. seconds: it took. infeasible: why there is no plan at all; empty if there is one."""

    number: int
    step_latency_s: float | None
    options: tuple[Option, ...]
    seconds: float
    infeasible: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a step was, beside what was predicted for it.

    predicted: stage -> seconds, and "step". signals: achieved "compute" and "bandwidth", where they can be known.
    fits: whether the plan is predicted to stay within the memory of its devices.
    """

    predicted: Mapping[str, float]
    peak_bytes: Mapping[str, int]
    signals: Mapping[str, float]
    fits: bool


class Planner(Protocol):
    """Answers questions about plans; all but `answer(wait=True)` and `close` return at once."""

    def ask(self, question: Question) -> None:
        """Begin to plan, in another thread; an earlier question is forgotten."""
        ...

    def answer(self, *, wait: bool) -> Answer | None:
        """To the last question; None while there is none."""
        ...

    def expect(self, plan: Plan, lengths: Lengths) -> None:
        """Begin to predict what a step of these lengths takes, in another thread."""
        ...

    def observe(self, plan: Plan, lengths: Lengths, measurements: Mapping[int, Any]) -> Seen:
        """Take in what a step measured, by device; what was expected of it, as far as that is known by now."""
        ...

    def took(self, seconds: float, predicted_s: float) -> None:
        """A change was made that was predicted to take `predicted_s` in all."""
        ...

    def does_not_fit(self, plan: Plan) -> None:
        """A device ran out of memory under this plan: no plan of that size will be offered again."""
        ...

    def close(self) -> None: ...


class AdaptiveDirector:
    """See the module, and `rl.direction.Director`.

    static: keep the plan as long as it can be kept (`adapt.policy: static`). record: keeps the controller's log.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        controller: Controller,
        planner: Planner,
        supply: Supply,
        emit: Callable[[events.Event], None],
        policy: str,
        margin: float,
        record: Callable[[Mapping[str, Any]], None] = lambda row: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._controller, self._planner, self._supply = fleet, controller, planner, supply
        self._emit, self._policy, self._margin, self._record, self._clock = emit, policy, margin, record, clock
        self._available = set(fleet.pool)
        self._leaving: set[int] = set()
        self._lengths: Lengths | None = None
        self._signals: dict[str, float] = {}
        self._bandwidth_planned: float | None = None
        self._asked: StartReplan | None = None
        self._going: StartTransition | None = None
        self._tried: Plan | None = None
        self._failing, self._told_s = False, clock()
        self._outcomes: list[_Outcome] = []
        self._step_seconds: list[float] = []
        self._static = policy == "static"

    # -- Director ----------------------------------------------------------------------------------------------------

    def boundary(self, step: int) -> PlannedChange | None:
        change = self._next_change(step)
        self._told_s = self._clock()
        return change

    def _next_change(self, step: int) -> PlannedChange | None:
        self._take_note_of_failures()
        for news in self._supply.poll(step):
            self._pool_is_to_be(step, news)
        change = self._follow(step, wait=False)
        if change is None and self._leaving & set(self._fleet.pool):
            # The plan does without the devices that leave: only they go.
            change = PlannedChange(step, self._devices, self._fleet.plan)
        return change

    def failed(self, step: int, stage: str, failure: BaseException) -> PlannedChange:
        if self._static and out_of_memory(failure):
            raise Unrecoverable(
                f"{failure_line(failure)}; adapt.policy is static, which keeps the plan: with --policy nereus it is changed "
                "before that happens"
            )
        lost = self._take_note_of_failures()
        if out_of_memory(failure) and not lost:
            self._planner.does_not_fit(self._tried or self._fleet.plan)
        self._tried = None
        if not self._available:
            raise Unrecoverable("no device is left")
        if lost:
            self._emit(events.PoolChanged(step=step, devices=self._devices, lost=tuple(sorted(lost)), why="failure"))
        self._failing = True
        self._tell(PoolChanged(step=step, devices=self._devices, lost=True))
        change = self._follow(step, wait=True)
        self._failing, self._told_s = False, self._clock()
        if change is None:
            raise Unrecoverable(f"no plan for devices {list(self._devices)} was found")
        return change

    def changed(self, step: int, transition: Transition | None) -> None:
        going, self._going = self._going, None
        if transition is None:
            self._tried = going.option.plan if going is not None else None
            return  # `failed` is asked next, and tells the controller
        self._leaving &= set(self._fleet.pool)
        self._bandwidth_planned = None  # of another plan's traffic
        if going is not None:
            seconds, predicted_s = self._clock() - self._told_s, going.option.transition_cost_s or 0.0
            self._planner.took(seconds, predicted_s)
            self._outcomes.append(
                _Outcome(
                    number=going.number,
                    step=step,
                    before=tuple(self._step_seconds[-OUTCOME_STEPS:]),
                    predicted_s=going.option.step_latency_s,
                    transition_s=seconds,
                    predicted_transition_s=predicted_s,
                )
            )
            self._tell(TransitionEnded(number=going.number))

    def generated(self, step: int, lengths: Sequence[int]) -> None:
        self._planner.expect(self._fleet.plan, Lengths.seen(lengths))

    def measured(
        self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float], measurements: Mapping[int, Any]
    ) -> Extra:
        self._lengths = Lengths.of(metrics)
        seen = self._planner.observe(self._fleet.plan, self._lengths, measurements)
        self._signals = {**{name: metrics[name] for name in LENGTHS}, **seen.signals}
        self._bandwidth_planned = self._bandwidth_planned or seen.signals.get("bandwidth")
        self._tell(StepMeasured(step=step, signals=self._signals, fits=seen.fits or self._static))
        self._step_seconds = [*self._step_seconds[-OUTCOME_STEPS:], seconds.get("step", 0.0)]
        self._report_outcomes(step, seconds.get("step", 0.0))
        return Extra(predicted=seen.predicted, peak_bytes=seen.peak_bytes, signals=self._signals)

    def close(self) -> None:
        self._planner.close()
        self._supply.close()

    # -- the pool ----------------------------------------------------------------------------------------------------

    @property
    def _devices(self) -> tuple[int, ...]:
        return tuple(sorted(self._available))

    def _take_note_of_failures(self) -> set[int]:
        """Devices that the plan had and the cluster has no more, though nobody was told that they would go."""
        lost = {d for d in (*self._fleet.plan.gpus,) if d not in self._fleet.pool} & (self._available | self._leaving)
        self._available -= lost
        self._leaving -= lost
        return lost

    def _pool_is_to_be(self, step: int, news: News) -> None:
        known = self._available | self._leaving | set(self._fleet.pool)
        gone = set(news.gone) & self._available
        joined = tuple(d for d in news.joined if d not in known)
        if news.devices is not None:
            more = news.devices - len(self._available)
            if more > 0:
                joined = self._supply.new_devices(known, more)
            elif more < 0 and news.devices >= 1:
                gone = set(self._giving_up(-more, news.notice_s))
        if gone == self._available:
            gone.remove(min(gone))  # a run needs one device
        if not gone and not joined:
            return
        self._available = (self._available | set(joined)) - gone
        self._leaving |= gone & set(self._fleet.pool)
        self._emit(
            events.PoolChanged(
                step=step,
                devices=self._devices,
                joined=joined,
                leaving=tuple(sorted(gone)),
                notice_s=news.notice_s,
                why=news.why,
            )
        )
        lost = bool(gone & set(self._fleet.plan.gpus))
        self._tell(PoolChanged(step=step, devices=self._devices, lost=lost))

    def _giving_up(self, count: int, notice_s: float | None) -> tuple[int, ...]:
        """Without notice it is for us to choose; devices that are reclaimed are the newest."""
        if notice_s is not None:
            chosen = tuple(sorted(self._available)[-count:])
            self._supply.vanish_in(notice_s, chosen)
            return chosen
        idle = sorted(self._available - set(self._fleet.pool))[:count]
        if len(idle) == count:
            return tuple(idle)
        pool = sorted(self._available - set(idle))
        return (*idle, *giving_up(self._fleet.plan, pool, count - len(idle), self._fleet.held_bytes()))

    # -- the controller ----------------------------------------------------------------------------------------------

    def _tell(self, event: ControllerEvent) -> None:
        """Let the controller know, and begin what it says."""
        instructions = self._controller.handle(event)
        self._record(log.row(event, instructions))
        for instruction in instructions:
            self._begin(instruction)

    def _begin(self, instruction: Instruction) -> None:
        match instruction:
            case StartReplan():
                self._asked = instruction
                self._planner.ask(self._question(instruction))
            case StartTransition():
                self._going = instruction
            case Restart():
                self._asked = None

    def _question(self, request: StartReplan) -> Question:
        bandwidth = self._signals.get("bandwidth")
        crossed = any(t.signal == "bandwidth" for t in request.triggers)
        changed = bandwidth / self._bandwidth_planned if crossed and bandwidth and self._bandwidth_planned else 1.0
        if crossed:
            self._bandwidth_planned = bandwidth
        return Question(
            number=request.number,
            devices=request.devices,
            current=self._fleet.plan,
            situation=self._fleet.situation(),
            lengths=self._lengths or Lengths(mean=0.0, p95=0.0, max=0.0),
            after_failure=self._failing,
            link_changed=changed,
        )

    def _follow(self, step: int, *, wait: bool) -> PlannedChange | None:
        """Take the planner's answers, as far as they are there or urgent, until the controller has no more questions."""
        while self._asked is not None:
            request = self._asked
            answer = self._planner.answer(wait=wait or request.urgent)
            if answer is None:
                return None
            self._asked = None
            decided = len(self._controller.decisions)
            self._tell(
                ReplanFinished(number=answer.number, step_latency_s=answer.step_latency_s, options=answer.options)
            )
            for asked, decision in self._controller.decisions[decided:]:
                self._emit(self._decision_made(step, asked, decision, answer))
                if decision.verdict == "restart":
                    return self._restart(step, asked, answer)
            if self._going is not None:
                return PlannedChange(step, self._devices, self._going.option.plan, decision=self._going.number)
        return None

    def _restart(self, step: int, request: StartReplan, answer: Answer) -> PlannedChange:
        """No plan can be reached from here: from a checkpoint, the first that fits once it is there can be."""
        if not answer.options:
            raise Unrecoverable(answer.infeasible or f"no plan fits devices {list(request.devices)}")
        return PlannedChange(step, self._devices, answer.options[0].plan, decision=request.number, restart=True)

    def _decision_made(
        self, step: int, request: StartReplan, decision: Decision, answer: Answer
    ) -> events.DecisionMade:
        triggers = [
            {
                "signal": t.signal,
                "value": t.value,
                "reference": t.reference,
                "threshold": t.threshold,
                "horizon_steps": t.horizon_steps,
            }
            for t in request.triggers
        ]
        return events.DecisionMade(
            step=step,
            number=request.number,
            verdict=decision.verdict,
            urgent=decision.urgent,
            devices=request.devices,
            triggers=tuple(triggers),
            step_latency_s=decision.step_latency_s,
            horizon_steps=decision.horizon_steps,
            considered=tuple(decision.to_json()["considered"]),
            policy=self._policy,
            margin=self._margin,
            replan_seconds=answer.seconds,
        )

    # -- outcomes ----------------------------------------------------------------------------------------------------

    def _report_outcomes(self, step: int, seconds: float) -> None:
        """Measured latencies after a change, once there are enough of them or the next change has come."""
        for outcome in self._outcomes:
            outcome.after.append(seconds)
        for outcome in [o for o in self._outcomes if len(o.after) >= OUTCOME_STEPS or o is not self._outcomes[-1]]:
            self._outcomes.remove(outcome)
            self._emit(outcome.event(step))


class _Outcome:
    """A change whose effect is being measured."""

    def __init__(
        self,
        *,
        number: int,
        step: int,
        before: tuple[float, ...],
        predicted_s: float,
        transition_s: float,
        predicted_transition_s: float,
    ) -> None:
        self.number, self.step, self.before, self.predicted_s = number, step, before, predicted_s
        self.transition_s, self.predicted_transition_s = transition_s, predicted_transition_s
        self.after: list[float] = []

    def event(self, step: int) -> events.OutcomeMeasured:
        return events.OutcomeMeasured(
            step=step,
            number=self.number,
            steps=len(self.after),
            before_s=fmean(self.before) if self.before else None,
            after_s=fmean(self.after),
            predicted_s=self.predicted_s,
            transition_s=self.transition_s,
            predicted_transition_s=self.predicted_transition_s,
        )


def failure_line(failure: BaseException) -> str:
    """An exception of a worker in one line, without its traceback; an out-of-memory names its device itself."""
    inner = getattr(failure, "failure", None)
    return " ".join((str(failure) if inner is None else inner.message).split())
