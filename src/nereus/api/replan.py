"""Replans of a running job: the scenario as it is now, its best plans, and what it would take to get to each.

    expect     in a thread of its own: what a step of these lengths takes under the plan
    observe    a step's measurements, taken down for the next calibration
    ask        in that thread: calibrate -> choose -> lay out over what is held -> the transition's real DAG
    answer     its options, best first

One thread plans, so what it learns (`_scenario`) is replaced whole and never shared half done.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from nereus.api.scenario import PlanEstimate, Scenario, candidate_of
from nereus.controller.admission import Option
from nereus.core.errors import PlanError, StateError
from nereus.core.graph import StepTask
from nereus.core.inventory import CpuHost
from nereus.core.measurements import (
    ALL_REDUCE,
    GRADIENT_REDUCE,
    SEND_RECV,
    TRANSFER,
    StepMeasurements,
    summarise,
)
from nereus.core.plan import ModelStage, Placement, Plan
from nereus.core.workload import Workload
from nereus.cost.calibration import MEMORY_KINDS, MemoryObservation, Observation
from nereus.cost.work import CLASSES
from nereus.planner.choice import PlanChoice
from nereus.planner.problem import HEADROOM
from nereus.rl.adapt import Answer, Lengths, Question, Seen
from nereus.runtime.fleet import Situation
from nereus.transition.align import align_plan
from nereus.transition.dag import TransitionDag
from nereus.transition.plan import plan_transition
from nereus.transition.profile import StateProfile

ALTERNATIVES = 5
"""Plans that are offered: the best and four slower ones, of which a cheaper transition may make one the better choice."""

WARM_UP_STEPS = 2
"""After so many measured steps the priors have done their part."""

CALIBRATE_EVERY = 8
"""Steps between calibrations where nothing triggers a replan."""

SIGNAL_STEPS = 3
"""Steps over which the median of an achieved efficiency is taken; a plan is not judged by its first, cold step."""

UNCOSTED = ("resident", "checkpoint")
"""Kinds of memory that are not a task's working memory."""

MEMORY_STEPS = 4
"""Steps whose longest response memory is planned for: lengths vary from step to step."""

LEARN = 0.5
"""Weight of the last change in what changes take beside their primitives."""

IN_FORCE = HEADROOM / 2
"""Share of memory that must stay free under the plan in force. Less than a new plan must leave, or a plan that was chosen to
just fit would be left again as soon as a response is longer."""

TOO_LARGE = 0.98
"""Of the predicted peak of a plan that ran out of memory, what later plans are allowed to reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One measured step."""

    plan: Plan
    workload: Workload
    measured: StepMeasurements


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expected:
    """Of a step: seconds by stage, bytes of the fullest device."""

    seconds: Mapping[str, float]
    peak_bytes: float


