"""What `nereus bench reshard` compares with: other systems that get the same state from one layout to another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from nereus.cli.bench_reshard_cases import Case
from nereus.core.errors import UserError
from nereus.runtime.cluster import LocalCluster


class Peer(Protocol):
    """One system."""

    def missing(self) -> str:
        """What has to be installed, in one line; empty if nothing."""
        ...

    def measure(self, cases: Sequence[Case], repeats: int) -> Iterator[tuple[Case, dict[str, Any]]]:
        """Seconds by name, medians, of every transition that the system can make."""
        ...


PEERS = ("dcp", "dtensor", "torchft", "universal", "refit")


def peers_named(names: Sequence[str]) -> list[Peer]:
    """Raises UserError for a name that is not known."""
    from nereus.cli.bench_reshard_refit import RefitPeer
    from nereus.cli.bench_reshard_torch import CheckpointPeer, RedistributePeer
    from nereus.cli.bench_reshard_torchft import TorchftTransport
    from nereus.cli.bench_reshard_universal import UniversalPeer

    kinds: tuple[Callable[[], Peer], ...] = (
        CheckpointPeer,
        RedistributePeer,
        TorchftTransport,
        UniversalPeer,
        RefitPeer,
    )
    known = dict(zip(PEERS, kinds, strict=True))
    if unknown := sorted(set(names) - set(known)):
        raise UserError(f"no peer is called {', '.join(unknown)}; known are {', '.join(PEERS)}")
    return [known[name]() for name in names]


# -- how peers are timed -----------------------------------------------------------------------------------------------

Times = tuple[float, float]
"""Seconds by the clock, and of the processor over all ranks."""

Caller = Callable[..., dict[int, Any]]
"""Calls a method on every rank of a world."""


def timed(peer: Caller, method: str, *arguments: Any) -> Times:
    """One call to all ranks, which know `cpu_s`."""
    used_s, began = _cpu_s(peer), time.perf_counter()
    peer(method, *arguments)
    seconds = time.perf_counter() - began
    return seconds, _cpu_s(peer) - used_s


def _cpu_s(peer: Caller) -> float:
    return float(sum(peer("cpu_s").values()))


@contextmanager
def ranks_of(program: str, gpus: Sequence[int], *arguments: Any) -> Iterator[Caller]:
    """New processes for one layout, for a system that keeps for good what it once knew of its world."""
    cluster = LocalCluster(program, arguments)

    def call(method: str, *arguments: Any) -> dict[int, Any]:
        return cluster.call(method, dict.fromkeys(cluster.devices, arguments)).results()

    try:
        cluster.start(sorted(gpus))
        yield call
    finally:
        cluster.close()
