"""Plans: what is impossible cannot be built, and positions, texts and JSON all have inverses."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.core.errors import PlanError
from nereus.core.plan import (
    ACTOR_TRAINING,
    MODELS,
    STAGES,
    Layout,
    ModelStage,
    Placement,
    Plan,
    split_evenly,
)

examples = settings(max_examples=40, derandomize=True, deadline=None)
MODEL_STAGES = [ModelStage(model, stage) for model in MODELS for stage in STAGES]


def placement(tp: int, pp: int, dp: int, gpus: tuple[int, ...], **more) -> Placement:
    return Placement(model_stage=ACTOR_TRAINING, layout=Layout(tp, pp), dp=dp, gpus=gpus, **more)


@st.composite
def random_placements(draw: st.DrawFn, model_stage: ModelStage = ACTOR_TRAINING) -> Placement:
    tp, pp, dp = (draw(st.integers(1, 4)) for _ in range(3))
    gpus = random.Random(draw(st.integers(0, 999))).sample(range(100), tp * pp * dp)
    return Placement(
        model_stage=model_stage,
        layout=Layout(tp, pp),
        dp=dp,
        gpus=tuple(gpus),
        micro_batch=draw(st.integers(1, 64)),
        recompute=draw(st.booleans()),
    )


@st.composite
def random_plans(draw: st.DrawFn) -> Plan:
    names = draw(st.lists(st.sampled_from(MODEL_STAGES), unique=True))
    return Plan(tuple(draw(random_placements(name)) for name in names))


# -- words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_stage", MODEL_STAGES, ids=str)
def test_a_model_stage_is_read_from_its_own_text(model_stage: ModelStage):
    assert ModelStage.parse(str(model_stage)) == model_stage


@pytest.mark.parametrize("text", ["actor", "", "actor/", "/training", "actor/train", "actr/training", "a/b/c"])
def test_a_model_stage_that_cannot_be_read_is_named_in_the_message(text: str):
    with pytest.raises(PlanError) as raised:
        ModelStage.parse(text)
    assert text in str(raised.value)


# -- placements --------------------------------------------------------------------------------------------------------


@examples
@given(random_placements())
def test_position_and_gpu_are_inverse(p: Placement):
    for gpu, at in p.positions():
        assert p.gpu(at.unit, at.pp_stage, at.tp_rank) == gpu
    at_all = {(at.unit, at.pp_stage, at.tp_rank) for _, at in p.positions()}
    assert at_all == {(u, s, t) for u in range(p.dp) for s in range(p.layout.pp) for t in range(p.layout.tp)}


@examples
@given(random_placements())
def test_units_are_contiguous_in_rank_order_and_answer_from_their_last_pp_stage(p: Placement):
    assert [gpu for unit in range(p.dp) for gpu in p.unit_gpus(unit)] == list(p.gpus)
    for unit in range(p.dp):
        assert [p.position(gpu).unit for gpu in p.unit_gpus(unit)] == [unit] * p.layout.size
        at = p.position(p.output_gpu(unit))
        assert (at.unit, at.pp_stage, at.tp_rank) == (unit, p.layout.pp - 1, 0)


def test_rank_order_is_tp_then_pp_then_dp():
    p = placement(2, 2, 2, tuple(range(8)))
    assert p.gpu(0, 0, 1) == 1
    assert p.gpu(0, 1, 0) == 2
    assert p.gpu(1, 0, 0) == 4


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Layout(0, 1), "tp=0"),
        (lambda: Layout(1, -2), "pp=-2"),
        (lambda: placement(1, 1, 0, ()), "actor/training: dp=0"),
        (lambda: placement(1, 1, 1, (0,), micro_batch=0), "actor/training: micro_batch=0"),
        (lambda: placement(2, 1, 2, (4, 5, 6)), r"actor/training: tp2 pp1 dp2 needs 4 GPUs, 3 .*\[4, 5, 6\]"),
        (lambda: placement(2, 1, 1, (7, 7)), r"actor/training: .*twice in \[7, 7\]"),
        (lambda: Plan((placement(1, 1, 1, (0,)), placement(1, 1, 1, (1,)))), "twice: actor/training"),
    ],
)
def test_an_impossible_plan_is_refused_with_the_field_and_the_bad_value(build, message: str):
    with pytest.raises(PlanError, match=message):
        build()


# -- plans -------------------------------------------------------------------------------------------------------------


@examples
@given(random_plans())
def test_a_plan_comes_back_from_its_json_text(plan: Plan):
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@examples
@given(random_plans(), st.sampled_from(MODEL_STAGES))
def test_a_plan_is_looked_up_by_model_stage(plan: Plan, name: ModelStage):
    if name in {p.model_stage for p in plan.placements}:
        assert name in plan and plan[name].model_stage == name
    else:
        assert name not in plan
        with pytest.raises(KeyError):
            plan[name]


@examples
@given(random_plans())
def test_the_gpus_of_a_plan_are_those_of_its_placements(plan: Plan):
    used = [gpu for p in plan.placements for gpu in p.gpus]
    assert list(plan.gpus) == sorted(set(used))


# -- dealing out -------------------------------------------------------------------------------------------------------


@examples
@given(st.integers(0, 200), st.integers(1, 30))
def test_split_evenly_gives_every_index_once_in_almost_equal_parts(total: int, parts: int):
    found = split_evenly(total, parts)
    assert len(found) == parts
    assert [i for part in found for i in part] == list(range(total))
    assert max(map(len, found)) - min(map(len, found)) <= 1
