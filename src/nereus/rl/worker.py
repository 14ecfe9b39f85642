"""What a device does in an RL job: hold units, generate, score, compute log-probabilities and values, train.

Every command that computes is given to all ranks of a unit with the same arguments; the answering rank of each unit
returns the result. An update is two commands, so that all replicas agree before any of them steps:

    gradients   forward, backward, reduction over all ranks -> statistics, norm
    update      clip and step; purely local
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from nereus.core.plan import ACTOR_GENERATION, ModelStage, Placement
from nereus.core.sharding import StateSpec
from nereus.engine import optimizer
from nereus.engine.architecture import Architecture
from nereus.engine.batch import Sequences
from nereus.engine.generation import Request, Response, Sampling, generate
from nereus.engine.unit import Unit, UnitGroups
from nereus.rl.objectives import Targets
from nereus.runtime.state import LocalState
from nereus.runtime.unit_store import UnitStore
from nereus.runtime.worker import WorkerContext

PROGRAM = "nereus.rl.worker:RlWorker"
PRELOAD = ("torch.optim.adamw", "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto")


def state_spec(model_stage: ModelStage, architecture: Architecture) -> StateSpec:
    """The logical state of a model-stage's units."""
    return architecture.training_state if model_stage.stage == "training" else architecture.inference_state


class RlWorker(UnitStore[Unit]):
    """The program of a worker process (`runtime.worker`)."""

    def __init__(self, context: WorkerContext, architectures: Mapping[ModelStage, Architecture]) -> None:
        super().__init__(context, {m: state_spec(m, a) for m, a in architectures.items()})
        self._architectures = architectures
        self._norms: dict[ModelStage, torch.Tensor] = {}

    def make_unit(self, placement: Placement, state: LocalState) -> Unit:
        name = placement.model_stage
        return Unit(
            self._architectures[name],
            placement,
            self.me,
            state,
            UnitGroups.of(placement, self.me, self.groups),
            trainable=name.stage == "training",
        )

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response] | None:
        """Responses to this unit's requests."""
        return generate(self.units[ACTOR_GENERATION], requests, sampling)

    def logprobs(self, name: ModelStage, sequences: Sequences, temperature: float) -> torch.Tensor | None:
        """Log-probabilities of the response tokens, [n, r]."""
        unit = self.units[name]
        return unit.forward(sequences, unit.logprobs(temperature))

    def values(self, name: ModelStage, sequences: Sequences) -> torch.Tensor | None:
        """The value before each response token, [n, r]."""
        unit = self.units[name]
        return unit.forward(sequences, unit.response_values)

    def scores(self, name: ModelStage, sequences: Sequences) -> torch.Tensor | None:
        """The reward model's score of each sequence, [n, 1]."""
        unit = self.units[name]
        return unit.forward(sequences, unit.final_scores)

    def gradients(self, name: ModelStage, sequences: Sequences, targets: Targets) -> tuple[list[float] | None, float]:
        """Accumulate and reduce the gradients of this unit's part of a mini-batch.

        Returns (this unit's summed statistics, on the answering rank; the norm of the whole gradient).
        """
        unit = self.units[name]
        optimizer.clear_gradients(unit)
        statistics = unit.accumulate(sequences, targets.loss(unit))
        optimizer.reduce_gradients(unit)
        self._norms[name] = optimizer.gradient_norm(unit)
        answer = statistics.tolist() if unit.answers and statistics is not None else None
        return answer, float(self._norms[name])

    def update(self, name: ModelStage, settings: optimizer.AdamW) -> None:
        """Apply the gradients that `gradients` left. Local: no rank waits for another."""
        norm = self._norms.pop(name)
        assert math.isfinite(norm), "an update with a gradient that is not finite must be discarded"
        optimizer.step(self.units[name], settings, norm)

    def discard(self, name: ModelStage) -> None:
        """Forget the gradients that `gradients` left."""
        self._norms.pop(name, None)
        optimizer.clear_gradients(self.units[name])
