"""Replans of a running job: what is offered, what is learned, what is never offered again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from nereus.api.replan import IN_FORCE, WARM_UP_STEPS, JobPlanner
from nereus.api.scenario import Scenario, describe
from nereus.core.inventory import Link, cpu_device
from nereus.core.measurements import DeviceMeasurements, TaskMeasurements, summarise
from nereus.core.plan import ModelStage, Plan
from nereus.core.shapes import ModelShape, state_spec
from nereus.core.sharding import StateSpec
from nereus.planner.problem import HEADROOM
from nereus.rl.adapt import Answer, Lengths, Question
from nereus.runtime.fleet import LOCAL_RATES, Situation
from nereus.transition.plan import LOWERINGS

TINY = ModelShape(
    name="tiny",
    num_layers=4,
    hidden=256,
    intermediate=512,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    vocab=1000,
    tied=True,
)
LONGEST = 4096
CAPACITY = 400 * 2**20
SHORT, LONG = Lengths(mean=100.0, p95=200.0, max=300.0), Lengths(mean=2000.0, p95=3500.0, max=4096.0)


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    base = describe("Llama-3.1-8B", device="H200", gpus=8, response_length=100, prompts=64, prompt_length=64)
    return Scenario(
        name="tiny",
        shapes=dict.fromkeys(base.shapes, TINY),
        device=cpu_device(1e12, 1e11, CAPACITY),
        link=Link(bandwidth_bytes_s=1e9, latency_s=1e-5),
        gpus=8,
        workload=base.workload,
        algorithm="ppo",
        reward_model=True,
    )


@pytest.fixture
def planner(scenario: Scenario) -> Iterator[JobPlanner]:
    made = JobPlanner(scenario, longest=LONGEST, overhead_s=0.25)
    yield made
    made.close()


def specs_of(scenario: Scenario) -> dict[ModelStage, StateSpec]:
    return {m: state_spec(TINY, dtype="float32", trained=m.stage == "training") for m in scenario.model_stages}


def question(
    scenario: Scenario, plan: Plan, lengths: Lengths, devices: tuple[int, ...] = tuple(range(8)), link: float = 1.0
) -> Question:
    specs = specs_of(scenario)
    situation = Situation(
        specs=specs,
        holdings={p.model_stage: specs[p.model_stage].holdings(p) for p in plan.placements},
        plan=plan,
        nodes=dict.fromkeys(range(8), 0),
        rates=LOCAL_RATES,
        usable_bytes=CAPACITY,
        base_bytes=0.0,
        lowerings=LOWERINGS,
        setup_s=0.0,
    )
    return Question(
        number=1,
        devices=devices,
        current=plan,
        situation=situation,
        lengths=lengths,
        after_failure=False,
        link_changed=link,
    )


def ask(planner: JobPlanner, asked: Question) -> Answer:
    planner.ask(asked)
    found = planner.answer(wait=True)
    assert found is not None and planner.answer(wait=False) is None
    return found


def workers(scenario: Scenario, plan: Plan, seconds: Mapping[str, float]) -> dict[int, DeviceMeasurements]:
    """What devices would report whose tasks took so long."""
    tasks = {
        name: TaskMeasurements(commands=1, seconds=s, operations={}, traffic={}, traces=(), memory={})
        for name, s in seconds.items()
    }
    return {gpu: DeviceMeasurements(device=gpu, tasks=tasks, memory={"resident": 1000 + gpu}) for gpu in plan.gpus}


def test_options_come_best_first_with_the_cost_of_their_own_transition(scenario: Scenario, planner: JobPlanner) -> None:
    plan = scenario.choose(k=1).best.plan
    asked = question(scenario, plan, LONG)
    found = ask(planner, asked)
    ordered = [o for o in found.options if not o.last_resort]
    assert ordered and [o.step_latency_s for o in ordered] == sorted(o.step_latency_s for o in ordered)
    for option in ordered:
        assert option.plan != plan and set(option.plan.gpus) <= set(asked.devices)
        assert option.transition_cost_s == pytest.approx(asked.situation.program(option.plan).dag.seconds + 0.25)


def test_after_a_failure_the_cost_is_of_what_is_really_held(scenario: Scenario, planner: JobPlanner) -> None:
    plan = scenario.choose(k=1).best.plan
    asked = replace(question(scenario, plan, LONG), after_failure=True)
    calm = {str(o.plan.to_json()): o for o in ask(planner, question(scenario, plan, LONG)).options}
    for option in ask(planner, asked).options:  # all is there as the plan says: both ways to cost it agree
        twin = calm[str(option.plan.to_json())]
        assert option.transition_cost_s == pytest.approx(twin.transition_cost_s)


def test_a_plan_that_lengths_have_outgrown_is_invalid_and_what_is_offered_fits(
    scenario: Scenario, planner: JobPlanner
) -> None:
    generous = scenario.updated(memory_bytes=4 * 2**30)
    plan = generous.updated(workload=planner._workload(SHORT)).choose(k=1).best.plan
    for name in ("short", "long"):
        lengths = {"short": SHORT, "long": LONG}[name]
        planner.expect(plan, lengths)
        assert planner._expected is not None
        fits = planner._expected.result().peak_bytes <= CAPACITY * (1 - IN_FORCE)
        found = ask(planner, question(scenario, plan, lengths))
        assert (found.step_latency_s is not None) == fits
        now = scenario.updated(workload=planner._workload(lengths))
        for option in found.options:
            assert max(now.estimate(option.plan).peak_bytes.values()) <= CAPACITY * (1 - HEADROOM)
    assert not fits


def test_what_ran_out_of_memory_is_not_offered_again(scenario: Scenario, planner: JobPlanner) -> None:
    plan = scenario.choose(k=1).best.plan
    before = ask(planner, question(scenario, plan, SHORT))
    assert before.step_latency_s is not None
    planner.expect(plan, SHORT)
    planner.does_not_fit(plan)
    after = ask(planner, question(scenario, plan, SHORT))
    assert after.step_latency_s is None and plan not in [o.plan for o in after.options]


def test_of_lost_devices_nothing_is_offered_and_without_a_plan_it_says_why(
    scenario: Scenario, planner: JobPlanner
) -> None:
    plan = scenario.choose(k=1).best.plan
    left = (0, 2, 3, 6, 7)
    found = ask(planner, question(scenario, plan, SHORT, left))
    assert found.step_latency_s is None and found.options
    assert all(set(o.plan.gpus) <= set(left) for o in found.options)
    planner._planned_bytes = 2.0**20
    nothing = ask(planner, question(scenario, plan, SHORT, left))
    assert not nothing.options and "fit" in nothing.infeasible


def test_the_static_policy_changes_replicas_alone(scenario: Scenario) -> None:
    planner = JobPlanner(scenario, longest=LONGEST, static=True)
    plan = scenario.choose(k=1).best.plan
    (option,) = ask(planner, question(scenario, plan, SHORT, (0, 1, 2, 3))).options
    for p in option.plan.placements:
        assert p.layout == plan[p.model_stage].layout and p.micro_batch == plan[p.model_stage].micro_batch
        assert set(p.gpus) <= {0, 1, 2, 3}
    planner.close()


def test_predictions_follow_what_is_measured(scenario: Scenario, planner: JobPlanner) -> None:
    plan = scenario.choose(k=1).best.plan
    then = scenario.updated(workload=planner._workload(SHORT))
    slow = {name: 3 * task.seconds for name, task in then.estimate(plan).tasks.items()}
    for _ in range(WARM_UP_STEPS):
        planner.expect(plan, SHORT)
        planner.observe(plan, SHORT, workers(scenario, plan, slow))
    planner.expect(plan, SHORT)
    assert planner._expected is not None
    predicted = planner._expected.result().seconds["step"]
    assert predicted == pytest.approx(3 * then.estimate(plan).step_latency_s, rel=0.15)


def test_a_step_reports_peaks_and_is_judged_by_them(scenario: Scenario, planner: JobPlanner) -> None:
    plan = scenario.choose(k=1).best.plan
    planner.expect(plan, SHORT)
    assert planner._expected is not None
    planner._expected.result()
    measured = workers(scenario, plan, {"generation": 1.0})
    seen = planner.observe(plan, SHORT, measured)
    assert seen.fits and seen.predicted["step"] > 0
    assert seen.peak_bytes == {str(g): size for g, size in summarise(measured, plan).peak_bytes.items()}
    full = {gpu: DeviceMeasurements(device=gpu, tasks={}, memory={"resident": CAPACITY - 1}) for gpu in measured}
    assert not planner.observe(plan, SHORT, full).fits


def test_slower_links_are_planned_for(scenario: Scenario, planner: JobPlanner) -> None:
    plan = scenario.updated(workload=planner._workload(LONG)).choose(k=1).best.plan
    before = ask(planner, question(scenario, plan, LONG)).step_latency_s
    after = ask(planner, question(scenario, plan, LONG, link=0.05)).step_latency_s
    assert before is not None and after is not None and after > before
    assert planner._scenario.link_factor == pytest.approx(0.05)
    back = ask(planner, question(scenario, plan, LONG, link=20.0)).step_latency_s
    assert back == pytest.approx(before)
