"""State moved between real processes: what arrives, how much of it crosses, and what a death leaves."""

from __future__ import annotations

import os
import random
import signal

import pytest
from devices_for_tests import DEVICES, Devices, error_of, kind_of
from states_for_tests import LAYOUTS, random_spec

from nereus.core.plan import ACTOR_TRAINING, Layout, Placement
from nereus.core.sharding import Cut, Holding, MovePlan, Segment, StateSpec, TensorSpec, plan_moves
from nereus.runtime.cluster import WorkerDied


def random_placement(draw: random.Random) -> Placement:
    layout = draw.choice(LAYOUTS)
    dp = draw.randint(1, len(DEVICES) // layout.size)
    gpus = tuple(draw.sample(DEVICES, dp * layout.size))
    return Placement(model_stage=ACTOR_TRAINING, layout=layout, dp=dp, gpus=gpus)


def hold(devices: Devices, spec: StateSpec, old: Placement, new: Placement) -> MovePlan:
    """Give the devices their state under the old placement and room for the new; the moves between them."""
    before, after = spec.holdings(old), spec.holdings(new)
    devices.cluster.call("hold", {d: (spec, before.get(d), after.get(d)) for d in DEVICES}).results()
    return plan_moves(spec, before, after)


def held_bytes(spec: StateSpec, holding: Holding | None) -> int:
    return spec.holding_bytes(holding or {})


def test_random_states_arrive_as_slicing_gives_them(devices: Devices) -> None:
    pool, most_rounds = devices.open(), 0
    for seed in range(30):
        draw = random.Random(seed)
        spec, old, new = random_spec(draw), random_placement(draw), random_placement(draw)
        moves, chunk_bytes = hold(devices, spec, old, new), draw.choice([1, 16, 40, 10_000])
        case = f"seed {seed}: {old.layout} on {old.gpus} -> {new.layout} on {new.gpus}, {chunk_bytes} bytes a chunk"
        received = devices.all("transfer", pool, moves.moves, chunk_bytes)
        assert {d: n for d, n in received.items() if d in new.gpus} == moves.received_bytes, case
        assert not any(n for d, n in received.items() if d not in new.gpus), case
        wrong = devices.call("wrong_tensors", new.gpus).results()
        assert wrong == {d: [] for d in new.gpus}, case
        for device, holding in spec.holdings(new).items():
            arrived = moves.received_bytes[device] + moves.kept_bytes[device]
            assert arrived == held_bytes(spec, holding), case
        most_rounds = max(most_rounds, *(n // chunk_bytes for n in received.values()))
    assert most_rounds > 50


def long_transfer(devices: Devices) -> tuple[str, MovePlan]:
    """Every rank sends 12 messages to, and receives 12 from, each of the others, when a chunk is one row of 32 bytes."""
    rows = Segment.rows(24)
    tensors = tuple(
        TensorSpec(name=f"t{i}", shape=(24, 8), dtype="float32", where="layer", layer=i, cut=Cut(0, (rows,)))
        for i in range(8)
    )
    gpus = DEVICES
    old = Placement(model_stage=ACTOR_TRAINING, layout=Layout(4, 1), dp=1, gpus=gpus)
    new = Placement(model_stage=ACTOR_TRAINING, layout=Layout(1, 4), dp=1, gpus=gpus[1:] + gpus[:1])
    return devices.open(), hold(devices, StateSpec(tensors, 8), old, new)


@pytest.mark.parametrize(("victim", "point", "nth"), [(0, "isend", 1), (2, "irecv", 20), (3, "isend", 30)])
@pytest.mark.parametrize("action", ["SIGKILL", "SIGSTOP"])
def test_a_rank_lost_in_a_transfer_leaves_the_sources_whole(
    devices: Devices, victim: int, point: str, nth: int, action: str
) -> None:
    pool, moves = long_transfer(devices)
    survivors = [device for device in DEVICES if device != victim]
    before = devices.all("source_sums")
    scene = devices.new_name("scene")
    devices.call("arm", [victim], scene, point, action, nth).results()
    calls = devices.each("transfer", DEVICES, pool, moves.moves, 32)
    if action == "SIGKILL":
        assert isinstance(error_of(calls[victim]), WorkerDied)
    else:
        devices.stopped(victim)
        devices.cluster.abort("a device does not answer")
    assert {kind_of(calls[device]) for device in survivors} == {"Aborted"}
    assert devices.call("source_sums", survivors).results() == {d: before[d] for d in survivors}
    if action == "SIGSTOP":
        os.kill(devices.pid(victim), signal.SIGCONT)
        assert kind_of(calls[victim]) == "Aborted"
        assert devices.all("source_sums") == before
        # Whole sources can be sent again.
        received = devices.all("transfer", devices.open(), moves.moves, 1000)
        assert received == moves.received_bytes
        assert devices.all("wrong_tensors") == {d: [] for d in DEVICES}
