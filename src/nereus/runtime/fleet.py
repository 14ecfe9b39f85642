"""The controller's hold on a job's distributed state: which units exist where, and how they are created and changed.

    Fleet.create(plan, sources)        connect, allocate, load from files
    Fleet.change(plan, devices)        start devices, connect, move every model-stage, commit, stop devices
    Fleet.weight_sync()                actor/training -> actor/generation, by the same region machinery
    Fleet.digest(...)                  one comparison for "nothing was lost"
    Fleet.write(model_stage, folder)   layout-free checkpoint of one model-stage

No unit is in use while these run (the caller drains first). Until every rank has received everything, the old state of every
model-stage is whole; a failure before that leaves it so, and forgets what was allocated.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereus.core.digest import combine, digest_regions
from nereus.core.errors import PlanError, StateError
from nereus.core.events import Moved
from nereus.core.plan import ACTOR_GENERATION, ACTOR_TRAINING, ModelStage, Plan
from nereus.core.sharding import Holdings, MovePlan, StateSpec, plan_moves
from nereus.runtime.checkpoint import INDEX, shards
from nereus.runtime.cluster import Call, Cluster, WorkerDied, WorkerFailed
from nereus.runtime.files import write_atomically
from nereus.runtime.groups import GroupDirectory

SHARD_BYTES = 512 * 2**20
"""The most that one rank gathers at a time to write a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a model-stage's state comes from: tensor name -> safetensors file; seed for a head made fresh."""

    files: Mapping[str, str]
    seed: int = 0


