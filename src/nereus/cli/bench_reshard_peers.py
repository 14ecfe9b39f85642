"""What `nereus bench reshard` compares with: other systems that get the same state from one layout to another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from nereus.cli.bench_reshard_cases import Case
from nereus.core.errors import UserError


class Peer(Protocol):
    """One system."""

    def missing(self) -> str:
        """What has to be installed, in one line; empty if nothing."""
        ...

    def measure(self, cases: Sequence[Case], repeats: int) -> Iterator[tuple[Case, dict[str, Any]]]:
        """Seconds by name, medians, of every transition that the system can make."""
        ...


PEERS = ("dcp", "dtensor", "torchft")


def peers_named(names: Sequence[str]) -> list[Peer]:
    """Raises UserError for a name that is not known."""
    from nereus.cli.bench_reshard_torch import CheckpointPeer, RedistributePeer
    from nereus.cli.bench_reshard_torchft import TorchftTransport

    kinds: tuple[Callable[[], Peer], ...] = (CheckpointPeer, RedistributePeer, TorchftTransport)
    known = dict(zip(PEERS, kinds, strict=True))
    if unknown := sorted(set(names) - set(known)):
        raise UserError(f"no peer is called {', '.join(unknown)}; known are {', '.join(PEERS)}")
    return [known[name]() for name in names]
