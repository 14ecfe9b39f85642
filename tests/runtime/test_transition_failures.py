"""A device is killed at every point of a change of all five model-stages: what is left is known, whole, and enough."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

import pytest
from devices_for_tests import DEVICES, PRELOAD
from states_for_tests import logical, random_spec

from nereus.core.plan import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    REFERENCE_INFERENCE,
    REWARD_INFERENCE,
    Layout,
    ModelStage,
    Placement,
    Plan,
)
from nereus.runtime.checkpoint import find_tensors, write_tensors
from nereus.runtime.cluster import LocalCluster, WorkerDied, WorkerFailed
from nereus.runtime.fleet import Fleet, Source
from nereus.transition.groups import Lowering

FIVE = (ACTOR_GENERATION, REFERENCE_INFERENCE, REWARD_INFERENCE, ACTOR_TRAINING, CRITIC_TRAINING)
KEPT = FIVE[1:]
Sources = Mapping[ModelStage, Source]
SPECS = {name: random_spec(random.Random(seed)) for seed, name in enumerate(FIVE)}


def placement(name: ModelStage, tp: int, pp: int, dp: int, *gpus: int) -> Placement:
    return Placement(model_stage=name, layout=Layout(tp, pp), dp=dp, gpus=gpus or tuple(range(tp * pp * dp)))


BEFORE = Plan(
    (
        placement(ACTOR_GENERATION, 4, 1, 1),
        placement(REFERENCE_INFERENCE, 1, 1, 2, 0, 1),
        placement(REWARD_INFERENCE, 2, 1, 1, 2, 3),
        placement(ACTOR_TRAINING, 2, 1, 2),
        placement(CRITIC_TRAINING, 1, 2, 2, 3, 2, 1, 0),
    )
)
AFTER = Plan(
    (
        placement(ACTOR_GENERATION, 2, 1, 2),
        placement(REFERENCE_INFERENCE, 1, 2, 1, 3, 2),
        placement(REWARD_INFERENCE, 1, 2, 2, 0, 1, 2, 3),
        placement(ACTOR_TRAINING, 1, 2, 2, 0, 3, 1, 2),
        placement(CRITIC_TRAINING, 1, 4, 1, 2, 0, 3, 1),
    )
)


def on(devices: list[int]) -> Plan:
    """All model-stages on all of these devices, one above the other."""
    return Plan(tuple(placement(name, 1, 1, len(devices), *devices) for name in FIVE))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """The logical state of every model-stage that a transition may not lose."""
    found = {}
    for name in KEPT:
        folder = tmp_path_factory.mktemp("state")
        write_tensors(folder / "all.safetensors", {t.name: logical(t) for t in SPECS[name].tensors})
        found[name] = Source(files=find_tensors(folder))
    return found


@pytest.fixture(scope="module", params=[True, False], ids=["shared memory", "messages"])
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    made = LocalCluster(
        "programs_for_tests:Striker", (SPECS,), preload=PRELOAD, timeout_s=60.0, shared_memory=request.param
    )
    yield made
    made.close()


def started(cluster: LocalCluster, sources: Sources, lowering: Lowering) -> tuple[Fleet, dict[ModelStage, str]]:
    """All devices, whole, under the first plan; the digests of what may not be lost."""
    if missing := [d for d in DEVICES if d not in cluster.devices]:
        cluster.start(missing)
    fleet = Fleet(cluster, SPECS, lowerings=(lowering, "direct"))
    fleet.create(BEFORE, sources)
    return fleet, {name: fleet.digest_of(name, SPECS[name]) for name in KEPT}


def elements(name: ModelStage, device: int) -> set[tuple[str, int]]:
    """What a device holds before the change or after it: (tensor, index)."""
    return {
        (tensor, i)
        for plan in (BEFORE, AFTER)
        for tensor, pieces in SPECS[name].holdings(plan[name]).get(device, {}).items()
        for a, b in pieces
        for i in range(a, b)
    }


def go_on(fleet: Fleet, sources: Sources, digests: dict[ModelStage, str], victim: int, what: str) -> None:
    """The survivors hold all that had a second copy, and a plan for them comes from that, bitwise; then the old plan again.

    Only what had none is loaded from files.
    """
    lost = fleet.salvage()
    for name in KEPT:
        gone = {(tensor, i) for tensor, pieces in lost.get(name, {}).items() for a, b in pieces for i in range(a, b)}
        assert gone <= elements(name, victim), f"{name}, {what}"  # when its copy was the only one; which, and when that
        # is, tests/transition checks for every moment of random changes
        if min(BEFORE[name].dp, AFTER[name].dp) > 1:
            assert not gone, f"{name}, {what}"
    survivors = [d for d in DEVICES if d != victim]
    fleet.change(on(survivors), survivors, {name: sources[name] for name in lost})
    assert {name: fleet.digest_of(name, SPECS[name]) for name in KEPT} == digests, what
    fleet.change(BEFORE, DEVICES)
    assert {name: fleet.digest_of(name, SPECS[name]) for name in KEPT} == digests, what


@pytest.mark.parametrize("lowering", ["direct", "streamed", "staged"])
def test_without_a_failure_all_model_stages_arrive(cluster: LocalCluster, sources: Sources, lowering: Lowering) -> None:
    fleet, digests = started(cluster, sources, lowering)
    transition = fleet.change(AFTER, DEVICES)
    assert {name: fleet.digest_of(name, SPECS[name]) for name in KEPT} == digests
    assert transition.program.dag.received_bytes == sum(span.received_bytes for span in transition.spans)
    for gpu, peak in transition.peak_bytes.items():
        assert peak <= transition.program.dag.peak_bytes[gpu]


@pytest.mark.parametrize("moment", ["start", "middle", "end"])
@pytest.mark.parametrize(("lowering", "stride"), [("direct", 1), ("streamed", 4)])
def test_a_kill_at_any_point_loses_only_last_copies(
    cluster: LocalCluster, sources: Sources, moment: str, lowering: Lowering, stride: int
) -> None:
    """Every command of a device in turn; of the many batches of a streamed change every fourth."""
    for victim in (0, 3) if cluster.shared_memory else (1,):
        nth, died = 1, True
        while died:
            fleet, digests = started(cluster, sources, lowering)
            cluster.call("arm", {victim: (nth, moment)}).results()
            what = f"device {victim}, command {nth}, {moment}, {lowering}"
            try:
                fleet.change(AFTER, DEVICES)
                died = False
            except (WorkerDied, WorkerFailed):  # a survivor that could read no further may be the first to say so
                go_on(fleet, sources, digests, victim, what)
            nth += stride
        assert nth > 5, "a device takes part in more than this"
        cluster.call("arm", {victim: (-1, moment)}).results()