class Fleet:
    """See the module. specs: the logical state of every model-stage of the job."""

    def __init__(self, cluster: Cluster, specs: Mapping[ModelStage, StateSpec]) -> None:
        self.cluster = cluster
        self.specs = specs
        self.plan = Plan(())
        self._groups = GroupDirectory()
        self._epoch = cluster.epoch
        self._sync: MovePlan | None = None

    @property
    def pool(self) -> tuple[int, ...]:
        return self.cluster.devices

    def create(self, plan: Plan, sources: Mapping[ModelStage, Source]) -> None:
        """Make all units of a plan; those without a source start as zeros, for `weight_sync` to fill."""
        self._connect(plan, self.pool)
        for placement in plan.placements:
            name = placement.model_stage
            self._call("allocate", placement.gpus, name, placement).results()
            if name in sources:
                self._call("load", placement.gpus, name, dict(sources[name].files), sources[name].seed).results()
            self._call("commit", placement.gpus, name, placement).results()
        self.plan, self._sync = plan, None

    def change(self, plan: Plan, devices: Sequence[int]) -> dict[ModelStage, Moved]:
        """Go to another plan on `devices`, at a step boundary. actor/generation is only made: weight_sync must follow."""
        beyond = sorted(set(plan.gpus) - set(devices))
        if beyond:
            raise PlanError(f"the plan uses devices {beyond}, which are not in the pool {sorted(devices)}")
        old, added = self.plan, sorted(set(devices) - set(self.pool))
        if added:
            self.cluster.start(added)
        pool = self.pool
        self._connect(plan, pool)
        try:
            moved = self._fill(plan, pool)
        except Exception:
            self._forget_incoming()
            raise
        for placement in plan.placements:
            name = placement.model_stage
            ranks = sorted(set(placement.gpus) | set(old[name].gpus))
            self.cluster.call(
                "commit", {r: (name, placement if r in placement.gpus else None) for r in ranks}
            ).results()
        self.plan, self._sync = plan, None
        leaving = sorted(set(pool) - set(devices))
        if leaving:
            self.cluster.stop(leaving)
            self._connect(plan, self.pool)
        return moved

    def _fill(self, plan: Plan, pool: Sequence[int]) -> dict[ModelStage, Moved]:
        """Allocate everything of a plan and move into it what is not made by weight_sync."""
        moved: dict[ModelStage, Moved] = {}
        for placement in plan.placements:
            name = placement.model_stage
            self._call("allocate", placement.gpus, name, placement).results()
            if name != ACTOR_GENERATION:
                moved[name] = self._move(name, plan, pool)
        return moved

    def _forget_incoming(self) -> None:
        with contextlib.suppress(WorkerDied, WorkerFailed):  # the failure that brought us here is what is reported
            self._call("discard_incoming", self.pool).results()

    def _move(self, name: ModelStage, plan: Plan, pool: Sequence[int]) -> Moved:
        spec = self.specs[name]
        moves = plan_moves(spec, spec.holdings(self.plan[name]), spec.holdings(plan[name]))
        involved = sorted({r for m in moves.moves for r in (m.source, m.target)})
        received = self._call("move", involved, name, moves.moves, pool).results()
        if sum(received.values()) != moves.total_received_bytes:
            raise StateError(
                f"{name}: {sum(received.values())} bytes arrived, {moves.total_received_bytes} were planned"
            )
        return Moved(received_bytes=moves.total_received_bytes, kept_bytes=moves.total_kept_bytes)

    def weight_sync(self) -> int:
        """Give the generation units the trained parameters; returns the bytes that crossed between ranks."""
        if self._sync is None:
            generation = self.specs[ACTOR_GENERATION]
            self._sync = plan_moves(
                generation,
                generation.holdings(self.plan[ACTOR_TRAINING]),
                generation.holdings(self.plan[ACTOR_GENERATION]),
            )
        ranks = sorted({*self.plan[ACTOR_TRAINING].gpus, *self.plan[ACTOR_GENERATION].gpus})
        self._call("synchronise", ranks, ACTOR_TRAINING, ACTOR_GENERATION, self._sync.moves, self.pool).results()
        return self._sync.total_received_bytes

    def digest(self, names: Sequence[ModelStage]) -> str:
        """One line for the logical state of several model-stages; raises StateError when replicas differ."""
        return " ".join(f"{name}={self.digest_of(name, self.specs[name])[:32]}" for name in names)

    def digest_of(self, name: ModelStage, spec: StateSpec) -> str:
        """The digest of one model-stage's tensors that are in `spec`."""
        regions = digest_regions(spec, spec.holdings(self.plan[name]))
        reports = self.cluster.call("digest_sums", {gpu: (name, regions[gpu]) for gpu in regions}).results()
        return combine(spec, regions, reports)

    def check_generation_weights(self) -> None:
        """Raise StateError unless actor/generation holds bitwise what actor/training holds."""
        spec = self.specs[ACTOR_GENERATION]
        if self.digest_of(ACTOR_GENERATION, spec) != self.digest_of(ACTOR_TRAINING, spec):
            raise StateError("actor/generation does not hold the weights of actor/training after weight_sync")

    def write(self, name: ModelStage, spec: StateSpec, folder: Path, stem: str, *, index: bool = False) -> int:
        """Write the tensors of `spec` as whole tensors to FOLDER/STEM-0000i-of-0000n.safetensors; returns bytes.

        Files are gathered and written by the ranks of the first unit in turn, at most SHARD_BYTES each. index: also
        write the index file that transformers looks for.
        """
        placement = self.plan[name]
        specs, sources = self.specs[name].by_name(), self.specs[name].holdings(placement)
        groups, writers, total, where = shards(spec, SHARD_BYTES), placement.unit_gpus(0), 0, {}
        for i, names in enumerate(groups):
            file = f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors"
            where.update(dict.fromkeys(names, file))
            targets: Holdings = {writers[i % len(writers)]: {n: ((0, specs[n].length),) for n in names}}
            part = StateSpec(tuple(specs[n] for n in names), spec.num_layers)
            moves = plan_moves(part, sources, targets)
            ranks = sorted({r for m in moves.moves for r in (m.source, m.target)})
            arguments = {r: (name, targets.get(r, {}), moves.moves, self.pool, str(folder / file)) for r in ranks}
            total += sum(self.cluster.call("write_gathered", arguments).results().values())
        if index:
            table = {"metadata": {"total_size": spec.num_bytes}, "weight_map": where}
            write_atomically(folder / INDEX, json.dumps(table, indent=1))
        return total

    def _connect(self, plan: Plan, pool: Sequence[int]) -> None:
        if self.cluster.epoch != self._epoch:
            self._groups.forget()
            self._epoch = self.cluster.epoch
        groups = self._groups.change(plan, pool, {r: self.cluster.incarnation(r) for r in pool})
        self._call("connect", pool, groups).results()

    def _call(self, method: str, ranks: Sequence[int], *arguments: Any) -> Call:
        return self.cluster.call(method, dict.fromkeys(ranks, arguments))
