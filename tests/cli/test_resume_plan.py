"""What a partial override of the plan leaves as it was at the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from nereus.api.job_file import parse_job
from nereus.cli.start import _plan_to_resume
from nereus.core.job import initial_plan, planned_changes
from nereus.core.plan import ACTOR_GENERATION, ACTOR_TRAINING, Plan

JOB = """
name: j
steps: 9
model: {path: m}
task: {name: count}
algorithm: {name: grpo}
batch: {prompts: 4, samples_per_prompt: 2}
sampling: {max_new_tokens: 4}
optimizer: {lr: 0.1}
cluster: {devices: 4}
plan: {all: {dp: 4}, actor/training: {dp: 2}}
changes: [{step: 2, plan: {actor/training: {tp: 2, pp: 2, recompute: true, micro_batch: 3, gpus: [3, 2, 1, 0]}}}]
"""


def no_auto(step: int, pool: Sequence[int], current: Plan | None) -> Plan:
    raise AssertionError("nothing here is auto")


def resumed(*overrides: str):  # type: ignore[no-untyped-def]
    before = parse_job(JOB, where="job", base=Path())
    at_checkpoint = planned_changes(before, initial_plan(before, no_auto), range(4), auto=no_auto)[-1].plan
    job = parse_job(JOB, where="job", base=Path(), overrides=overrides)
    return at_checkpoint, *_plan_to_resume(job, overrides, at_checkpoint, (0, 1, 2, 3), auto=no_auto, step=5)


def test_a_named_field_changes_alone() -> None:
    before, plan, _ = resumed("plan.actor/training.micro_batch=1")
    old, new = before[ACTOR_TRAINING], plan[ACTOR_TRAINING]
    assert (new.layout, new.dp, new.gpus, new.recompute, new.micro_batch) == (old.layout, 1, old.gpus, True, 1)
    assert plan[ACTOR_GENERATION] == before[ACTOR_GENERATION]


def test_a_field_of_all_changes_everywhere() -> None:
    before, plan, _ = resumed("plan.all.micro_batch=7")
    assert {p.micro_batch for p in plan.placements} == {7}
    assert [p.layout for p in plan.placements] == [p.layout for p in before.placements]
    assert plan[ACTOR_TRAINING].gpus == (3, 2, 1, 0)


@pytest.mark.parametrize("override", ["plan.actor/training={tp: 2}", "plan={actor/training: {tp: 2}}"])
def test_a_whole_placement_replaces_the_old_one(override: str) -> None:
    _, plan, _ = resumed(override)
    new = plan[ACTOR_TRAINING]
    assert (new.layout.tp, new.layout.pp, new.dp, new.gpus, new.recompute) == (2, 1, 1, (0, 1), False)
