"""The conformance tests on actors of a Ray cluster, and what only Ray has: nodes that come and go."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

ray = pytest.importorskip("ray")

from cluster_conformance import *  # noqa: E402, F403
from devices_for_tests import DEVICES, PROGRAM, Devices, error_of, wait_until  # noqa: E402

from nereus.core.errors import UserError  # noqa: E402
from nereus.runtime.cluster import WorkerDied  # noqa: E402
from nereus.runtime.ray_cluster import RayCluster  # noqa: E402


def ray_processes() -> set[int]:
    """Servers and workers of every Ray on this machine."""
    found = set()
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended since
            if any(name in place.read_text() for name in ("ray::", "/raylet", "gcs_server")):
                found.add(int(place.parent.name))
    return found


@pytest.fixture(scope="module")
def all_devices(board: dist.TCPStore) -> Iterator[Devices]:
    """A Ray of its own, on this machine."""
    before = ray_processes()
    cluster = RayCluster(PROGRAM, (board.port,), address="local", new_slots=6, timeout_s=120.0, heartbeat_s=0.3)
    cluster.start(DEVICES)
    yield Devices(cluster, board)
    cluster.close()
    assert not ray.is_initialized()
    wait_until(lambda: ray_processes() <= before)


@pytest.fixture
def watched(devices: Devices) -> Devices:
    return devices


def test_a_stopped_device_of_another_machine_is_seen_by_somebody_there(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nereus.runtime.ray_cluster.boot_id", lambda: "another machine")
    devices.cluster.start([4])
    waiting = devices.call("wait_for_abort", [4])
    os.kill(devices.pid(4), signal.SIGSTOP)
    error = error_of(waiting)
    assert isinstance(error, WorkerDied)
    assert error.silent_s is not None and error.silent_s < 6.0  # 12 s if nobody could see it


def test_a_new_cluster_is_one_node_whose_devices_share_memory(devices: Devices) -> None:
    cluster = devices.cluster
    assert isinstance(cluster, RayCluster)
    assert cluster.shared_memory
    assert cluster.available() == (0, 1, 2, 3, 4, 5)
    assert {cluster.node_of(device) for device in DEVICES} == {0}
    assert cluster.poll() == ()
    with pytest.raises(UserError, match=r"devices \[6\] are not there: the Ray cluster has \[0, 1, 2, 3, 4, 5\]"):
        cluster.start([6])
