"""The GPUs that this process may use, and how full they are, asked of their driver: NVML or AMD SMI behind one port.

    GpuProbe         inventory(), used_bytes(index)
      NvmlProbe      package nvidia-ml-py (extra "gpu"): makes no CUDA context, so nothing is taken from the GPU
      AmdSmiProbe    package amdsmi, of ROCm 6.4 or newer
      TorchProbe     what remains: names and sizes; what is free is not known, since asking would take memory of each GPU

GPUs are counted as torch.cuda counts them, after CUDA_VISIBLE_DEVICES (AMD: ROCR_, then HIP_VISIBLE_DEVICES). Where that
order cannot be told from what the driver says, a probe does not answer, and the next one is asked.

Tested with stand-ins for both packages, and with both packages where there is no driver; not yet run on a GPU.
"""

from __future__ import annotations

import importlib
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any, Protocol

XGMI = 2
"""`AMDSMI_LINK_TYPE_XGMI` (amdsmi 7.0.2, amdsmi_wrapper.py)."""


class NoAnswer(RuntimeError):
    """No such package, driver or GPU here, or it does not say what was asked; one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInfo:
    """One GPU. index: torch.cuda's. memory_bytes: all of it. free_bytes: what no process holds, None if not known.

    linked: the GPUs that it reaches over NVLink or Infinity Fabric, None if not known.
    """

    index: int
    name: str
    memory_bytes: int
    free_bytes: int | None = None
    linked: frozenset[int] | None = None


class GpuProbe(Protocol):
    """Asks anew with each call, and holds nothing open between calls. Both raise NoAnswer."""

    def inventory(self) -> tuple[GpuInfo, ...]:
        """All GPUs that this process may use."""

    def used_bytes(self, index: int) -> int | None:
        """What all processes and the driver hold of a GPU's memory; None if not known."""


def find_probe(environ: Mapping[str, str] = os.environ) -> GpuProbe | None:
    """The first probe that names a GPU which this build of torch could use, or None. Imports torch; raises nothing."""
    import torch

    driver: GpuProbe = NvmlProbe(environ) if torch.version.hip is None else AmdSmiProbe(environ)
    for probe in (driver, TorchProbe()):
        with suppress(NoAnswer):
            if probe.inventory():
                return probe
    return None


class NvmlProbe:
    """NVIDIA's. environ: where CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER are read."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ

    def inventory(self) -> tuple[GpuInfo, ...]:
        with self._session() as nvml:
            handles = self._visible(nvml)
            return tuple(self._info(nvml, index, handles) for index in range(len(handles)))

    def used_bytes(self, index: int) -> int | None:
        with self._session() as nvml:
            total, free = self._memory(nvml, _at(self._visible(nvml), index))
            return total - free

    @contextmanager
    def _session(self) -> Iterator[Any]:
        nvml = _binding("pynvml")
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:  # no driver, or one that does not match
            raise NoAnswer(f"NVML: {error}") from error
        try:
            yield nvml
        except nvml.NVMLError as error:
            raise NoAnswer(f"NVML: {error}") from error
        finally:
            with suppress(nvml.NVMLError):
                nvml.nvmlShutdown()

    def _visible(self, nvml: Any) -> list[Any]:
        """Handles in torch.cuda's order."""
        asked = self._environ.get("CUDA_VISIBLE_DEVICES")
        if asked is not None and asked.startswith("MIG-"):
            return [nvml.nvmlDeviceGetHandleByUUID(asked.split(",")[0].strip())]  # CUDA shows a process one instance
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        if self._environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":  # NVML's order; CUDA's own is the fastest first
            _check_order(asked, [nvml.nvmlDeviceGetName(handle) for handle in handles])
        chosen = [handles[i] for i in visible(asked, [nvml.nvmlDeviceGetUUID(handle) for handle in handles])]
        if any(_is_split(nvml, handle) for handle in chosen):
            raise NoAnswer("NVML: a GPU is split (MIG), and CUDA_VISIBLE_DEVICES names no instance of it by its UUID")
        return chosen

    def _info(self, nvml: Any, index: int, handles: Sequence[Any]) -> GpuInfo:
        def has_nvlink(other: int) -> bool:
            status = nvml.nvmlDeviceGetP2PStatus(handles[index], handles[other], nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            return bool(status == nvml.NVML_P2P_STATUS_OK)

        total, free = self._memory(nvml, handles[index])
        return GpuInfo(
            index=index,
            name=nvml.nvmlDeviceGetName(handles[index]),
            memory_bytes=total,
            free_bytes=free,
            linked=_linked(index, len(handles), has_nvlink, nvml.NVMLError),
        )

    def _memory(self, nvml: Any, handle: Any) -> tuple[int, int]:
        """(all, free). What the driver keeps for itself is not free, whichever version of the call tells it apart."""
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)  # not supported where a GPU uses the machine's memory
        if not memory.total:
            raise NoAnswer("NVML: a GPU reports no memory of its own")
        return int(memory.total), int(memory.free)


