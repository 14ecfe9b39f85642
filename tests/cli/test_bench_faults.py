"""The fault campaign: a small one on real runs, and its judge, which must see what a recovery does wrong."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from nereus.cli.bench_faults import DEVICES, bench_faults
from nereus.cli.bench_faults_draw import draw_faults
from nereus.cli.bench_faults_judge import judge
from nereus.cli.bench_faults_run import draw_plan
from nereus.cli.bench_faults_worker import Fault, Mark
from nereus.core.events import CheckpointWritten, DeviceFailed, Event, Recovered, RunStarted, StepFinished
from nereus.core.plan import ACTOR_TRAINING, CRITIC_TRAINING, Layout, Placement, Plan
from nereus.telemetry.folder import Record

NAMES = (ACTOR_TRAINING, CRITIC_TRAINING)


def test_a_small_campaign(write_job: Callable[..., Path], tmp_path: Path) -> None:
    said: list[str] = []
    found = bench_faults(write_job(), (), faults=6, seed=0, folder=tmp_path, say=said.append)
    summary = found["summary"]
    assert summary["ok"], (summary, said)
    assert summary["faults"] == sum(row["faults"] for row in found["rows"]) >= 6
    assert 0 < summary["detect_s_median"] <= summary["detect_s_max"] < 60
    assert 0 < summary["recover_s_median"] <= summary["recover_s_max"] < 60
    assert 0 < summary["max_weight_difference"] < 1e-4


def test_faults_depend_on_the_seed_alone() -> None:
    def drawn(seed: str) -> tuple[Fault, ...]:
        return draw_faults(seed, steps=40, devices=DEVICES, numbers=count(), director="mixed")

    assert drawn("1") == drawn("1") != drawn("2")
    faults = drawn("1")
    assert {f.step for f in faults} == set(range(40))
    assert {f.phase for f in faults} == {"step", "transition", "recovery"}
    assert {type(f.moment) for f in faults} == {str, int}
    assert draw_plan("1", NAMES, (0, 1, 3)) == draw_plan("1", NAMES, (0, 1, 3)) != draw_plan("2", NAMES, (0, 1, 3))


# -- the judge -----------------------------------------------------------------------------------------------------

REPLICAS = Plan(tuple(Placement(model_stage=m, layout=Layout(2, 1), dp=2, gpus=(0, 1, 2, 3)) for m in NAMES))
SURVIVORS = Plan(tuple(Placement(model_stage=m, layout=Layout(2, 1), dp=1, gpus=(0, 3)) for m in NAMES))
ONE_LEFT = Plan(tuple(Placement(model_stage=m, layout=Layout(1, 1), dp=1, gpus=(3,)) for m in NAMES))


def killed(device: int, number: int = 0) -> Fault:
    return Fault(
        number=number,
        group=0,
        kind="SIGKILL",
        device=device,
        step=1,
        phase="step",
        command="update",
        nth=1,
        moment="before",
    )


def failed(device: int, kind: str = "died") -> DeviceFailed:
    return DeviceFailed(step=1, stage="training", device=device, kind=kind, why="it ended")


def recovered(plan: Plan, restored_from: int | None = None) -> Recovered:
    return Recovered(
        step=1,
        stage="training",
        devices=plan.gpus,
        plan=plan,
        seconds=0.5,
        rolled="none",
        restored_from=restored_from,
    )


def verdict_of(*events: Event, faults: tuple[Fault, ...], tried: tuple[Plan, ...] = ()) -> Any:
    """A second from event to event; faults all happen half a second before the first failure, plans just after it."""
    started = RunStarted(
        run="r", job="j", algorithm="ppo", first_step=0, num_steps=2, devices=(0, 1, 2, 3), plan=REPLICAS
    )
    saved = CheckpointWritten(step=1, path="p", num_bytes=1, seconds=0.1)
    records = [Record(time_s=float(i), event=event) for i, event in enumerate((started, saved, *events))]
    marks = [Mark(fault=fault.number, time_s=1.5, command=fault.command) for fault in faults]
    plans = [{"time_s": 2.1, "plan": plan.to_json()} for plan in tried]
    return judge(records, faults, marks, plans)


def test_a_recovery_that_is_right() -> None:
    verdict = verdict_of(failed(1), recovered(SURVIVORS), faults=(killed(1),))
    assert (verdict.detect_s, verdict.recover_s) == ({0: 0.5}, {0: 1.0})
    assert (verdict.lost_state, verdict.restores, verdict.false_positives, verdict.wrong) == (0, 0, 0, [])


def test_a_device_that_did_nothing() -> None:
    verdict = verdict_of(failed(1), failed(2), recovered(SURVIVORS), faults=(killed(1),))
    assert verdict.false_positives == 1 and "device 2" in verdict.wrong[0]


@pytest.mark.parametrize(("restored_from", "lost"), [(1, 0), (0, 1)])
def test_a_restore_where_both_copies_died(restored_from: int, lost: int) -> None:
    """Devices 1 and 3 have the same half: that is gone. All but the newest checkpoint is too old."""
    faults = killed(1), killed(3, 1)
    verdict = verdict_of(failed(1), failed(3), recovered(ONE_LEFT, restored_from), faults=faults)
    assert (verdict.restores, verdict.lost_state) == (1, lost)


def test_a_restore_that_was_not_needed() -> None:
    """Devices 1 and 2 have different halves, of different replicas."""
    faults = killed(1), killed(2, 1)
    verdict = verdict_of(failed(1), failed(2), recovered(SURVIVORS, 1), faults=faults)
    assert (verdict.restores, verdict.lost_state) == (1, 1)


@pytest.mark.parametrize(("tried", "lost"), [((SURVIVORS,), 0), ((), 1)])
def test_a_last_copy_that_dies_on_the_way_to_another_plan(tried: tuple[Plan, ...], lost: int) -> None:
    """Device 2 has the same half as device 0, until the plan is another one."""
    faults = killed(1), killed(0, 1)
    verdict = verdict_of(failed(1), failed(0), recovered(ONE_LEFT, 1), faults=faults, tried=tried)
    assert (verdict.restores, verdict.lost_state) == (1, lost)


def test_steps_that_are_done_again() -> None:
    def step(number: int) -> StepFinished:
        return StepFinished(step=number, metrics={}, seconds={})

    faults = killed(1), killed(3, 1)
    events = step(0), step(1), failed(1), failed(3), recovered(ONE_LEFT, 1), step(1)
    assert verdict_of(*events, faults=faults).steps_redone == 1
