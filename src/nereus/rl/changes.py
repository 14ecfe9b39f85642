"""The planned changes of a job, before it starts: laid so that the most state stays where it is, and known to fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nereus.core.errors import PlanError
from nereus.core.job import Job, PlannedChange
from nereus.core.plan import ModelStage, Plan
from nereus.core.sharding import StateSpec
from nereus.runtime.fleet import LOCAL_RATES
from nereus.transition.align import align_plan
from nereus.transition.profile import StateProfile
from nereus.transition.program import program


def lay_out(
    job: Job, plan: Plan, changes: Sequence[PlannedChange], specs: Mapping[ModelStage, StateSpec]
) -> tuple[PlannedChange, ...]:
    """The same changes with every model-stage's devices in the order that keeps the most of its state in place.

    Model-stages whose devices the job file names are left as they are.
    """
    profiles = {name: StateProfile.of(spec) for name, spec in specs.items()}
    sections = {change.step: change.plan for change in job.changes}
    found: list[PlannedChange] = []
    for change in changes:
        section = sections.get(change.step)
        named = {name for name, s in section.items() if s.gpus is not None} if isinstance(section, Mapping) else set()
        aligned = align_plan(change.plan, plan, profiles, _one_node(change.plan, plan))
        after = change.plan
        if "all" not in named:
            kept = {p.model_stage: p for p in plan.placements}
            after = Plan(
                tuple(
                    given if str(given.model_stage) in named or given == kept.get(given.model_stage) else laid
                    for given, laid in zip(change.plan.placements, aligned.placements, strict=True)
                )
            )
        found.append(PlannedChange(change.step, change.devices, after))
        plan = after
    return tuple(found)


def check_changes(
    plan: Plan, changes: Sequence[PlannedChange], specs: Mapping[ModelStage, StateSpec], usable_bytes: float
) -> None:
    """Raise PlanError, naming the step, for a change that does not fit into the devices' memory in any order."""
    for change in changes:
        try:
            program(
                specs,
                {p.model_stage: specs[p.model_stage].holdings(p) for p in plan.placements},
                plan,
                change.plan,
                node_of=_one_node(plan, change.plan),
                rates=LOCAL_RATES,
                usable_bytes=usable_bytes,
            )
        except PlanError as error:
            raise PlanError(f"changes: step {change.step}: {error}") from error
        plan = change.plan


def _one_node(*plans: Plan) -> np.ndarray:
    return np.zeros(max(gpu for plan in plans for gpu in plan.gpus) + 1, dtype=np.int64)
