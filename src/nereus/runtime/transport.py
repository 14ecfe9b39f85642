"""How regions of tensors get from the ranks that have them to the ranks that need them.

A `Transport` executes one rank's part of a list of moves. All ranks are given the same list, so nothing but data is sent:

    PeerToPeer         messages of a communicator: Gloo or NCCL, one machine or many
    SharedMemoryCopy   a CPU rank copies straight out of the memory of the others; those have nothing to do
    InProcess          the same without processes: all states are at hand

A region of a tensor is a matrix here: a row for every index of the dimensions before the cut one, each row contiguous.
Pieces are runs of whole rows, or parts of one row where that is too long: what is contiguous at one end stays so.

PeerToPeer. The moves of a pair of ranks become messages: a large piece is a message of its own, small ones share one. Each
end decides for itself whether it sends from or receives into the tensor itself (one piece, contiguous there) or stages it.
Messages have a total order, in rounds of which each has at most one message of a pair and direction. A rank starts its
messages in that order, as many at a time as its staging memory allows, and goes on as soon as any of them is complete. It
cannot deadlock: of all incomplete messages the first in the order has been started at both of its ends, or is the next to be
started there, with nothing before it that holds memory. And messages of a pair are started in one order at both ends, as
NCCL needs.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Protocol

import torch

from nereus.core.errors import StateError
from nereus.core.sharding import ITEM_BYTES, Move, TensorSpec
from nereus.runtime.abort import AbortFlag
from nereus.runtime.communicator import Communicator, Pending
from nereus.runtime.state import LocalState, PeerState, StateAddress

STAGING_BYTES = 64 * 2**20
"""The most that a rank stages in a peer-to-peer transfer, over all peers and both directions."""

MESSAGE_BYTES = 4 * 2**20
"""The largest message."""

DIRECT_BYTES = 256 * 2**10
"""From this size on, a piece is a message of its own: below, a message costs more than the two copies it saves."""

MESSAGES_IN_FLIGHT = 32
"""The most that a rank has started and not completed, staged or not."""

CHECK_BYTES = 16 * 2**20
"""A copy of this size, about 10 ms, is not interrupted by an abort."""

ALIGNMENT = 16
"""Bytes: where a piece may begin in a message."""

NO_ADDRESSES: Mapping[int, StateAddress] = MappingProxyType({})


class Transport(Protocol):
    """Executes one rank's part of a list of moves."""

    @property
    def one_sided(self) -> bool:
        """Whether only the ranks that receive need to call `transfer`, with the addresses of those that they read from."""
        ...

    def transfer(
        self,
        moves: Sequence[Move],
        *,
        source: LocalState | None,
        target: LocalState | None,
        addresses: Mapping[int, StateAddress] = NO_ADDRESSES,
    ) -> int:
        """Write this rank's regions; returns the bytes that came from other ranks. All is complete then, on a GPU too.

        moves: the same list on all ranks. source: what this rank has; target: where it gets what it needs; None where it
        has no such part, and possibly the same object. Moves from this rank to itself are copied, unless both ends are the
        same memory. addresses: of the sources' states, by device, for a one-sided transport.

        Raises Aborted, also when a source has died, PeerTimeout, and StateError where a source has not what it is to give.
        The target's regions are undefined then, the source is untouched.
        """
        ...


# -- pieces ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows and columns (elements) of a move's region as a matrix. Either all columns, or one row."""

    move: Move
    rows: tuple[int, int]
    columns: tuple[int, int]
    num_bytes: int

    def of(self, state: LocalState | PeerState, spec: TensorSpec) -> torch.Tensor:
        """This piece of a state's tensor, a view: [rows, columns]."""
        region = state.region(self.move.tensor, self.move.start, self.move.stop)
        (top, bottom), (left, right) = self.rows, self.columns
        return region.view(prod(spec.shape[: spec.dim]), -1)[top:bottom, left:right]


