"""What this machine is made of: its GPUs by what the driver says, its cores by measuring them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nereus.api.gpus import GpuInfo, GpuProbe, NoAnswer, find_probe
from nereus.core.errors import UserError
from nereus.core.inventory import GIB, CpuHost, DeviceKind, reported_device
from nereus.core.job import Job

MEASURE_S = 0.12
"""Time that each measurement takes."""
MATRIX = 384
BLOCK_BYTES = 64 * 2**20
"""Beyond the caches."""
GPU_UNIT = 2**28
"""Free memory of a GPU is rounded down to a multiple of this: a driver's own use differs a little from start to start."""
OTHERS = 0.95
"""With less than this share free, somebody else is on the GPU: a driver alone takes 1 to 3 %."""


def cache_folder() -> Path:
    """Where converted models are kept: $NEREUS_CACHE, or nereus under the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nereus"
    return Path(os.environ.get("NEREUS_CACHE") or default)


def device_type_of(job: Job) -> str:
    """ "cuda" where the job wants it and the machine has as many, else "cpu". Raises UserError."""
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    most = most_devices(job)
    if job.cluster.device == "cuda" and found < most:
        raise UserError(f"cluster.device: cuda needs {most} GPUs, this machine has {found}; cpu needs none")
    return "cuda" if job.cluster.device != "cpu" and found >= most else "cpu"


def most_devices(job: Job) -> int:
    """How many devices the job file asks for at a time, at the most."""
    return max([job.cluster.devices, *(c.devices or 0 for c in job.changes)])


def device_of(device_type: str, num_devices: int = 1) -> tuple[DeviceKind | CpuHost, str]:
    """A run's devices on this machine, and where the figures are from.

    A GPU's memory is what is free on the fullest of the first `num_devices`: ask before the run's own processes hold any.
    Raises UserError where no GPU answers.
    """
    return (cpu_host(), "measured") if device_type == "cpu" else gpu_device(find_probe(), num_devices)


def gpu_device(probe: GpuProbe | None, num_devices: int) -> tuple[DeviceKind, str]:
    """`device_of` for GPUs, by what a probe says. Raises UserError."""
    gpus = _first_gpus(probe, num_devices)
    kind, note = reported_device(gpus[0].name, gpus[0].memory_bytes)
    notes = [note or "data sheet"]
    least = min(gpus, key=gpu_capacity_bytes)
    if least.free_bytes is None:
        notes.append("all memory taken to be free, neither NVML nor AMD SMI answers")
    elif least.free_bytes < OTHERS * least.memory_bytes:
        free, whole = (f"{x / GIB:.1f}" for x in (gpu_capacity_bytes(least), least.memory_bytes))
        notes.append(f"others hold memory: {free} of {whole} GiB are free on GPU {least.index}")
    if any(gpu.linked is not None and len(gpu.linked & set(range(len(gpus)))) < len(gpus) - 1 for gpu in gpus):
        notes.append("not all GPUs are linked directly, planned as if they were")
    return replace(kind, memory_bytes=gpu_capacity_bytes(least)), "; ".join(notes)


def gpu_capacity_bytes(gpu: GpuInfo) -> int:
    """What a run may hold on a GPU: what is free, or all where that is not known; two equal starts find the same."""
    if gpu.free_bytes is None:
        return gpu.memory_bytes
    return gpu.free_bytes // GPU_UNIT * GPU_UNIT


def device_memory_bytes(job: Job, device_type: str, num_devices: int) -> float:
    """What each of `num_devices` devices may hold. Of GPUs: what is free on the fullest that the job may use.

    Raises UserError where no GPU answers.
    """
    if job.cluster.memory_gib is not None:
        return job.cluster.memory_gib * 2**30
    if device_type == "cpu":
        return available_bytes() / num_devices
    return float(min(gpu_capacity_bytes(gpu) for gpu in _first_gpus(find_probe(), most_devices(job))))


def _first_gpus(probe: GpuProbe | None, num_devices: int) -> tuple[GpuInfo, ...]:
    try:
        found = () if probe is None else probe.inventory()[:num_devices]
    except NoAnswer as error:  # it did a moment ago
        raise UserError(f"cluster.device: cuda, but {error}") from error
    if not found:
        raise UserError("cluster.device: cuda, but neither the driver nor torch names a GPU")
    return found


def cpu_host() -> CpuHost:
    """Measure this machine, in about 0.3 s: float32 products and memory reads of one thread.

    Figures are the best of many tries, rounded to quarters of an octave, and memory down to an eighth of a power of two:
    what other processes do meanwhile should not give two equal starts two plans.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a worker does
    try:
        flops, bandwidth = _flops(), _bandwidth_bytes_s()
    finally:
        torch.set_num_threads(threads)
    return CpuHost(
        cores=_cores(),
        flops=rounded(flops),
        memory_bandwidth_bytes_s=rounded(bandwidth),
        memory_bytes=int(rounded_down(available_bytes())),
    )


def rounded(value: float) -> float:
    """To the nearest quarter of an octave, two digits of it: 100 -> 110, 128 -> 130."""
    return float(f"{2 ** (round(4 * math.log2(value)) / 4):.1e}")


def rounded_down(value: float) -> float:
    """To a multiple of an eighth of the power of two below: 23 -> 22."""
    unit = 2.0 ** (math.floor(math.log2(value)) - 3)
    return math.floor(value / unit) * unit


def _flops() -> float:
    import torch

    a = torch.ones(MATRIX, MATRIX)
    out = torch.empty_like(a)
    return 2 * MATRIX**3 / _least_seconds(lambda: torch.mm(a, a, out=out))


def _bandwidth_bytes_s() -> float:
    import torch

    block = torch.ones(BLOCK_BYTES // 4)
    return BLOCK_BYTES / _least_seconds(block.sum)


def _least_seconds(act: Callable[[], object]) -> float:
    least, end = math.inf, time.perf_counter() + MEASURE_S
    while (began := time.perf_counter()) < end:
        act()
        least = min(least, time.perf_counter() - began)
    return least


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_bytes() -> float:
    """Memory that processes may still take: of the machine, or of the control group that this process is in."""
    found = []
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(float(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError):  # not Linux: half of what is there
        found.append(0.5 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        group = Path("/sys/fs/cgroup")
        limit, used = (float((group / name).read_text()) for name in ("memory.max", "memory.current"))
        found.append(limit - used)
    except (OSError, ValueError):  # no such group, or one without a limit ("max")
        pass
    return max(min(found), 2.0**28)
