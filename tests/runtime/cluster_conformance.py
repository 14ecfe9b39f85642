"""Calls, failures, deaths and aborts as the controller sees them: what every backend does, on real processes.

A module of tests imports all of this and gives two fixtures: `devices`, the four devices, whole; `watched`, the same or
other ones, that must not be silent for long.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import types

import pytest
from devices_for_tests import DEVICES, LARGE, Devices, error_of, kind_of, process_state, wait_until

from nereus.core.errors import PlanError
from nereus.runtime.cluster import WorkerDied, WorkerFailed


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


def test_a_death_is_told_with_all_that_is_known_of_it(devices: Devices) -> None:
    cluster, before = devices.cluster, devices.cluster.incarnation(1)
    pid = devices.pid(1)
    answered = devices.call("echo", DEVICES, "x")
    fatal = devices.call("exit", [1], 3)
    behind = devices.call("echo", [1], "y")
    for call in (fatal, behind):
        error = error_of(call)
        assert isinstance(error, WorkerDied)
        assert (error.device, error.running, error.silent_s, error.deaf_s) == (1, "exit", None, None)
        assert error.exit_code in (3, None)
        assert re.fullmatch(r"device 1 died \((exit code 3|its process has ended)\) while running exit", str(error))
    assert answered.results() == dict.fromkeys(DEVICES, "x")  # it had answered that before
    assert cluster.devices == (0, 2, 3)
    with pytest.raises(WorkerDied):
        devices.all("echo", "x")
    wait_until(lambda: process_state(pid) == "")  # not even a zombie
    cluster.start([1])
    assert cluster.incarnation(1) == before + 1
    assert devices.pid(1) != pid
    assert devices.all("echo", "x") == dict.fromkeys(DEVICES, "x")


def test_a_death_is_the_cause_whoever_is_the_first_to_notice(devices: Devices) -> None:
    name = devices.open()
    devices.call("arm", [2], devices.new_name("scene"), "in all_reduce", "SIGKILL", 3).results()
    with pytest.raises(WorkerDied, match=r"device 2 died \(.+\) while running talk"):
        devices.all("talk", name, "all_reduce", 2)


def test_a_device_that_is_stopped_in_the_middle_of_a_call_is_killed_and_named(watched: Devices) -> None:
    name, pid = watched.open(), watched.pid(2)
    watched.call("arm", [2], "stops by itself", "before", "SIGSTOP").results()
    with pytest.raises(
        WorkerDied, match=r"device 2 did not answer for \d.\d s and was killed while running talk"
    ) as caught:
        watched.all("talk", name, "all_reduce", 2)
    assert caught.value.silent_s is not None and caught.value.silent_s >= 0.3
    wait_until(lambda: process_state(pid) == "")
    assert watched.cluster.devices == (0, 1, 3)
    assert set(watched.call("sum_of_ones", (0, 1, 3), watched.open((0, 1, 3))).results().values()) == {3.0}


def test_a_stopped_device_that_is_waited_for_among_others_wakes_the_waiter(watched: Devices) -> None:
    idle, stopped = watched.call("wait_for_abort", [0]), watched.call("wait_for_abort", [1])
    os.kill(watched.pid(1), signal.SIGSTOP)
    assert watched.cluster.wait_any([idle, stopped]) == 1
    error = error_of(stopped)
    assert isinstance(error, WorkerDied) and error.silent_s is not None
    assert kind_of(idle) == "Aborted"


def test_a_device_that_is_killed_is_missed_like_one_that_died(devices: Devices) -> None:
    waiting = devices.call("wait_for_abort", [3])
    devices.cluster.kill(3)
    devices.cluster.kill(7)  # does not run
    error = error_of(waiting)
    assert isinstance(error, WorkerDied)
    assert (error.device, error.running, error.silent_s, error.deaf_s) == (3, "wait_for_abort", None, None)
    devices.cluster.stop([3])  # stopped is what it is
    with pytest.raises(ValueError, match=r"no such device: \[3\]"):
        devices.call("echo", [3], "x")


@pytest.mark.parametrize("how", ["working", "sleeping"])
def test_a_device_whose_listener_cannot_answer_is_not_dead(watched: Devices, how: str) -> None:
    """A call that keeps the interpreter to itself for several heartbeats."""
    assert watched.call("keep_interpreter", (0, 1), how, 1.0).results() == dict.fromkeys((0, 1), "kept")
    assert watched.cluster.devices == DEVICES


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


@pytest.mark.parametrize("fault", ["PlanError", "7"])
def test_a_start_that_fails_leaves_things_as_they_were(devices: Devices, fault: str) -> None:
    name = devices.open()
    devices.board.set("fault at start 5", fault)
    with pytest.raises((PlanError, WorkerDied)) as caught:
        devices.cluster.start([4, 5])
    if fault == "PlanError":
        assert str(caught.value) == "device 5 is not wanted"
    else:
        assert re.fullmatch(
            r"device 5 died \((exit code 7|its process has ended)\) while running start", str(caught.value)
        )
    assert devices.cluster.devices == DEVICES
    assert set(devices.all("sum_of_ones", name).values()) == {4.0}
    if fault == "7":
        devices.cluster.start([5])
        assert devices.call("echo", [5], "x").results() == {5: "x"}
        devices.cluster.stop([5])


def test_a_device_is_started_once(devices: Devices) -> None:
    for ids in ([4, 1], [4, 4]):
        with pytest.raises(ValueError, match=rf"device {ids[1]} is running already"):
            devices.cluster.start(ids)
    assert devices.cluster.devices == DEVICES
