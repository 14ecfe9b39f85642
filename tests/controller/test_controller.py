"""Events in, instructions out: triggers, horizons, admission, and what happens when devices are lost."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.controller.admission import AnyGain, Option, Payback, decide
from nereus.controller.controller import (
    Controller,
    Event,
    Instruction,
    PoolChanged,
    ReplanFinished,
    Restart,
    StartReplan,
    StartTransition,
    StepMeasured,
    TransitionEnded,
)
from nereus.controller.monitor import Monitor
from nereus.core.plan import Plan

EIGHT = tuple(range(8))


def option(latency: float, cost: float | None = 1.0, *, last_resort: bool = False) -> Option:
    return Option(
        plan=Plan(()),
        step_latency_s=latency,
        transition_cost_s=cost,
        why="no room" if cost is None else "",
        last_resort=last_resort,
    )


def lengths(step: int, mean: float, *, fits: bool = True) -> StepMeasured:
    return StepMeasured(step=step, signals={"length_mean": mean}, fits=fits)


def replans(found: Sequence[Instruction]) -> list[StartReplan]:
    return [i for i in found if isinstance(i, StartReplan)]


# -- signals ---------------------------------------------------------------------------------------------------------


def test_a_signal_crosses_beyond_its_threshold_and_not_at_it() -> None:
    monitor = Monitor()
    assert monitor.observe(0, {"length_mean": 100}) == ()
    assert monitor.observe(1, {"length_mean": 130}) == ()
    (crossing,) = monitor.observe(2, {"length_mean": 131})
    assert (crossing.signal, crossing.reference, crossing.change) == ("length_mean", 100, pytest.approx(0.31))
    (down,) = monitor.observe(3, {"length_mean": 69})
    assert down.change < 0
    assert monitor.observe(4, {"unknown": 5}) == () == monitor.observe(5, {"unknown": 500})


def test_the_horizon_is_one_step_then_the_first_interval_then_an_average_of_weight_half() -> None:
    monitor = Monitor()
    monitor.observe(0, {"length_mean": 100})
    horizons = []
    for step, value in ((10, 200), (14, 400), (34, 800), (36, 1600)):
        (crossing,) = monitor.observe(step, {"length_mean": value})
        horizons.append(crossing.horizon_steps)
        monitor.reset()
    assert horizons == [1, 4, 12, 7]  # nothing known; 14 - 10; (20 + 4) / 2; (2 + 12) / 2


def test_without_a_reset_a_steady_deviation_would_cross_at_every_step_and_with_it_never_again() -> None:
    controller = Controller(EIGHT)
    controller.handle(lengths(0, 100))
    (first,) = replans(controller.handle(lengths(1, 150)))
    controller.handle(ReplanFinished(number=first.number, step_latency_s=10, options=(option(9.9, 100),)))
    assert controller.decisions[-1][1].verdict == "refused"
    assert [controller.handle(lengths(step, 150)) for step in range(2, 9)] == [[]] * 7
    assert replans(controller.handle(lengths(9, 200)))


# -- admission -------------------------------------------------------------------------------------------------------


@given(
    latency=st.floats(1, 100),
    target=st.floats(1, 100),
    cost=st.floats(0, 1000),
    margin=st.floats(0, 1),
    horizon=st.floats(1, 1000),
)
def test_opportunistic_admission_is_equation_2(
    latency: float, target: float, cost: float, margin: float, horizon: float
) -> None:
    found = decide(
        [option(target, cost)], step_latency_s=latency, horizon_steps=horizon, urgent=False, policy=Payback(margin)
    )
    savings = latency - target
    expected = margin > 0 and savings > 0 and cost / savings <= margin * horizon
    assert (found.verdict == "admitted") == expected


def test_margin_0_admits_only_urgent_ones_and_any_gain_pays_any_price() -> None:
    dear = [option(9.99, 1e6)]
    for policy, urgent, verdict in (
        (Payback(0.0), False, "refused"),
        (Payback(0.0), True, "admitted"),
        (Payback(1.0), False, "refused"),
        (AnyGain(), False, "admitted"),
    ):
        found = decide(dear, step_latency_s=10, horizon_steps=1000, urgent=urgent, policy=policy)
        assert found.verdict == verdict
    free = decide([option(5, 0.0)], step_latency_s=10, horizon_steps=1, urgent=False, policy=Payback(0.0))
    assert free.verdict == "refused"


def test_alternatives_are_tried_in_order_and_each_says_why_not() -> None:
    options = [option(5, None), option(5.5, 100), option(6, 1), option(6.5, 0)]
    found = decide(options, step_latency_s=10, horizon_steps=4, urgent=False, policy=Payback())
    assert [c.admitted for c in found.considered] == [False, False, True]
    assert found.chosen is not None and found.chosen.option is options[2]
    assert "no room" in found.considered[0].why and "horizon 4" in found.considered[1].why
    assert found.chosen.payback_steps == pytest.approx(1 / 4)


def test_the_urgent_path_goes_on_to_last_resorts_and_then_to_a_restart() -> None:
    options = [option(5, None), option(20, None, last_resort=True), option(30, 2, last_resort=True)]
    calm = decide(options, step_latency_s=10, horizon_steps=9, urgent=False, policy=Payback())
    assert calm.verdict == "refused" and len(calm.considered) == 1
    urgent = decide(options, step_latency_s=None, horizon_steps=9, urgent=True, policy=Payback())
    assert urgent.chosen is not None and urgent.chosen.option is options[2]
    nothing = decide(options[:2], step_latency_s=None, horizon_steps=9, urgent=True, policy=Payback())
    assert nothing.verdict == "restart"


# -- the controller --------------------------------------------------------------------------------------------------


def test_of_several_triggers_the_smallest_horizon_counts() -> None:
    controller = Controller(EIGHT)
    controller.monitor._horizons.update(length_mean=50, compute=3)
    controller.handle(StepMeasured(step=0, signals={"length_mean": 100, "compute": 0.5}))
    (request,) = replans(controller.handle(StepMeasured(step=1, signals={"length_mean": 200, "compute": 0.3})))
    assert {t.signal for t in request.triggers} == {"length_mean", "compute"}
    controller.handle(ReplanFinished(number=request.number, step_latency_s=10, options=(option(8, 3.5),)))
    assert controller.decisions[-1][1].horizon_steps == 3
    assert controller.decisions[-1][1].verdict == "refused"  # 1.75 steps against half of 3


def test_what_crosses_during_a_replan_or_a_transition_is_planned_for_afterwards() -> None:
    controller = Controller(EIGHT)
    controller.handle(lengths(0, 100))
    (first,) = replans(controller.handle(lengths(1, 200)))
    assert controller.handle(lengths(2, 300)) == []
    assert controller.handle(ReplanFinished(number=first.number, step_latency_s=10, options=(option(1, 0.1),))) == [
        StartTransition(number=first.number, option=option(1, 0.1))
    ]
    assert controller.handle(lengths(3, 310)) == []
    (second,) = replans(controller.handle(TransitionEnded(number=first.number)))
    assert [t.signal for t in second.triggers] == ["length_mean"]


def test_lost_devices_are_planned_for_at_once_and_old_answers_are_ignored() -> None:
    controller = Controller(EIGHT)
    controller.handle(lengths(0, 100))
    (first,) = replans(controller.handle(lengths(1, 200)))
    (second,) = replans(controller.handle(PoolChanged(step=1, devices=EIGHT[:6], lost=True)))
    assert second.urgent and second.devices == EIGHT[:6]
    assert {t.signal for t in second.triggers} == {"pool", "length_mean"}
    assert controller.handle(ReplanFinished(number=first.number, step_latency_s=10, options=(option(1),))) == []
    (go,) = controller.handle(ReplanFinished(number=second.number, step_latency_s=None, options=(option(30),)))
    assert isinstance(go, StartTransition)
    (third,) = replans(controller.handle(PoolChanged(step=1, devices=EIGHT[:5], lost=True)))  # in mid-transition
    assert third.urgent and controller.handle(TransitionEnded(number=second.number, succeeded=False)) == []


def test_an_answer_for_devices_that_have_gone_again_is_not_taken() -> None:
    """They were no part of the plan yet, so nothing is urgent; but no plan may use them any more."""
    controller = Controller(EIGHT[:1])
    (first,) = replans(controller.handle(PoolChanged(step=3, devices=EIGHT)))
    (second,) = replans(controller.handle(PoolChanged(step=4, devices=EIGHT[:2])))
    assert not second.urgent and second.devices == EIGHT[:2]
    assert controller.handle(ReplanFinished(number=first.number, step_latency_s=10, options=(option(1),))) == []
    assert controller.handle(PoolChanged(step=5, devices=EIGHT[:4])) == []  # more than was asked about is no harm
    (go,) = controller.handle(ReplanFinished(number=second.number, step_latency_s=10, options=(option(1, 0.1),)))
    assert isinstance(go, StartTransition)


def test_a_transition_that_failed_is_urgent_and_so_is_a_plan_that_will_not_fit() -> None:
    controller = Controller(EIGHT)
    (request,) = replans(controller.handle(lengths(0, 100, fits=False)))
    assert request.urgent and request.triggers == ()
    controller.handle(ReplanFinished(number=request.number, step_latency_s=None, options=(option(9),)))
    (again,) = replans(controller.handle(TransitionEnded(number=request.number, succeeded=False)))
    assert again.urgent
    (end,) = controller.handle(ReplanFinished(number=again.number, step_latency_s=None, options=(option(9, None),)))
    assert isinstance(end, Restart)


def test_more_devices_are_an_opportunity() -> None:
    controller = Controller(EIGHT[:4])
    (request,) = replans(controller.handle(PoolChanged(step=3, devices=EIGHT)))
    assert not request.urgent and request.triggers[0].change == 1.0


def test_every_k_steps() -> None:
    controller = Controller(EIGHT, policy=AnyGain(), every=3)
    asked = []
    for step in range(1, 10):
        for request in replans(controller.handle(lengths(step, 100))):
            asked.append(step)
            controller.handle(ReplanFinished(number=request.number, step_latency_s=10, options=()))
    assert asked == [3, 6, 9]


def random_events(rng: random.Random) -> list[Event]:
    """A history that a driver could report: answers to what was asked, and others."""
    controller, events = Controller(EIGHT), []
    for step in range(rng.randint(5, 40)):
        kind = rng.random()
        event: Event
        if kind < 0.6 or controller.state == "idle":
            event = lengths(step, rng.choice([100, 120, 150, 300, 30]), fits=rng.random() > 0.1)
        elif kind < 0.7:
            devices = tuple(sorted(rng.sample(EIGHT, rng.randint(1, 8))))
            event = PoolChanged(step=step, devices=devices, lost=rng.random() < 0.5)
        elif controller.state == "replanning":
            options = tuple(option(rng.uniform(1, 20), rng.choice([None, 0.1, 50.0])) for _ in range(3))
            number = rng.choice([controller._number, controller._number - 1])
            event = ReplanFinished(number=number, step_latency_s=rng.choice([10.0, None]), options=options)
        else:
            event = TransitionEnded(number=controller._number, succeeded=rng.random() < 0.8)
        controller.handle(event)
        events.append(event)
    return events


@pytest.mark.parametrize("seed", range(50))
def test_a_log_of_events_gives_the_same_instructions_again(seed: int) -> None:
    events = random_events(random.Random(seed))
    first, second = Controller(EIGHT), Controller(EIGHT)
    assert [first.handle(e) for e in events] == [second.handle(e) for e in events]
    assert first.decisions == second.decisions
    numbers = [request.number for request, _ in first.decisions]
    assert numbers == sorted(set(numbers))
