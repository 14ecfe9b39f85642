"""The thread that writes files: what lies in them, what is freed when, and how a batch ends."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from states_for_tests import cut_out, random_spec

from nereus.core.digest import combine
from nereus.core.errors import Aborted, OutOfMemory
from nereus.core.sharding import StateSpec
from nereus.engine.budget import Budget
from nereus.runtime.background_writes import BackgroundWrites
from nereus.runtime.checkpoint import WrittenFile, write_tensors
from nereus.runtime.memory import HostMemory
from nereus.runtime.state import LocalState


class Gate:
    """Holds every write, before its first byte, until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Semaphore(0), threading.Event()

    def write(
        self, path: Path, tensors: Mapping[str, torch.Tensor], go_on: Callable[[], None] = lambda: None
    ) -> WrittenFile:
        self.reached.release()
        self.opened.wait()
        return write_tensors(path, tensors, go_on)


def never() -> None:
    pass


def whole(spec: StateSpec, memory: HostMemory) -> LocalState:
    state = LocalState.empty(spec, {t.name: ((0, t.length),) for t in spec.tensors}, memory)
    state.add(state.holding)
    for name, tensor in state.tensors.items():
        tensor.copy_(cut_out(state.specs[name], state.holding[name]))
    return state


@pytest.fixture
def spec() -> StateSpec:
    return random_spec(random.Random(3))


def test_files_are_what_the_copies_were_and_their_memory_is_kept_for_the_next(tmp_path: Path, spec: StateSpec) -> None:
    gate, memory = Gate(), HostMemory(shared=False)
    writes = BackgroundWrites(gate.write)
    expected = whole(spec, memory)
    size, one = expected.present_bytes, memory.live_bytes
    for i in range(2):
        writes.add(tmp_path / f"{i}.safetensors", whole(spec, memory))
    gate.reached.acquire()
    assert writes.held_bytes == 2 * size and writes.told().num_left == 2
    gate.opened.set()
    report = writes.wait(never)
    assert (report.num_left, report.error, writes.held_bytes) == (0, "", 0)
    memory.trim(most_kept_bytes=1e9)
    assert (memory.live_bytes, memory.kept_bytes) == (one, 2 * one)
    for path, file in report.files.items():
        content = Path(path).read_bytes()
        assert (file.written.num_bytes, file.written.sha256) == (len(content), sha256(content).hexdigest())
        found = load_file(path)
        assert found.keys() == expected.tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.tensors.items())
        regions = {0: {t.name: [(0, t.length)] for t in spec.tensors}}
        sums = {name: [value] for name, value in file.sums.items()}
        assert combine(spec, regions, {0: sums}) == combine(spec, regions, {0: expected.digest_sums(regions[0])})


def test_an_error_ends_the_batch_and_not_the_next(tmp_path: Path, spec: StateSpec) -> None:
    writes, memory = BackgroundWrites(), HostMemory(shared=False)
    writes.add(tmp_path / "absent" / "a.safetensors", whole(spec, memory))
    writes.wait(never)
    writes.add(tmp_path / "b.safetensors", whole(spec, memory))
    report = writes.wait(never)
    assert report.error == "a.safetensors: No such file or directory"
    assert (report.files, writes.held_bytes) == ({}, 0) and not list(tmp_path.iterdir())
    writes.clear()
    writes.add(tmp_path / "c.safetensors", whole(spec, memory))
    report = writes.wait(never)
    assert report.error == "" and list(report.files) == [str(tmp_path / "c.safetensors")]


def test_what_nobody_wants_is_not_written(tmp_path: Path, spec: StateSpec) -> None:
    gate, memory = Gate(), HostMemory(shared=False)
    writes = BackgroundWrites(gate.write)
    for name in "ab":
        writes.add(tmp_path / name, whole(spec, memory))
    gate.reached.acquire()
    writes.clear()
    assert writes.told().num_left == 0
    writes.add(tmp_path / "c", whole(spec, memory))
    assert writes.told().num_left == 1
    gate.opened.set()
    report = writes.wait(never)
    assert list(report.files) == [str(tmp_path / "c")] and report.error == ""
    assert not (tmp_path / "b").exists() and not (tmp_path / "a").read_bytes()


def test_a_wait_can_be_ended(tmp_path: Path, spec: StateSpec) -> None:
    gate = Gate()
    writes = BackgroundWrites(gate.write)
    writes.add(tmp_path / "a", whole(spec, HostMemory(shared=False)))

    def check() -> None:
        raise Aborted("called off")

    with pytest.raises(Aborted):
        writes.wait(check)
    gate.opened.set()
    assert list(writes.wait(never).files) == [str(tmp_path / "a")]


def test_what_only_copies_are_in_the_way_of_waits_for_them() -> None:
    budget, waited = Budget(0, 100), list[str]()
    budget.until_written = lambda: waited.append("x")
    budget.begin(resident=40, gradients=0, workspace=0, checkpoint=50)
    budget.take("logits", 10)
    assert not waited
    budget.take("logits", 10)
    assert waited == ["x"] and budget.total == 60 and budget.held["checkpoint"] == 0
    with pytest.raises(OutOfMemory, match="would hold"):
        budget.take("logits", 50)
    budget.end("task")
    assert budget.most_bytes <= 60, "copies are no part of what commands need"
