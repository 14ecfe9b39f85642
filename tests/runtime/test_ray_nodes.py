"""A job's state through the loss of a node of a Ray cluster, and on a new one. A node is a raylet of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from devices_for_tests import error_of, kind_of, wait_until
from fleet_for_tests import SPEC, plan
from states_for_tests import logical

from nereus.core.errors import UserError
from nereus.core.plan import ACTOR_TRAINING
from nereus.runtime.checkpoint import find_tensors, write_tensors
from nereus.runtime.cluster import PoolNews, WorkerDied
from nereus.runtime.fleet import Fleet, Source
from nereus.runtime.ray_cluster import RayCluster

cluster_utils = pytest.importorskip("ray.cluster_utils")

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}


@pytest.fixture
def nodes() -> Iterator[Any]:
    """A Ray cluster of two nodes: the controller's, with two devices, and one with one."""
    made = cluster_utils.Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 2})
    made.add_node(**NODE)
    yield made
    made.shutdown()


@pytest.fixture
def cluster(nodes: Any) -> Iterator[RayCluster]:
    made = RayCluster("programs_for_tests:Holder", ({ACTOR_TRAINING: SPEC},), address=nodes.address, timeout_s=60.0)
    yield made
    made.close()


def test_a_job_goes_on_without_a_lost_node_and_on_a_new_one(nodes: Any, cluster: RayCluster, tmp_path: Path) -> None:
    assert (cluster.available(), cluster.shared_memory, cluster.poll()) == ((0, 1, 2), False, ())
    cluster.start([0, 1, 2])
    assert [cluster.node_of(device) for device in cluster.devices] == [0, 0, 1]
    write_tensors(tmp_path / "a.safetensors", {t.name: logical(t) for t in SPEC.tensors})
    fleet = Fleet(cluster, {ACTOR_TRAINING: SPEC})
    fleet.create(plan(3, 1, 1), {ACTOR_TRAINING: Source(files=find_tensors(tmp_path))})
    digest = fleet.digest([ACTOR_TRAINING])
    fleet.change(plan(1, 1, 3), [0, 1, 2])
    assert fleet.digest([ACTOR_TRAINING]) == digest

    calls = {device: cluster.call("wait_for_abort", {device: ()}) for device in cluster.devices}
    nodes.remove_node(nodes.list_all_nodes()[-1], allow_graceful=False)
    assert cluster.wait_any(list(calls.values())) == 2
    error = error_of(calls[2])
    assert isinstance(error, WorkerDied)
    assert (error.device, error.silent_s) == (2, None)
    assert [kind_of(calls[device]) for device in (0, 1)] == ["Aborted", "Aborted"]
    assert cluster.devices == (0, 1)
    news: list[PoolNews] = []
    wait_until(lambda: news.extend(cluster.poll()) or bool(news))
    assert news == [PoolNews(vanished=(2,))]
    assert fleet.salvage() == {}
    fleet.change(plan(2, 1, 1), [0, 1])
    assert fleet.digest([ACTOR_TRAINING]) == digest
    with pytest.raises(UserError, match=r"devices \[2\] are not there"):
        cluster.start([2])

    nodes.add_node(**NODE)
    assert cluster.poll() == (PoolNews(appeared=(2,)),)
    fleet.change(plan(1, 3, 1), [0, 1, 2])
    assert [cluster.node_of(device) for device in cluster.devices] == [0, 0, 2]
    assert [cluster.incarnation(device) for device in cluster.devices] == [0, 0, 1]
    assert fleet.digest([ACTOR_TRAINING]) == digest
