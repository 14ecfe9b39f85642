"""A job's state through failures that leave all units whole: the next change of plan makes every communicator anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from devices_for_tests import PRELOAD
from fleet_for_tests import SPEC, plan
from states_for_tests import logical

from nereus.core.errors import StateError
from nereus.core.plan import ACTOR_TRAINING
from nereus.runtime.checkpoint import find_tensors, write_tensors
from nereus.runtime.cluster import LocalCluster, WorkerDied, WorkerFailed
from nereus.runtime.fleet import Fleet, Source


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    made = LocalCluster("programs_for_tests:Holder", ({ACTOR_TRAINING: SPEC},), preload=PRELOAD, timeout_s=120.0)
    yield made
    made.close()


@pytest.fixture
def fleet(cluster: LocalCluster, tmp_path: Path) -> Fleet:
    """One model-stage on devices 0-2 of four."""
    write_tensors(tmp_path / "a.safetensors", {t.name: logical(t) for t in SPEC.tensors})
    cluster.start([0, 1, 2, 3])
    made = Fleet(cluster, {ACTOR_TRAINING: SPEC})
    made.create(plan(3, 1, 1), {ACTOR_TRAINING: Source(files=find_tensors(tmp_path))})
    return made


def test_a_change_of_plan_after_a_failed_call_or_a_death_loses_nothing(fleet: Fleet) -> None:
    cluster, digest = fleet.cluster, fleet.digest([ACTOR_TRAINING])
    assert fleet.change(plan(1, 3, 1), [0, 1, 2, 3]).moved[ACTOR_TRAINING].received_bytes > 0
    assert fleet.digest([ACTOR_TRAINING]) == digest
    with pytest.raises(WorkerFailed):
        cluster.call("no_such_method", {0: ()}).results()
    fleet.change(plan(3, 1, 1), [0, 1, 2, 3])
    assert fleet.digest([ACTOR_TRAINING]) == digest
    with pytest.raises(WorkerDied):
        cluster.call("die", {3: ()}).results()
    fleet.change(plan(1, 1, 3), [0, 1, 2])
    assert fleet.digest([ACTOR_TRAINING]) == digest
    fleet.change(plan(2, 2, 1), [0, 1, 2, 3])  # the same id, another process
    assert fleet.digest([ACTOR_TRAINING]) == digest


def test_replicas_that_differ_are_an_error_and_not_a_digest(fleet: Fleet) -> None:
    fleet.change(plan(1, 1, 2), [0, 1, 2, 3])
    fleet.cluster.call("set_counters", {1: (ACTOR_TRAINING, "t2", {3: 5})}).results()
    with pytest.raises(StateError, match=r"replicas differ: t2\[0:6\] on devices 0 and 1"):
        fleet.digest([ACTOR_TRAINING])
