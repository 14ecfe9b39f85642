"""DeepSpeed's universal checkpoint: saved under the old layout, converted by its own program, loaded under the new one.

The same logical tensors as parameters of a module, cut over tp as in the transition, given to DeepSpeed's ZeRO 1 with an
`mpu` that names the groups. bf16, with fp32 weights and Adam's moments beside it, as its users train: 2 bytes a parameter
more than the state of the row, and less than with fp32, where it has the weights twice. ZeRO cuts the fp32 part over dp.

universal_checkpoint_s   save, convert and load, which are also there one by one: universal_save_s, universal_convert_s,
                         universal_load_s. Files are in /dev/shm. Starting processes, imports, engines and their groups
                         are left out, also of the converting program, whose number of processes is the one it chooses

Only without pp, on either side: the layers would have to be a PipelineModule. What arrives is compared with what was there.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nereus.cli.bench_reshard_cases import Case
from nereus.cli.bench_reshard_peers import Times, ranks_of, timed
from nereus.cli.bench_reshard_worker import pattern
from nereus.core.plan import ACTOR_TRAINING, Placement
from nereus.core.sharding import StateSpec, TensorSpec
from nereus.runtime.worker import WorkerContext

PROGRAM = "nereus.cli.bench_reshard_universal:DeepSpeedRank"
MOMENTS = ("exp_avg", "exp_avg_sq")
SAVED, CONVERTED = "saved", "universal"
"""Tags, which are folders."""


class UniversalPeer:
    """See the module."""

    def missing(self) -> str:
        if find_spec("deepspeed") is None:
            return "universal is left out: it is not installed (DS_BUILD_OPS=0 pip install 'deepspeed==0.19.*')"
        return "" if Path("/dev/shm").is_dir() else "universal is left out: there is no /dev/shm"

    def measure(self, cases: Sequence[Case], repeats: int) -> Iterator[tuple[Case, dict[str, Any]]]:
        """Only a trained model by itself, without pp."""
        for case in cases:
            if _is_able(case):
                yield case, _measured(case, repeats)


def _is_able(case: Case) -> bool:
    if case.moved != [ACTOR_TRAINING] or case.state_fraction < 1:
        return False
    return case.current[ACTOR_TRAINING].layout.pp == case.target[ACTOR_TRAINING].layout.pp == 1


def _measured(case: Case, repeats: int) -> dict[str, Any]:
    folder = Path(f"/dev/shm/nereus-bench-{time.time_ns()}")
    spec, old, new = case.specs[ACTOR_TRAINING], case.current[ACTOR_TRAINING], case.target[ACTOR_TRAINING]
    saved, converted, loaded = [], [], []
    try:
        with ranks_of(PROGRAM, old.gpus, spec, old) as ranks:
            ranks("fill")
            for _ in range(repeats):
                shutil.rmtree(folder, ignore_errors=True)
                saved.append(timed(ranks, "save", str(folder)))
                converted.append(_convert(folder))
        with ranks_of(PROGRAM, new.gpus, spec, new) as ranks:
            for _ in range(repeats):
                loaded.append(timed(ranks, "load", str(folder)))
            ranks("check")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    turns = list(zip(saved, converted, loaded, strict=True))
    stages = {"save": saved, "convert": converted, "load": loaded}
    return {
        **{f"universal_{name}_s": statistics.median(seconds for seconds, _ in times) for name, times in stages.items()},
        "universal_checkpoint_s": statistics.median(sum(seconds for seconds, _ in turn) for turn in turns),
        "universal_checkpoint_cpu_s": statistics.median(sum(cpu_s for _, cpu_s in turn) for turn in turns),
    }


def _convert(folder: Path) -> Times:
    """DeepSpeed's own program, in a process of its own, which says how long it took without its imports."""
    command = [sys.executable, "-m", __name__, "--input_folder", f"{folder / SAVED}", "--output_folder"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([*command, f"{folder / CONVERTED}"], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ds_to_universal ended with {done.returncode}: {done.stderr[-2000:]}")
    seconds, cpu_s = done.stdout.split()[-2:]
    return float(seconds), float(cpu_s)


def _convert_here() -> None:
    from deepspeed.checkpoint import ds_to_universal  # type: ignore[import-not-found]

    used_s, began = _cpu_with_children_s(), time.perf_counter()
    ds_to_universal.main(ds_to_universal.parse_arguments())
    print(time.perf_counter() - began, _cpu_with_children_s() - used_s)


def _cpu_with_children_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


# -- in the worker -----------------------------------------------------------------------------------------------------


class DeepSpeedRank:
    """One rank with its engine."""

    def __init__(self, context: WorkerContext, spec: StateSpec, placement: Placement) -> None:
        self._me, self._placement, self._store = context.device_id, placement, context.store
        self._specs = spec.by_name()
        os.dup2(2, 1)  # DeepSpeed prints
        self._make_engine()

    def _make_engine(self) -> None:
        """A world of the layout's devices, the module with this rank's shards, and DeepSpeed's engine around it."""
        ranks = sorted(self._placement.gpus)
        os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "RANK": f"{ranks.index(self._me)}"}
        os.environ |= {"WORLD_SIZE": f"{len(ranks)}"}
        import deepspeed  # type: ignore[import-not-found]

        dist.init_process_group("gloo", store=self._store, rank=ranks.index(self._me), world_size=len(ranks))
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        at = self._placement.position(self._me)
        names = [name for name in self._specs if f"{MOMENTS[0]}/{name}" in self._specs]
        self._module = _Shards([self._specs[name] for name in names], self._placement.layout.tp, at.tp_rank)
        self._engine, *_ = deepspeed.initialize(
            model=self._module,
            optimizer=torch.optim.Adam(self._module.parameters()),
            mpu=_Groups(self._placement, self._me),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": 1},
                "checkpoint": {"load_universal": True},
            },
        )

    def cpu_s(self) -> float:
        """What this process has used of the processor so far."""
        return time.process_time()

    @torch.no_grad()
    def fill(self) -> None:
        """Content that follows from name and index; the moments as after a first step."""
        zero = self._engine.optimizer
        (part,) = zero.single_partition_of_fp32_groups
        moments = {name: torch.zeros_like(part) for name in MOMENTS}
        zero.optimizer.state[part] = {"step": torch.tensor(1.0), **moments}
        for _, parameter, mapping in self._mine():
            mapping.get_hp_fragment().copy_(self._wanted(parameter, ""))
            address = mapping.get_hp_fragment_address()
            for name in MOMENTS:
                moments[name].narrow(0, address.start, address.numel).copy_(self._wanted(parameter, name))

    def save(self, folder: str) -> None:
        self._engine.save_checkpoint(folder, tag=SAVED)

    def load(self, folder: str) -> None:
        self._engine.load_checkpoint(folder, tag=CONVERTED)

    def check(self) -> None:
        """Raise unless this rank's part of every tensor is what it should be."""
        for name, parameter, mapping in self._mine():
            for kind in ("", *MOMENTS):
                if not torch.equal(mapping.get_hp_fragment(kind or None), self._wanted(parameter, kind)):
                    raise ValueError(f"{kind} of {name} is not what it was")

    def _mine(self) -> Iterator[tuple[str, Any, Any]]:
        """Name, parameter and where ZeRO keeps its fp32 part, of those of which this rank has a part."""
        for name, parameter in self._module.named_parameters():
            if (mapping := parameter._hp_mapping) is not None:  # type: ignore[attr-defined]
                yield name, parameter, mapping

    def _wanted(self, parameter: Any, kind: str) -> torch.Tensor:
        """[elements of this rank's part] fp32."""
        spec = self._module.specs[parameter]
        spec = self._specs[f"{kind}/{spec.name}"] if kind else spec
        whole = pattern(parameter.shape, spec, self._module.intervals[parameter]).to(torch.float32).flatten()
        address = parameter._hp_mapping.lp_fragment_address
        return whole.narrow(0, address.start, address.numel)


