"""The conformance tests on local processes, and what only those can do: stop and go on, Ctrl-C, leaks."""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from cluster_conformance import *  # noqa: F403
from devices_for_tests import (
    DEVICES,
    LARGE,
    PRELOAD,
    PROGRAM,
    Devices,
    error_of,
    kind_of,
    parent_of,
    process_state,
    wait_until,
)

from nereus.runtime.cluster import LocalCluster, WorkerDied, WorkerFailed


@pytest.fixture(autouse=True, scope="module")
def start_early(doomed_controller: subprocess.Popen[str]) -> None:
    """The last tests need it; it starts beside the first ones."""


@pytest.fixture
def cluster(board: dist.TCPStore, all_devices: Devices) -> Iterator[LocalCluster]:
    """One more cluster, for tests that stop it; no device is started. Its controller is less patient than its ranks."""
    made = LocalCluster(PROGRAM, (board.port,), preload=PRELOAD, timeout_s=120.0, heartbeat_s=math.inf)
    made.timeout_s = 2.0
    yield made
    made.close()


@pytest.fixture
def watched(board: dist.TCPStore, all_devices: Devices) -> Iterator[Devices]:
    """Four more devices, that must not be silent for long."""
    made = LocalCluster(PROGRAM, (board.port,), preload=PRELOAD, timeout_s=120.0, heartbeat_s=0.3)
    made.start(DEVICES)
    yield Devices(made, board)
    made.close()


# -- calls ---------------------------------------------------------------------------------------------------------


def test_a_stopped_device_holds_up_neither_calls_nor_other_devices(devices: Devices) -> None:
    scene = devices.new_name("scene")
    devices.call("arm", [1], scene, "point", "SIGSTOP").results()
    stopped = devices.call("reach", [1], "point")
    devices.stopped(1)
    queued = [devices.call("echo", [1], LARGE) for _ in range(3)]
    assert devices.call("echo", [0], "x").results() == {0: "x"}
    os.kill(devices.pid(1), signal.SIGCONT)
    assert stopped.results() == {1: None}
    assert [len(call.results()[1]) for call in queued] == [len(LARGE)] * 3


# -- deaths --------------------------------------------------------------------------------------------------------


def test_a_device_that_dies_unasked_is_missed_at_the_next_call(devices: Devices) -> None:
    os.kill(devices.pid(3), signal.SIGKILL)
    error = error_of(devices.call("echo", [3], "x"))
    assert isinstance(error, WorkerDied)
    assert error.exit_code == -signal.SIGKILL
    devices.cluster.stop([3])  # stopped is what it is
    with pytest.raises(ValueError, match=r"no such device: \[3\]"):
        devices.call("echo", [3], "x")


def test_a_device_that_does_not_answer_an_abort_is_killed(cluster: LocalCluster) -> None:
    cluster.start([0, 1])
    cluster.call("arm", dict.fromkeys((0, 1), ("hangs",))).results()
    with pytest.raises(WorkerFailed, match="ZeroDivisionError"):  # the cause, not what came of it
        cluster.call("hang_or_fail", {0: (0,), 1: (0,)}).results()
    assert cluster.devices == (1,)
    with pytest.raises(WorkerDied, match=r"device 0 died .* running hang_or_fail: no answer to an abort in 2.0 s"):
        cluster.call("echo", {0: ("x",)})
    assert cluster.call("echo", {1: ("x",)}).results() == {1: "x"}


def test_a_peer_that_stops_is_found_by_timeouts_alone(cluster: LocalCluster, board: dist.TCPStore) -> None:
    devices = Devices(cluster, board)
    cluster.start([0, 1, 2])
    name = devices.open((0, 1, 2))
    devices.call("set_timeout", (0, 1, 2), name, 0.3).results()
    devices.call("arm", [1], "stops by itself", "before", "SIGSTOP").results()
    with pytest.raises(WorkerDied, match=r"device 1 died .* running talk: no answer to an abort"):
        devices.call("talk", (0, 1, 2), name, "all_reduce", 1).results()
    assert set(devices.call("sum_of_ones", (0, 2), devices.open((0, 2))).results().values()) == {2.0}


# -- aborts --------------------------------------------------------------------------------------------------------


# -- start, stop, close --------------------------------------------------------------------------------------------


def test_arguments_that_cannot_be_sent_start_nothing(all_devices: Devices) -> None:
    cluster = LocalCluster(PROGRAM, (threading.Lock(),))
    with pytest.raises(TypeError, match="the arguments for device 0 cannot be sent"):
        cluster.start([0])
    assert cluster.devices == ()


def test_stop_ends_processes_also_stopped_ones(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nereus.runtime.cluster.STOP_S", 0.5)
    cluster.start([0, 1])
    pids = [cluster.process_id(0), cluster.process_id(1)]
    os.kill(pids[0], signal.SIGSTOP)
    cluster.stop([0, 1])
    assert [process_state(pid) for pid in pids] == ["", ""]


def test_closing_ends_calls_in_flight(cluster: LocalCluster) -> None:
    cluster.start([0, 1])
    waiting, deaf = cluster.call("wait_for_abort", {0: ()}), cluster.call("echo", {1: (LARGE,)})
    cluster.close()
    assert kind_of(waiting) == "Aborted"
    assert kind_of(deaf) == "Aborted" or deaf.results()
    with pytest.raises(ValueError, match="no such device"):
        cluster.call("echo", {0: ("x",)})


def test_stopping_a_device_ends_what_was_called_on_it(cluster: LocalCluster) -> None:
    cluster.start([0])
    call = cluster.call("exit", {0: (0,)})
    behind = cluster.call("echo", {0: ("x",)})
    cluster.stop([0])
    for ended in (call, behind):
        assert isinstance(error_of(ended), WorkerDied)


def test_starting_and_stopping_leaks_nothing_in_the_controller(devices: Devices) -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    devices.cluster.start([8])
    devices.cluster.stop([8])
    devices.all("echo", "x")
    before = held()
    for _ in range(5):
        devices.cluster.start([8])
        devices.call("echo", [8], LARGE)
        devices.cluster.stop([8])
    devices.all("echo", "x")
    wait_until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))


def test_ctrl_c_is_for_the_controller_and_workers_end_with_it(doomed_controller: subprocess.Popen[str]) -> None:
    controller: Any = doomed_controller
    pids = [int(word) for word in controller.stdout.readline().split()]
    assert len(pids) == 2
    os.killpg(controller.pid, signal.SIGINT)  # as a terminal does
    controller.stdin.write("go on\n")
    controller.stdin.flush()
    assert controller.stdout.readline() == "1 [0, 1]\n"
    pids.append(parent_of(pids[0]))  # the fork server
    assert "" not in [process_state(pid) for pid in pids]
    # One worker is in a command that never ends by itself.
    assert controller.stdout.readline() == "hanging\n"
    controller.kill()
    controller.wait()
    wait_until(lambda: [process_state(pid) for pid in pids] == ["", "", ""])