def _pieces(move: Move, spec: TensorSpec, most_bytes: int) -> Iterator[_Piece]:
    """Cut a region into pieces of at most `most_bytes`, or one element."""
    item = ITEM_BYTES[spec.dtype]
    rows, columns = prod(spec.shape[: spec.dim]), (move.stop - move.start) * prod(spec.shape[spec.dim + 1 :])
    if not rows * columns:
        return
    if (height := most_bytes // (columns * item)) >= 1:
        for top in range(0, rows, height):
            bottom = min(top + height, rows)
            yield _Piece(move, (top, bottom), (0, columns), (bottom - top) * columns * item)
        return
    width = max(1, most_bytes // item)
    for row in range(rows):
        for left in range(0, columns, width):
            right = min(left + width, columns)
            yield _Piece(move, (row, row + 1), (left, right), (right - left) * item)


def _copy(piece: _Piece, origin: LocalState | PeerState, target: LocalState) -> None:
    """Copy a piece, unless both ends are the same memory."""
    spec = target.specs[piece.move.tensor]
    old, new = piece.of(origin, spec), piece.of(target, spec)
    if old.data_ptr() != new.data_ptr():
        new.copy_(old)


def _present(state: LocalState | None, move: Move) -> LocalState:
    if state is None:
        raise StateError(f"{move} concerns a rank that has no such state")
    return state


def _pulls(
    moves: Iterable[Move], target: LocalState | None, origin: Callable[[Move], LocalState | PeerState]
) -> Iterator[int]:
    """Copy regions out of the states that have them, a piece at each step; yields its bytes."""
    for move in moves:
        into = _present(target, move)
        for piece in _pieces(move, into.specs[move.tensor], CHECK_BYTES):
            _copy(piece, origin(move), into)
            yield piece.num_bytes


# -- one-sided transports ----------------------------------------------------------------------------------------------


class InProcess:
    """All states are in this process. sources: by device. Call `transfer` for every device, in any order."""

    one_sided = True

    def __init__(self, me: int, sources: Mapping[int, LocalState]) -> None:
        self._me, self._sources = me, sources

    @torch.no_grad()
    def transfer(
        self,
        moves: Sequence[Move],
        *,
        source: LocalState | None,
        target: LocalState | None,
        addresses: Mapping[int, StateAddress] = NO_ADDRESSES,
    ) -> int:
        """See `Transport`."""

        def origin(move: Move) -> LocalState:
            return _present(source if move.source == self._me else self._sources.get(move.source), move)

        own, others = _incoming(moves, self._me)
        sum(_pulls(own, target, origin))
        return sum(_pulls(others, target, origin))


class SharedMemoryCopy:
    """CPU ranks of one machine read each other's states, which lie in shared memory (`memory.SharedMemory`).

    A source that dies once its memory has been mapped here does no harm: the memory stays until it is unmapped. One that
    gives back what is being read is an error at the end of the transfer (`memory`).
    """

    one_sided = True

    def __init__(self, me: int, flag: AbortFlag) -> None:
        self._me, self._flag = me, flag

    @torch.no_grad()
    def transfer(
        self,
        moves: Sequence[Move],
        *,
        source: LocalState | None,
        target: LocalState | None,
        addresses: Mapping[int, StateAddress] = NO_ADDRESSES,
    ) -> int:
        """See `Transport`. What is mapped is unmapped at the end, also by an error."""
        peers: dict[int, PeerState] = {}

        def origin(move: Move) -> LocalState | PeerState:
            if move.source == self._me:
                return _present(source, move)
            if move.source not in addresses:
                raise StateError(f"{move}: no address of device {move.source} is known")
            if move.source not in peers:
                peers[move.source] = PeerState(move.source, addresses[move.source], _present(target, move).specs)
            return peers[move.source]

        self._flag.check()
        own, others = _incoming(moves, self._me)
        try:
            self._run(_pulls(own, target, origin))
            received_bytes = self._run(_pulls(others, target, origin))
            for peer in peers.values():
                peer.check()
            return received_bytes
        finally:
            peers.clear()  # an error's traceback would keep them mapped

    def _run(self, copies: Iterator[int]) -> int:
        copied_bytes = 0
        for num_bytes in copies:
            copied_bytes += num_bytes
            self._flag.check()
        return copied_bytes


def _incoming(moves: Iterable[Move], me: int) -> tuple[list[Move], list[Move]]:
    """What a rank gets from itself, and from others."""
    mine = [move for move in moves if move.target == me]
    return [m for m in mine if m.source == me], [m for m in mine if m.source != me]


# -- peer to peer ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Message:
    """Pieces that go from a rank to another at once, each but the first at the next multiple of ALIGNMENT."""

    source: int
    target: int
    pieces: tuple[_Piece, ...]

    def offsets(self) -> Iterator[tuple[_Piece, int]]:
        """Where each piece begins, in bytes."""
        end = 0
        for piece in self.pieces:
            yield piece, _aligned(end)
            end = _aligned(end) + piece.num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        *_, (last, offset) = self.offsets()
        return offset + last.num_bytes


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _messages(moves: Iterable[Move], specs: Mapping[str, TensorSpec], most_bytes: int) -> Iterator[_Message]:
    """Cut the moves of one pair and direction into messages: the same at both ends."""
    shared: list[_Piece] = []
    end = 0
    for move in moves:
        for piece in _pieces(move, specs[move.tensor], most_bytes):
            if piece.num_bytes >= DIRECT_BYTES:
                yield _Message(move.source, move.target, (piece,))
                continue
            if shared and _aligned(end) + piece.num_bytes > most_bytes:
                yield _Message(move.source, move.target, tuple(shared))
                shared, end = [], 0
            shared.append(piece)
            end = _aligned(end) + piece.num_bytes
    if shared:
        yield _Message(shared[0].move.source, shared[0].move.target, tuple(shared))


def _in_order(pairs: Mapping[tuple[int, int], Iterator[_Message]], num_devices: int) -> Iterator[_Message]:
    """All messages of a rank in the total order: by round, then by how far apart the two devices are, then by source.

    So that in each round all ranks turn to different peers. num_devices: more than any device id.
    """

    def ranked(pair: tuple[int, int], messages: Iterator[_Message]) -> Iterator[tuple[int, int, int, _Message]]:
        source, target = pair
        for number, message in enumerate(messages):
            yield number, (target - source) % num_devices, source, message

    merged = heapq.merge(*(ranked(*item) for item in pairs.items()), key=lambda ranking: ranking[:3])
    return (message for *_, message in merged)


class PeerToPeer:
    """Messages over a communicator; every rank that has a part in the moves calls `transfer`, others need not.

    staging_bytes: the most that this rank stages. message_bytes: the most of a message, the same on all ranks (though one
    element, if that is more). Staging memory is kept for the next transfer, until this object goes.
    """

    one_sided = False

    def __init__(
        self, communicator: Communicator, *, staging_bytes: int = STAGING_BYTES, message_bytes: int = MESSAGE_BYTES
    ) -> None:
        if not 0 < message_bytes <= staging_bytes:
            raise ValueError(
                f"message_bytes {message_bytes} must be positive and at most staging_bytes {staging_bytes}"
            )
        self._communicator = communicator
        self._message_bytes = message_bytes
        slot_bytes = max(message_bytes, max(ITEM_BYTES.values()))
        self._staging = _Staging(slot_bytes, max(1, staging_bytes // slot_bytes))

    @torch.no_grad()
    def transfer(
        self,
        moves: Sequence[Move],
        *,
        source: LocalState | None,
        target: LocalState | None,
        addresses: Mapping[int, StateAddress] = NO_ADDRESSES,
    ) -> int:
        """See `Transport`."""
        me = self._communicator.rank
        own, _ = _incoming(moves, me)
        exchange = _Exchange(
            self._communicator, self._staging, _pulls(own, target, lambda move: _present(source, move))
        )
        received_bytes = 0
        for message in self._mine(moves, source, target):
            state = _present(source if message.source == me else target, message.pieces[0].move)
            exchange.start(message, state)
            received_bytes += sum(piece.num_bytes for piece in message.pieces) if message.target == me else 0
        exchange.finish()
        self._communicator.settle()
        return received_bytes

    @property
    def staged_bytes(self) -> int:
        """Staging memory that this rank has taken so far, at most `staging_bytes`."""
        return self._staging.num_bytes

    def _mine(self, moves: Iterable[Move], source: LocalState | None, target: LocalState | None) -> Iterator[_Message]:
        """The messages of this rank, in order."""
        me, num_devices = self._communicator.rank, 1
        pairs: dict[tuple[int, int], list[Move]] = defaultdict(list)
        for move in moves:
            num_devices = max(num_devices, move.source + 1, move.target + 1)
            if move.source != move.target and me in (move.source, move.target):
                pairs[move.source, move.target].append(move)
        cut = {}
        for pair, listed in pairs.items():
            state = _present(source if pair[0] == me else target, listed[0])
            cut[pair] = _messages(listed, state.specs, self._message_bytes)
        return _in_order(cut, num_devices)


class _Staging:
    """At most `num_slots` buffers of `slot_bytes`, made when first needed and used again."""

    def __init__(self, slot_bytes: int, num_slots: int) -> None:
        self._slot_bytes, self._num_slots = slot_bytes, num_slots
        self._made = 0
        self._free: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        """What all buffers take."""
        return self._made * self._slot_bytes

    @property
    def available(self) -> bool:
        return bool(self._free) or self._made < self._num_slots

    def take(self, device: torch.device) -> torch.Tensor:
        if self._free:
            return self._free.pop()
        self._made += 1
        return torch.empty(self._slot_bytes, dtype=torch.uint8, device=device)

    def give_back(self, slot: torch.Tensor) -> None:
        self._free.append(slot)


@dataclass(frozen=True, slots=True)
class _Started:
    """A message under way. staged: its staging memory, if any. state: where it is from, or goes to."""

    message: _Message
    pending: Pending
    staged: torch.Tensor | None
    state: LocalState


class _Exchange:
    """The messages of one transfer that are under way. local: copies to make whenever there is nothing else to do."""

    def __init__(self, communicator: Communicator, staging: _Staging, local: Iterator[int]) -> None:
        self._communicator, self._staging, self._local = communicator, staging, local
        self._started: list[_Started] = []

    def start(self, message: _Message, state: LocalState) -> None:
        """Begin to send or receive, from or into the tensor itself or staging memory, when there is room for it."""
        tensor, slot = _tensor_itself(message, state), None
        while len(self._started) >= MESSAGES_IN_FLIGHT or (tensor is None and not self._staging.available):
            self._advance()
        if tensor is None:
            slot = self._staging.take(state.tensors[message.pieces[0].move.tensor].device)
            tensor = slot[: message.num_bytes]
        if message.source == self._communicator.rank:
            for there, staged in _parts(message, slot, state):
                staged.copy_(there)
            pending = self._communicator.isend(tensor, message.target)
        else:
            pending = self._communicator.irecv(tensor, message.source)
        self._started.append(_Started(message, pending, slot, state))

    def finish(self) -> None:
        """Return when all has arrived."""
        while self._started:
            self._advance()
        for _ in self._local:
            self._communicator.flag.check()

    def _advance(self) -> None:
        """Complete what has arrived; if nothing has, make a local copy; if none is left, wait for the first message."""
        arrived = [one for one in self._started if one.pending.done]
        if not arrived and next(self._local, None) is not None:
            self._communicator.flag.check()
            return
        for one in arrived or self._started[:1]:
            self._complete(one)

    def _complete(self, one: _Started) -> None:
        one.pending.wait()
        self._started.remove(one)
        if one.message.target == self._communicator.rank:
            for there, staged in _parts(one.message, one.staged, one.state):
                there.copy_(staged)
        if one.staged is not None:
            self._staging.give_back(one.staged)


def _tensor_itself(message: _Message, state: LocalState) -> torch.Tensor | None:
    """The bytes of a message as they lie in the state's tensor, if it is one piece and contiguous there."""
    if len(message.pieces) > 1:
        return None
    piece = message.pieces[0]
    there = piece.of(state, state.specs[piece.move.tensor])
    return there.view(-1).view(torch.uint8) if there.is_contiguous() else None


def _parts(
    message: _Message, slot: torch.Tensor | None, state: LocalState
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each piece of a staged message, in the state's tensor and in staging memory."""
    if slot is None:
        return
    for piece, offset in message.offsets():
        there = piece.of(state, state.specs[piece.move.tensor])
        yield there, slot[offset : offset + piece.num_bytes].view(there.dtype).view(there.shape)
