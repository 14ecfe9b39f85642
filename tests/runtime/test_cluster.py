"""Calls, failures, deaths and aborts as the controller sees them, on real processes."""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from devices_for_tests import (
    DEVICES,
    PRELOAD,
    PROGRAM,
    Devices,
    error_of,
    kind_of,
    parent_of,
    process_state,
    wait_until,
)

from nereus.core.errors import PlanError
from nereus.runtime.cluster import LocalCluster, WorkerDied, WorkerFailed

LARGE = bytes(4 * 2**20)
"""Many times what a pipe holds."""


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


def test_results_come_by_device(devices: Devices) -> None:
    arguments = {device: (f"to {device}",) for device in (3, 0, 2)}
    assert devices.cluster.call("echo", arguments).results() == {device: f"to {device}" for device in (3, 0, 2)}


def test_commands_of_a_device_run_in_the_order_of_the_calls(devices: Devices) -> None:
    before = devices.all("note", "first")
    calls = [devices.call("note", DEVICES, i) for i in range(50)]
    # Whatever the order in which the results are asked for.
    for i in reversed(range(50)):
        assert calls[i].results() == {d: [*before[d], *range(i + 1)] for d in DEVICES}


def test_an_exception_reaches_the_caller_and_frees_the_other_ranks(devices: Devices) -> None:
    name = devices.open()
    with pytest.raises(WorkerFailed) as caught:
        devices.all("sum_or_fail", name, 1)
    error = caught.value
    assert (error.device, error.running, error.failure.kind) == (1, "sum_or_fail", "ZeroDivisionError")
    assert "ZeroDivisionError: on purpose" in str(error)
    assert "in sum_or_fail" in error.failure.traceback
    assert set(devices.all("sum_of_ones", devices.open()).values()) == {4.0}


def test_an_error_of_the_user_arrives_as_itself(devices: Devices) -> None:
    with pytest.raises(PlanError) as caught:
        devices.cluster.call("fail", {2: ("PlanError",)}).results()
    assert str(caught.value) == "PlanError on purpose"


def test_an_unknown_method_or_device_is_an_error_and_nothing_more(devices: Devices) -> None:
    assert kind_of(devices.call("no_such_method", [0])) == "AttributeError"
    with pytest.raises(ValueError, match=r"echo: no such device: \[7\]; running are \[0, 1, 2, 3\]"):
        devices.call("echo", [0, 7], "x")
    assert devices.all("echo", "x") == dict.fromkeys(DEVICES, "x")


