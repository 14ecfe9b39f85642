"""torchft's transport for Extend: a new replica receives whole shards from an old one, over a process group."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from nereus.cli.bench_reshard_cases import Case
from nereus.core.plan import Placement
from nereus.runtime.cluster import LocalCluster
from nereus.runtime.state import LocalState
from nereus.runtime.worker import WorkerContext

PROGRAM = "nereus.cli.bench_reshard_torchft:TorchftPeer"
TIMEOUT = timedelta(minutes=5)


class TorchftTransport:
    """One process group over all devices; a sender serves all of its receivers."""

    def __init__(self) -> None:
        self._turn = 0

    def missing(self) -> str:
        return "" if find_spec("torchft") else "torchft is left out: it is not installed (pip install torchft)"

    def measure(self, cases: Sequence[Case], repeats: int) -> Iterator[tuple[Case, dict[str, Any]]]:
        """Only where replicas are added."""
        able = [case for case in cases if _adds_replicas(case)]
        cluster = LocalCluster(PROGRAM, ())  # nothing preloaded: torchft starts threads, which do not survive a fork
        try:
            if able:
                cluster.start(range(max(case.devices for case in able)))
            for case in able:
                yield case, {"torchft_pg_s": statistics.median(self._once(cluster, case) for _ in range(repeats))}
        finally:
            cluster.close()

    def _once(self, cluster: LocalCluster, case: Case) -> float:
        m = case.moved[0]
        spec, old = case.specs[m], case.current[m]
        pairs = _pairs(old, case.target[m])
        self._turn += 1
        holdings = spec.holdings(old)
        ranks = range(case.devices)
        orders = {g: (spec, holdings.get(g), len(ranks), self._turn) for g in ranks}
        cluster.call("hold", orders).results()
        source_of = {target: source for source, targets in pairs.items() for target in targets}
        busy = sorted({*source_of, *pairs})
        began = time.perf_counter()
        cluster.call("extend", {g: (pairs.get(g, []), source_of.get(g)) for g in busy}).results()
        return time.perf_counter() - began


def _adds_replicas(case: Case) -> bool:
    old, new = case.current[case.moved[0]], case.target[case.moved[0]]
    return len(case.moved) == 1 and old.layout == new.layout and new.dp > old.dp


def _pairs(old: Placement, new: Placement) -> dict[int, list[int]]:
    """By source, the devices that get its shard; sources in turn."""
    size = old.layout.size
    found: dict[int, list[int]] = {gpu: [] for gpu in old.gpus}
    for i, gpu in enumerate(new.gpus):
        if gpu not in old.gpus:
            sources = [g for j, g in enumerate(old.gpus) if j % size == i % size]
            min((found[g] for g in sources), key=len).append(gpu)
    return {gpu: targets for gpu, targets in found.items() if targets}


class TorchftPeer:
    """One rank."""

    def __init__(self, context: WorkerContext) -> None:
        self._context, self._me = context, context.device_id
        self._state: dict[str, torch.Tensor] = {}

    def hold(self, spec: Any, holding: Any, size: int, turn: int) -> None:
        """A state, if there is one, and a new process group."""
        from torchft.checkpointing.pg_transport import PGTransport  # type: ignore[import-not-found]
        from torchft.process_group import ProcessGroupGloo  # type: ignore[import-not-found]

        self._state = {}
        if holding is not None:
            state = LocalState.zeros(spec, holding, torch.device("cpu"))
            for tensor in state.tensors.values():
                tensor.fill_(1)
            self._state = dict(state.tensors)
        self._group = ProcessGroupGloo(timeout=TIMEOUT)
        store = self._context.store
        assert isinstance(store, dist.TCPStore)
        self._group.configure(f"{store.host}:{store.port}/torchft/{turn}", f"{self._me}", self._me, size)
        self._transport = PGTransport(self._group, timeout=TIMEOUT, device=torch.device("cpu"))

    def extend(self, targets: list[int], source: int | None) -> None:
        if targets:
            self._transport.send_checkpoint(dst_ranks=targets, step=1, state_dict=self._state, timeout=TIMEOUT)
        if source is not None:
            metadata = self._transport.metadata()
            self._state = self._transport.recv_checkpoint(src_rank=source, metadata=metadata, step=1, timeout=TIMEOUT)
