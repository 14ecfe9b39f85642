"""The worker program of the engine tests: the RL worker, which can change its models and show its gradients."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nereus.core.job import PaceSection
from nereus.core.plan import ModelStage
from nereus.engine import optimizer
from nereus.engine.architecture import Architecture
from nereus.engine.batch import MicroBatch
from nereus.engine.collectives import token_statistics
from nereus.engine.pace import Pace
from nereus.engine.unit import Loss, Unit
from nereus.rl.worker import RlWorker, state_spec

PROGRAM = "programs_for_engine_tests:EngineTestWorker"

Region = tuple[int, int, int, torch.Tensor]
"""(cut dimension, start, stop, what a rank has of it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTargets:
    """A loss for reward models, which the product only runs forward: the sum of scores x weights [n]."""

    weights: torch.Tensor

    def rows(self, index: torch.Tensor) -> ScoreTargets:
        return ScoreTargets(weights=self.weights[index])

    def loss(self, unit: Unit) -> Loss:
        def compute(micro: MicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            total = (unit.final_scores(micro, hidden)[:, 0] * self.weights[micro.index]).sum()
            return total, total.detach().double()[None]

        return compute


class EngineTestWorker(RlWorker):
    """See the module."""

    def install(self, architectures: Mapping[ModelStage, Architecture]) -> None:
        """Forget all units; from now on these models."""
        for holders in (self.units, self._states, self._incoming, self._norms):
            holders.clear()
        self._architectures = architectures
        self.specs = {name: state_spec(name, a) for name, a in architectures.items()}

    def gradient_regions(self, names: Sequence[ModelStage]) -> dict[ModelStage, dict[str, list[Region]]]:
        """This rank's gradients, by logical tensor."""
        return {name: _regions(self.units[name]) for name in names}

    def norm_of_ones(self, name: ModelStage) -> float:
        """The gradient norm when every element's gradient is one."""
        unit = self.units[name]
        for parameter in unit.module.parameters.values():
            parameter.grad = torch.ones_like(parameter)
        norm = float(optimizer.gradient_norm(unit))
        optimizer.clear_gradients(unit)
        return norm

    def split_token_statistics(
        self,
        name: ModelStage,
        logits: torch.Tensor,
        first: int,
        tokens: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(log-probabilities, entropies, gradient of their weighted sum by this rank's logits)."""
        logits = logits.clone().requires_grad_()
        logprobs, entropies = token_statistics(logits, tokens, first=first, tp=self.units[name].groups.tp)
        (logprobs @ weights[0] + entropies @ weights[1]).backward()
        assert logits.grad is not None
        return logprobs.detach(), entropies.detach(), logits.grad

    def held(self) -> dict[str, int]:
        """What the budget counts now, by kind."""
        return dict(self.budget.held)

    def restrict(self, capacity_bytes: float | None) -> None:
        """From now on the device has this capacity."""
        self.budget.capacity_bytes = capacity_bytes

    def keep_pace(self, declared: PaceSection | None) -> None:
        """From now on the device is the declared one."""
        self.meter.pace = None if declared is None else Pace(declared)

    def footprint(self) -> dict[str, int]:
        """What a leak would make grow: resident bytes, threads, open files."""
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return {
            "resident_bytes": resident,
            "threads": len(os.listdir("/proc/self/task")),
            "files": len(os.listdir("/proc/self/fd")),
        }


def _regions(unit: Unit) -> dict[str, list[Region]]:
    found: dict[str, list[Any]] = {}
    for name, parameter in unit.module.parameters.items():
        spec, gradient = unit.state.specs[name], parameter.grad
        assert gradient is not None
        lengths = [stop - start for start, stop in unit.state.holding[name]]
        pieces = gradient.split(lengths, spec.dim) if lengths else []
        found[name] = [
            (spec.dim, *interval, piece.clone())
            for interval, piece in zip(unit.state.holding[name], pieces, strict=True)
        ]
    return found
