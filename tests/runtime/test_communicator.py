"""Traffic among real processes: results, and how every wait ends when a peer is dead or stopped."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from devices_for_tests import DEVICES, PROMPT_S, Devices, error_of, kind_of, wait_until
from programs_for_tests import BIG, sample

from nereus.runtime.abort import AbortFlag
from nereus.runtime.cluster import WorkerDied
from nereus.runtime.communicator import ONE_HOP_BYTES, Communicator

DTYPES = ("float32", "bfloat16", "int64")
VICTIM = 2
SURVIVORS = (0, 1, 3)


def sizes_for(dtype: str, num_ranks: int) -> list[int]:
    """On both sides of the switch to Gloo's ring, divisible and not; also one element and none."""
    last = ONE_HOP_BYTES // getattr(torch, dtype).itemsize // num_ranks
    return [0, 1, last, last + 1, 2 * last + 13] if dtype == "float32" else [7, last + 7]


# -- results -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2), (3, 1, 0, 2)], ids=str)
def test_collectives_give_the_same_right_result_on_every_rank(devices: Devices, ranks: tuple[int, ...]) -> None:
    name = devices.open(ranks)
    for dtype in DTYPES:
        sizes = sizes_for(dtype, len(ranks))
        found = devices.call("collectives", ranks, name, dtype, sizes).results()
        for numel in sizes:
            samples = {rank: sample(rank, numel, dtype) for rank in ranks}
            stacked = torch.stack([samples[rank] for rank in ranks])
            for rank in ranks:
                got = found[rank][numel]
                what = f"{dtype}, {numel} elements, device {rank}"
                assert got.keys() == found[ranks[0]][numel].keys()
                for kind, value in got.items():
                    assert value.dtype == getattr(torch, dtype), f"{kind}, {what}"
                    assert torch.equal(value, found[ranks[0]][numel][kind]), f"{kind}, {what}: ranks differ"
                assert torch.equal(got["max"], stacked.amax(0)), what
                assert torch.equal(got["gathered"], stacked), what
                for source in ranks:
                    assert torch.equal(got[f"from {source}"], samples[source]), what
                assert_is_sum(got["sum"], stacked, what)


def assert_is_sum(got: torch.Tensor, stacked: torch.Tensor, what: str) -> None:
    if not stacked.is_floating_point():
        assert torch.equal(got, stacked.sum(0).to(stacked.dtype)), what
        return
    # Each of the additions rounds once, in any order.
    bound = stacked.double().abs().sum(0) * torch.finfo(stacked.dtype).eps * len(stacked)
    assert bool(((got.double() - stacked.double().sum(0)).abs() <= bound).all()), what


def test_messages_arrive_by_peer_and_tag_whatever_the_order_of_the_waits(devices: Devices) -> None:
    name, sizes, tags = devices.open(), [1, 1000, BIG], [0, 3]
    found = devices.all("exchange", name, "float32", sizes, tags)
    for rank, boxes in found.items():
        assert len(boxes) == 3 * len(sizes) * len(tags)
        for (peer, tag, numel), box in boxes.items():
            assert torch.equal(box, sample(peer, numel, "float32") + tag), (rank, peer, tag, numel)


def test_a_late_peer_does_not_hold_up_the_message_of_another(devices: Devices) -> None:
    ranks = (0, 1, 2)
    name = devices.open(ranks)
    assert devices.call("second_first", ranks, name).results()[0] == [6.0, 5.0]


def test_overlapping_communicators_are_used_at_once(devices: Devices) -> None:
    first, second, both = devices.open((0, 1, 2)), devices.open((1, 2, 3)), devices.open()
    found = devices.all("overlapping", first, second, both)
    assert found == {
        0: [10.0, 6.0, 10.0, 12.0],
        1: [10.0, 6.0, 9.0, 10.0, 10.0, 13.0],
        2: [10.0, 6.0, 9.0, 10.0, 11.0, 11.0],
        3: [10.0, 9.0, 10.0, 12.0],
    }