def test_what_cannot_be_sent_or_read_fails_that_call_and_no_other(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = devices.all("note", "before")
    with pytest.raises(TypeError, match=r"note: the arguments for device 1 cannot be sent: .*lock"):
        devices.cluster.call("note", {0: ("never",), 1: (threading.Lock(),)})
    module = types.ModuleType("only_in_the_controller")
    exec("class Stranger:\n    pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_in_the_controller", module)
    assert kind_of(devices.call("note", [0], module.Stranger())) == "ModuleNotFoundError"
    assert "lambda" in str(error_of(devices.call("unsendable", [0])))
    with pytest.raises(TypeError, match=r"unreadable: the result of device 0 cannot be read here: .*only_here"):
        devices.call("unreadable", [0]).results()
    assert devices.all("note", "after") == {d: [*noted[d], "after"] for d in DEVICES}


def test_large_messages_in_both_directions_do_not_block_each_other(devices: Devices) -> None:
    calls = [devices.call("echo", DEVICES, (i, LARGE)) for i in range(4)]
    for i, call in enumerate(calls):
        assert all(value == (i, LARGE) for value in call.results().values())


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


def test_a_death_is_told_with_all_that_is_known_of_it(devices: Devices) -> None:
    cluster, before = devices.cluster, devices.cluster.incarnation(1)
    pid = devices.pid(1)
    answered = devices.call("echo", DEVICES, "x")
    fatal = devices.call("exit", [1], 3)
    behind = devices.call("echo", [1], "y")
    for call in (fatal, behind):
        error = error_of(call)
        assert isinstance(error, WorkerDied)
        assert (error.device, error.running, error.exit_code) == (1, "exit", 3)
        assert str(error) == "device 1 died (exit code 3) while running exit"
    assert answered.results() == dict.fromkeys(DEVICES, "x")  # it had answered that before
    assert cluster.devices == (0, 2, 3)
    with pytest.raises(WorkerDied):
        devices.all("echo", "x")
    assert process_state(pid) == ""  # not even a zombie
    cluster.start([1])
    assert cluster.incarnation(1) == before + 1
    assert devices.pid(1) != pid
    assert devices.all("echo", "x") == dict.fromkeys(DEVICES, "x")


def test_a_death_is_the_cause_whoever_is_the_first_to_notice(devices: Devices) -> None:
    name = devices.open()
    devices.call("arm", [2], devices.new_name("scene"), "in all_reduce", "SIGKILL", 3).results()
    with pytest.raises(WorkerDied, match=r"device 2 died \(exit code -9\) while running talk"):
        devices.all("talk", name, "all_reduce", 2)


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


def test_a_device_that_is_stopped_in_the_middle_of_a_call_is_killed_and_named(watched: Devices) -> None:
    name, pid = watched.open(), watched.pid(2)
    watched.call("arm", [2], "stops by itself", "before", "SIGSTOP").results()
    with pytest.raises(
        WorkerDied, match=r"device 2 did not answer for \d.\d s and was killed while running talk"
    ) as caught:
        watched.all("talk", name, "all_reduce", 2)
    assert caught.value.silent_s is not None and caught.value.silent_s >= 0.3
    assert caught.value.exit_code == -signal.SIGKILL
    assert process_state(pid) == ""
    assert watched.cluster.devices == (0, 1, 3)
    assert set(watched.call("sum_of_ones", (0, 1, 3), watched.open((0, 1, 3))).results().values()) == {3.0}


def test_a_stopped_device_that_is_waited_for_among_others_wakes_the_waiter(watched: Devices) -> None:
    idle, stopped = watched.call("wait_for_abort", [0]), watched.call("wait_for_abort", [1])
    os.kill(watched.pid(1), signal.SIGSTOP)
    assert watched.cluster.wait_any([idle, stopped]) == 1
    error = error_of(stopped)
    assert isinstance(error, WorkerDied) and error.silent_s is not None
    assert kind_of(idle) == "Aborted"


@pytest.mark.parametrize("how", ["working", "sleeping"])
def test_a_device_whose_listener_cannot_answer_is_not_dead(watched: Devices, how: str) -> None:
    """A call that keeps the interpreter to itself for several heartbeats."""
    assert watched.call("keep_interpreter", (0, 1), how, 1.0).results() == dict.fromkeys((0, 1), "kept")
    assert watched.cluster.devices == DEVICES


# -- aborts --------------------------------------------------------------------------------------------------------


def test_an_abort_ends_what_was_called_before_and_nothing_after(devices: Devices) -> None:
    noted = devices.all("note", "before")
    for i in range(60):
        running = devices.call("wait_for_abort", DEVICES)
        queued = devices.call("note", DEVICES, "never")
        devices.cluster.abort(f"abort {i}")
        after = devices.call("stay", DEVICES, 10)
        assert after.results() == dict.fromkeys(DEVICES, "stayed")
        later = devices.call("stay", DEVICES, 3)
        for call in (running, queued):  # asked for late, when other calls run
            error = error_of(call)
            assert isinstance(error, WorkerFailed)
            assert (error.failure.kind, error.failure.message) == ("Aborted", f"abort {i}")
        assert later.results() == dict.fromkeys(DEVICES, "stayed")
    assert devices.all("note", "after") == {d: [*noted[d], "after"] for d in DEVICES}


def test_a_failed_call_is_no_danger_to_later_ones_however_often_it_is_asked(devices: Devices) -> None:
    failed = devices.call("fail", [0], "ZeroDivisionError")
    assert kind_of(failed) == "ZeroDivisionError"
    name = devices.open()
    for _ in range(3):
        assert kind_of(failed) == "ZeroDivisionError"
        assert set(devices.all("sum_of_ones", name).values()) == {4.0}


def test_an_abort_breaks_the_communicators_of_idle_and_busy_devices_alike(devices: Devices) -> None:
    name = devices.open()
    for _ in range(20):
        devices.cluster.abort("between two commands")
        calls = devices.each("sum_of_ones", DEVICES, name)
        assert {kind_of(call) for call in calls.values()} == {"Aborted"}
        name = devices.open()
        assert set(devices.all("sum_of_ones", name).values()) == {4.0}


# -- start, stop, close --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["PlanError", "7"])
def test_a_start_that_fails_leaves_things_as_they_were(devices: Devices, fault: str) -> None:
    name = devices.open()
    devices.board.set("fault at start 5", fault)
    with pytest.raises((PlanError, WorkerDied)) as caught:
        devices.cluster.start([4, 5, 6])
    if fault == "PlanError":
        assert str(caught.value) == "device 5 is not wanted"
    else:
        assert str(caught.value) == "device 5 died (exit code 7) while running start"
    assert devices.cluster.devices == DEVICES
    assert set(devices.all("sum_of_ones", name).values()) == {4.0}
    devices.cluster.start([5])
    assert devices.call("echo", [5], "x").results() == {5: "x"}
    devices.cluster.stop([5])


def test_arguments_that_cannot_be_sent_start_nothing(all_devices: Devices) -> None:
    cluster = LocalCluster(PROGRAM, (threading.Lock(),))
    with pytest.raises(TypeError, match="the arguments for device 0 cannot be sent"):
        cluster.start([0])
    assert cluster.devices == ()


def test_a_device_is_started_once(devices: Devices) -> None:
    for ids in ([4, 1], [4, 4]):
        with pytest.raises(ValueError, match=rf"device {ids[1]} is running already"):
            devices.cluster.start(ids)
    assert devices.cluster.devices == DEVICES


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