class AmdSmiProbe:
    """AMD's. environ: where ROCR_, HIP_ and CUDA_VISIBLE_DEVICES are read."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ

    def inventory(self) -> tuple[GpuInfo, ...]:
        with self._session() as smi:
            handles = self._visible(smi)
            return tuple(self._info(smi, index, handles) for index in range(len(handles)))

    def used_bytes(self, index: int) -> int | None:
        with self._session() as smi:
            total, free = self._memory(smi, _at(self._visible(smi), index))
            return total - free

    @contextmanager
    def _session(self) -> Iterator[Any]:
        smi = _binding("amdsmi")
        try:
            smi.amdsmi_init()
        except smi.AmdSmiException as error:
            raise NoAnswer(f"AMD SMI: {_line(error)}") from error
        try:
            yield smi
        except smi.AmdSmiException as error:
            raise NoAnswer(f"AMD SMI: {_line(error)}") from error
        finally:
            with suppress(smi.AmdSmiException):
                smi.amdsmi_shut_down()

    def _visible(self, smi: Any) -> list[Any]:
        """Handles in torch.cuda's order: AMD SMI lists by discovery, HIP counts by `hip_id`."""
        if not hasattr(smi, "amdsmi_get_gpu_enumeration_info"):
            raise NoAnswer("AMD SMI: this version does not say how HIP counts the GPUs")
        found = [(smi.amdsmi_get_gpu_enumeration_info(handle), handle) for handle in smi.amdsmi_get_processor_handles()]
        if not all(isinstance(info["hip_id"], int) for info, _ in found):  # "N/A" where the driver does not know
            raise NoAnswer("AMD SMI: the driver does not say how HIP counts the GPUs")
        found.sort(key=lambda pair: pair[0]["hip_id"])
        first, then = self._environ.get("ROCR_VISIBLE_DEVICES"), self._environ.get("HIP_VISIBLE_DEVICES")
        if then is None:
            then = self._environ.get("CUDA_VISIBLE_DEVICES")
        if first is not None:  # ROCr's own order; HIP's is another where GPUs differ
            _check_order(first, [_amd_name(smi, handle) for _, handle in found])
        for asked in (first, then):  # HIP selects among what ROCr leaves
            found = [found[i] for i in visible(asked, [info["hip_uuid"] for info, _ in found])]
        return [handle for _, handle in found]

    def _info(self, smi: Any, index: int, handles: Sequence[Any]) -> GpuInfo:
        def has_fabric(other: int) -> bool:
            return bool(smi.amdsmi_topo_get_link_type(handles[index], handles[other])["type"] == XGMI)

        total, free = self._memory(smi, handles[index])
        return GpuInfo(
            index=index,
            name=_amd_name(smi, handles[index]),
            memory_bytes=total,
            free_bytes=free,
            linked=_linked(index, len(handles), has_fabric, smi.AmdSmiException),
        )

    def _memory(self, smi: Any, handle: Any) -> tuple[int, int]:
        """(all, free)."""
        kind = smi.AmdSmiMemoryType.VRAM
        total = int(smi.amdsmi_get_gpu_memory_total(handle, kind))
        if not total:
            raise NoAnswer("AMD SMI: a GPU reports no memory of its own")
        return total, max(0, total - int(smi.amdsmi_get_gpu_memory_usage(handle, kind)))