def test_a_single_rank_needs_no_group() -> None:
    alone = Communicator.create(
        store=None,  # type: ignore[arg-type]  # never asked
        name="alone",
        ranks=[5],
        rank=5,
        timeout_s=1.0,
        flag=AbortFlag(),
        device=torch.device("cpu"),
    )
    assert alone.group is None
    x = torch.arange(6.0)
    assert torch.equal(alone.all_reduce(x.clone()), x)
    assert torch.equal(alone.all_gather(x), x[None])
    assert torch.equal(alone.broadcast(x.clone(), 5), x)
    with pytest.raises(ValueError, match="device 5 is not one of the others"):
        alone.isend(x, 5)
    alone.close()


def test_what_is_not_contiguous_is_refused_before_anything_is_sent() -> None:
    group = Communicator(name="g", ranks=(0, 1), rank=0, timeout_s=1.0, flag=AbortFlag())
    columns = torch.zeros(4, 3).T
    for attempt in (
        lambda: group.all_reduce(columns),
        lambda: group.broadcast(columns, 0),
        lambda: group.isend(columns, 1),
        lambda: group.irecv(columns, 1),
    ):
        with pytest.raises(ValueError, match=r"contiguous tensor, got strides \(1, 3\)"):
            attempt()


# -- faults --------------------------------------------------------------------------------------------------------

FAULTS = [
    ("all_reduce", "before", 1),
    ("all_reduce", "in all_reduce", 5),
    ("small all_reduce", "before", 1),
    ("small all_reduce", "in all_gather", 5),
    ("all_gather", "in all_gather", 5),
    ("broadcast", "in broadcast", 5),
    ("recv", "before", 1),
    ("send", "before", 1),
    ("connect", "before", 1),
    ("connect", "met", 1),
]
"""An operation, and where the victim is struck: at a point, the nth time that it gets there."""


def start_talk(devices: Devices, kind: str, point: str, nth: int, action: str) -> dict[int, Any]:
    """All ranks begin an operation in which the victim is struck at a point; the calls of all four."""
    name, scene = devices.open(), devices.new_name("scene")
    devices.all("arm", scene)
    devices.call("arm", [VICTIM], scene, point, action, nth).results()
    calls = devices.each("talk", DEVICES, name if kind != "connect" else devices.new_name(), kind, VICTIM)
    devices.reached(scene, point, [VICTIM])
    return calls


def assert_survivors_talk(devices: Devices) -> None:
    name = devices.open(SURVIVORS)
    assert set(devices.call("sum_of_ones", SURVIVORS, name, BIG).results().values()) == {3.0}
    assert set(devices.call("sum_of_ones", SURVIVORS, name).results().values()) == {3.0}


def leave_no_constructor(devices: Devices, point: str) -> None:
    """A constructor that waits for a peer's address stays behind in its thread: not in the tests that count threads."""
    if point == "met":
        devices.cluster.stop(devices.cluster.devices)


@pytest.mark.parametrize(("kind", "point", "nth"), FAULTS)
def test_a_killed_peer_ends_every_wait_and_the_others_go_on(devices: Devices, kind: str, point: str, nth: int) -> None:
    calls = start_talk(devices, kind, point, nth, "SIGKILL")
    error = error_of(calls.pop(VICTIM))
    assert isinstance(error, WorkerDied)
    assert (error.device, error.exit_code, error.running) == (VICTIM, -signal.SIGKILL, "talk")
    assert {kind_of(call) for call in calls.values()} == {"Aborted"}
    assert_survivors_talk(devices)
    leave_no_constructor(devices, point)


@pytest.mark.parametrize(("kind", "point", "nth"), FAULTS)
def test_an_abort_ends_every_wait_for_a_stopped_peer(devices: Devices, kind: str, point: str, nth: int) -> None:
    calls = start_talk(devices, kind, point, nth, "SIGSTOP")
    pid = devices.pid(VICTIM)
    devices.stopped(VICTIM)
    try:
        devices.cluster.abort("the victim does not answer")
        assert {kind_of(calls[device]) for device in SURVIVORS} == {"Aborted"}
        assert max(devices.call("close", SURVIVORS).results().values()) < 1.0
        assert_survivors_talk(devices)
    finally:
        os.kill(pid, signal.SIGCONT)
    # It reads of the abort when it goes on, and is as good as the others then.
    name = devices.open()
    assert set(devices.all("sum_of_ones", name, BIG).values()) == {4.0}
    leave_no_constructor(devices, point)


