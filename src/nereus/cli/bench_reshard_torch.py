"""PyTorch's own ways to reshard: a distributed checkpoint through memory, and DTensor's redistribute.

The same state as DTensors: on every pp_stage a mesh [dp, tp] of its ranks, tensors that are cut over tp as `Shard`, others
replicated; one world of the transition's devices over Gloo. What arrives is compared with what was there (not timed).

dcp_tmpfs_s   save into /dev/shm and load as the new layout, which may be any. Files are not synced; the old state is freed
              before the load, so that all fits. `_kept`: the tensors that are loaded into are there already, and were
              written to before; a file's pages are always new
dtensor_s     tensor by tensor, on one mesh: only where pp stays and tp changes by a factor over the same devices. Its ranks
              are where the least must move
"""

from __future__ import annotations

import logging
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from nereus.cli.bench_reshard_cases import Case
from nereus.cli.bench_reshard_peers import Caller, Times, timed
from nereus.cli.bench_reshard_worker import pattern
from nereus.core.plan import ACTOR_GENERATION, ModelStage, Placement, Plan
from nereus.core.sharding import StateSpec, TensorSpec
from nereus.runtime.cluster import LocalCluster
from nereus.runtime.worker import WorkerContext

PROGRAM = "nereus.cli.bench_reshard_torch:TorchPeer"
COUNTERS = "counters"
"""The update counters, 24 bytes, are left out."""

Specs = Mapping[ModelStage, StateSpec]


class CheckpointPeer:
    """See the module."""

    def missing(self) -> str:
        return "" if Path("/dev/shm").is_dir() else "dcp is left out: there is no /dev/shm"

    def measure(self, cases: Sequence[Case], repeats: int) -> Iterator[tuple[Case, dict[str, Any]]]:
        """Save and load, and both."""
        with _workers(cases) as cluster:
            for case in cases:
                with _world(cluster, case) as peer:
                    yield case, _checkpointed(peer, case, repeats)


def _checkpointed(peer: Caller, case: Case, repeats: int) -> dict[str, Any]:
    saved, loaded, kept = [], [], []
    for turn in range(repeats):
        folder = Path(f"/dev/shm/nereus-bench-{time.time_ns()}")
        try:
            peer("hold", case.specs, case.current, True)
            saved.append(timed(peer, "save", str(folder)))
            peer("hold", case.specs, case.target, False)
            loaded.append(timed(peer, "load", str(folder)))
            if turn == 0:
                peer("check")
            peer("spoil")
            kept.append(timed(peer, "load", str(folder)))
            if turn == 0:
                peer("check")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    found = {"dcp_save_s": statistics.median(seconds for seconds, _ in saved)}
    for kind, times in (("", loaded), ("_kept", kept)):
        both = [(a + b, c + d) for (a, c), (b, d) in zip(saved, times, strict=True)]
        found |= {
            f"dcp_load{kind}_s": statistics.median(seconds for seconds, _ in times),
            f"dcp_tmpfs{kind}_s": statistics.median(seconds for seconds, _ in both),
            f"dcp_tmpfs{kind}_cpu_s": statistics.median(cpu_s for _, cpu_s in both),
        }
    return found


class RedistributePeer:
    """See the module."""

    def missing(self) -> str:
        return ""

    def measure(self, cases: Sequence[Case], repeats: int) -> Iterator[tuple[Case, dict[str, Any]]]:
        """Only where DTensor can."""
        able = [case for case in cases if all(_on_one_mesh(case.current[m], case.target[m]) for m in case.moved)]
        with _workers(able) as cluster:
            for case in able:
                with _world(cluster, case) as peer:
                    times = list(_redistributed(peer, case, repeats))
                    yield (
                        case,
                        {
                            "dtensor_s": statistics.median(seconds for seconds, _ in times),
                            "dtensor_cpu_s": statistics.median(cpu_s for _, cpu_s in times),
                        },
                    )


def _redistributed(peer: Caller, case: Case, repeats: int) -> Iterator[Times]:
    for turn in range(repeats):
        peer("hold_for", case.specs, case.current, case.target)
        yield timed(peer, "redistribute")
        if turn == 0:
            peer("check")


def _on_one_mesh(old: Placement, new: Placement) -> bool:
    (a, b) = sorted((old.layout.tp, new.layout.tp))
    return old.layout.pp == new.layout.pp and sorted(old.gpus) == sorted(new.gpus) and a != b and b % a == 0


@contextmanager
def _workers(cases: Sequence[Case]) -> Iterator[LocalCluster]:
    """As many as the largest case needs."""
    cluster = LocalCluster(PROGRAM, (), preload=("torch.distributed.checkpoint", "torch.distributed.tensor"))
    try:
        if cases:
            cluster.start(range(max(case.devices for case in cases)))
        yield cluster
    finally:
        cluster.close()


@contextmanager
def _world(cluster: LocalCluster, case: Case) -> Iterator[Caller]:
    """The devices of a case in one world."""

    def call(method: str, *arguments: Any) -> dict[int, Any]:
        return cluster.call(method, dict.fromkeys(range(case.devices), arguments)).results()

    call("join", case.name, case.devices)
    yield call
    call("leave")


# -- in the worker -----------------------------------------------------------------------------------------------------


