"""What the workers of `nereus bench coordination` run: units that are nothing but state, on GPUs whose memory is limited.

A GPU is a counter of free bytes that all of its processes share: one process for all model-stages, or one for each. A
shard takes memory when it is begun, all of it at once, and waits for as long as there is not enough; it gives back what a
primitive frees when that is settled. Waiting is on the record, so that a wait without an end can be told from a long one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

from nereus.cli.bench_reshard_worker import StateOnly
from nereus.core.errors import StateError
from nereus.core.plan import ModelStage
from nereus.core.sharding import Holding, Move
from nereus.runtime.transport import NO_ADDRESSES
from nereus.runtime.unit_store import Addresses, Built, Names
from nereus.runtime.worker import WorkerContext

PROGRAM = "nereus.cli.bench_coordination_worker:OnLimitedGpu"
POLL_S = 0.001


class GpuMemory:
    """One GPU's bytes, in a store that its processes share. trial: prefix of all keys. holder: who takes here."""

    def __init__(self, store: dist.Store, trial: str, gpu: int, holder: str) -> None:
        self._store, self._holder = store, holder
        self._free, self._stop, self._waits = f"{trial} free {gpu}", f"{trial} stop", f"{trial} waits"
        self._held, self._wanted = f"{trial} held {holder} {gpu}", f"{trial} wanted {holder} {gpu}"

    def take(self, num_bytes: int) -> None:
        """Wait until so much is free and take it. Raises StateError when the trial is stopped."""
        if not num_bytes or self._try(num_bytes):
            return
        self._store.add(self._wanted, num_bytes)
        self._store.add(self._waits, 1)
        while not self._try(num_bytes):
            if self._store.add(self._stop, 0):
                raise StateError("stopped while waiting for memory")
            time.sleep(POLL_S)
        self._store.add(self._wanted, -num_bytes)

    def give_back(self, num_bytes: int) -> None:
        self._store.add(self._held, -num_bytes)
        self._store.add(self._free, num_bytes)

    def _try(self, num_bytes: int) -> bool:
        if self._store.add(self._free, 0) < num_bytes:
            return False
        if self._store.add(self._free, -num_bytes) < 0:  # another process was faster
            self._store.add(self._free, num_bytes)
            return False
        self._store.add(self._held, num_bytes)
        return True


class OnLimitedGpu(StateOnly):
    """A process on a GPU. holder: of which model-stage, or of all."""

    def __init__(self, context: WorkerContext, store_port: int, holder: str) -> None:
        super().__init__(context)
        self._store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
        self._holder = holder
        self._memory: GpuMemory | None = None
        self._charged = 0

    def begin(self, trial: str) -> None:
        """What is held now is taken from the GPU's memory; from here on it is limited."""
        self._memory = GpuMemory(self._store, trial, self.me, self._holder)
        self._charged = self._held_bytes()
        self._memory.take(self._charged)

    def end(self) -> None:
        """No limit any more."""
        self._memory, self._charged = None, 0

    def build(
        self,
        model_stage: ModelStage,
        holding: Holding | None,
        names: Names,
        moves: Sequence[Move],
        addresses: Addresses = NO_ADDRESSES,
    ) -> Built:
        """See `UnitStore`."""
        if holding is not None:
            self._take(self._new_bytes(model_stage, holding, names))
        return super().build(model_stage, holding, names, moves, addresses)

    def settle(self, model_stage: ModelStage, names: Names, last: bool) -> None:
        """See `UnitStore`."""
        super().settle(model_stage, names, last)
        if self._memory is not None:
            self._memory.give_back(self._charged - self._held_bytes())
            self._charged = self._held_bytes()

    def _take(self, num_bytes: int) -> None:
        if self._memory is not None:
            self._memory.take(num_bytes)
            self._charged += num_bytes

    def _new_bytes(self, model_stage: ModelStage, holding: Holding, names: Names) -> int:
        """What a shard, or a batch of its tensors, takes beside the old one."""
        present = self._states.get(model_stage)
        old = {} if present is None else {n: present.holding[n] for n in present.tensors}
        new = {n: i for n, i in holding.items() if (names is None or n in names) and old.get(n) != i}
        return self.specs[model_stage].holding_bytes(new)
