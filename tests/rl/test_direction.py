"""The director of a job file's changes: what it wants, and what it makes do with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from nereus.core.errors import PlanError
from nereus.core.job import PlannedChange
from nereus.core.plan import ACTOR_GENERATION, ACTOR_TRAINING, Layout, Placement, Plan
from nereus.rl.direction import FixedDirector, Unrecoverable, leaner, out_of_memory
from nereus.runtime.cluster import WorkerDied, WorkerFailed
from nereus.runtime.worker import Failure


def on(*gpus: int, micro_batch: int = 4, recompute: bool = False) -> Plan:
    return Plan(
        tuple(
            Placement(
                model_stage=name,
                layout=Layout(1, 1),
                dp=len(gpus),
                gpus=gpus,
                micro_batch=micro_batch,
                recompute=recompute and name == ACTOR_TRAINING,
            )
            for name in (ACTOR_GENERATION, ACTOR_TRAINING)
        )
    )


@dataclass
class Devices:
    plan: Plan
    pool: tuple[int, ...]


def replan(devices: Sequence[int], current: Plan) -> Plan:
    if len(devices) == 1:
        raise PlanError("one device is not enough")
    return on(*devices)


def died(device: int) -> WorkerDied:
    return WorkerDied(device, "generate", -9)


def full(device: int) -> WorkerFailed:
    return WorkerFailed(device, "gradients", Failure(kind="OutOfMemory", message="full", traceback=""))


def test_changes_come_at_their_steps() -> None:
    change = PlannedChange(3, (0, 1), on(0, 1))
    director = FixedDirector([change], replan, Devices(on(0, 1, 2, 3), (0, 1, 2, 3)))
    assert [director.boundary(step) for step in range(5)] == [None, None, None, change, None]


def test_a_device_that_has_failed_is_left_out_for_good() -> None:
    fleet = Devices(on(0, 1, 2, 3), (0, 1, 2, 3))
    director = FixedDirector([PlannedChange(5, (0, 1, 2), on(0, 1, 2))], replan, fleet)
    director.boundary(0)
    fleet.pool = (0, 2, 3)
    assert director.failed(0, "generation", died(1)) == PlannedChange(0, (0, 2, 3), on(0, 2, 3))
    fleet.plan = on(0, 2, 3)
    assert director.boundary(1) is None
    assert director.boundary(5) == PlannedChange(5, (0, 2), on(0, 2))


def test_a_device_that_dies_while_nobody_uses_it_has_failed_too() -> None:
    fleet = Devices(on(0, 1), (0, 1, 2, 3))
    director = FixedDirector([PlannedChange(5, (0, 1, 2), on(0, 1, 2))], replan, fleet)
    fleet.pool = (0, 1, 3)
    assert director.boundary(0) is None
    assert director.boundary(5) == PlannedChange(5, (0, 1), on(0, 1))


def test_devices_that_the_job_gave_up_are_not_taken_back() -> None:
    """Unless nothing else is left: here the change that gives up 2 and 3 fails with device 0."""
    fleet = Devices(on(0, 1, 2, 3), (0, 1, 2, 3))
    director = FixedDirector([PlannedChange(1, (0, 1, 2), on(0, 1, 2))], replan, fleet)
    director.boundary(1)
    fleet.pool = (1, 2, 3)
    assert director.failed(1, "transition", died(0)).devices == (1, 2)
    fleet.pool = (3,)
    with pytest.raises(Unrecoverable, match=r"no plan for devices \[3\]: one device is not enough"):
        director.failed(1, "transition", died(1))
    fleet.pool = ()
    with pytest.raises(Unrecoverable, match="no device is left"):
        director.failed(1, "transition", died(3))


def test_a_plan_that_lacks_nothing_is_kept() -> None:
    fleet = Devices(on(0, 1), (0, 1, 2))
    director = FixedDirector([], replan, fleet)
    director.boundary(0)
    fleet.pool = (0, 1)
    assert director.failed(0, "training", died(2)) == PlannedChange(0, (0, 1), on(0, 1))


def test_less_memory_by_smaller_micro_batches_then_recomputation() -> None:
    fleet = Devices(on(0, 1), (0, 1))
    director = FixedDirector([], replan, fleet)
    director.boundary(0)
    assert out_of_memory(full(1)) and not out_of_memory(died(1))
    for wanted in (on(0, 1, micro_batch=2), on(0, 1, micro_batch=1), on(0, 1, micro_batch=1, recompute=True)):
        assert director.failed(0, "training", full(1)) == PlannedChange(0, (0, 1), wanted)
        fleet.plan = wanted
    with pytest.raises(Unrecoverable, match="device 1 is out of memory with micro-batches of one sequence"):
        director.failed(0, "training", full(1))


def test_a_change_that_there_is_no_memory_for_is_given_up() -> None:
    """Device 2 is in the new plan alone: there is nothing on it to make smaller."""
    fleet = Devices(on(0, 1), (0, 1))
    change = PlannedChange(1, (0, 1, 2), on(0, 1, 2))
    director = FixedDirector([change], replan, fleet)
    assert director.boundary(1) == change
    fleet.pool = (0, 1, 2)
    assert director.failed(1, "transition", full(2)) == PlannedChange(1, (0, 1, 2), on(0, 1))


def test_only_what_runs_on_the_device_is_made_smaller() -> None:
    training = on(0, 1)[ACTOR_TRAINING]
    elsewhere = Placement(model_stage=ACTOR_GENERATION, layout=Layout(1, 1), dp=1, gpus=(2,))
    after = leaner(Plan((elsewhere, training)), 1)
    assert after[ACTOR_GENERATION] == elsewhere
    assert after[ACTOR_TRAINING].micro_batch == training.micro_batch // 2