class TorchPeer:
    """One rank: a state of DTensors."""

    def __init__(self, context: WorkerContext) -> None:
        self._context, self._me = context, context.device_id
        self._state: dict[str, DTensor] = {}
        self._targets: dict[str, list[Any]] = {}
        self._wanted: dict[str, TensorSpec] = {}
        logging.getLogger("torch.distributed").setLevel(logging.ERROR)

    def join(self, name: str, size: int) -> None:
        """One world of `size` devices. name: used once."""
        store = dist.PrefixStore(name, self._context.store)
        dist.init_process_group("gloo", store=store, rank=self._me, world_size=size)

    def cpu_s(self) -> float:
        """What this process has used of the processor so far."""
        return time.process_time()

    def leave(self) -> None:
        self._state = {}
        dist.destroy_process_group()

    def hold(self, specs: Specs, plan: Plan, filled: bool) -> None:
        """The state under a plan; without content there is only room for it, when `load` comes."""
        self._state, self._wanted, self._filled = {}, {}, filled
        self._plan, self._specs = plan, specs
        self._meshes = {
            placement.model_stage: [DeviceMesh("cpu", _ranks(placement, stage)) for stage in range(placement.layout.pp)]
            for placement in plan.placements
        }
        if filled:
            self._make(filled=True)

    def _make(self, *, filled: bool) -> None:
        for placement in self._plan.placements:
            if placement.model_stage == ACTOR_GENERATION or self._me not in placement.gpus:
                continue
            at = placement.position(self._me)
            mesh = self._meshes[placement.model_stage][at.pp_stage]
            for spec in _held(self._specs[placement.model_stage], placement.layout.pp, at.pp_stage):
                name = f"{placement.model_stage}/{spec.name}"
                cut = Replicate() if spec.cut is None else Shard(spec.cut.dim)
                self._wanted[name] = spec
                self._state[name] = _dtensor(spec, mesh, [Replicate(), cut], filled)

    def save(self, folder: str) -> None:
        writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=False)
        dcp.save(self._state, storage_writer=writer)

    def spoil(self) -> None:
        """Overwrite the state, which stays where it is: `load` has to write all of it."""
        for tensor in self._state.values():
            tensor.to_local().fill_(-1)

    def load(self, folder: str) -> None:
        """Into the tensors that are there, or into new ones."""
        if not self._state:
            self._make(filled=False)
        dcp.load(self._state, storage_reader=FileSystemReader(folder))

    def hold_for(self, specs: Specs, current: Plan, target: Plan) -> None:
        """The state under one plan, on meshes on which the other can be said, too."""
        self._state, self._wanted, self._targets = {}, {}, {}
        for old in current.placements:
            new = target[old.model_stage]
            less, more = sorted((old.layout.tp, new.layout.tp))
            for stage in range(old.layout.pp):
                ranks = torch.tensor(sorted(_ranks(old, stage).flatten().tolist())).view(-1, less, more // less)
                mesh = DeviceMesh("cpu", ranks)
                if self._me not in ranks:
                    continue
                for spec in _held(specs[old.model_stage], old.layout.pp, stage):
                    name = f"{old.model_stage}/{spec.name}"
                    self._wanted[name] = spec
                    self._state[name] = _dtensor(spec, mesh, _cuts(spec, old.layout.tp == more), True)
                    self._targets[name] = _cuts(spec, new.layout.tp == more)

    def redistribute(self) -> None:
        for name, placements in self._targets.items():
            self._state[name] = self._state[name].redistribute(placements=placements)

    def check(self) -> None:
        """Raise unless every tensor is what it should be here."""
        for name, tensor in self._state.items():
            if not torch.equal(tensor.to_local(), _local(self._wanted[name], tensor)):
                raise ValueError(f"{name} is not what it was")


def _ranks(placement: Placement, stage: int) -> torch.Tensor:
    """[dp, tp] of a pp_stage."""
    layout = placement.layout
    return torch.tensor(
        [[placement.gpu(unit, stage, t) for t in range(layout.tp)] for unit in range(placement.dp)], dtype=torch.int
    )


def _held(spec: StateSpec, pp: int, stage: int) -> Iterator[TensorSpec]:
    return (t for t in spec.tensors if t.on_pp_stage(spec.num_layers, pp, stage) and t.name != COUNTERS)


def _cuts(spec: TensorSpec, fine: bool) -> list[Any]:
    """On a mesh [replicas, less, factor]: cut by the last dimension too, or not."""
    if spec.cut is None:
        return [Replicate(), Replicate(), Replicate()]
    return [Replicate(), Shard(spec.cut.dim), Shard(spec.cut.dim) if fine else Replicate()]


def _dtensor(spec: TensorSpec, mesh: DeviceMesh, placements: Sequence[Any], filled: bool) -> DTensor:
    whole = torch.empty(spec.shape, dtype=torch.float32, device="meta")
    shape = list(spec.shape)
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            shape[placement.dim] //= mesh.size(dim)
    made = DTensor.from_local(
        torch.empty(shape, dtype=torch.float32),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    if filled:
        made.to_local().copy_(_local(spec, made))
    return made


def _local(spec: TensorSpec, tensor: DTensor) -> torch.Tensor:
    """What the local part of a tensor is to be."""
    size, first = list(tensor.to_local().shape), 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    length = spec.length
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            length //= tensor.device_mesh.size(dim)
            first += coordinate[dim] * length
    return pattern(size, spec, (first, first + size[spec.dim])).to(torch.float32)
