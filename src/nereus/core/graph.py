"""The graph of a step: which model-stage computes what, after what (design: one longest path gives the step latency).

    ppo   generation -> reference, reward, values, old_logprobs -> actor_update, critic_update -> weight_sync
    grpo  the same without the critic; remax too, whose generation samples once more for each prompt, greedily

Values and old log-probabilities are forward passes of the training units, whose weights they need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nereus.core.errors import UserError
from nereus.core.plan import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    REFERENCE_INFERENCE,
    REWARD_INFERENCE,
    ModelStage,
)

StepStage = Literal["generation", "inference", "training", "weight_sync"]
ALGORITHMS = ("ppo", "grpo", "remax")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTask:
    """One task of a step. after: names of the tasks whose results it needs."""

    name: str
    stage: StepStage
    model_stage: ModelStage
    after: tuple[str, ...] = ()


def job_graph(algorithm: str, *, reward_model: bool) -> tuple[StepTask, ...]:
    """The tasks of one step of an algorithm, in an order that respects `after`. Raises UserError for an unknown one."""
    if algorithm not in ALGORITHMS:
        raise UserError(f"algorithm {algorithm!r} is not known; known are {', '.join(ALGORITHMS)}")
    critic = algorithm == "ppo"
    inference = [("reference_logprobs", REFERENCE_INFERENCE)]
    if reward_model:
        inference.append(("scores", REWARD_INFERENCE))
    if critic:
        inference.append(("values", CRITIC_TRAINING))
    inference.append(("old_logprobs", ACTOR_TRAINING))
    tasks = [StepTask(name="generation", stage="generation", model_stage=ACTOR_GENERATION)]
    tasks += [StepTask(name=n, stage="inference", model_stage=m, after=("generation",)) for n, m in inference]
    known = tuple(name for name, _ in inference)
    tasks.append(StepTask(name="actor_update", stage="training", model_stage=ACTOR_TRAINING, after=known))
    if critic:
        tasks.append(StepTask(name="critic_update", stage="training", model_stage=CRITIC_TRAINING, after=known))
    tasks.append(
        StepTask(name="weight_sync", stage="weight_sync", model_stage=ACTOR_GENERATION, after=("actor_update",))
    )
    return tuple(tasks)


def model_stages(tasks: Sequence[StepTask]) -> tuple[ModelStage, ...]:
    """Every model-stage that a graph needs, once, in order of first use."""
    return tuple(dict.fromkeys(task.model_stage for task in tasks))
