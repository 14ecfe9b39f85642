"""The director between loop, controller and planner: what is asked when, what is waited for, what is written down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import pytest

from nereus.controller.admission import Option, Payback
from nereus.controller.controller import Controller
from nereus.controller.log import replay, started
from nereus.core import events
from nereus.core.job import PlannedChange, SupplyPoint
from nereus.core.plan import ACTOR_TRAINING, Layout, ModelStage, Placement, Plan
from nereus.rl.adapt import AdaptiveDirector, Answer, Lengths, Question, Seen
from nereus.rl.direction import Unrecoverable
from nereus.rl.supply import Supply
from nereus.runtime.cluster import WorkerDied, WorkerFailed
from nereus.runtime.fleet import Fleet, Transition
from nereus.runtime.worker import Failure


def plan_on(*gpus: int) -> Plan:
    return Plan(
        (
            Placement(
                model_stage=ACTOR_TRAINING, layout=Layout(1, 1), dp=len(gpus), gpus=gpus, micro_batch=1, recompute=False
            ),
        )
    )


class FakeFleet:
    """What the director sees of a fleet; `go` is what the loop would do with a change."""

    def __init__(self, *gpus: int) -> None:
        self.plan, self.pool = plan_on(*gpus), tuple(gpus)

    def situation(self) -> None:
        return None

    def held_bytes(self) -> dict[ModelStage, dict[int, float]]:
        return {ACTOR_TRAINING: dict.fromkeys(self.plan.gpus, 1.0)}

    def go(self, change: PlannedChange) -> None:
        self.plan, self.pool = change.plan, change.devices


class FakePlanner:
    """Answers when `ready`: what the test has put into `reply`."""

    def __init__(self) -> None:
        self.questions: list[Question] = []
        self.reply: list[Option] = []
        self.latency: float | None = 10.0
        self.ready, self.fits = False, True
        self.refused: list[Plan] = []
        self.costs: list[tuple[float, float]] = []
        self._open: Question | None = None

    def ask(self, question: Question) -> None:
        self.questions.append(question)
        self._open = question

    def answer(self, *, wait: bool) -> Answer | None:
        if self._open is None or not (wait or self.ready):
            return None
        question, self._open = self._open, None
        valid = set(question.current.gpus) <= set(question.devices) and self.fits
        return Answer(
            number=question.number,
            step_latency_s=self.latency if valid else None,
            options=tuple(self.reply),
            seconds=0.01,
            infeasible="" if self.reply else "nothing fits",
        )

    def expect(self, plan: Plan, lengths: Lengths) -> None:
        pass

    def observe(self, plan: Plan, lengths: Lengths, measurements: Mapping[int, Any]) -> Seen:
        return Seen(predicted={"step": 10.0}, peak_bytes={"0": 5}, signals={"bandwidth": 1e9}, fits=self.fits)

    def took(self, seconds: float, predicted_s: float) -> None:
        self.costs.append((seconds, predicted_s))

    def does_not_fit(self, plan: Plan) -> None:
        self.refused.append(plan)

    def close(self) -> None:
        pass


class Rig:
    def __init__(self, *gpus: int, points: tuple[SupplyPoint, ...] = (), policy: str = "nereus") -> None:
        self.fleet, self.planner = FakeFleet(*gpus), FakePlanner()
        self.emitted: list[events.Event] = []
        self.lines: list[str] = []
        self.director = AdaptiveDirector(
            fleet=cast(Fleet, self.fleet),
            controller=Controller(tuple(gpus), policy=Payback(0.5)),
            planner=self.planner,
            supply=Supply(points, elapsed_s=lambda: 0.0),
            emit=self.emitted.append,
            policy=policy,
            margin=0.5,
            record=lambda row: self.lines.append(json.dumps(row)),
        )

    def step(self, step: int, length: float) -> PlannedChange | None:
        """A whole step: the boundary before it, and what it measured."""
        change = self.director.boundary(step)
        if change is not None:
            self.fleet.go(change)
            self.director.changed(step, cast(Transition, _Done()))
        metrics = {"length_mean": length, "length_p95": length, "length_max": length}
        self.director.measured(step, metrics, {"step": 10.0}, {})
        return change

    def decisions(self) -> list[events.DecisionMade]:
        return [e for e in self.emitted if isinstance(e, events.DecisionMade)]


class _Done:
    seconds = 0.5


def to(plan: Plan, latency: float = 5.0, cost: float | None = 1.0) -> Option:
    return Option(plan=plan, step_latency_s=latency, transition_cost_s=cost)


def test_a_replan_runs_beside_a_step_and_the_change_comes_at_the_boundary_after_it() -> None:
    rig = Rig(0, 1, 2, 3)
    rig.planner.reply = [to(plan_on(0, 1))]
    assert rig.step(0, 100) is None and rig.step(1, 200) is None
    assert len(rig.planner.questions) == 1
    assert rig.step(2, 200) is None  # the planner is not done
    assert not rig.decisions()
    rig.planner.ready = True
    rig.planner.reply = [to(plan_on(0, 1), latency=5.0, cost=0.1)]
    change = rig.step(3, 200)
    assert change is not None and change.plan == plan_on(0, 1) and change.devices == (0, 1, 2, 3)
    (decision,) = rig.decisions()
    assert decision.number == change.decision and decision.verdict == "admitted"
    assert decision.triggers[0]["signal"].startswith("length")
    for step in range(4, 7):
        rig.step(step, 200)
    (outcome,) = [e for e in rig.emitted if isinstance(e, events.OutcomeMeasured)]
    assert [predicted for _, predicted in rig.planner.costs] == [0.1]
    assert (outcome.number, outcome.steps, outcome.after_s, outcome.predicted_s) == (decision.number, 3, 10.0, 5.0)


def test_a_refusal_is_written_down_with_its_numbers_and_nothing_changes() -> None:
    rig = Rig(0, 1)
    rig.planner.ready, rig.planner.reply = True, [to(plan_on(0), latency=9.9, cost=50.0)]
    rig.step(0, 100)
    rig.step(1, 200)
    assert rig.step(2, 200) is None
    (decision,) = rig.decisions()
    assert decision.verdict == "refused" and decision.chosen is None
    assert decision.considered[0]["payback_steps"] == pytest.approx(500)
    assert [rig.step(step, 200) for step in range(3, 8)] == [None] * 5 and len(rig.decisions()) == 1


def test_devices_that_are_taken_away_are_waited_for_and_the_cheapest_go() -> None:
    rig = Rig(0, 1, 2, 3, points=(SupplyPoint(step=2, devices=2),))
    rig.planner.reply = [to(plan_on(0, 1))]
    rig.step(0, 100)
    rig.step(1, 100)
    change = rig.step(2, 100)
    assert change is not None and change.devices == (0, 1) and rig.fleet.pool == (0, 1)
    assert rig.planner.questions[0].devices == (0, 1)
    (pool,) = [e for e in rig.emitted if isinstance(e, events.PoolChanged)]
    assert pool.leaving == (2, 3) and rig.decisions()[0].urgent


def test_devices_that_the_plan_does_not_use_go_without_a_new_plan() -> None:
    rig = Rig(0, 1, 2, 3, points=(SupplyPoint(step=1, gone=[3]),))
    rig.fleet.plan = plan_on(0, 1)
    rig.planner.latency = 10.0
    change = rig.step(1, 100)
    assert change == PlannedChange(1, (0, 1, 2), plan_on(0, 1))


def test_new_devices_are_an_opportunity_and_are_started_with_the_plan_that_uses_them() -> None:
    rig = Rig(0, 1, points=(SupplyPoint(step=1, devices=4),))
    rig.planner.ready, rig.planner.reply = True, [to(plan_on(0, 1, 2, 3), latency=5.0, cost=0.5)]
    rig.step(0, 100)
    change = rig.step(1, 100)
    assert change is not None and change.devices == (0, 1, 2, 3)
    assert [e.joined for e in rig.emitted if isinstance(e, events.PoolChanged)] == [(2, 3)]


def test_after_a_death_the_loop_gets_a_plan_for_those_that_are_left() -> None:
    rig = Rig(0, 1, 2)
    rig.step(0, 100)
    rig.fleet.pool = (0, 2)
    rig.planner.reply = [to(plan_on(0, 2))]
    change = rig.director.failed(1, "training", WorkerDied(1, "gradients", -9))
    assert (change.plan, change.devices) == (plan_on(0, 2), (0, 2))
    rig.director.changed(1, None)  # that failed as well, and took a device along
    rig.fleet.pool = (0,)
    rig.planner.reply = [to(plan_on(0))]
    assert rig.director.failed(1, "transition", WorkerDied(2, "build", -9)).plan == plan_on(0)
    assert [d.urgent for d in rig.decisions()] == [True, True]
    rig.fleet.pool = ()
    with pytest.raises(Unrecoverable, match="no device is left"):
        rig.director.failed(1, "transition", WorkerDied(0, "build", -9))


def out_of_memory() -> WorkerFailed:
    failure = Failure(kind="OutOfMemory", message="device 1 would hold 2 GiB, its capacity is 1 GiB", traceback="")
    return WorkerFailed(1, "gradients", failure)


def test_out_of_memory_is_answered_with_a_plan_that_is_known_to_be_smaller() -> None:
    rig = Rig(0, 1)
    rig.step(0, 100)
    rig.planner.reply = [to(plan_on(1, 0))]
    assert rig.director.failed(1, "training", out_of_memory()).plan == plan_on(1, 0)
    assert rig.planner.refused == [plan_on(0, 1)]
    rig.director.changed(1, None)  # there is no memory for that change: it is the plan it led to that is too large
    rig.planner.reply = [to(plan_on(0))]
    assert rig.director.failed(1, "transition", out_of_memory()).plan == plan_on(0)
    assert rig.planner.refused == [plan_on(0, 1), plan_on(1, 0)]


def test_the_static_policy_ends_with_what_happened_and_what_would_help() -> None:
    rig = Rig(0, 1, policy="static")
    rig.planner.fits = False
    rig.step(0, 100)
    assert rig.step(1, 500) is None and not rig.decisions()
    with pytest.raises(Unrecoverable, match=r"device 1.*2 GiB.*--policy nereus"):
        rig.director.failed(1, "training", out_of_memory())


def test_where_no_transition_fits_the_way_is_by_a_checkpoint_and_where_no_plan_fits_there_is_none() -> None:
    rig = Rig(0, 1)
    rig.planner.fits, rig.planner.reply = False, [to(plan_on(0), cost=None)]
    rig.step(0, 100)
    change = rig.director.boundary(1)
    assert change is not None and change.restart and change.plan == plan_on(0)
    rig = Rig(0, 1)
    rig.planner.fits, rig.planner.reply = False, []
    rig.step(0, 100)
    with pytest.raises(Unrecoverable, match="nothing fits"):
        rig.director.boundary(1)


def test_the_log_of_a_history_is_answered_the_same_by_a_new_controller() -> None:
    rig = Rig(0, 1, 2, 3, points=(SupplyPoint(step=3, devices=3), SupplyPoint(step=6, devices=4)))
    rig.planner.ready = True
    for step in range(9):
        rig.planner.reply = [to(plan_on(*range(3)), latency=6.0 + step, cost=0.5)]
        rig.step(step, 100 + 60 * (step % 4))
    assert rig.decisions()
    rows = [started((0, 1, 2, 3), 0), *(json.loads(line) for line in rig.lines)]
    assert replay(rows, lambda devices, _: Controller(devices, policy=Payback(0.5))) == []
    assert replay(rows, lambda devices, _: Controller(devices, policy=Payback(0.0)))
