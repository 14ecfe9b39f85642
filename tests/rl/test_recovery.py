"""Devices fail at every point of a step: the run ends as if nothing had happened, and every sample is trained on once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from comparing_runs import SAME, difference
from faulty_worker_for_tests import PROGRAM, Fault

from nereus.core.events import DeviceFailed, Event, Recovered
from nereus.core.job import PlannedChange
from nereus.core.plan import Layout, Placement, Plan
from nereus.rl.direction import FixedDirector
from nereus.rl.ledger import read_ledger
from nereus.rl.loop import Trainer
from nereus.rl.saving import Checkpoints
from nereus.telemetry.folder import read_events

Run = Callable[..., dict[str, Any]]
WriteJob = Callable[..., Path]

PLAN: dict[str, Any] = {
    "all": {"dp": 2, "gpus": [1, 2], "micro_batch": 2},
    "actor/generation": {"dp": 2, "gpus": [0, 1], "micro_batch": 2},
    "actor/training": {"tp": 2, "dp": 2, "micro_batch": 2},
    "critic/training": {"pp": 2, "dp": 2, "micro_batch": 2, "gpus": [1, 0, 3, 2]},
}
"""Two replicas of everything, device 1 in all of them."""

at_boundary = Checkpoints.at_boundary

EVERYTHING = {"trained": 2 * 8 * 2, "repeated": 0, "skipped": 0}
REDUCED, NORM = "nereus.engine.optimizer:reduce_gradients", "nereus.engine.optimizer:gradient_norm"
STEPPED = "torch.optim.adamw:adamw"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run with faults, and what it told of them."""

    summary: dict[str, Any]
    failed: list[DeviceFailed]
    recovered: list[Recovered]

    @property
    def lost(self) -> list[int]:
        return [e.device for e in self.failed]


def replan(devices: Sequence[int], current: Plan) -> Plan:
    """Whole replicas on the last of the devices, so that there is something to move."""
    dp = {1: 1, 2: 2, 3: 2, 4: 4}[len(devices)]
    used = tuple(reversed(devices))[:dp]
    names = [p.model_stage for p in current.placements]
    return Plan(tuple(Placement(model_stage=name, layout=Layout(1, 1), dp=dp, gpus=used) for name in names))


def fixed_director(stack: Any, start: Any, fleet: Any, *more: Any) -> tuple[FixedDirector, Callable[[Event], None]]:
    return FixedDirector(start.changes, replan, fleet), lambda event: None


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    return {}


