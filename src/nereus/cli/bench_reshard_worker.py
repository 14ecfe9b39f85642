"""What the workers of `nereus bench reshard` and `coordination` run: units that are nothing but state.

Beside the engine's own commands there are `reset` and `fill`, so that every measurement begins alike, and the raw limit: the
same number of bytes, one contiguous buffer for every pair of devices, into memory like a new shard's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from nereus.core.plan import ModelStage, Placement
from nereus.core.sharding import Interval, StateSpec, TensorSpec
from nereus.runtime.memory import Block
from nereus.runtime.state import LocalState, PeerState, StateAddress
from nereus.runtime.unit_store import UnitStore
from nereus.runtime.worker import WorkerContext

PROGRAM = "nereus.cli.bench_reshard_worker:StateOnly"
ITEM = 4
"""Bytes of an element of a raw buffer."""


class StateOnly(UnitStore[LocalState]):
    """A device of these benches."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context, {})
        self._offered: LocalState | None = None
        self._received: list[Block] = []

    def make_unit(self, placement: Placement, state: LocalState) -> LocalState:
        return state

    def reset(self, specs: Mapping[ModelStage, StateSpec]) -> None:
        """Forget all state; from here on these are the model-stages."""
        for state in (*self._states.values(), *self._incoming.values()):
            state.drop()
        for table in (self.units, self._states, self._incoming, self._arrived):
            table.clear()
        self.specs = specs

    def fill(self) -> None:
        """Every element of every shard gets bits that follow from its tensor and its logical indices."""
        for state in self._states.values():
            for name, intervals in state.holding.items():
                for interval in intervals:
                    write_pattern(state.region(name, *interval), state.specs[name], interval)

    def cpu_s(self) -> float:
        """What this process has used of the processor so far."""
        return time.process_time()

    # -- the raw limit -------------------------------------------------------------------------------------------

    def raw_offer(self, num_bytes: int) -> StateAddress | None:
        """A buffer that others receive; where it lies, if memory is shared."""
        self._offered = None
        if not num_bytes:
            return None
        spec = _raw_spec(num_bytes)
        self._offered = LocalState.empty(spec, {"raw": ((0, spec.tensors[0].length),)}, self._allocator)
        self._offered.add(["raw"])
        self._offered.tensors["raw"].fill_(1)
        return self._offered.address() if self.context.shared_memory else None

    def raw_exchange(
        self,
        sent: Mapping[int, int],
        received: Mapping[int, int],
        copied_bytes: int,
        addresses: Mapping[int, StateAddress],
        pool: Sequence[int],
    ) -> None:
        """Send and receive that many bytes, by peer, and copy so many on the spot, all into memory that is allocated now.

        pool: the devices of the communicator.
        """
        sizes = {**received, self.me: copied_bytes}
        wanted = {str(peer): ((size // ITEM,), torch.float32) for peer, size in sizes.items() if size}
        blocks = self._allocator.allocate(wanted)
        self._received += blocks.values()
        for block in blocks.values():
            block.touch()
        into = {peer: blocks[str(peer)].tensor for peer, size in sizes.items() if size}
        own = into.pop(self.me, None)
        if self.context.shared_memory:
            for peer, buffer in into.items():
                there = PeerState(peer, addresses[peer], _raw_spec(sizes[peer]).by_name())
                buffer.copy_(there.region("raw", 0, len(buffer)))
        else:
            self._raw_messages(sent, into, pool)
        if own is not None:
            _copy_again_and_again(self._offered_tensor(), own)

    def raw_end(self) -> None:
        """Free what `raw_exchange` received."""
        self._offered, self._received = None, []

    def _raw_messages(self, sent: Mapping[int, int], into: Mapping[int, torch.Tensor], ranks: Sequence[int]) -> None:
        pool = self.groups.get("pool", ranks)
        pending = [pool.irecv(buffer, peer) for peer, buffer in into.items()]
        for peer, size in sent.items():
            pending.append(pool.isend(self._offered_tensor()[: size // ITEM], peer))
        for one in pending:
            one.wait()

    def _offered_tensor(self) -> torch.Tensor:
        assert self._offered is not None, "raw_offer comes first"
        return self._offered.tensors["raw"]


def _raw_spec(num_bytes: int) -> StateSpec:
    return StateSpec((TensorSpec(name="raw", shape=(num_bytes // ITEM,), dtype="float32", where="everywhere"),), 1)


def _copy_again_and_again(source: torch.Tensor, target: torch.Tensor) -> None:
    """Fill `target`, which may be the longer of the two."""
    for start in range(0, len(target), len(source)):
        part = target[start : start + len(source)]
        part.copy_(source[: len(part)])


def write_pattern(region: torch.Tensor, spec: TensorSpec, interval: Interval) -> None:
    """Bits that follow from the tensor's name and the logical indices; replicas are equal, other elements differ."""
    bits = pattern(tuple(region.shape), spec, interval)
    region.view(bits.dtype).copy_(bits)


def pattern(shape: Sequence[int], spec: TensorSpec, interval: Interval) -> torch.Tensor:
    """See `write_pattern`; int32 or int64."""
    dtype = torch.int64 if spec.dtype == "int64" else torch.int32
    found = torch.full((1,) * len(shape), sum(map(ord, spec.name)) * 65_599 % 2**31, dtype=dtype)
    for dim, length in enumerate(shape):
        first = interval[0] if dim == spec.dim else 0
        index = torch.arange(first, first + length, dtype=dtype) * (40_503 + 1_618_033 * dim)
        found = found + index.view([-1 if d == dim else 1 for d in range(len(shape))])
    return found
