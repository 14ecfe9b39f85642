"""Four devices, as the tests of this folder talk to them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from nereus.runtime.calls import WorkerCall
from nereus.runtime.cluster import WorkerCluster, WorkerDied, WorkerFailed

DEVICES = (0, 1, 2, 3)
PROGRAM = "programs_for_tests:Talker"
PRELOAD = ("nereus.runtime.unit_store",)
LARGE = bytes(4 * 2**20)
"""Many times what a pipe holds."""

PROMPT_S = 15.0
"""What must happen at once has this long on a busy machine; timeouts that must not be what ends a wait are far longer."""


def wait_until(what: Callable[[], bool], limit_s: float = PROMPT_S) -> None:
    """Return when `what()` is true."""
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline, f"{what} did not become true in {limit_s} s"
        time.sleep(0.002)


def process_state(pid: int) -> str:
    """R, S, T (stopped), Z (zombie) ..., or an empty string when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Devices:
    """The four devices, as tests talk to them."""

    def __init__(self, cluster: WorkerCluster, board: dist.TCPStore) -> None:
        self.cluster = cluster
        self.board = board
        self._names = itertools.count()

    def heal(self) -> None:
        """Start what is missing, forget what is left over."""
        self.cluster.abort("between tests")
        dead = [device for device in DEVICES if device not in self.cluster.devices]
        if dead:
            self.cluster.start(dead)
        self.all("close")
        self.all("arm", "")

    def new_name(self, what: str = "group") -> str:
        return f"{what} {next(self._names)}"

    def call(self, method: str, devices: Sequence[int], *arguments: Any) -> WorkerCall:
        return self.cluster.call(method, dict.fromkeys(devices, arguments))

    def all(self, method: str, *arguments: Any) -> dict[int, Any]:
        """The results of a call to all devices."""
        return self.call(method, DEVICES, *arguments).results()

    def each(self, method: str, devices: Sequence[int], *arguments: Any) -> dict[int, WorkerCall]:
        """One call of its own a device: one that fails says nothing about the others."""
        return {device: self.call(method, [device], *arguments) for device in devices}

    def open(self, ranks: Sequence[int] = DEVICES, timeout_s: float | None = None) -> str:
        """A new communicator; returns its name."""
        name = self.new_name()
        self.call("open", sorted(ranks), name, tuple(ranks), timeout_s).results()
        return name

    def reached(self, scene: str, point: str, devices: Sequence[int]) -> None:
        """Return when the devices have reached a point."""
        self.board.wait([f"{scene} {point} {device}" for device in devices])

    def stopped(self, device: int) -> None:
        """Return when a device's process is stopped."""
        wait_until(lambda: process_state(self.pid(device)) == "T")

    def pid(self, device: int) -> int:
        return self.cluster.process_id(device)


def error_of(call: WorkerCall) -> Exception:
    """The exception that a call ends with, which must come soon."""
    began = time.monotonic()
    with pytest.raises((WorkerFailed, WorkerDied)) as caught:
        call.results()
    assert time.monotonic() - began < PROMPT_S
    return caught.value


def kind_of(call: WorkerCall) -> str:
    """The class name of the exception that was raised in a worker."""
    error = error_of(call)
    assert isinstance(error, WorkerFailed), error
    return error.failure.kind
