"""What a job file can ask for: its plan and changes made concrete, or refused with the field and the bad value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from nereus.core.errors import PlanError, UserError
from nereus.core.job import (
    AlgorithmSection,
    BatchSection,
    ChangeSection,
    ClusterSection,
    Job,
    ModelSection,
    OptimizerSection,
    PlacementSection,
    SamplingSection,
    TaskSection,
    check_plan,
    initial_plan,
    planned_changes,
    resolve_plan,
)
from nereus.core.plan import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    REFERENCE_INFERENCE,
    Layout,
    ModelStage,
    Placement,
    Plan,
)

examples = settings(max_examples=100, derandomize=True, deadline=None)
P = PlacementSection


def job(
    *,
    algorithm: str = "ppo",
    devices: int = 8,
    batch: BatchSection | None = None,
    betas: Any = (0.9, 0.999),
    **more: Any,
) -> Job:
    """Eight devices, 24 sequences a step, 12 a mini-batch."""
    return Job(
        name="j",
        steps=10,
        model=ModelSection(path="m"),
        task=TaskSection(name="count"),
        algorithm=AlgorithmSection(name=algorithm),
        batch=batch or BatchSection(prompts=12, samples_per_prompt=2, mini_batches=2),
        sampling=SamplingSection(max_new_tokens=4),
        optimizer=OptimizerSection(lr=1e-4, betas=betas),
        cluster=ClusterSection(devices=devices),
        **more,
    )


def no_auto(step: int, pool: Sequence[int], current: Plan | None) -> Plan:
    raise AssertionError("nothing here is auto")


def changes(*sections: ChangeSection, **more: Any) -> Job:
    return job(changes=sections, **more)


# -- the job itself ----------------------------------------------------------------------------------------------------


def test_mini_batches_that_do_not_divide_the_sequences_are_refused():
    with pytest.raises(UserError, match=r"batch\.mini_batches: 5 does not divide the 24 sequences"):
        job(batch=BatchSection(prompts=12, samples_per_prompt=2, mini_batches=5))


def test_grpo_needs_a_group_to_compare_in():
    alone = BatchSection(prompts=4, samples_per_prompt=1)
    job(algorithm="ppo", batch=alone)
    with pytest.raises(UserError, match=r"batch\.samples_per_prompt: 1 "):
        job(algorithm="grpo", batch=alone)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
def test_a_seed_must_fit_the_64_bits_of_a_draw(seed: int):
    job(seed=seed - 1 if seed > 0 else seed + 1)
    with pytest.raises(UserError, match=f"seed: {seed} "):
        job(seed=seed)


@pytest.mark.parametrize("betas", [(0.9, 1.0), (-0.1, 0.9)])
def test_betas_that_adam_cannot_use_are_refused(betas: tuple[float, float]):
    with pytest.raises(UserError, match=re.escape(f"optimizer.betas: {list(betas)}")):
        job(betas=betas)


@pytest.mark.parametrize(
    ("section", "field", "bad"),
    [
        (PlacementSection, "tp", 0),
        (PlacementSection, "micro_batch", 0),
        (PlacementSection, "tensor_parallel", 2),
        (ChangeSection, "step", 0),
        (AlgorithmSection, "name", "PPO"),
        (AlgorithmSection, "value_clip", -0.2),
        (OptimizerSection, "critic_lr", -1e-4),
        (SamplingSection, "top_p", 0),
        (SamplingSection, "temperature", 0),
        (ClusterSection, "devices", 0),
        (BatchSection, "prompts", "many"),
    ],
)
def test_the_annotations_refuse_a_bad_value_at_its_field(section: type, field: str, bad: object):
    with pytest.raises(ValidationError) as raised:
        TypeAdapter(section).validate_python({field: bad})
    assert ((field,), bad) in [(e["loc"], e["input"]) for e in raised.value.errors()]


@pytest.mark.parametrize("steps", [(3, 2), (2, 2)])
def test_changes_must_ascend(steps: tuple[int, int]):
    with pytest.raises(UserError, match=re.escape(f"changes: steps {list(steps)}")):
        changes(*(ChangeSection(step=s, devices=4) for s in steps))


@pytest.mark.parametrize(
    ("section", "place", "estimator"),
    [
        (AlgorithmSection(name="ppo"), "reward", "k1"),
        (AlgorithmSection(name="grpo"), "loss", "k3"),
        (AlgorithmSection(name="ppo", kl_in="loss"), "loss", "k3"),
        (AlgorithmSection(name="grpo", kl_in="reward"), "reward", "k1"),
        (AlgorithmSection(name="grpo", kl_kind="k2"), "loss", "k2"),
    ],
)
def test_the_kl_goes_where_the_algorithm_puts_it_unless_the_job_says_so(
    section: AlgorithmSection, place: str, estimator: str
):
    assert (section.kl_place, section.kl_estimator) == (place, estimator)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("reward", [None, ModelSection(path="r")])
def test_what_a_job_places_is_what_its_algorithm_runs(algorithm: str, reward: ModelSection | None):
    placed = {str(m) for m in job(algorithm=algorithm, reward=reward).model_stages}
    expected = {"actor/generation", "reference/inference", "actor/training"}
    expected |= {"critic/training"} if algorithm == "ppo" else set()
    expected |= {"reward/inference"} if reward else set()
    assert placed == expected


# -- resolve_plan ------------------------------------------------------------------------------------------------------


def test_all_stands_for_every_model_stage_that_is_not_named():
    section = {"all": P(tp=2, dp=4), "actor/generation": P(dp=8, micro_batch=3)}
    plan = resolve_plan(job(), section, range(8), None, auto=no_auto)
    assert {str(p.model_stage): (p.layout, p.dp) for p in plan.placements} == {
        "actor/generation": (Layout(1, 1), 8),
        "reference/inference": (Layout(2, 1), 4),
        "actor/training": (Layout(2, 1), 4),
        "critic/training": (Layout(2, 1), 4),
    }
    assert plan[ACTOR_GENERATION].micro_batch == 3


def test_without_gpus_a_placement_takes_the_first_devices_of_the_pool():
    plan = resolve_plan(job(), {"all": P(tp=2, pp=2)}, (9, 3, 5, 7, 1), None, auto=no_auto)
    assert plan[ACTOR_TRAINING].gpus == (1, 3, 5, 7)


def test_named_gpus_keep_their_order():
    plan = resolve_plan(
        job(), {"all": P(), "actor/training": P(tp=2, dp=2, gpus=[6, 2, 4, 0])}, range(8), None, auto=no_auto
    )
    assert plan[ACTOR_TRAINING].gpus == (6, 2, 4, 0)


def test_model_stages_that_a_change_does_not_name_keep_their_placement():
    before = resolve_plan(job(), {"all": P(tp=2, dp=4)}, range(8), None, auto=no_auto)
    after = resolve_plan(job(), {"actor/training": P(tp=4)}, range(8), before, auto=no_auto)
    assert after[ACTOR_TRAINING].layout == Layout(4, 1)
    assert {p for p in after.placements if p.model_stage != ACTOR_TRAINING} == {
        p for p in before.placements if p.model_stage != ACTOR_TRAINING
    }


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"actor/training": P()}, "actor/generation is not placed"),
        ({}, "actor/generation is not placed"),
        ({"all": P(), "actor/trainin": P()}, "'actor/trainin' is not a model-stage of this job; it has actor/gen"),
        ({"all": P(), "reward/inference": P()}, "'reward/inference' is not a model-stage of this job"),
        ({"all": P(), "actor/training": P(tp=4, pp=3)}, "actor/training: tp4 x pp3 x dp1 needs 12 .* has 8"),
        ({"all": P(), "actor/training": P(gpus=[8])}, r"actor/training: devices \[8\] are not in the pool"),
        ({"all": P(), "actor/training": P(tp=2, gpus=[0])}, r"actor/training: .* needs 2 .*1 are given: \[0\]"),
        ({"all": P(), "actor/generation": P(dp=5)}, "actor/generation: dp=5 does not divide the 24 .* of a step"),
        ({"all": P(), "actor/training": P(dp=8)}, "actor/training: dp=8 does not divide the 12 .* of a mini-batch"),
        ({"all": P(), "critic/training": P(dp=8)}, "critic/training: dp=8 does not divide the 12 .* of a mini-batch"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_with_the_model_stage_and_the_value(section: Any, message: str):
    with pytest.raises(PlanError, match=message):
        resolve_plan(job(), section, range(8), None, auto=no_auto)


def test_only_trained_units_have_to_divide_a_mini_batch():
    plan = resolve_plan(job(), {"all": P(), "actor/generation": P(dp=8)}, range(8), None, auto=no_auto)
    assert plan[ACTOR_GENERATION].dp == 8


def test_the_message_on_dp_lists_what_divides():
    with pytest.raises(PlanError, match=re.escape("possible are [1, 2, 3, 4, 6, 12]")):
        resolve_plan(job(), {"all": P(), "actor/training": P(dp=5)}, range(8), None, auto=no_auto)


# -- automatic plans ---------------------------------------------------------------------------------------------------


def whole_on_each(step: int, pool: Sequence[int], current: Plan | None) -> Plan:
    """As many replicas as the pool has devices."""
    everywhere = {"layout": Layout(1, 1), "dp": len(pool), "gpus": tuple(pool)}
    return Plan(tuple(Placement(model_stage=m, **everywhere) for m in job().model_stages))


def test_auto_is_asked_with_its_step_its_pool_and_the_plan_before():
    asked = []

    def auto(step: int, pool: Sequence[int], current: Plan | None) -> Plan:
        asked.append((step, tuple(pool), current))
        return whole_on_each(step, pool, current)

    j = changes(ChangeSection(step=2, plan={"all": P(dp=2)}), ChangeSection(step=5, devices=3), plan="auto")
    first = initial_plan(j, auto)
    found = planned_changes(j, first, range(8), auto=auto)
    assert first == whole_on_each(0, range(8), None)
    assert asked == [(0, tuple(range(8)), None), (5, (0, 1, 2), found[0].plan)]
    assert found[1].plan == whole_on_each(5, range(3), None)


@examples
@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 6), st.integers(1, 24), st.booleans())
def test_a_plan_passes_exactly_when_its_devices_exist_and_dp_divides_the_batch(
    tp: int, pp: int, dp: int, num_devices: int, trained: bool
):
    name = ACTOR_TRAINING if trained else REFERENCE_INFERENCE
    gpus = tuple(range(tp * pp * dp))
    plan = Plan((Placement(model_stage=name, layout=Layout(tp, pp), dp=dp, gpus=gpus),))
    if tp * pp * dp <= num_devices and (12 if trained else 24) % dp == 0:
        check_plan(job(), plan, range(num_devices))
    else:
        with pytest.raises(PlanError, match=str(name)):
            check_plan(job(), plan, range(num_devices))


def test_the_first_plan_is_on_the_devices_of_the_cluster():
    assert initial_plan(job(devices=3), whole_on_each).gpus == (0, 1, 2)
    assert initial_plan(job(plan={"all": P(tp=2)}), no_auto)[CRITIC_TRAINING].layout == Layout(2, 1)


# -- changes -----------------------------------------------------------------------------------------------------------


def layouts(plan: Plan, *names: ModelStage) -> list[tuple[int, int, int]]:
    return [(p.layout.tp, p.layout.pp, p.dp) for p in (plan[name] for name in names)]


def test_each_change_starts_from_the_pool_and_plan_of_the_one_before():
    j = changes(
        ChangeSection(step=2, plan={"actor/training": P(tp=2, dp=3)}),
        ChangeSection(step=4, devices=12, plan={"actor/generation": P(dp=12)}),
        ChangeSection(step=6, plan={"all": P(pp=2, dp=6)}),
        ChangeSection(step=8, devices=4),
        plan={"all": P(dp=4)},
    )
    found = planned_changes(j, initial_plan(j, no_auto), range(8), auto=whole_on_each)
    assert [c.step for c in found] == [2, 4, 6, 8]
    assert [len(c.devices) for c in found] == [8, 12, 12, 4]
    assert [layouts(c.plan, ACTOR_GENERATION, ACTOR_TRAINING) for c in found] == [
        [(1, 1, 4), (2, 1, 3)],
        [(1, 1, 12), (2, 1, 3)],
        [(1, 2, 6), (1, 2, 6)],
        [(1, 1, 4), (1, 1, 4)],
    ]


def test_changes_up_to_a_step_are_left_out_when_a_run_goes_on_from_it():
    j = changes(ChangeSection(step=2, devices=4), ChangeSection(step=5, devices=6), plan={"all": P(dp=4)})
    assert [c.step for c in planned_changes(j, initial_plan(j, no_auto), range(8), auto=whole_on_each, after=2)] == [5]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ([ChangeSection(step=3)], "changes: step 3: neither devices nor plan"),
        ([ChangeSection(step=3, devices=0)], "changes: step 3: devices: 0 "),
        (
            [ChangeSection(step=3, devices=2, plan={"actor/generation": P()})],
            r"changes: step 3: reference/inference: devices \[2, 3\] are not in the pool",
        ),
        (
            [ChangeSection(step=3, devices=4), ChangeSection(step=5, plan={"all": P(dp=6)})],
            "changes: step 5: actor/generation: .* needs 6 devices, the pool has 4",
        ),
        ([ChangeSection(step=3, plan={"all": P(dp=8)})], "changes: step 3: critic/training: dp=8 does not divide"),
        ([ChangeSection(step=3, plan={"actor": P()})], "changes: step 3: plan: 'actor' is not a model-stage"),
    ],
)
def test_a_change_that_cannot_be_is_refused_with_its_step(sections: Sequence[ChangeSection], message: str):
    j = changes(*sections, plan={"all": P(dp=4)})
    with pytest.raises(PlanError, match=message):
        planned_changes(j, initial_plan(j, no_auto), range(8), auto=whole_on_each)
