"""`nereus bench reshard` and `coordination` at small sizes: what must hold of every row, whatever the machine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import permutations
from typing import Any

import pytest

from nereus.cli import bench_coordination
from nereus.cli.bench_coordination import OVERLAPS, WAYS, Ground, Trial, draw_trial, overlap_s
from nereus.cli.bench_reshard import bench_reshard, lines
from nereus.cli.bench_reshard_cases import FIVE_NAME, NAMES, TRANSITIONS, case_of, decoder, least_bytes, placement
from nereus.cli.bench_reshard_figure12 import figure_12
from nereus.core.errors import UserError
from nereus.core.plan import ACTOR_TRAINING, REFERENCE_INFERENCE, REWARD_INFERENCE, ModelStage, Plan
from nereus.core.shapes import state_spec
from nereus.core.sharding import StateSpec, plan_moves

SMALL = 1e6


@pytest.fixture(scope="module")
def reshard() -> dict[str, Any]:
    return bench_reshard(
        SMALL,
        transitions=("tp4 -> tp2 dp2", FIVE_NAME),
        peers=("dcp", "dtensor"),
        repeats=1,
        figure=False,
        say=lambda line: None,
    )


def test_every_transition_is_run_in_every_way(reshard: dict[str, Any]) -> None:
    ways = {(row["transition"], row["transport"], row["way"]) for row in reshard["rows"]}
    transitions = {row["transition"] for row in reshard["rows"]}
    assert transitions == {"tp4 -> tp2 dp2", FIVE_NAME}
    assert ways >= {(t, p, w) for t in transitions for p in ("shared memory", "gloo") for w in ("direct", "staged")}
    assert {row["lowering"] for row in reshard["rows"]} >= {"direct", "staged", "streamed"}


def test_bytes_peaks_and_digests(reshard: dict[str, Any]) -> None:
    for row in reshard["rows"]:
        assert row["digest_equal"], row
        assert row["peak_off_bytes"] <= row["staging_bytes"], row
        assert row["peak_bytes"] <= row["predicted_peak_bytes"], row
        if row["way"] != "staged":
            assert row["bytes_received"] == row["bytes_lower_bound"], row
        assert row["bytes_received"] >= row["bytes_lower_bound"]
        assert 0 < row["primitives_s"] < row["seconds"]
    assert reshard["summary"]["ok"]
    assert len(lines(reshard)) > len(reshard["rows"])


def test_tight_is_less_memory_than_direct(reshard: dict[str, Any]) -> None:
    by_way = {(row["transition"], row["transport"], row["way"]): row["peak_bytes"] for row in reshard["rows"]}
    tight = [key for key in by_way if key[2] == "tight"]
    assert tight and all(by_way[key] < by_way[(*key[:2], "direct")] for key in tight)


def test_peers_are_beside_the_transitions_that_they_can_make(reshard: dict[str, Any]) -> None:
    for row in reshard["rows"]:
        assert row["peers"]["dcp_tmpfs_s"] > 0
        assert ("dtensor_s" in row["peers"]) == (row["transition"] != FIVE_NAME)


def test_a_peer_that_is_not_installed_is_said_to_be_missing() -> None:
    found = bench_reshard(
        SMALL, devices=(1,), transitions=NAMES, peers=("torchft",), figure=False, say=lambda line: None
    )
    assert found["rows"] == []
    if find_spec("torchft") is None:
        assert found["summary"]["notes"] == ["torchft is left out: it is not installed (pip install torchft)"]


def test_a_peer_that_is_not_known_is_refused() -> None:
    with pytest.raises(UserError, match="no peer is called deepfreeze; known are dcp"):
        bench_reshard(SMALL, transitions=("dp out",), peers=("deepfreeze",), say=lambda line: None)


# -- the lower bound -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, (_, new) in TRANSITIONS.items() if new[0] * new[1] * new[2] <= 4])
def test_the_bound_is_the_least_over_all_orders_of_the_moves_that_are_planned(name: str) -> None:
    case = case_of(name, round(SMALL))
    spec, old, new = case.specs[ACTOR_TRAINING], case.current[ACTOR_TRAINING], case.target[ACTOR_TRAINING]
    ways = (new.layout.tp, new.layout.pp, new.dp)
    totals = [
        plan_moves(spec, spec.holdings(old), spec.holdings(placement(ACTOR_TRAINING, ways, gpus))).total_received_bytes
        for gpus in permutations(sorted(new.gpus))
    ]
    assert least_bytes(spec, old, new) == min(totals)


def test_cases_are_made_smaller_to_fit() -> None:
    for name in NAMES:
        case = case_of(name, 336_000_000, memory_bytes=10e9)
        both = sum(
            case.specs[p.model_stage].num_bytes * p.dp for plan in (case.current, case.target) for p in plan.placements
        )
        assert both < 11e9
    assert 0.9 < decoder(336e6).num_params / 336e6 < 1.1


def test_figure_12_has_every_model_that_fits() -> None:
    (row,) = figure_12(("Llama-3.1-8B",), (8,))
    assert row["transitions"] > 0 and 0 < row["staged_transitions"] <= row["transitions"]
    assert row["seconds"] > 0 and row["staged_over"] > 1


# -- coordination ----------------------------------------------------------------------------------------------------


def test_coordination_never_fails_and_never_waits() -> None:
    found = bench_coordination.bench_coordination(
        4, overlaps=("other model, other stage",), parameters=SMALL, say=lambda line: None
    )
    (row,) = found["rows"]
    assert row["coordinated_success"] == 1 and row["coordinated_waits"] == 0 and row["edges"] >= 1
    assert row["independent_success"] * row["trials"] + sum(row["failures"].values()) == row["trials"]
    assert row["allow_overlap"] >= 2


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    made = Ground((REFERENCE_INFERENCE, REWARD_INFERENCE), SMALL)
    yield made
    made.close()


def swap(usable_copies: float) -> Trial:
    """Two model-stages that change places; memory for so many copies on each GPU."""
    m, n = REFERENCE_INFERENCE, REWARD_INFERENCE
    current = Plan((placement(m, (1, 1, 1), (0,)), placement(n, (1, 1, 1), (1,))))
    target = Plan((placement(m, (1, 1, 1), (1,)), placement(n, (1, 1, 1), (0,))))
    copy = state_spec(decoder(SMALL), dtype="float32", trained=False).num_bytes
    planned = draw_trial(random.Random(0), specs(), 1).planned
    return Trial(number=0, current=current, target=target, usable_bytes=usable_copies * copy, planned=planned)


def specs() -> dict[ModelStage, StateSpec]:
    spec = state_spec(decoder(SMALL), dtype="float32", trained=False)
    return {REFERENCE_INFERENCE: spec, REWARD_INFERENCE: spec}


def test_independent_swaps_wait_for_each_other_where_there_is_no_room(ground: Ground) -> None:
    ground.times = [0.1]
    assert ground._independent(swap(1.5), random.Random(0)).why == "circular wait"
    ground.times = [5.0]
    done = ground._independent(Trial(**_fields(swap(2.5), number=1)), random.Random(0))
    assert done.ok and not done.waits and not done.why


def _fields(trial: Trial, **other: Any) -> dict[str, Any]:
    return {name: getattr(trial, name) for name in Trial.__dataclass_fields__} | other


def test_every_trial_that_is_drawn_needs_coordination() -> None:
    rng = random.Random(5)
    for number in range(8):
        trial = draw_trial(rng, specs(), number)
        assert trial.planned.edges
        assert trial.planned.peak_bytes.max() <= trial.usable_bytes
        assert set(trial.planned.lowerings.values()) <= set(WAYS)
        assert trial.allows_overlap or number % 2


def test_overlap_counts_moments_with_two_model_stages_once() -> None:
    m, n, o = OVERLAPS["other model, other stage"]
    assert overlap_s([]) == 0
    assert overlap_s([(m, 0, 2), (m, 1, 3)]) == 0
    assert overlap_s([(m, 0, 4), (n, 1, 3), (o, 2, 5), (n, 6, 7)]) == 3