@pytest.fixture
def fault_free(kept: dict[str, Any], run: Run, write_job: WriteJob, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run that nothing happened to, with its rollouts; made when first asked for."""
    if not kept:
        where = {"folder": str(tmp_path_factory.mktemp("kept")), "record_rollouts": True}
        path = write_job(steps=2, plan=PLAN, cluster={"devices": 4}, run=where)
        kept.update(run(path))
        path.unlink()
    return kept


@pytest.fixture
def suffer(run: Run, write_job: WriteJob, monkeypatch: pytest.MonkeyPatch, fault_free: dict[str, Any]) -> Any:
    """Runs the job with faults, on the same rollouts unless told to generate; checks what must always hold.

    Survivors get a plan of this module; adaptive: the controller's.
    """
    monkeypatch.setattr("nereus.rl.worker.PROGRAM", PROGRAM)
    monkeypatch.setattr(Checkpoints, "at_boundary", written_at_once)
    train = Trainer.run

    def with_faults(*faults: Fault, generate: bool = False, adaptive: bool = False, **job: Any) -> Outcome:
        if not adaptive:
            monkeypatch.setattr("nereus.cli.directing.make_director", fixed_director)

        def armed(self: Trainer, first_step: int) -> int:
            known = [replace(f, peer=self.fleet.cluster.process_id(f.peer)) if f.peer else f for f in faults]
            self.fleet.cluster.call("arm", dict.fromkeys(self.fleet.pool, (known,))).results()
            return train(self, first_step)

        monkeypatch.setattr(Trainer, "run", armed)
        path = write_job(**{"steps": 2, "plan": PLAN, "cluster": {"devices": 4}, **job})
        summary = run(path) if generate else run(path, replay=Path(fault_free["run"]))
        events = [record.event for record in read_events(Path(summary["run"]))]
        outcome = Outcome(
            summary=summary,
            failed=[e for e in events if isinstance(e, DeviceFailed)],
            recovered=[e for e in events if isinstance(e, Recovered)],
        )
        assert summary["samples"] == EVERYTHING
        entries = [(e.step, e.epoch, e.mini_batch) for e in read_ledger(Path(summary["run"]) / "ledger.jsonl")]
        assert entries == [(s, e, m) for s in range(2) for e in range(2) for m in range(2)]
        assert difference(fault_free, summary) < SAME
        assert all(row["sampling_difference"] < SAME for row in summary["history"])
        assert all(0 < e.seconds < 100 for e in outcome.recovered)
        return outcome

    return with_faults


def written_at_once(self: Checkpoints, step: int, *more: Any, **how: Any) -> None:
    """So that it does not depend on the disk what is there when a device fails."""
    at_boundary(self, step, *more, **how)
    self.settle()


def kill(command: str, nth: int, moment: str, device: int = 1) -> Fault:
    return Fault(device=device, command=command, nth=nth, moment=moment)


DEATHS: dict[str, tuple[Fault, str, str, tuple[str, ...]]] = {
    # the fault, the stage it is in, what becomes of the update in flight, what is done again
    "before weight_sync": (kill("synchronise", 2, "before"), "weight_sync", "none", ("weight_sync",)),
    "generation": (kill("generate", 2, "after"), "generation", "none", ("weight_sync", "generation")),
    "log-probabilities": (kill("logprobs", 1, "before"), "inference", "none", ("inference",)),
    "scores": (kill("scores", 1, "after"), "inference", "none", ("inference",)),
    "first gradients": (kill("gradients", 1, "before"), "training", "discarded by all", ("gradients",)),
    "reduced gradients": (kill("gradients", 3, REDUCED), "training", "discarded by all", ("gradients",)),
    "known norm": (kill("gradients", 12, NORM), "training", "discarded by all", ("gradients",)),
    "last gradients": (kill("gradients", 16, "after"), "training", "discarded by all", ("gradients",)),
    "before an update": (kill("update", 2, "before"), "training", "applied by all", ()),
    "in an update": (kill("update", 3, STEPPED), "training", "applied by all", ()),
    "after an update": (kill("update", 16, "after"), "training", "applied by all", ()),
    "before counters": (kill("set_counters", 1, "before"), "training", "none", ()),
    "after counters": (kill("set_counters", 4, "after"), "training", "none", ()),
}


@pytest.mark.parametrize("where", DEATHS)
def test_a_death_anywhere_in_a_step(suffer: Callable[..., Outcome], where: str) -> None:
    fault, stage, rolled, redone = DEATHS[where]
    outcome = suffer(fault, generate=fault.command == "generate")
    (failed,), (recovered,) = outcome.failed, outcome.recovered
    assert (failed.device, failed.kind, failed.stage) == (1, "died", stage)
    assert (recovered.stage, recovered.rolled, recovered.redone) == (stage, rolled, redone)
    assert recovered.devices == (0, 2, 3) and 1 not in recovered.plan.gpus
    assert recovered.step == failed.step and recovered.restored_from is None


@pytest.mark.parametrize("command", ["generate", "update"])
def test_a_death_that_the_controller_answers(suffer: Callable[..., Outcome], command: str) -> None:
    outcome = suffer(kill(command, 2, "after"), generate=True, adaptive=True)
    assert outcome.lost == [1]
    assert [e.devices for e in outcome.recovered] == [(0, 2, 3)]


@pytest.mark.parametrize("command", ["clear_writes", "write_gathered", "written"])
def test_a_death_in_a_checkpoint(suffer: Callable[..., Outcome], command: str) -> None:
    """Of the first step, and the last one of the run."""
    for nth in (1, 2):
        outcome = suffer(kill(command, nth, "after", device=0), run={"checkpoint_every": 1})
        (recovered,) = outcome.recovered
        assert (recovered.stage, recovered.redone) == ("checkpoint", ("checkpoint",))
        folders = sorted((Path(outcome.summary["run"]) / "checkpoints").iterdir())
        assert [folder.name for folder in folders][-1] == "step-000002"


@pytest.mark.parametrize("command", ["connect", "build", "settle", "commit"])
def test_a_death_in_a_change_of_plan(suffer: Callable[..., Outcome], command: str) -> None:
    changes = [{"step": 1, "plan": {"actor/training": {"pp": 2, "dp": 2}, "reference/inference": {"dp": 4}}}]
    outcome = suffer(kill(command, 1, "after", device=3), changes=changes)
    (recovered,) = outcome.recovered
    assert (recovered.step, recovered.stage, recovered.devices) == (1, "transition", (0, 1, 2))
    assert outcome.lost == [3]


# -- who has not done it yet does it, or none does ------------------------------------------------------------------


def test_an_update_that_is_refused_on_some_survivors(suffer: Callable[..., Outcome]) -> None:
    """Device 3 has applied it, 0 and 2 get the abort before they begin."""
    refused = [Fault(device=d, command="update", nth=3, action="refuse") for d in (0, 2)]
    outcome = suffer(kill("update", 3, "before"), *refused)
    assert outcome.lost == [1] and [e.rolled for e in outcome.recovered] == ["applied by all"]


def test_counters_that_only_some_survivors_have(suffer: Callable[..., Outcome]) -> None:
    refused = [Fault(device=d, command="set_counters", nth=1, action="refuse") for d in (0, 2)]
    assert suffer(kill("set_counters", 1, "after"), *refused).lost == [1]


def test_a_death_while_an_update_is_settled(suffer: Callable[..., Outcome]) -> None:
    refused = Fault(device=0, command="update", nth=3, action="refuse")
    outcome = suffer(kill("update", 3, "before"), refused, kill("update", 4, "before", device=0))
    assert outcome.lost == [1, 0] and [e.rolled for e in outcome.recovered] == ["applied by all"]
    # Both units of the actor have lost a rank, which is not the same one: the other two ranks are one unit still.


# -- several at once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["gradients", "update"])
def test_two_deaths_at_once(suffer: Callable[..., Outcome], command: str) -> None:
    outcome = suffer(kill(command, 2, "before", device=1), kill(command, 2, "before", device=2))
    assert sorted(outcome.lost) == [1, 2]
    assert outcome.recovered[-1].devices == (0, 3)


@pytest.mark.parametrize("command", ["consolidate", "build", "settle", "commit"])
def test_a_death_in_a_recovery(suffer: Callable[..., Outcome], command: str) -> None:
    outcome = suffer(kill("gradients", 3, NORM), kill(command, 1, "after", device=2))
    assert outcome.lost == [1, 2]
    assert [e.rolled for e in outcome.recovered] == ["discarded by all"], "once, whatever else failed"


def test_the_last_copy_dies_as_soon_as_it_is_counted_on(suffer: Callable[..., Outcome]) -> None:
    """The plan that was taken has device 3 in it, which would be started again, with nothing of what it held."""
    outcome = suffer(kill("gradients", 3, "before"), kill("consolidate", 2, "after", device=3))
    assert outcome.lost == [1, 3]
    assert [(e.restored_from, e.devices) for e in outcome.recovered] == [(0, (0, 2))]


# -- not a death ---------------------------------------------------------------------------------------------------


def test_out_of_memory(suffer: Callable[..., Outcome]) -> None:
    """The device stays; what it runs is cut into smaller micro-batches."""
    outcome = suffer(Fault(device=3, command="gradients", nth=5, action="oom"))
    (failed,), (recovered,) = outcome.failed, outcome.recovered
    assert (failed.device, failed.kind) == (3, "out of memory") and "device 3 is full" in failed.why
    assert recovered.devices == (0, 1, 2, 3)
    sizes = {str(p.model_stage): p.micro_batch for p in recovered.plan.placements}
    assert sizes == {name: 1 if "training" in name else 2 for name in sizes}


def test_out_of_memory_before_anybody_has_begun_an_update(suffer: Callable[..., Outcome]) -> None:
    """The others are called off before they begin: it is discarded by all, and done again under the other plan."""
    first = Fault(device=0, command="update", nth=5, action="oom")
    outcome = suffer(first, *[Fault(device=d, command="update", nth=5, action="refuse") for d in (1, 2, 3)])
    (failed,) = outcome.failed
    assert (failed.kind, failed.stage) == ("out of memory", "training")
    (recovered,) = outcome.recovered
    assert (recovered.rolled, recovered.redone) == ("discarded by all", ("gradients",))
    assert recovered.devices == (0, 1, 2, 3)


def test_out_of_memory_on_one_after_an_update(suffer: Callable[..., Outcome]) -> None:
    outcome = suffer(Fault(device=3, command="update", nth=5, moment="after", action="oom"))
    assert [(e.device, e.kind) for e in outcome.failed] == [(3, "out of memory")]
    assert [(e.rolled, e.devices) for e in outcome.recovered] == [("applied by all", (0, 1, 2, 3))]


def test_out_of_memory_in_the_middle_of_an_update(suffer: Callable[..., Outcome]) -> None:
    """Half of the device's shard is new: it is not used any more."""
    outcome = suffer(Fault(device=3, command="update", nth=5, moment=STEPPED, action="oom"))
    assert [(e.device, e.kind) for e in outcome.failed] == [(3, "out of memory"), (3, "error")]
    assert [e.rolled for e in outcome.recovered] == ["applied by all"]


def test_an_error_that_is_the_device_s(suffer: Callable[..., Outcome]) -> None:
    outcome = suffer(Fault(device=2, command="logprobs", action="error"))
    (failed,) = outcome.failed
    assert (failed.device, failed.kind) == (2, "error") and "ZeroDivisionError: on purpose" in failed.why
    assert outcome.recovered[0].devices == (0, 1, 3)


def test_a_wait_that_ran_out(suffer: Callable[..., Outcome]) -> None:
    """All devices are there: the same plan is tried once more."""
    outcome = suffer(Fault(device=2, command="gradients", nth=2, action="timeout"))
    (recovered,) = outcome.recovered
    assert recovered.devices == (0, 1, 2, 3)
    assert {str(p.model_stage): p.dp for p in recovered.plan.placements} == {
        str(p.model_stage): 2 for p in recovered.plan.placements
    }


def test_a_device_that_stops_answering(suffer: Callable[..., Outcome]) -> None:
    outcome = suffer(
        Fault(device=1, command="update", nth=2, action="stop"), cluster={"devices": 4, "heartbeat_s": 1.0}
    )
    (failed,) = outcome.failed
    assert (failed.device, failed.kind) == (1, "silent")
    assert failed.detect_seconds is not None and 1.0 <= failed.detect_seconds < 60
    assert [e.rolled for e in outcome.recovered] == ["applied by all"]


def test_a_device_that_is_no_party_to_the_command(suffer: Callable[..., Outcome]) -> None:
    """A peer that reads what it holds is the first to know, and is not taken for the one that failed."""
    orphan = Fault(device=2, command="scores", action="orphan", peer=3)
    outcome = suffer(orphan, cluster={"devices": 4, "heartbeat_s": 1.0})
    assert [(e.device, e.kind) for e in outcome.failed] == [(3, "silent")]
    assert [e.devices for e in outcome.recovered] == [(0, 1, 2)]


MESSAGES = {
    "weight_sync": [kill("synchronise", 2, "before")],
    "gradients": [kill("gradients", 3, NORM)],
    "update, and then a move": [kill("update", 3, STEPPED), kill("build", 1, "before", device=0)],
    "checkpoint": [kill("write_gathered", 1, "before", device=2)],
}


@pytest.mark.parametrize("where", MESSAGES)
def test_where_state_goes_in_messages(
    suffer: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr("nereus.runtime.cluster.has_shared_memory", lambda: False)
    outcome = suffer(*MESSAGES[where])
    assert outcome.lost == [fault.device for fault in MESSAGES[where]]


# -- the last copy -------------------------------------------------------------------------------------------------


def test_the_last_copy_of_a_frozen_model_comes_from_its_files(suffer: Callable[..., Outcome]) -> None:
    plan = {**PLAN, "reference/inference": {"gpus": [3]}}
    outcome = suffer(kill("gradients", 11, "before", device=3), plan=plan)
    (recovered,) = outcome.recovered
    assert recovered.restored_from is None and recovered.redone == ("gradients",)


def test_a_death_while_a_frozen_model_is_read(suffer: Callable[..., Outcome]) -> None:
    """What was read of it by then does not count."""
    plan = {**PLAN, "reference/inference": {"gpus": [3]}}
    outcome = suffer(kill("values", 2, "before", device=3), kill("load", 1, "before", device=2), plan=plan)
    assert outcome.lost == [3, 2]
    assert [e.restored_from for e in outcome.recovered] == [None]


@pytest.mark.parametrize("every", [0, 1])
def test_the_last_copy_of_a_trained_model(suffer: Callable[..., Outcome], every: int) -> None:
    """Both models go back together, to the checkpoint or to where the job began, and the ledger with them."""
    plan = {**PLAN, "actor/training": {"tp": 2, "gpus": [0, 3]}}
    outcome = suffer(kill("update", 11, "before", device=3), plan=plan, run={"checkpoint_every": every})
    (recovered,) = outcome.recovered
    assert (recovered.step, recovered.restored_from) == (1, every)
    assert (recovered.rolled, recovered.redone) == ("applied by all", ())


def test_a_death_while_the_last_copy_is_restored(suffer: Callable[..., Outcome]) -> None:
    plan = {**PLAN, "actor/training": {"tp": 2, "gpus": [0, 3]}}
    faults = kill("update", 11, "before", device=3), kill("load", 1, "after", device=2)
    outcome = suffer(*faults, plan=plan, run={"checkpoint_every": 1})
    assert outcome.lost == [3, 2]
    assert [(e.restored_from, e.devices) for e in outcome.recovered] == [(1, (0, 1))]


@pytest.mark.parametrize("at", ["boundary", "failure"])
def test_a_plan_that_only_a_checkpoint_leads_to(
    suffer: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """At a boundary the checkpoint is written there and then; after a failure it is the newest one."""

    class Restarting(FixedDirector):
        def boundary(self, step: int) -> PlannedChange | None:
            change = super().boundary(step)
            return replace(change, restart=True) if change is not None else None

        def failed(self, *more: Any) -> PlannedChange:
            return replace(super().failed(*more), restart=True)

    monkeypatch.setattr("test_recovery.FixedDirector", Restarting)
    if at == "boundary":
        outcome = suffer(changes=[{"step": 1, "devices": 3, "plan": {"all": {"dp": 2, "gpus": [1, 2]}}}])
        assert [(e.step, e.restored_from, e.devices) for e in outcome.recovered] == [(1, 1, (0, 1, 2))]
        assert (Path(outcome.summary["run"]) / "checkpoints" / "step-000001").is_dir()
    else:
        outcome = suffer(kill("gradients", 11, "before"))
        assert [(e.step, e.restored_from) for e in outcome.recovered] == [(1, 0)]


def test_an_intact_model_goes_back_with_the_lost_one(suffer: Callable[..., Outcome]) -> None:
    """Only the critic is lost; the actor's two copies are one step further than the checkpoint."""
    plan = {**PLAN, "critic/training": {"gpus": [3]}}
    outcome = suffer(kill("values", 2, "before", device=3), plan=plan)
    assert [(e.step, e.restored_from) for e in outcome.recovered] == [(1, 0)]
