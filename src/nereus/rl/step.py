"""A step in progress: what is done of it. After a failure only what is not done is done again.

    changed      the change of plan before it, if one was due           rollouts     kept once they are generated
    experience   kept once it is computed                               waiting      the updates that are left, in order
    in_flight    the updates that all replicas have the gradient of     counted, reported

Plain data. `rl.loop` fills it in order; `rl.recovery` settles what was in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from nereus.core.job import Job
from nereus.core.plan import ACTOR_TRAINING, CRITIC_TRAINING, ModelStage
from nereus.core.randomness import hash_words
from nereus.engine.batch import Sequences
from nereus.engine.optimizer import AdamW
from nereus.rl.rollouts import Rollouts

TRAINED = (ACTOR_TRAINING, CRITIC_TRAINING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """A step's sequences with all that training needs, response-aligned [n, r]. keys: (position, sample) of each."""

    sequences: Sequences
    keys: tuple[tuple[int, int], ...]
    old_logprobs: torch.Tensor
    reference_logprobs: torch.Tensor
    advantages: torch.Tensor
    old_values: torch.Tensor | None
    returns: torch.Tensor | None
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimizer update of a trained model-stage. rows: of the step's batch, ascending int64 [mini-batch]."""

    model_stage: ModelStage
    epoch: int
    mini_batch: int
    rows: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """An update whose gradient and norm all replicas have: from here on all that are left apply it, or none does.

    number: the updates before it. statistics: summed over all units. settings: None where the gradient is not finite,
    so that all discard it.
    """

    update: Update
    number: int
    statistics: Mapping[str, float]
    norm: float
    settings: AdamW | None


@dataclass(slots=True)
class Totals:
    """What the updates of a step add up to. num_tokens: response tokens trained on, once for each epoch."""

    sums: dict[str, float] = field(default_factory=dict)
    norms: dict[str, list[float]] = field(default_factory=dict)
    num_tokens: int = 0
    discarded: int = 0

    def add(self, done: InFlight, num_tokens: int) -> None:
        for key, value in done.statistics.items():
            self.sums[key] = self.sums.get(key, 0.0) + value
        self.norms.setdefault(done.update.model_stage.model, []).append(done.norm)
        self.discarded += done.settings is None
        if done.update.model_stage == ACTOR_TRAINING:
            self.num_tokens += num_tokens

    @property
    def metrics(self) -> dict[str, float]:
        """Means over tokens of the losses, over updates of the norms."""
        found = {key: value / max(self.num_tokens, 1) for key, value in self.sums.items()}
        for model, values in self.norms.items():
            found["grad_norm" if model == "actor" else f"{model}_grad_norm"] = sum(values) / len(values)
        return {**found, "updates_discarded": float(self.discarded)}


@dataclass(slots=True, kw_only=True)
class StepState:
    """See the module. began_s: by the loop's clock. stage: where it is, as in `StageStarted`. seconds: by stage.

    unproven: the plan was changed, and generation's weights have not been compared with the trained ones since.
    computing: the updates whose gradients are being computed, side by side; in_flight: those of them that are not done.
    """

    step: int
    began_s: float
    stage: str = ""
    changed: bool = False
    unproven: bool = False
    rollouts: Rollouts | None = None
    experience: Experience | None = None
    waiting: list[Update] = field(default_factory=list)
    computing: tuple[Update, ...] = ()
    in_flight: tuple[InFlight, ...] = ()
    counting: bool = False
    counted: bool = False
    reported: bool = False
    totals: Totals = field(default_factory=Totals)
    seconds: dict[str, float] = field(default_factory=dict)


def updates_of(job: Job, step: int) -> list[Update]:
    """All updates of a step in order: epochs of mini-batches, in each the actor's and then the critic's."""
    names = TRAINED if CRITIC_TRAINING in job.model_stages else TRAINED[:1]
    found = []
    for epoch in range(job.batch.epochs):
        order = shuffled(job.batch.sequences, job.seed, step, epoch)
        for mini_batch, rows in enumerate(np.split(order, job.batch.mini_batches)):
            index = torch.from_numpy(np.sort(rows))
            found += [Update(model_stage=m, epoch=epoch, mini_batch=mini_batch, rows=index) for m in names]
    return found


def shuffled(n: int, seed: int, step: int, epoch: int) -> np.ndarray:
    """A permutation of the batch that depends on (seed, step, epoch) alone; the first epoch goes through in order."""
    if epoch == 0:
        return np.arange(n)
    return np.argsort(hash_words(seed, step, epoch, np.arange(n)), kind="stable")
