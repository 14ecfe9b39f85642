"""What changes the pool, and when it is heard of."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from nereus.core.errors import UserError
from nereus.core.job import SupplyPoint
from nereus.rl.supply import News, Supply, read_trace, scale_request


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_points_are_told_once_in_order_by_step_and_by_time() -> None:
    clock = Clock()
    points = [
        SupplyPoint(step=5, devices=4),
        SupplyPoint(step=2, gone=[1]),
        SupplyPoint(time_s=10.0, devices=8),
        SupplyPoint(step=2, devices=6),
    ]
    supply = Supply(points, elapsed_s=clock)
    assert supply.poll(0) == []
    assert supply.poll(3) == [News(gone=(1,), why="supply"), News(devices=6, why="supply")]
    clock.now = 10.0
    assert supply.poll(3) == [News(devices=8, why="supply")]
    assert supply.poll(9) == [News(devices=4, why="supply")] and supply.poll(99) == []


def test_a_resumed_run_hears_only_of_what_is_to_come() -> None:
    clock = Clock()
    clock.now = 60.0
    points = [SupplyPoint(step=2, devices=6), SupplyPoint(step=7, devices=5), SupplyPoint(time_s=30.0, devices=1)]
    supply = Supply(points, elapsed_s=clock, first_step=4)
    assert [news.devices for step in range(4, 20) for news in supply.poll(step)] == [5]


def test_requests_are_read_as_they_are_written_and_a_half_line_waits(tmp_path: Path) -> None:
    file = tmp_path / "scale.jsonl"
    file.write_bytes(scale_request(3, (), None))  # of an earlier session
    supply = Supply((), elapsed_s=Clock(), requests=file)
    assert supply.poll(0) == []
    with file.open("ab") as out:
        out.write(b"\n[]\nrubbish\n{}\n")  # somebody's own hand: no reason to end a run
    assert supply.poll(0) == []
    line = scale_request(None, (2, 3), 5.0)
    with file.open("ab") as out:
        out.write(scale_request(6, (), None) + line[:7])
    assert supply.poll(1) == [News(devices=6, why="nereus scale")]
    with file.open("ab") as out:
        out.write(line[7:])
    assert supply.poll(1) == [News(gone=(2, 3), notice_s=5.0, why="nereus scale")]


def test_a_planned_death_comes_once_in_its_stage_and_a_notice_is_carried_out() -> None:
    killed: list[int] = []
    done = threading.Event()

    def kill(device: int) -> None:
        killed.append(device)
        if device == 7:
            done.set()

    points = [SupplyPoint(step=3, gone=[2], during="training"), SupplyPoint(step=4, gone=[7], notice_s=0.0)]
    supply = Supply(points, elapsed_s=Clock(), kill=kill)
    for step, stage in ((2, "training"), (3, "generation")):
        supply.stage_began(step, stage)
    assert killed == [] and supply.poll(3) == []
    supply.stage_began(3, "training")
    supply.stage_began(3, "training")
    assert killed == [2]
    assert supply.poll(4) == [News(gone=(7,), notice_s=0.0, why="supply")]
    assert done.wait(10) and killed == [2, 7]
    supply.close()


def test_new_devices_are_those_that_the_cluster_can_start() -> None:
    assert Supply((), elapsed_s=Clock()).new_devices({0, 2}, 3) == (1, 3, 4)
    some = Supply((), elapsed_s=Clock(), startable=lambda: (0, 2, 5))
    assert some.new_devices({0, 1}, 3) == (2, 5)


def test_a_trace_file(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("time_s,devices,notice_s\n0,8,\n60.5,4,30\n")
    assert read_trace(file) == (
        SupplyPoint(time_s=0.0, devices=8),
        SupplyPoint(time_s=60.5, devices=4, notice_s=30.0),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no rows"),
        ("when,devices\n1,2\n", "when"),
        ("step,time_s,devices\n1,2,3\n", "step or time_s"),
        ("step,devices\n1,many\n", "line 2: devices: 'many'"),
        ("step,devices\n1,2\n2,0\n", "line 3: devices: '0'"),
    ],
)
def test_a_trace_that_cannot_be_read(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(UserError, match=said):
        read_trace(file)