class _Shards(nn.Module):
    """A rank's shards as parameters. `universal_checkpoint_info`: what ds_to_universal must be told of how tp cuts them."""

    def __init__(self, specs: Sequence[TensorSpec], tp: int, tp_rank: int) -> None:
        super().__init__()
        self.specs: dict[nn.Parameter, TensorSpec] = {}
        self.intervals: dict[nn.Parameter, tuple[int, int]] = {}
        for spec in specs:
            (interval,) = spec.intervals(tp, tp_rank)
            parameter = nn.Parameter(torch.zeros(spec.local_shape([interval]), dtype=torch.bfloat16))
            self.register_parameter(_field(spec.name), parameter)
            self.specs[parameter], self.intervals[parameter] = spec, interval
        by_cut = [(f"{_field(spec.name)}$", None if spec.cut is None else spec.cut.dim) for spec in specs]
        self.universal_checkpoint_info = {
            "universal_checkpoint_version": 0.4,
            "tp_replicated_parameter_patterns": [name for name, dim in by_cut if dim is None],
            "parameter_with_row_parallelism_patterns": [name for name, dim in by_cut if dim == 1],
        }


def _field(name: str) -> str:
    return name.replace(".", "_")


class _Groups:
    """DeepSpeed's `mpu`."""

    def __init__(self, placement: Placement, me: int) -> None:
        self._tp, self._dp, self._at = placement.layout.tp, placement.dp, placement.position(me)
        world = sorted(placement.gpus)
        for unit in range(placement.dp):
            group = dist.new_group([world.index(gpu) for gpu in placement.unit_gpus(unit)])
            self._tp_group = group if unit == self._at.unit else getattr(self, "_tp_group", group)
        for tp_rank in range(self._tp):
            group = dist.new_group([world.index(placement.gpu(unit, 0, tp_rank)) for unit in range(self._dp)])
            self._dp_group = group if tp_rank == self._at.tp_rank else getattr(self, "_dp_group", group)

    def get_tensor_model_parallel_rank(self) -> int:
        return self._at.tp_rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._tp

    def get_tensor_model_parallel_group(self) -> Any:
        return self._tp_group

    get_model_parallel_rank = get_tensor_model_parallel_rank
    get_model_parallel_world_size = get_tensor_model_parallel_world_size
    get_model_parallel_group = get_tensor_model_parallel_group

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._dp_group)

    def get_data_parallel_world_size(self) -> int:
        return self._dp

    def get_data_parallel_group(self) -> Any:
        return self._dp_group


if __name__ == "__main__":
    _convert_here()
