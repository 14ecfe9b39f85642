"""The tensors that one rank holds of one model-stage, and how regions of them are copied between ranks.

`transfer` executes a `MovePlan`: regions that a rank holds already are copied in place; all others go as point-to-point
messages, one a pair of ranks and round, packed to at most `CHUNK_BYTES`, so that staging memory is bounded by twice
that per peer. Both ends cut the same list of moves by the same rule, so nothing but data is sent. Messages are started in
one order of pairs on all ranks, and of a pair's two messages first that of the lower device: on a GPU, a message of a
pair waits for the one before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nereus.core.randomness import hash_words
from nereus.core.sharding import Holding, Interval, Move, StateSpec, TensorSpec, local_offset
from nereus.runtime.communicator import Communicator, Pending

CHUNK_BYTES = 32 * 2**20
"""The largest message between two ranks in one round of a transfer."""

_MIX = 0x1B03738712FAD5C9  # odd
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(eq=False)
class LocalState:
    """One rank's part of a model-stage: by tensor name, its intervals of the logical tensor and the local tensor."""

    spec: StateSpec
    holding: Holding
    tensors: dict[str, torch.Tensor]

    def __post_init__(self) -> None:
        self.specs: dict[str, TensorSpec] = self.spec.by_name()

    @classmethod
    def zeros(cls, spec: StateSpec, holding: Holding, device: torch.device) -> LocalState:
        specs = spec.by_name()
        return cls(
            spec,
            holding,
            {
                name: torch.zeros(
                    specs[name].local_shape(pieces), dtype=getattr(torch, specs[name].dtype), device=device
                )
                for name, pieces in holding.items()
            },
        )

    def region(self, name: str, start: int, stop: int) -> torch.Tensor:
        """A view of logical indices [start, stop) along the cut dimension."""
        offset = local_offset(self.holding[name], start)
        return self.tensors[name].narrow(self.specs[name].dim, offset, stop - start)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def digest_sums(self, regions: Mapping[str, Sequence[Interval]]) -> dict[str, list[int]]:
        """For `core.digest.combine`: the weighted sum, modulo 2^64, of every region."""
        return {name: [self._digest_sum(name, *region) for region in pieces] for name, pieces in regions.items()}

    def _digest_sum(self, name: str, start: int, stop: int) -> int:
        spec = self.specs[name]
        bits = self.region(name, start, stop).contiguous()
        wide = bits.element_size() == 8
        bits = bits.view(_BITS[bits.element_size()]).to(torch.int64)
        if wide:  # sums are modulo 2^64: without mixing, changes of two top bits would cancel
            bits = (bits ^ ((bits >> 32) & 0xFFFFFFFF)) * _MIX
            bits = bits ^ ((bits >> 29) & 0x7FFFFFFFF)
        for dim in reversed(range(bits.dim())):
            first = start if dim == spec.dim else 0
            bits = (bits * _weights(name, dim, first, bits.shape[dim], bits.device)).sum(-1)
        return int(bits) & (2**64 - 1)


def _weights(name: str, dim: int, first: int, length: int, device: torch.device) -> torch.Tensor:
    """Odd 64-bit weights of a dimension's logical indices, as int64 (arithmetic is modulo 2^64)."""
    seed = sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**61
    words = hash_words(seed, dim, np.arange(first, first + length)) | np.uint64(1)
    return torch.from_numpy(words.view(np.int64)).to(device)


def transfer(
    moves: Sequence[Move],
    *,
    me: int,
    source: LocalState | None,
    target: LocalState | None,
    communicator: Communicator,
    device: torch.device,
    chunk_bytes: int = CHUNK_BYTES,
) -> int:
    """Execute this rank's part of `moves`; every involved rank calls it with the same list.

    source: what this rank holds; target: what it will hold (may be the same object). Returns the bytes received from
    other ranks. Raises Aborted or PeerTimeout: the target's content is then undefined, the source's untouched.
    """
    outgoing: dict[int, list[Move]] = defaultdict(list)
    incoming: dict[int, list[Move]] = defaultdict(list)
    for move in moves:
        if move.source == move.target == me:
            _copy_in_place(move, source, target)
        elif move.source == me:
            outgoing[move.target].append(move)
        elif move.target == me:
            incoming[move.source].append(move)
    sends = {peer: _chunks(listed, source, chunk_bytes) for peer, listed in sorted(outgoing.items())}
    receives = {peer: _chunks(listed, target, chunk_bytes) for peer, listed in sorted(incoming.items())}
    received_bytes = 0
    while sends or receives:
        arriving: list[tuple[list[Move], torch.Tensor, Pending]] = []
        leaving: list[tuple[torch.Tensor, Pending]] = []
        for peer in sorted({*sends, *receives}):
            for way in (sends, receives) if me < peer else (receives, sends):
                if (chunk := next(way.get(peer, iter(())), None)) is None:
                    way.pop(peer, None)
                elif way is sends:
                    buffer = torch.cat([_as_bytes(_region(m, source)) for m in chunk])
                    leaving.append((buffer, communicator.isend(buffer, peer)))
                else:
                    buffer = torch.empty(sum(_num_bytes(m, target) for m in chunk), dtype=torch.uint8, device=device)
                    arriving.append((chunk, buffer, communicator.irecv(buffer, peer)))
        for chunk, buffer, pending in arriving:
            pending.wait()
            received_bytes += buffer.numel()
            _unpack(chunk, buffer, target)
        for _, pending in leaving:
            pending.wait()
    communicator.settle()
    return received_bytes


def _region(move: Move, state: LocalState | None) -> torch.Tensor:
    assert state is not None, f"{move} concerns a rank that has no such state"
    return state.region(move.tensor, move.start, move.stop)


def _copy_in_place(move: Move, source: LocalState | None, target: LocalState | None) -> None:
    old, new = _region(move, source), _region(move, target)
    if old.data_ptr() != new.data_ptr():
        new.copy_(old)


def _num_bytes(move: Move, state: LocalState | None) -> int:
    assert state is not None
    return state.specs[move.tensor].index_bytes * (move.stop - move.start)


def _chunks(moves: Sequence[Move], state: LocalState | None, chunk_bytes: int) -> Iterator[list[Move]]:
    """Cut a pair's moves into messages of at most `chunk_bytes` (one index along the cut dimension at least)."""
    assert state is not None
    chunk: list[Move] = []
    free = chunk_bytes
    for move in moves:
        index_bytes = state.specs[move.tensor].index_bytes
        start = move.start
        while start < move.stop:
            if chunk and free < index_bytes:
                yield chunk
                chunk, free = [], chunk_bytes
            stop = min(move.stop, start + max(1, free // index_bytes))
            chunk.append(Move(move.tensor, move.source, move.target, start, stop))
            free -= index_bytes * (stop - start)
            start = stop
    if chunk:
        yield chunk


def _as_bytes(region: torch.Tensor) -> torch.Tensor:
    return region.contiguous().view(-1).view(torch.uint8)


def _unpack(chunk: Sequence[Move], buffer: torch.Tensor, target: LocalState | None) -> None:
    offset = 0
    for move in chunk:
        region = _region(move, target)
        num_bytes = region.numel() * region.element_size()
        part = buffer[offset : offset + num_bytes].clone()  # aligned for the view below
        region.copy_(part.view(region.dtype).view(region.shape))
        offset += num_bytes
