"""Four devices for all tests of a module, whole again before each test, and a controller that will be killed."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

pytest.register_assert_rewrite("cluster_conformance", "devices_for_tests")

from devices_for_tests import DEVICES, PRELOAD, PROGRAM, Devices  # noqa: E402

from nereus.runtime.cluster import LocalCluster  # noqa: E402


@pytest.fixture(scope="session")
def board() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(scope="module")
def doomed_controller() -> Iterator[subprocess.Popen[str]]:
    """A controller with two workers, in a session of its own; started early, since it takes seconds."""
    script = Path(__file__).with_name("controller_for_tests.py")
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, start_new_session=True
    )
    yield process
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def all_devices(board: dist.TCPStore) -> Iterator[Devices]:
    """Whom nobody watches: tests stop them, and let them go on."""
    cluster = LocalCluster(PROGRAM, (board.port,), preload=PRELOAD, timeout_s=120.0, heartbeat_s=math.inf)
    cluster.start(DEVICES)
    yield Devices(cluster, board)
    cluster.close()


@pytest.fixture
def devices(all_devices: Devices) -> Devices:
    all_devices.heal()
    return all_devices
