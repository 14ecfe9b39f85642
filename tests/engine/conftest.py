from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engine_rig import Rig
from programs_for_engine_tests import PROGRAM

from nereus.rl.worker import PRELOAD
from nereus.runtime.cluster import LocalCluster

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3")


@pytest.fixture(scope="session")
def _rig() -> Iterator[Rig]:
    preload = (*PRELOAD, *(f"transformers.models.{f}.modeling_{f}" for f in FAMILIES))
    rig = Rig(LocalCluster(PROGRAM, ({},), preload=preload, timeout_s=60))
    rig.cluster.start(range(4))
    yield rig
    rig.close()


@pytest.fixture
def rig(_rig: Rig) -> Rig:
    """Four worker processes, the same for all tests."""
    devices = set(_rig.cluster.devices)
    if devices != set(range(4)):  # a test failed while it had others
        _rig.cluster.stop(sorted(devices - set(range(4))))
        _rig.cluster.start(sorted(set(range(4)) - devices))
    return _rig


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """The workers need the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
