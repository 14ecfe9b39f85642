"""GPUs by what their driver says, with stand-ins for pynvml and amdsmi that fail as the packages do."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nereus
from nereus.api import machine
from nereus.api.gpus import AmdSmiProbe, GpuInfo, NoAnswer, NvmlProbe, TorchProbe, find_probe, visible
from nereus.api.machine import device_memory_bytes, device_of, gpu_device
from nereus.cli import directing
from nereus.core.errors import UserError
from nereus.core.inventory import cpu_device
from nereus.core.job import ChangeSection

GIB = 2**30
A100 = "NVIDIA A100-SXM4-80GB"


@dataclass
class Gpu:
    """What a driver knows of a GPU. fails: functions that refuse it. hip: how HIP counts it."""

    uuid: str
    name: str = A100
    total: int = 80 * GIB
    used: int = GIB // 2
    mig: bool = False
    fails: tuple[str, ...] = ()
    hip: int | str = 0


@dataclass
class Driver:
    gpus: list[Gpu]
    instances: Mapping[str, Gpu] = field(default_factory=dict)
    linked: bool = True
    loads: bool = True
    sessions: int = 0
    opened: int = 0


def nvml_of(driver: Driver) -> ModuleType:
    """pynvml of nvidia-ml-py 13: errors by number, handles only within a session."""
    nvml: Any = ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def answer(gpu: Gpu, function: str, value: Any) -> Any:
        if driver.sessions < 1:
            raise NVMLError("Uninitialized")
        if function in gpu.fails:
            raise NVMLError("Not Supported")
        return value

    def init() -> None:
        if not driver.loads:
            raise NVMLError("Driver Not Loaded")
        driver.sessions += 1
        driver.opened += 1

    def shutdown() -> None:
        driver.sessions -= 1

    def by_uuid(uuid: str) -> Gpu:
        if uuid not in driver.instances:
            raise NVMLError("Not Found")
        return driver.instances[uuid]

    def memory(gpu: Gpu) -> SimpleNamespace:
        return answer(gpu, "memory", SimpleNamespace(total=gpu.total, free=gpu.total - gpu.used, used=gpu.used))

    nvml.NVMLError = NVMLError
    nvml.NVML_P2P_CAPS_INDEX_NVLINK, nvml.NVML_P2P_STATUS_OK = 2, 0
    nvml.nvmlInit, nvml.nvmlShutdown = init, shutdown
    nvml.nvmlDeviceGetCount = lambda: len(driver.gpus)
    nvml.nvmlDeviceGetHandleByIndex = lambda i: answer(driver.gpus[i], "handle", driver.gpus[i])
    nvml.nvmlDeviceGetHandleByUUID = by_uuid
    nvml.nvmlDeviceGetName = lambda gpu: answer(gpu, "name", gpu.name)
    nvml.nvmlDeviceGetUUID = lambda gpu: answer(gpu, "uuid", gpu.uuid)
    nvml.nvmlDeviceGetMemoryInfo = memory
    nvml.nvmlDeviceGetMigMode = lambda gpu: answer(gpu, "mig", [int(gpu.mig), int(gpu.mig)])
    nvml.nvmlDeviceGetP2PStatus = lambda one, other, _: answer(one, "p2p", 0 if driver.linked else 5)
    return nvml


def smi_of(driver: Driver) -> ModuleType:
    """amdsmi 7.0: errors of one family, handles only within a session."""
    smi: Any = ModuleType("amdsmi")

    class AmdSmiException(Exception):
        pass

    def answer(gpu: Gpu, function: str, value: Any) -> Any:
        if driver.sessions < 1 or function in gpu.fails:
            raise AmdSmiException("Error code:\n\t2 | AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported")
        return value

    def init() -> None:
        if not driver.loads:
            raise AmdSmiException("Error code:\n\t34 | AMDSMI_STATUS_DRIVER_NOT_LOADED - Driver not loaded")
        driver.sessions += 1

    def shut_down() -> None:
        driver.sessions -= 1

    smi.AmdSmiException, smi.AmdSmiMemoryType = AmdSmiException, SimpleNamespace(VRAM=0)
    smi.amdsmi_init, smi.amdsmi_shut_down = init, shut_down
    smi.amdsmi_get_processor_handles = lambda: driver.gpus
    smi.amdsmi_get_gpu_enumeration_info = lambda gpu: answer(gpu, "ids", {"hip_id": gpu.hip, "hip_uuid": gpu.uuid})
    smi.amdsmi_get_gpu_asic_info = lambda gpu: answer(gpu, "name", {"market_name": gpu.name})
    smi.amdsmi_get_gpu_memory_total = lambda gpu, kind: answer(gpu, "memory", gpu.total)
    smi.amdsmi_get_gpu_memory_usage = lambda gpu, kind: answer(gpu, "memory", gpu.used)
    smi.amdsmi_topo_get_link_type = lambda one, other: answer(
        one, "p2p", {"hops": 1, "type": 2 if driver.linked else 1}
    )
    return smi


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver([Gpu(f"GPU-{c}0", used=used * GIB) for c, used in zip("abcd", (1, 2, 40, 4), strict=True)])
    monkeypatch.setitem(sys.modules, "pynvml", nvml_of(driver))
    return driver


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> Driver:
    gpus = [
        Gpu(f"GPU-{c}0", "AMD Instinct MI250X", 64 * GIB, h * GIB, hip=h) for c, h in zip("abc", (2, 0, 1), strict=True)
    ]
    driver = Driver(gpus)
    monkeypatch.setitem(sys.modules, "amdsmi", smi_of(driver))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    return driver


def used(probe: Any) -> list[int]:
    """GiB of each GPU in order: here they tell the GPUs apart."""
    found = probe.inventory()
    assert [gpu.index for gpu in found] == list(range(len(found)))
    assert [gpu.memory_bytes - gpu.free_bytes for gpu in found] == [probe.used_bytes(gpu.index) for gpu in found]
    return [probe.used_bytes(gpu.index) // GIB for gpu in found]


# -- which GPUs ------------------------------------------------------------------------------------------------------

UUIDS = ("GPU-aa00", "GPU-ab00", "GPU-b000", "GPU-c000")
WORDS = ("0", "1", "2gpu", " 3", "-1", "9", "", "none", "GPU-aa00", "GPU-ab", "GPU-a", "GPU-c", "GPU-d")


@given(st.lists(st.sampled_from(WORDS), unique=True, max_size=5))
def test_visible_gpus_are_those_that_torch_counts(words: list[str]) -> None:
    asked = ",".join(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", asked)
        wanted = torch.cuda._parse_visible_devices()
    if wanted and isinstance(wanted[0], str):
        wanted = torch.cuda._transform_uuid_to_ordinals(wanted, list(UUIDS))
    else:
        wanted = wanted[: next((i for i, found in enumerate(wanted) if found >= len(UUIDS)), None)]
    assert visible(asked, UUIDS) == tuple(wanted)


@pytest.mark.parametrize(
    ("asked", "found"),
    [(None, (0, 1, 2, 3)), ("", ()), ("2,0", (2, 0)), ("1,1", ()), ("GPU-AB", (1,)), ("GPU-aa,GPU-aa00", ())],
)
def test_visible_gpus(asked: str | None, found: tuple[int, ...]) -> None:
    assert visible(asked, UUIDS) == found


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, [1, 2, 40, 4]),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, [4, 2]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-c0,GPU-a"}, [40, 1]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_nvidia_gpus_are_counted_as_cuda_counts_them(nvml: Driver, environ: dict[str, str], found: list[int]) -> None:
    assert used(NvmlProbe(environ)) == found
    assert nvml.opened > 0 and nvml.sessions == 0


def test_different_gpus_are_only_told_apart_where_the_order_is_known(nvml: Driver) -> None:
    nvml.gpus[0].name = "NVIDIA T400"
    for environ in ({}, {"CUDA_VISIBLE_DEVICES": "0"}):
        with pytest.raises(NoAnswer, match=r"GPUs differ.*T400"):
            NvmlProbe(environ).inventory()
        assert used(NvmlProbe({**environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}))[0] == 1
    assert used(NvmlProbe({"CUDA_VISIBLE_DEVICES": "GPU-b"})) == [2]


def test_a_split_gpu_is_the_instance_that_is_named(nvml: Driver) -> None:
    nvml.gpus[0].mig = True
    nvml.instances = {"MIG-1": Gpu("MIG-1", f"{A100} MIG 3g.40gb", 40 * GIB, 3 * GIB, fails=("mig", "p2p"))}
    with pytest.raises(NoAnswer, match="MIG"):
        NvmlProbe({}).inventory()
    assert used(NvmlProbe({"CUDA_VISIBLE_DEVICES": "1,2"})) == [2, 40]
    assert used(NvmlProbe({"CUDA_VISIBLE_DEVICES": "MIG-1"})) == [3]
    with pytest.raises(NoAnswer, match="Not Found"):
        NvmlProbe({"CUDA_VISIBLE_DEVICES": "MIG-2"}).inventory()


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, [0, 1, 2]),  # by hip_id, not as listed
        ({"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "0"}, [2]),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, [1, 0]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, [2]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-a0,GPU-b0", "CUDA_VISIBLE_DEVICES": "1"}, [0]),
    ],
)
def test_amd_gpus_are_counted_as_hip_counts_them(smi: Driver, environ: dict[str, str], found: list[int]) -> None:
    assert used(AmdSmiProbe(environ)) == found
    assert smi.sessions == 0


def test_amd_gpus_in_an_order_that_nobody_knows(smi: Driver) -> None:
    smi.gpus[0].hip = "N/A"
    with pytest.raises(NoAnswer, match="how HIP counts"):
        AmdSmiProbe({}).inventory()
    del sys.modules["amdsmi"].amdsmi_get_gpu_enumeration_info
    with pytest.raises(NoAnswer, match="this version"):
        AmdSmiProbe({}).inventory()


def test_gpus_that_are_linked(nvml: Driver, smi: Driver) -> None:
    for driver, probe in ((nvml, NvmlProbe({})), (smi, AmdSmiProbe({}))):
        everything = set(range(len(driver.gpus)))
        assert [gpu.linked for gpu in probe.inventory()] == [everything - {i} for i in sorted(everything)]
        driver.linked = False
        assert {gpu.linked for gpu in probe.inventory()} == {frozenset()}
        for gpu in driver.gpus:
            gpu.fails = ("p2p",)
        assert {gpu.linked for gpu in probe.inventory()} == {None}


# -- what does not answer --------------------------------------------------------------------------------------------


def test_without_packages_and_gpus_there_is_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, hip in (("pynvml", None), ("amdsmi", "7.0")):
        monkeypatch.setitem(sys.modules, name, None)  # so that its import fails
        monkeypatch.setattr(torch.version, "hip", hip)
        assert find_probe({}) is None


def test_amdsmi_without_its_library_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "amdsmi.py").write_text("print('Unable to find libamd_smi.so')\n{}['libamd_smi.so']\n")  # as 7.0.2 does
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    with pytest.raises(NoAnswer, match=r"amdsmi cannot be imported: 'libamd_smi\.so'"):
        AmdSmiProbe({}).inventory()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", ["nvml", "smi"])
@pytest.mark.parametrize("fault", ["driver", "memory", "no memory", "hidden"])
def test_a_driver_that_does_not_answer_leaves_what_torch_says(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str, fault: str
) -> None:
    driver = request.getfixturevalue(kind)
    environ = {"CUDA_VISIBLE_DEVICES": "-1"} if fault == "hidden" else {}
    driver.loads = fault != "driver"
    driver.gpus[1].fails = ("memory",) if fault == "memory" else ()
    driver.gpus[1].total = 0 if fault == "no memory" else driver.gpus[1].total
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_probe(environ) is None and driver.sessions == 0

    properties = SimpleNamespace(name=A100, total_memory=79 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    probe = find_probe(environ)
    assert isinstance(probe, TorchProbe) and probe.used_bytes(0) is None
    assert probe.inventory() == tuple(GpuInfo(index=i, name=A100, memory_bytes=79 * GIB) for i in range(2))
    planned, source = gpu_device(probe, 2)
    assert planned.memory_bytes == 79 * GIB and "all memory taken to be free" in source


def test_a_driver_that_fails_says_so_in_a_line(nvml: Driver, smi: Driver) -> None:
    for driver, probe in ((nvml, NvmlProbe({})), (smi, AmdSmiProbe({}))):
        assert probe.used_bytes(0) is not None
        with pytest.raises(NoAnswer, match="GPU 7 is not there"):
            probe.used_bytes(7)
        driver.gpus[0].fails = ("name",)
        with pytest.raises(NoAnswer, match=r"^(NVML|AMD SMI): [^\n]*(?i:not supported)[^\n]*$"):
            probe.inventory()
        assert driver.sessions == 0


# -- what is planned with --------------------------------------------------------------------------------------------


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever would start CUDA in this process fails."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("CUDA was started")

    for name in ("is_available", "device_count", "get_device_properties", "mem_get_info", "init"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def job_of(devices: int, memory_gib: float | None = None, most: int | None = None) -> Any:
    changes = () if most is None else (ChangeSection(step=1, devices=most, plan="auto"),)
    return SimpleNamespace(cluster=SimpleNamespace(devices=devices, memory_gib=memory_gib), changes=changes)


@pytest.mark.usefixtures("no_cuda")
def test_a_gpu_that_somebody_fills_is_planned_with_what_is_free(nvml: Driver) -> None:
    kind, source = device_of("cuda", 2)
    assert (kind.name, kind.memory_bytes, source) == ("A100-80GB", 78 * GIB, "data sheet")
    kind, source = device_of("cuda", 4)
    assert (kind.name, kind.memory_bytes) == ("A100-80GB", 40 * GIB)  # not the kind of 40 GB
    assert source == "data sheet; others hold memory: 40.0 of 80.0 GiB are free on GPU 2"
    nvml.linked = False
    assert device_of("cuda", 2)[1] == "data sheet; not all GPUs are linked directly, planned as if they were"
    assert device_of("cuda", 1)[1] == "data sheet"


@pytest.mark.usefixtures("no_cuda", "nvml")
def test_a_device_may_hold_what_is_free_on_the_fullest_gpu_of_the_job() -> None:
    assert device_memory_bytes(job_of(2), "cuda", 2) == 78 * GIB
    assert device_memory_bytes(job_of(2, most=3), "cuda", 2) == 40 * GIB
    assert device_memory_bytes(job_of(2, memory_gib=5, most=3), "cuda", 2) == 5 * GIB


@pytest.mark.usefixtures("no_cuda")
def test_two_starts_find_the_same_memory(nvml: Driver) -> None:
    found = set()
    for more in (0, 1, 5 * 2**20, 200 * 2**20):
        nvml.gpus[0].used = GIB + GIB // 2 + more
        found.add(device_memory_bytes(job_of(1), "cuda", 1))
    assert len(found) == 2 and max(found) == 78.5 * GIB  # a GPU without others, and one with a little more


@pytest.mark.parametrize(("device", "memory_bytes"), [("H200", 70 * GIB), ("cpu", 2 * GIB)])
def test_what_a_run_holds_itself_is_not_taken_for_somebody_elses(
    monkeypatch: pytest.MonkeyPatch, device: str, memory_bytes: int
) -> None:
    kind = cpu_device(1e11, 2e10, 2 * GIB) if device == "cpu" else device
    measured = nereus.describe("SmolLM2-135M", device=kind, gpus=2, prompts=8, response_length=32)
    monkeypatch.setattr(directing, "scenario_of", lambda job: measured)
    found = directing._scenario(job_of(2), 70 * GIB)
    assert found is not None and found.device_kind.memory_bytes == memory_bytes


def test_no_gpu_where_one_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_probe", lambda: None)
    with pytest.raises(UserError, match=r"^cluster\.device: cuda"):
        device_memory_bytes(job_of(1), "cuda", 1)