class TorchProbe:
    """What torch.cuda says without making a context on each GPU. Starts CUDA in this process."""

    def inventory(self) -> tuple[GpuInfo, ...]:
        import torch

        if not torch.cuda.is_available():
            raise NoAnswer("torch.cuda is not available")
        try:
            found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        except RuntimeError as error:
            raise NoAnswer(f"torch.cuda: {_line(error)}") from error
        return tuple(GpuInfo(index=i, name=p.name, memory_bytes=int(p.total_memory)) for i, p in enumerate(found))

    def used_bytes(self, index: int) -> int | None:
        return None


def visible(asked: str | None, uuids: Sequence[str]) -> tuple[int, ...]:
    """Which of a machine's GPUs CUDA_VISIBLE_DEVICES (or AMD's like of it) leaves, in its order, as CUDA reads it.

    asked: indices, or UUIDs cut short where that is clear, with commas between; None: all. The first that names no GPU ends
    the list; one that is named twice empties it.
    """
    if asked is None:
        return tuple(range(len(uuids)))
    position = _uuid_position if asked.startswith("GPU-") else _index_position
    chosen: list[int] = []
    for word in asked.split(","):
        found = position(word.strip(), uuids)
        if found is None:
            break
        if found in chosen:
            return ()
        chosen.append(found)
    return tuple(chosen)


def _uuid_position(word: str, uuids: Sequence[str]) -> int | None:
    fits = [i for i, uuid in enumerate(uuids) if word.startswith("GPU-") and uuid.lower().startswith(word.lower())]
    return fits[0] if len(fits) == 1 else None


def _index_position(word: str, uuids: Sequence[str]) -> int | None:
    digits = re.match(r"\+?\d+", word)  # CUDA takes "1gpu" for 1
    return int(digits[0]) if digits and int(digits[0]) < len(uuids) else None


def _check_order(asked: str | None, names: Sequence[str]) -> None:
    """Equal GPUs are in the same order everywhere; of different ones only UUIDs say which is meant. Raises NoAnswer."""
    if len(set(names)) > 1 and not (asked or "").startswith("GPU-"):
        raise NoAnswer(
            f"GPUs differ ({', '.join(names)}): only UUIDs or CUDA_DEVICE_ORDER=PCI_BUS_ID say which is meant"
        )


def _is_split(nvml: Any, handle: Any) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:  # a kind that cannot be
        return False
    return bool(current)


def _linked(
    index: int, num_gpus: int, is_linked: Callable[[int], bool], error: type[Exception]
) -> frozenset[int] | None:
    try:
        return frozenset(other for other in range(num_gpus) if other != index and is_linked(other))
    except error:
        return None


def _amd_name(smi: Any, handle: Any) -> str:
    return str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"])


def _at(handles: Sequence[Any], index: int) -> Any:
    if not 0 <= index < len(handles):
        raise NoAnswer(f"GPU {index} is not there: {len(handles)} are visible")
    return handles[index]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _binding(name: str) -> Any:
    """The package of that name. amdsmi prints, then raises KeyError, where its library is not installed."""
    try:
        with redirect_stdout(io.StringIO()):
            return importlib.import_module(name)
    except (ImportError, KeyError, OSError, AttributeError) as error:
        raise NoAnswer(f"{name} cannot be imported: {_line(error)}") from error