def test_after_an_abort_the_old_communicator_raises(devices: Devices) -> None:
    name = devices.open()
    assert set(devices.all("sum_of_ones", name).values()) == {4.0}
    devices.cluster.abort("just so")
    for numel in (1, BIG):
        calls = devices.each("sum_of_ones", DEVICES, name, numel)
        assert {kind_of(call) for call in calls.values()} == {"Aborted"}
    assert "broken" in str(error_of(devices.call("talk", [0], name, "recv", 1)))


def test_an_abort_at_the_very_end_of_connect_is_not_lost(devices: Devices) -> None:
    scene = devices.new_name("scene")
    devices.call("arm", [0], scene, "connected", "abort").results()
    calls = devices.each("open", (0, 1), devices.new_name(), (0, 1))
    assert kind_of(calls[0]) == "Aborted"


@pytest.mark.parametrize("kind", ["all_reduce", "small all_reduce", "all_gather", "broadcast", "recv", "send"])
def test_a_peer_that_never_comes_is_a_timeout_that_names_the_devices(devices: Devices, kind: str) -> None:
    name, timeout_s = devices.open((0, VICTIM)), 0.3
    devices.call("set_timeout", [0], name, timeout_s).results()
    error = error_of(devices.call("talk", [0], name, kind, VICTIM))
    assert "PeerTimeout" in str(error)
    assert f"devices [0, {VICTIM}]: no answer in {timeout_s} s" in str(error)


def test_a_peer_that_never_connects_is_a_timeout_that_names_the_devices(devices: Devices) -> None:
    error = error_of(devices.call("open", [1], devices.new_name(), (1, 3), 0.3))
    assert "PeerTimeout" in str(error)
    assert "connect" in str(error)
    assert "devices [1, 3]" in str(error)


def test_a_connect_that_was_given_up_does_not_hold_up_the_next(devices: Devices) -> None:
    scene = devices.new_name("scene")
    devices.all("arm", scene)
    calls = devices.each("open", (0, 1), devices.new_name(), (0, 1, 2))
    devices.reached(scene, "open", (0, 1))
    devices.cluster.abort("given up")
    assert {kind_of(call) for call in calls.values()} == {"Aborted"}
    began = time.monotonic()
    devices.open((0, 1))
    assert time.monotonic() - began < PROMPT_S


def test_pending_transfers_end_when_the_communicator_is_closed(devices: Devices) -> None:
    assert "closed" in str(error_of(devices.call("wait_after_close", [0, 1], devices.open((0, 1)), 1)))


# -- leaks ---------------------------------------------------------------------------------------------------------


def settles(devices: Devices, ranks: tuple[int, ...], before: dict[int, tuple[int, int]]) -> None:
    """Threads and sockets go back to what they were; the last of them are freed by a thread."""

    def back() -> bool:
        now = devices.call("resources", ranks).results()
        return all(n <= b for rank in ranks for n, b in zip(now[rank], before[rank], strict=True))

    wait_until(back)


def test_making_and_closing_communicators_leaks_nothing(devices: Devices) -> None:
    ranks = (0, 1, 2)
    devices.call("open_and_close", ranks, devices.new_name(), ranks, 2).results()
    before = devices.call("resources", ranks).results()
    devices.call("open_and_close", ranks, devices.new_name(), ranks, 50).results()
    settles(devices, ranks, before)


def test_connects_that_were_given_up_leak_nothing(devices: Devices) -> None:
    before = devices.call("resources", (0, 1)).results()
    for _ in range(5):
        scene, name = devices.new_name("scene"), devices.new_name()
        devices.all("arm", scene)
        devices.call("arm", [3], scene, "open", "SIGSTOP").results()
        calls = devices.each("open", (0, 1, 3), name, (0, 1, 3))
        devices.reached(scene, "open", (0, 1))
        devices.stopped(3)
        devices.cluster.abort("given up")
        assert {kind_of(calls[device]) for device in (0, 1)} == {"Aborted"}
        os.kill(devices.pid(3), signal.SIGCONT)
        assert kind_of(calls[3]) == "Aborted"
    settles(devices, (0, 1), before)