class JobPlanner:
    """See the module, and `rl.adapt.Planner`.

    scenario: of the job at its start. capacity_bytes: of a device. longest: tokens of the longest possible response.
    overhead_s: what a change takes beside its primitives: digests, devices that start; learned from those that were made.
    static: offer plans with the current layouts alone (data parallelism follows the pool).
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        longest: int,
        static: bool = False,
        overhead_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scenario, self._longest, self._static, self._clock = scenario, longest, static, clock
        self._overhead_s = overhead_s
        self._planned_bytes = float(scenario.device_kind.memory_bytes)
        self._has_links = not isinstance(scenario.device, CpuHost)  # processes that share cores have none to be slow
        self._signals_of: Plan | None = None
        self._recent: deque[dict[str, float]] = deque(maxlen=SIGNAL_STEPS)
        self._steps: list[_Step] = []
        self._calibrated = False
        self._longest_seen: deque[float] = deque(maxlen=MEMORY_STEPS)
        self._profiles: dict[ModelStage, StateProfile] = {}
        self._previous: PlanChoice | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="replan")
        self._future: Future[Answer] | None = None
        self._expected: Future[_Expected] | None = None
        self._calibrating: Future[None] | None = None

    # -- Planner -----------------------------------------------------------------------------------------------------

    def ask(self, question: Question) -> None:
        self._future = self._threads.submit(self._answer, question, self._taken(), self._planned_bytes)

    def answer(self, *, wait: bool) -> Answer | None:
        if self._future is None or not (wait or self._future.done()):
            return None
        found, self._future = self._future.result(), None
        return found

    def expect(self, plan: Plan, lengths: Lengths) -> None:
        self._longest_seen.append(lengths.max)
        self._expected = self._threads.submit(self._expect, plan, lengths)

    def observe(self, plan: Plan, lengths: Lengths, measurements: Mapping[int, Any]) -> Seen:
        measured = summarise(measurements, plan) if measurements else None
        expected = self._expected.result() if self._expected is not None and self._expected.done() else None
        self._expected = None
        if measured is not None:
            self._take_down(_Step(plan=plan, workload=self._workload(lengths), measured=measured))
        return Seen(
            predicted=expected.seconds if expected else {},
            peak_bytes={str(gpu): size for gpu, size in measured.peak_bytes.items()} if measured else {},
            signals=self._signals(plan, measured) if measured else {},
            fits=self._fits(expected, measured),
        )

    def took(self, seconds: float, predicted_s: float) -> None:
        self._overhead_s = max(0.0, self._overhead_s + LEARN * (seconds - predicted_s))

    def does_not_fit(self, plan: Plan) -> None:
        estimate = self._scenario.estimate(plan)
        peak = max(estimate.peak_bytes.values(), default=self._planned_bytes) / (1 - IN_FORCE)
        self._planned_bytes = min(self._planned_bytes, TOO_LARGE * peak)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _answer(self, question: Question, steps: Sequence[_Step], planned_bytes: float) -> Answer:
        began = self._clock()
        if question.link_changed != 1.0:
            factor = self._scenario.link_factor * question.link_changed
            self._scenario = self._scenario.updated(link_factor=factor)
        else:
            self._calibrate(steps)
        scenario = self._scenario.updated(
            workload=self._workload(question.lengths), gpus=len(question.devices), memory_bytes=planned_bytes
        )
        latency = self._latency(scenario, question)
        infeasible, options = "", []
        try:
            options = list(self._options(scenario, question))
        except PlanError as error:
            infeasible = str(error)
        options += self._last_resorts(scenario, question)
        return Answer(
            number=question.number,
            step_latency_s=latency,
            options=tuple(options),
            seconds=self._clock() - began,
            infeasible=infeasible,
        )

    def _expect(self, plan: Plan, lengths: Lengths) -> _Expected:
        scenario = self._scenario.updated(workload=self._workload(lengths), gpus=max(1, len(plan.gpus)))
        estimate = scenario.estimate(plan)
        return _Expected(seconds=_predicted(scenario, estimate), peak_bytes=max(estimate.peak_bytes.values()))

    def _latency(self, scenario: Scenario, question: Question) -> float | None:
        """Of the plan in force; None where it lacks devices or does not fit."""
        if not question.current.placements or not set(question.current.gpus) <= set(question.devices):
            return None
        estimate = scenario.estimate(question.current)
        return estimate.step_latency_s if _within(scenario, estimate, IN_FORCE) else None

    def _options(self, scenario: Scenario, question: Question) -> Iterator[Option]:
        if self._static:
            yield self._option(scenario, question, _same_layouts(scenario, question.current, question.devices))
            return
        choice = scenario.choose(
            k=ALTERNATIVES, devices=question.devices, current=question.current, previous=self._previous
        )
        self._previous = choice
        for planned in choice.plans:
            plan = self._laid_out(planned.plan, question)
            if plan != question.current:
                yield self._option(scenario, question, plan)

    def _last_resorts(self, scenario: Scenario, question: Question) -> Iterator[Option]:
        """The current layouts with less at a time, where all of their devices are there."""
        if self._static or not set(question.current.gpus) <= set(question.devices):
            return
        plan = question.current
        for _ in range(8):
            plan = Plan(tuple(_smaller(p) for p in plan.placements))
            estimate = scenario.estimate(plan)
            if _within(scenario, estimate):
                yield self._option(scenario, question, plan, last_resort=True)
                return

    def _option(self, scenario: Scenario, question: Question, plan: Plan, *, last_resort: bool = False) -> Option:
        estimate = scenario.estimate(plan)
        cost, why = None, ""
        try:
            cost = self._transition(question, plan).seconds + self._overhead_s
        except (PlanError, StateError) as error:
            why = str(error)
        return Option(
            plan=plan,
            step_latency_s=estimate.step_latency_s,
            transition_cost_s=cost,
            why=why,
            last_resort=last_resort,
        )

    def _transition(self, question: Question, plan: Plan) -> TransitionDag:
        """The DAG of a change: from plan to plan, or from the very regions that are held where no plan describes them."""
        now = question.situation
        if question.after_failure:
            return now.program(plan).dag
        return plan_transition(
            self._profiles_of(now),
            question.current,
            plan,
            node_of=now.node_of(plan),
            rates=now.rates,
            usable_bytes=now.usable_bytes,
            base_bytes=now.base_bytes,
            lowerings=now.lowerings,
            setup_s=now.setup_s,
        )

    def _profiles_of(self, situation: Situation) -> dict[ModelStage, StateProfile]:
        if not self._profiles:
            self._profiles = {name: StateProfile.of(spec) for name, spec in situation.specs.items()}
        return self._profiles

    def _laid_out(self, plan: Plan, question: Question) -> Plan:
        """Every model-stage's devices in the order that keeps the most of its state in place."""
        profiles, node_of = self._profiles_of(question.situation), question.situation.node_of(plan)
        aligned = align_plan(plan, question.current, profiles, node_of)
        kept = {p.model_stage: p for p in question.current.placements}
        return Plan(tuple(kept[p.model_stage] if _same(p, kept.get(p.model_stage)) else p for p in aligned.placements))

    def _calibrate(self, steps: Sequence[_Step]) -> None:
        """Learn efficiencies and memory from measured steps; what was learned before counts as much as its precision."""
        scenario = self._scenario
        calibration = scenario.cost.calibration
        times, memory = [], []
        for step in steps:
            then = scenario.updated(workload=step.workload)
            times += list(_observations(then, step))
            memory += list(_memory(then, step))
        if times:
            calibration = calibration.updated(times)
        if memory:
            calibration = calibration.fit_memory(memory)
        self._scenario = scenario.updated(calibration=calibration)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _workload(self, lengths: Lengths) -> Workload:
        """The job's with lengths as they are; the longest is that of the last few steps. Before any step, as planned."""
        if not lengths.max:
            return self._scenario.workload
        longest = min(float(self._longest), max(lengths.max, *self._longest_seen, 1.0))
        mean = min(max(lengths.mean, 1.0), longest)
        return replace(
            self._scenario.workload,
            response_length=mean,
            response_p95=min(max(lengths.p95, mean), longest),
            response_max=longest,
        )

    def _signals(self, plan: Plan, measured: StepMeasurements) -> dict[str, float]:
        """Achieved FLOP/s and bytes/s, each the median of the last three steps under this plan."""
        if plan != self._signals_of:
            self._signals_of, self._recent = plan, deque(maxlen=SIGNAL_STEPS)
        self._recent.append(_achieved(measured, links=self._has_links))
        if len(self._recent) < SIGNAL_STEPS:
            return {}
        names = set.intersection(*(set(row) for row in self._recent))
        return {name: median(row[name] for row in self._recent) for name in sorted(names)}

    def _take_down(self, step: _Step) -> None:
        """Keep a measured step for the next calibration, which comes by itself if no replan does."""
        self._steps.append(step)
        if len(self._steps) >= (CALIBRATE_EVERY if self._calibrated else WARM_UP_STEPS):
            self._calibrating = self._threads.submit(self._calibrate, self._taken())

    def _taken(self) -> list[_Step]:
        """The steps that nothing was learned from yet, for a calibration."""
        if self._calibrating is not None and self._calibrating.done():
            self._calibrating.result()  # raises what went wrong
        steps, self._steps, self._calibrated = self._steps, [], True
        return steps

    def _fits(self, expected: _Expected | None, measured: StepMeasurements | None) -> bool:
        """By what was expected of the step, and by what was measured."""
        predicted = expected.peak_bytes if expected is not None else 0.0
        seen = max(measured.peak_bytes.values(), default=0) if measured is not None else 0
        return max(predicted, float(seen)) <= self._planned_bytes * (1 - IN_FORCE)


