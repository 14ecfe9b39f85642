"""Where a run begins: at step 0 of a job file, or at a run's newest checkpoint, there perhaps with another plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from nereus.api.job_file import load_job, override_paths
from nereus.api.jobs import AutoPlanner
from nereus.core.errors import PlanError, UserError
from nereus.core.events import PlanChosen
from nereus.core.job import (
    AutoPlan,
    Job,
    PlacementSection,
    PlannedChange,
    PlanSection,
    initial_plan,
    planned_changes,
    resolve_plan,
)
from nereus.core.plan import Plan
from nereus.telemetry.folder import JOB, read_events

FIXED = ("algorithm.name", "batch.prompts", "batch.samples_per_prompt", "batch.epochs", "task")
"""What a resumed run cannot change: it decides which samples a step trains on, and so what the ledger means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run begins. sources: of the trained model-stages, where not from the job's models; digest: of these.

    chosen: what the planner chose for `auto` in it, now.
    """

    job: Job
    plan: Plan
    devices: tuple[int, ...]
    changes: tuple[PlannedChange, ...] = ()
    chosen: tuple[PlanChosen, ...] = ()
    first_step: int = 0
    ledger_bytes: int = 0
    sources: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    digest: str = ""


def fresh(path: Path, overrides: Sequence[str], *, static: bool) -> Start:
    """Step 0 of a job file. Raises UserError."""
    job = _without_changes(load_job(path, overrides), static)
    auto, devices = AutoPlanner(job), tuple(range(job.cluster.devices))
    with _naming_the_field():
        plan = initial_plan(job, auto)
    changes = planned_changes(job, plan, devices, auto=auto)
    return Start(job=job, plan=plan, devices=devices, changes=changes, chosen=tuple(auto.chosen))


def resumed(run: Path, overrides: Sequence[str], *, static: bool) -> Start:
    """The newest checkpoint of a run, under the plan and devices it had, or those that the overrides ask for.

    Raises UserError when there is no whole checkpoint, nothing is left to do, or the overrides change what is FIXED.
    """
    from nereus.rl.saving import newest_checkpoint

    job = _without_changes(load_job(run / JOB, overrides), static)
    _check_same_samples(load_job(run / JOB), job)
    restored = newest_checkpoint(run / "checkpoints")
    if restored.step >= job.steps:
        raise UserError(
            f"run {run} has trained its {restored.step} steps; to go on, ask for more, as in "
            f"nereus run --resume {run} --set steps={restored.step + 10}"
        )
    auto = AutoPlanner(job, _recorded(run))
    plan, devices = _plan_to_resume(job, overrides, restored.plan, restored.devices, auto=auto, step=restored.step)
    return Start(
        job=job,
        plan=plan,
        devices=devices,
        changes=planned_changes(job, plan, devices, auto=auto, after=restored.step - 1),
        chosen=tuple(auto.chosen),
        first_step=restored.step,
        ledger_bytes=restored.ledger_bytes,
        sources=restored.sources,
        digest=restored.digest,
    )


def _recorded(run: Path) -> dict[tuple[int, tuple[int, ...]], Plan]:
    """What the planner chose earlier in a run: it goes on with that, whatever the machine measures now."""
    events = [record.event for record in read_events(run)]
    return {(e.step, e.devices): e.plan for e in events if isinstance(e, PlanChosen)}


def _without_changes(job: Job, static: bool) -> Job:
    """Neither those of the job file nor any other, if static."""
    return (
        dataclasses.replace(job, changes=(), adapt=dataclasses.replace(job.adapt, policy="static")) if static else job
    )


def _check_same_samples(before: Job, now: Job) -> None:
    for name in FIXED:
        old, new = attrgetter(name)(before), attrgetter(name)(now)
        if old != new:
            values = "" if dataclasses.is_dataclass(old) else f" from {old} to {new}"
            raise UserError(f"{name}: a run that is resumed cannot change it{values}; start a new run for that")


def _plan_to_resume(
    job: Job, overrides: Sequence[str], plan: Plan, devices: tuple[int, ...], *, auto: AutoPlan, step: int
) -> tuple[Plan, tuple[int, ...]]:
    """What the overrides ask for works as a change of plan does: what they do not name stays as it was."""
    asked = override_paths(overrides)
    pool_asked = any(path[:2] == ("cluster", "devices") for path in asked)
    pool = tuple(range(job.cluster.devices)) if pool_asked else devices
    section: PlanSection = {}
    if ("plan",) in asked:
        section = job.plan
    elif job.plan != "auto" and any(path[0] == "plan" for path in asked):
        section = _parts_of_plan(job, [path[1:] for path in asked if path[0] == "plan"], plan, pool)
    elif pool_asked:
        section = "auto"
    with _naming_the_field():
        return resolve_plan(job, section, pool, plan, auto=auto, step=step), pool


def _parts_of_plan(
    job: Job, asked: Sequence[tuple[str, ...]], plan: Plan, pool: Sequence[int]
) -> dict[str, PlacementSection]:
    """Placements for overrides of `plan.NAME`, whole, or `plan.NAME.FIELD`, whose other fields stay those of `plan`.

    Devices stay too where as many are needed and they are in the pool.
    """
    assert job.plan != "auto"
    section: dict[str, PlacementSection] = {}
    partial: set[str] = set()
    for name, *fields in sorted(asked, key=lambda path: path[0] != "all"):
        given = job.plan[name]
        if not fields:
            section[name] = given
            continue
        for placement in plan.placements:
            key = str(placement.model_stage)
            if name in ("all", key):
                now = section.get(key) or PlacementSection(
                    tp=placement.layout.tp,
                    pp=placement.layout.pp,
                    dp=placement.dp,
                    micro_batch=placement.micro_batch,
                    recompute=placement.recompute,
                )
                section[key] = dataclasses.replace(now, **{fields[0]: getattr(given, fields[0])})
                partial.add(key)
    for placement in plan.placements:
        key = str(placement.model_stage)
        found = section.get(key)
        if found is None or key not in partial or found.gpus is not None or not set(placement.gpus) <= set(pool):
            continue
        if found.tp * found.pp * found.dp == len(placement.gpus):
            section[key] = dataclasses.replace(found, gpus=placement.gpus)
    return section


@contextmanager
def _naming_the_field() -> Iterator[None]:
    try:
        yield
    except PlanError as error:
        raise PlanError(f"plan: {str(error).removeprefix('plan: ')}") from error
