"""Planned changes before a run starts: laid where the state is, and refused where no order fits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nereus.core.errors import PlanError
from nereus.core.job import ChangeSection, PlacementSection, PlannedChange
from nereus.core.plan import ACTOR_GENERATION, ACTOR_TRAINING, CRITIC_TRAINING, Layout, ModelStage, Placement, Plan
from nereus.core.sharding import Cut, Segment, StateSpec, TensorSpec, plan_moves
from nereus.rl.changes import check_changes, lay_out

STATE = StateSpec(
    tuple(
        TensorSpec(
            name=f"{layer}", shape=(8, 64), dtype="float32", where="layer", layer=layer, cut=Cut(0, (Segment.rows(8),))
        )
        for layer in range(8)
    ),
    8,
)
SPECS = dict.fromkeys((ACTOR_GENERATION, ACTOR_TRAINING, CRITIC_TRAINING), STATE)


def place(m: ModelStage, tp: int, pp: int, dp: int) -> Placement:
    return Placement(model_stage=m, layout=Layout(tp, pp), dp=dp, gpus=tuple(range(tp * pp * dp)))


def job(**plan: PlacementSection) -> Any:
    return SimpleNamespace(changes=[ChangeSection(step=1, plan={k.replace("_", "/"): v for k, v in plan.items()})])


BEFORE = Plan((place(ACTOR_GENERATION, 2, 4, 1), place(ACTOR_TRAINING, 1, 4, 2), place(CRITIC_TRAINING, 1, 8, 1)))
AFTER = Plan((place(ACTOR_GENERATION, 2, 4, 1), place(ACTOR_TRAINING, 2, 4, 1), place(CRITIC_TRAINING, 1, 8, 1)))
CHANGE = PlannedChange(1, tuple(range(8)), AFTER)


def received(plan: Plan, m: ModelStage) -> int:
    return plan_moves(STATE, STATE.holdings(BEFORE[m]), STATE.holdings(plan[m])).total_received_bytes


def test_a_change_is_laid_so_that_it_moves_nothing_where_it_can() -> None:
    (laid,) = lay_out(job(actor_training=PlacementSection(tp=2, pp=4)), BEFORE, [CHANGE], SPECS)
    assert received(AFTER, ACTOR_TRAINING) > 0
    assert received(laid.plan, ACTOR_TRAINING) == 0
    assert laid.plan[CRITIC_TRAINING] == BEFORE[CRITIC_TRAINING]


def test_devices_that_the_job_names_stay_in_their_order() -> None:
    named = PlacementSection(tp=2, pp=4, gpus=list(range(8)))
    (laid,) = lay_out(job(actor_training=named), BEFORE, [CHANGE], SPECS)
    assert laid.plan == AFTER


def test_a_change_that_fits_in_no_order_is_refused_with_its_step() -> None:
    most = max(STATE.holding_bytes(h) for h in STATE.holdings(BEFORE[ACTOR_TRAINING]).values())
    check_changes(BEFORE, [CHANGE], SPECS, usable_bytes=10 * most)
    with pytest.raises(PlanError, match=r"changes: step 1: no order of the transition fits: GPUs 0, 1"):
        check_changes(BEFORE, [CHANGE], SPECS, usable_bytes=most)
