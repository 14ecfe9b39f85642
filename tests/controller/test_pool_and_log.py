"""Which devices go, which come, and that a log of decisions can be asked again."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_controller import EIGHT, random_events

from nereus.controller.admission import AnyGain
from nereus.controller.controller import Controller
from nereus.controller.log import event_from_json, replay, row, started
from nereus.controller.pool import giving_up, joining
from nereus.core.plan import ACTOR_GENERATION, ACTOR_TRAINING, CRITIC_TRAINING, Layout, ModelStage, Placement, Plan

Held = dict[ModelStage, dict[int, float]]


def placed(name: ModelStage, layout: Layout, *gpus: int) -> Placement:
    return Placement(model_stage=name, layout=layout, dp=len(gpus) // layout.size, gpus=gpus, micro_batch=1)


def held(plan: Plan, bytes_each: float = 10.0) -> Held:
    return {p.model_stage: dict.fromkeys(p.gpus, bytes_each) for p in plan.placements}


@given(known=st.sets(st.integers(0, 20)), count=st.integers(0, 8))
def test_new_devices_have_the_least_free_ids(known: set[int], count: int) -> None:
    found = joining(known, count)
    assert len(set(found)) == count and not known & set(found)
    assert all(i in known or i in found for i in range(max(found, default=0)))


def test_an_idle_device_goes_first_then_a_redundant_one_then_the_one_with_the_least() -> None:
    plan = Plan((placed(ACTOR_TRAINING, Layout(2, 1), 0, 1, 2, 3), placed(CRITIC_TRAINING, Layout(1, 1), 4)))
    bytes_held = held(plan)
    assert giving_up(plan, range(6), 1, bytes_held) == (5,)
    assert giving_up(plan, range(5), 1, bytes_held) == (3,)
    assert giving_up(plan, range(5), 2, bytes_held) == (2, 3)
    bytes_held[CRITIC_TRAINING][4] = 1.0
    assert giving_up(plan, range(5), 3, bytes_held) == (2, 3, 4)


def test_generation_units_hold_nothing_that_is_not_elsewhere() -> None:
    plan = Plan((placed(ACTOR_GENERATION, Layout(1, 1), 1), placed(ACTOR_TRAINING, Layout(1, 1), 0)))
    assert giving_up(plan, (0, 1), 1, held(plan)) == (1,)


@given(seed=st.integers(0, 10_000))
def test_no_single_device_that_is_kept_would_have_been_cheaper(seed: int) -> None:
    rng = random.Random(seed)
    layout = rng.choice([Layout(1, 1), Layout(2, 1), Layout(1, 2)])
    gpus = rng.sample(EIGHT, rng.choice([n for n in (2, 4, 6, 8) if n % layout.size == 0]))
    plan = Plan((placed(ACTOR_TRAINING, layout, *gpus),))
    bytes_held: Held = {ACTOR_TRAINING: {gpu: rng.choice([1.0, 5.0]) for gpu in gpus}}

    def lost_bytes(without: int) -> float:
        positions: dict[int, list[int]] = {}
        for i, gpu in enumerate(gpus):
            positions.setdefault(i % layout.size, []).append(gpu)
        return sum(bytes_held[ACTOR_TRAINING][g[0]] for g in positions.values() if g == [without])

    (given_up,) = giving_up(plan, EIGHT, 1, bytes_held)
    assert lost_bytes(given_up) == min(lost_bytes(gpu) for gpu in EIGHT)


@pytest.mark.parametrize("count", [8, 9, -1])
def test_one_device_must_be_left(count: int) -> None:
    with pytest.raises(ValueError, match=str(count)):
        giving_up(Plan(()), EIGHT, count, {})


@pytest.mark.parametrize("seed", range(20))
def test_a_log_on_disk_is_answered_the_same_and_another_policy_is_found_out(seed: int) -> None:
    controller, lines = Controller(EIGHT), [json.dumps(started(EIGHT, 0))]
    for event in random_events(random.Random(seed)):
        lines.append(json.dumps(row(event, controller.handle(event))))
        assert event_from_json(json.loads(lines[-1])["event"]) == event
    rows = [json.loads(line) for line in lines]
    assert replay(rows * 2, lambda devices, decided: Controller(devices, decided=decided)) == []  # two sessions
    answers = [line for line in rows[1:] if line["event"]["kind"] == "ReplanFinished"]
    every = replay(rows, lambda devices, _: Controller(devices, policy=AnyGain(), every=1))
    assert bool(every) or not answers
    with pytest.raises(ValueError, match="begin"):
        replay(rows[1:], lambda devices, _: Controller(devices))
