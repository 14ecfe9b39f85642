"""How fast state moves: what turns the bytes of a primitive into seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nereus.core.inventory import ClusterShape

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of one GPU, one direction: bytes/s and seconds a message, inside a node and between nodes.

    copy_bytes_s: from one place of a GPU's memory to another. node_bytes_s: what all GPUs of a node together can receive
    from each other; it binds where they are processes that share a machine's cores, not on a switch. There, what they copy
    on the spot takes from the same cores.
    setup_s: to begin one primitive on all of its GPUs.
    """

    intra_bytes_s: float
    inter_bytes_s: float
    copy_bytes_s: float
    intra_latency_s: float = 0.0
    inter_latency_s: float = 0.0
    node_bytes_s: float = float("inf")
    setup_s: float = 0.0

    @classmethod
    def of(cls, cluster: ClusterShape, *, efficiency: float = 0.8) -> Rates:
        """From data sheets. efficiency: the share of a link's peak that large messages reach; a prior, as in `cost`."""
        return cls(
            intra_bytes_s=efficiency * cluster.intra_node.bandwidth_bytes_s,
            inter_bytes_s=efficiency * cluster.inter_node.bandwidth_bytes_s,
            copy_bytes_s=efficiency * cluster.device.memory_bandwidth_bytes_s / 2,  # read and written
            intra_latency_s=cluster.intra_node.latency_s,
            inter_latency_s=cluster.inter_node.latency_s,
            setup_s=1e-3,
        )

    def slowed(self, factor: float) -> Rates:
        """All of it `factor` times slower (below 1: faster)."""
        names = ("intra_bytes_s", "inter_bytes_s", "copy_bytes_s", "node_bytes_s")
        return replace(self, **{name: getattr(self, name) / factor for name in names}, setup_s=self.setup_s * factor)

    def seconds(self, traffic: Traffic, copied: Floats) -> Floats:
        """[n] seconds that each GPU is busy; its two kinds of link work side by side. copied: [n] bytes."""
        intra = traffic.intra_bytes / self.intra_bytes_s + traffic.intra_messages * self.intra_latency_s
        inter = traffic.inter_bytes / self.inter_bytes_s + traffic.inter_messages * self.inter_latency_s
        return np.asarray(np.maximum(intra, inter) + copied / self.copy_bytes_s)

    def node_seconds(self, received: Floats, copied: Floats, node_of: Ints) -> float:
        """That the busiest node needs for all of it. received, copied: [n] bytes by GPU.

        A copied byte takes as much of the node as it takes of a GPU, compared with a received one.
        """
        alike = received + copied * (self.intra_bytes_s / self.copy_bytes_s)
        return float(np.bincount(node_of, alike).max(initial=0.0) / self.node_bytes_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What each GPU sends or receives, [n], whichever is more: links are full duplex."""

    intra_bytes: Floats
    inter_bytes: Floats
    intra_messages: Floats
    inter_messages: Floats

    @classmethod
    def of(cls, flows: Flows, node_of: Ints) -> Traffic:
        """Of GPUs 0 .. len(node_of) - 1."""
        n, inter = len(node_of), node_of[flows.source] != node_of[flows.target]
        if not inter.any():
            more, messages = flows.busiest(n, None)
            return cls(intra_bytes=more, inter_bytes=np.zeros(n), intra_messages=messages, inter_messages=np.zeros(n))
        within, within_messages = flows.busiest(n, ~inter)
        across, across_messages = flows.busiest(n, inter)
        return cls(
            intra_bytes=within,
            inter_bytes=across,
            intra_messages=within_messages,
            inter_messages=across_messages,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Flows:
    """Bytes that go from GPU to GPU, [f] each; never from one to itself."""

    source: Ints
    target: Ints
    num_bytes: Floats

    @classmethod
    def none(cls) -> Flows:
        empty = np.zeros(0, dtype=np.int64)
        return cls(source=empty, target=empty, num_bytes=np.zeros(0))

    def busiest(self, n: int, which: NDArray[np.bool_] | None) -> tuple[Floats, Floats]:
        """([n] bytes, [n] messages) sent or received by each GPU, whichever is more."""
        source, target, size = self.source, self.target, self.num_bytes
        if which is not None:
            source, target, size = source[which], target[which], size[which]
        sent, received = np.bincount(source, size, n), np.bincount(target, size, n)
        messages = np.maximum(np.bincount(source, minlength=n), np.bincount(target, minlength=n))
        return np.maximum(sent, received), messages.astype(np.float64)

    def received(self, n: int) -> Floats:
        """[n] bytes that each GPU receives."""
        return np.asarray(np.bincount(self.target, self.num_bytes, n))
