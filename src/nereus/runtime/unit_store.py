"""What a worker holds: the state of its units, and the commands that create, move, check and save it.

A change of plan builds a model-stage's new state beside the old one:

    allocate   memory for the new holding           (`incoming`)
    move       regions from the old to the new      old untouched
    commit     the new one becomes the unit         old freed

so that a failure before `commit` leaves everything as it was. A program (the RL worker, a test) derives from `UnitStore`
and makes units out of states; the store itself knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import torch

from nereus.core.plan import ModelStage, Placement
from nereus.core.sharding import Holding, Interval, Move, StateSpec
from nereus.runtime.checkpoint import read_regions, write_tensors
from nereus.runtime.groups import Group, GroupTable
from nereus.runtime.state import LocalState, transfer
from nereus.runtime.worker import WorkerContext

U = TypeVar("U")


class UnitStore(Generic[U]):
    """Base of worker programs. specs: the logical state of every model-stage that may ever be here."""

    def __init__(self, context: WorkerContext, specs: Mapping[ModelStage, StateSpec]) -> None:
        self.context = context
        self.me = context.device_id
        self.specs = specs
        self.units: dict[ModelStage, U] = {}
        self._states: dict[ModelStage, LocalState] = {}
        self._incoming: dict[ModelStage, LocalState] = {}
        self.groups = GroupTable(
            me=self.me, store=context.store, flag=context.flag, device=context.device, timeout_s=context.timeout_s
        )

    def make_unit(self, placement: Placement, state: LocalState) -> U:
        """A unit's rank over its state; called at commit."""
        raise NotImplementedError  # the one method a program must give

    # -- commands ------------------------------------------------------------------------------------------------

    def ping(self) -> int:
        return self.me

    def connect(self, groups: Sequence[Group]) -> None:
        """Open and close communicators so that these are open."""
        self.groups.change(groups)

    def allocate(self, model_stage: ModelStage, placement: Placement) -> int:
        """Zeros for what this rank will hold under `placement`; returns their bytes."""
        at = placement.position(self.me)
        spec = self.specs[model_stage]
        holding = spec.position_holding(placement.layout, at.pp_stage, at.tp_rank)
        self._incoming[model_stage] = LocalState.zeros(spec, holding, self.context.device)
        return self._incoming[model_stage].num_bytes

    def move(self, model_stage: ModelStage, moves: Sequence[Move], pool: Sequence[int]) -> int:
        """From the present state of a model-stage to the allocated one; returns bytes received from other ranks."""
        source, target = self._states.get(model_stage), self._incoming.get(model_stage)
        return self._transfer(moves, source, target, pool)

    def synchronise(self, source: ModelStage, target: ModelStage, moves: Sequence[Move], pool: Sequence[int]) -> int:
        """Overwrite one model-stage's tensors with another's; returns bytes received from other ranks."""
        return self._transfer(moves, self._states.get(source), self._states.get(target), pool)

    def load(self, model_stage: ModelStage, files: Mapping[str, str], seed: int) -> None:
        """Fill the allocated state from safetensors files (`runtime.checkpoint.read_regions`)."""
        read_regions(self._incoming[model_stage], files, seed)

    def commit(self, model_stage: ModelStage, placement: Placement | None) -> None:
        """Put the allocated state in the place of the present one; None: this rank holds nothing of it any more."""
        self.units.pop(model_stage, None)
        self._states.pop(model_stage, None)
        if placement is not None:
            state = self._incoming.pop(model_stage)
            self._states[model_stage] = state
            self.units[model_stage] = self.make_unit(placement, state)

    def discard_incoming(self) -> None:
        """Forget allocations of a change that did not come about."""
        self._incoming.clear()

    def digest_sums(self, model_stage: ModelStage, regions: Mapping[str, Sequence[Interval]]) -> dict[str, list[int]]:
        """See `core.digest`."""
        return self._states[model_stage].digest_sums(regions)

    def set_counters(self, model_stage: ModelStage, tensor: str, values: Mapping[int, int]) -> None:
        """Set entries of a counter tensor."""
        for index, value in values.items():
            self._states[model_stage].tensors[tensor][index] = value

    def write_gathered(
        self,
        model_stage: ModelStage,
        holding: Holding,
        moves: Sequence[Move],
        pool: Sequence[int],
        path: str,
    ) -> int:
        """Gather whole tensors on the rank whose `holding` is not empty, which writes them to `path`; bytes written."""
        target = LocalState.zeros(self.specs[model_stage], holding, self.context.device)
        self._transfer(moves, self._states.get(model_stage), target, pool)
        return write_tensors(Path(path), target.tensors) if holding else 0

    def _transfer(
        self, moves: Sequence[Move], source: LocalState | None, target: LocalState | None, pool: Sequence[int]
    ) -> int:
        with torch.no_grad():
            return transfer(
                moves,
                me=self.me,
                source=source,
                target=target,
                communicator=self.groups.get("pool", tuple(sorted(pool))),
                device=self.context.device,
            )
