"""What a cluster is made of: devices, links, and how many of each. Peaks are the vendors'; what is achieved of them is
learned (`nereus.cost.calibration`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from nereus.core.errors import UserError

GB = 10**9
GIB = 2**30
TFLOPS = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """One accelerator. peak_flops: by dtype ("bfloat16", "float16", "float32", "float8"), dense, FLOP/s."""

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: int
    memory_bandwidth_bytes_s: float

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s; a 16-bit type stands in for its twin, float32 for an unknown one."""
        twins = {"bfloat16": "float16", "float16": "bfloat16"}
        for key in (dtype, twins.get(dtype, ""), "float32"):
            if key in self.peak_flops:
                return self.peak_flops[key]
        raise UserError(f"device {self.name} has no peak FLOP/s for {dtype}; it has {', '.join(self.peak_flops)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What one GPU can send while it receives as much (one direction), bytes/s, and the time of an empty message, s."""

    bandwidth_bytes_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """`num_nodes` nodes of `gpus_per_node` equal devices. inter_node: the share of one GPU."""

    device: DeviceKind
    num_nodes: int
    gpus_per_node: int
    intra_node: Link
    inter_node: Link

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.gpus_per_node < 1:
            raise UserError(f"a cluster of {self.num_nodes} nodes x {self.gpus_per_node} GPUs has no GPU")

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node


def _device(name: str, bf16_tflops: float, fp32_tflops: float, gb: float, gb_s: float, **more: float) -> DeviceKind:
    peaks = {"bfloat16": bf16_tflops, "float16": bf16_tflops, "float32": fp32_tflops, **more}
    return DeviceKind(
        name=name,
        peak_flops={dtype: value * TFLOPS for dtype, value in peaks.items()},
        memory_bytes=int(gb * GIB),
        memory_bandwidth_bytes_s=gb_s * GB,
    )


DEVICES: Mapping[str, DeviceKind] = {
    d.name: d
    for d in (
        # NVIDIA A100 data sheet (nvidia-a100-datasheet-us-nvidia-1758950-r4), dense; float32 without TF32. The sizes are
        # what CUDA reports as GiB, within 2 %.
        _device("A100-40GB", 312, 19.5, 39.4, 1555),
        _device("A100-80GB", 312, 19.5, 79.2, 2039),
        # Leonardo's custom A100 ("Da Vinci", 64 GB HBM2e): Turisini et al., "LEONARDO: A Pan-European Pre-Exascale
        # Supercomputer", 2023: 124 SMs, 1.64 TB/s; tensor peak scales with SMs and clock.
        _device("A100-64GB", 358, 22.4, 63.4, 1640),
        # NVIDIA H100 and H200 data sheets, SXM, dense
        _device("H100-SXM", 989, 67, 79.6, 3350, float8=1979),
        _device("H200", 989, 67, 139.8, 4800, float8=1979),
        # NVIDIA HGX B200 data sheet, per GPU, dense
        _device("B200", 2250, 75, 178.4, 7700, float8=4500),
        # NVIDIA H20, published by resellers' data sheets: 148 TFLOP/s bf16, 96 GB, 4.0 TB/s
        _device("H20", 148, 44, 95.6, 4000, float8=296),
        # AMD Instinct MI250X data sheet, one of its two dies (GCD)
        _device("MI250X-GCD", 191.5, 23.95, 64, 1638),
    )
}

_LINKS: Mapping[str, tuple[float, float, int]] = {
    # device: (NVLink or Infinity Fabric GB/s a GPU and direction, network GB/s a GPU, GPUs a node)
    "A100-40GB": (300, 25, 8),  # DGX A100: NVLink 3 600 GB/s both directions; 8 HDR-200 adapters
    "A100-80GB": (300, 25, 8),
    "A100-64GB": (300, 12.5, 4),  # Leonardo: 4 GPUs a node, 2 dual-port HDR100 adapters
    "H100-SXM": (450, 50, 8),  # DGX H100: NVLink 4 900 GB/s both directions; 8 NDR-400
    "H200": (450, 50, 8),
    "H20": (450, 50, 8),
    "B200": (900, 50, 8),  # DGX B200: NVLink 5 1.8 TB/s both directions; 8 NDR-400
    "MI250X-GCD": (50, 12.5, 8),  # LUMI: Infinity Fabric 50 GB/s between GCDs at the least; 4 Slingshot-200 for 8 GCDs
    "cpu": (2, 1, 8),  # Gloo over loopback, measured
}

_ALIASES = {"A100": "A100-80GB", "H100": "H100-SXM", "MI250X": "MI250X-GCD", "A100-SXM-80GB": "A100-80GB"}


def device_kind(name: str) -> DeviceKind:
    """By name: case and a memory suffix do not matter where they are not needed. Raises UserError."""
    wanted = name.lower()
    for key in (*DEVICES, *_ALIASES):
        if key.lower() == wanted:
            return DEVICES[_ALIASES.get(key, key)]
    for key in sorted((*DEVICES, *_ALIASES), key=len, reverse=True):
        if wanted.startswith(key.lower()):
            return DEVICES[_ALIASES.get(key, key)]
    raise UserError(f"device {name!r} is not known; known are {', '.join(DEVICES)}")


def cluster_of(device: str | DeviceKind, num_gpus: int, gpus_per_node: int | None = None) -> ClusterShape:
    """`num_gpus` of a device in nodes and with links as its usual machine has them; CPU devices are all in one.

    A pool that does not fill its last node counts it whole. Raises UserError for an unknown device.
    """
    kind = device if isinstance(device, DeviceKind) else device_kind(device)
    intra, inter, usual = _LINKS.get(kind.name, _LINKS["cpu"])
    usual = max(num_gpus, 1) if kind.name == "cpu" else usual
    per_node = min(gpus_per_node or usual, max(num_gpus, 1))
    return ClusterShape(
        device=kind,
        num_nodes=-(-num_gpus // per_node),
        gpus_per_node=per_node,
        intra_node=Link(bandwidth_bytes_s=intra * GB, latency_s=50e-6 if kind.name == "cpu" else 4e-6),
        inter_node=Link(bandwidth_bytes_s=inter * GB, latency_s=100e-6 if kind.name == "cpu" else 12e-6),
    )


def reported_device(name: str, memory_bytes: int) -> tuple[DeviceKind, str]:
    """The kind of a GPU by what its driver says of it ("NVIDIA A100-SXM4-80GB"), with the memory that it reports.

    Where it is not in the table a kindred one stands in, and a line says which; "" otherwise.
    """
    words = re.split(r"[ -]+", re.sub(r"^(NVIDIA|AMD|Instinct|Tesla| )+", "", name))
    family = [kind for kind in DEVICES.values() if kind.name.split("-")[0] == words[0]]
    nearest = min(family or [DEVICES[STAND_IN]], key=lambda kind: abs(kind.memory_bytes - memory_bytes))
    kind = replace(nearest, memory_bytes=memory_bytes)
    if family and not {"PCIe", "PCIE", "NVL"} & set(words):
        return kind, ""
    return kind, f"the peaks of {name!r} are not known: planned with those of {nearest.name} and its own memory"


STAND_IN = "A100-80GB"


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuHost:
    """A machine whose devices are processes of one core, as measured.

    flops: float32 FLOP/s of one core alone. memory_bandwidth_bytes_s: of one core alone. memory_bytes: what all devices
    may hold together.
    """

    cores: int
    flops: float
    memory_bandwidth_bytes_s: float
    memory_bytes: int

    def share(self, num_devices: int) -> float:
        """Of a core, that each of so many devices has."""
        return min(1.0, self.cores / max(num_devices, 1))

    def device(self, num_devices: int) -> DeviceKind:
        """One of `num_devices`: they share the memory, and the cores where there are more devices than cores."""
        share = self.share(num_devices)
        return cpu_device(
            self.flops * share, self.memory_bandwidth_bytes_s * share, self.memory_bytes // max(num_devices, 1)
        )


def cpu_device(flops: float, bandwidth_bytes_s: float, memory_bytes: int) -> DeviceKind:
    """The CPU device with what was measured of it at start."""
    peaks = dict.fromkeys(("float32", "bfloat16", "float16"), flops)
    return DeviceKind(
        name="cpu", peak_flops=peaks, memory_bytes=memory_bytes, memory_bandwidth_bytes_s=bandwidth_bytes_s
    )