def _within(scenario: Scenario, estimate: PlanEstimate, headroom: float = HEADROOM) -> bool:
    usable = scenario.device_kind.memory_bytes * (1 - headroom)
    return max(estimate.peak_bytes.values(), default=0.0) <= usable


def _same(a: Placement, b: Placement | None) -> bool:
    """Whether two placements differ at most in which shard is where, on the same devices: nothing is gained by that."""
    if b is None or set(a.gpus) != set(b.gpus):
        return False
    return replace(a, gpus=b.gpus) == b


def _smaller(placement: Placement) -> Placement:
    if placement.micro_batch > 1:
        return replace(placement, micro_batch=placement.micro_batch // 2)
    return replace(placement, recompute=placement.model_stage.stage == "training")


def _same_layouts(scenario: Scenario, plan: Plan, devices: Sequence[int]) -> Plan:
    """The plan's layouts with as many replicas as the devices and the batch allow. Raises PlanError."""
    found = []
    for p in plan.placements:
        batch = scenario.workload.mini_batch if p.model_stage.stage == "training" else scenario.workload.sequences
        dp = next((d for d in range(len(devices) // p.layout.size, 0, -1) if batch % d == 0), 0)
        if not dp:
            raise PlanError(f"{p.model_stage}: {p.layout} needs {p.layout.size} devices, {len(devices)} are left")
        kept = [gpu for gpu in p.gpus if gpu in devices]
        rest = [gpu for gpu in devices if gpu not in kept]
        found.append(replace(p, dp=dp, gpus=tuple((*kept, *rest)[: dp * p.layout.size])))
    return Plan(tuple(found))


def _predicted(scenario: Scenario, estimate: PlanEstimate) -> dict[str, float]:
    """Stage -> seconds, and "step"; a stage's tasks side by side where they have devices of their own."""
    stages: dict[str, float] = {}
    for task in scenario.cost.graph:
        seconds = estimate.tasks[task.name].seconds
        stages[task.stage] = stages.get(task.stage, 0.0) + seconds
    whole = sum(stages.values())
    scale = estimate.step_latency_s / whole if whole else 0.0
    return {**{stage: seconds * scale for stage, seconds in stages.items()}, "step": estimate.step_latency_s}


TRAFFIC = ("all_reduce", "gradient_reduce", "shard_gradients", "gradient_message", "message", "decode_message")
"""Classes of work that are traffic between ranks of a model-stage, without their link."""

BANDWIDTH_OF = (GRADIENT_REDUCE, ALL_REDUCE, SEND_RECV, TRANSFER)
"""The traffic whose bandwidth is watched: the first of these that a plan has."""


def _achieved(measured: StepMeasurements, *, links: bool) -> dict[str, float]:
    """FLOP/s and bytes/s of a step, where they could be measured."""
    found = {"compute": measured.flops_s} if measured.flops_s else {}
    kind = next((kind for kind in BANDWIDTH_OF if links and kind in measured.bandwidth_bytes_s), None)
    return found if kind is None else {**found, "bandwidth": measured.bandwidth_bytes_s[kind]}


def _observations(scenario: Scenario, step: _Step) -> Iterator[Observation]:
    """The tasks of a measured step beside their work at peak rates."""
    for task in scenario.cost.graph:
        measured = step.measured.tasks.get(task.name)
        if measured is None or not measured.seconds > 0:
            continue
        work = scenario.cost.work(candidate_of(scenario.as_run(step.plan[task.model_stage])), task.name)
        found = {name: float(seconds) for name, seconds in zip(CLASSES, work, strict=True) if seconds > 0}
        if found:
            yield Observation(work=found, seconds=measured.seconds)
        # Along a pipeline messages overlap with work; elsewhere their own time tells what is theirs of the task.
        sent = {name: seconds for name, seconds in found.items() if name.partition("/")[0] in TRAFFIC}
        own = sum(traffic.seconds for traffic in measured.communication.values())
        if sent and own > 0 and step.plan[task.model_stage].layout.pp == 1:
            yield Observation(work=sent, seconds=own)


def _memory(scenario: Scenario, step: _Step) -> Iterator[MemoryObservation]:
    """What each model-stage's largest task had in use beside what was resident, and what was counted for it."""
    for m in scenario.model_stages:
        tasks = [
            step.measured.tasks[t.name] for t in scenario.cost.graph if _of(t, m) and t.name in step.measured.tasks
        ]
        working = max((sum(n for kind, n in t.memory.items() if kind not in UNCOSTED) for t in tasks), default=0)
        counted = scenario.cost.memory(candidate_of(scenario.as_run(step.plan[m])))
        kinds = {
            kind: size for kind, size in counted.items() if kind in MEMORY_KINDS and kind != "resident" and size > 0
        }
        if working > 0 and kinds:
            yield MemoryObservation(kinds=kinds, peak_bytes=float(working))


def _of(task: StepTask, model_stage: ModelStage) -> bool:
    return task.model_stage == model_stage and task.stage == model_stage.stage
