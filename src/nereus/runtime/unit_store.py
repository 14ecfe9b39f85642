"""What a worker holds: the state of its units, and the commands that make, move, check and save it.

A primitive of a transition builds a model-stage's new shard beside the old one:

    build      memory for the new shard, or for some of its tensors, and their content    old untouched
    settle     what has arrived everywhere takes the place of the old, which is freed
    commit     shards become units: at the end of a transition, never before

so whatever fails, what was complete is still there, under one of two names: `consolidate` puts the two together and says
what this rank has. A program (the RL worker, a test) derives from `UnitStore` and makes units out of states; the store
itself knows nothing of models.
"""

from __future__ import annotations

import gc
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from nereus.core.errors import StateError
from nereus.core.plan import ModelStage, Placement
from nereus.core.sharding import Holding, Interval, Move, StateSpec, merge_intervals
from nereus.runtime.background_writes import BackgroundWrites, WritesReport
from nereus.runtime.checkpoint import read_regions
from nereus.runtime.groups import Group, GroupTable
from nereus.runtime.memory import Allocator, DeviceMemory, HostMemory
from nereus.runtime.state import LocalState, StateAddress
from nereus.runtime.transport import MESSAGE_BYTES, NO_ADDRESSES, PeerToPeer, SharedMemoryCopy, Transport
from nereus.runtime.worker import WorkerContext
from nereus.transition.program import union

U = TypeVar("U")

Names = Set[str] | None
"""Tensors by name; None for all."""

Addresses = Mapping[int, StateAddress]

GARBAGE_BYTES = 256 * 2**20
"""Retiring so much state is worth a garbage collection, a tenth of a second: what models hold in cycles cannot be kept."""

KEPT_SHARE = 1 / 2
"""Of the memory that state leaves, how much kept pages may take between transitions: units need some to work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What a rank says of a build. address: of the new shard, where memory is shared."""

    received_bytes: int
    address: StateAddress | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What there is for copies of state: of this device's own memory, and of its machine's, which others share."""

    device_bytes: float
    host_bytes: float


class UnitStore(Generic[U]):
    """Base of worker programs. specs: the logical state of every model-stage that may ever be here."""

    def __init__(self, context: WorkerContext, specs: Mapping[ModelStage, StateSpec]) -> None:
        self.context = context
        self.me = context.device_id
        self.specs = specs
        self.units: dict[ModelStage, U] = {}
        self._versions: dict[ModelStage, int] = {}
        self._host = HostMemory(shared=context.shared_memory) if context.device.type == "cpu" else None
        self._allocator: Allocator = self._host or DeviceMemory(context.device)
        self._states: dict[ModelStage, LocalState] = {}
        self._incoming: dict[ModelStage, LocalState] = {}
        self._arrived: dict[ModelStage, set[str]] = {}
        self._peak_bytes = 0
        self._messages: PeerToPeer | None = None
        self.writes = BackgroundWrites()
        self.groups = GroupTable(
            me=self.me, store=context.store, flag=context.flag, device=context.device, timeout_s=context.timeout_s
        )

    def make_unit(self, placement: Placement, state: LocalState) -> U:
        """A unit's rank over its state; called at commit."""
        raise NotImplementedError  # the one method a program must give

    def admit(self, num_bytes: int) -> None:
        """Called before state takes so much more memory; a program that keeps an account may raise OutOfMemory."""

    # -- commands ------------------------------------------------------------------------------------------------

    def ping(self) -> int:
        return self.me

    def connect(
        self, groups: Sequence[Group], pool: Sequence[int], staging_bytes: int, usable_bytes: float = float("inf")
    ) -> None:
        """Open and close communicators so that these are open; transfers go among `pool`, staging at most so much.

        usable_bytes: what state, kept pages and staging may take together.
        """
        if self._host is not None:
            self._host.limit(usable_bytes - staging_bytes)
        self._messages = None
        self.groups.change(groups)
        if not self.context.shared_memory:
            self._messages = PeerToPeer(
                self.groups.get("pool", tuple(sorted(pool))),
                staging_bytes=staging_bytes,
                message_bytes=min(MESSAGE_BYTES, staging_bytes),
            )

    def retire(self, names: Sequence[ModelStage]) -> None:
        """Take units out of use; their state stays."""
        retired = [name for name in names if self.units.pop(name, None) is not None]
        if sum(self._states[name].num_bytes for name in retired if name in self._states) >= GARBAGE_BYTES:
            gc.collect()

    def forget(self) -> None:
        """Free everything."""
        self.units.clear()
        self._arrived.clear()
        for states in (self._states, self._incoming):
            for state in states.values():
                state.drop()
            states.clear()

    def create(self, model_stage: ModelStage, holding: Holding) -> None:
        """A shard of zeros, for `load` or weight_sync to fill."""
        self.admit(self.specs[model_stage].holding_bytes(holding))
        state = LocalState.empty(self.specs[model_stage], holding, self._allocator)
        state.add(holding, zero=True)
        self._states[model_stage] = state
        self._note_peak()

    def load(self, model_stage: ModelStage, files: Mapping[str, str], seed: int) -> None:
        """Fill a shard from safetensors files (`runtime.checkpoint.read_regions`)."""
        read_regions(self._states[model_stage], files, seed)

    def build(
        self,
        model_stage: ModelStage,
        holding: Holding | None,
        names: Names,
        moves: Sequence[Move],
        addresses: Addresses = NO_ADDRESSES,
    ) -> Built:
        """This rank's part of a primitive, or of one batch of its tensors.

        holding: what the whole new shard will have; None for a rank that only sends. names: the tensors of this batch.
        moves: those that concern this rank. addresses: of the shards that are read.
        """
        present = self._states.get(model_stage)
        incoming = self._incoming_shard(model_stage, holding, names, moves) if holding is not None else None
        received = self._transport().transfer(moves, source=present, target=incoming, addresses=addresses)
        if incoming is None:
            return Built(received_bytes=received, address=None)
        arrived = self._arrived.setdefault(model_stage, set())
        arrived |= set(incoming.tensors)
        shared = self.context.shared_memory and arrived == set(incoming.holding)
        return Built(received_bytes=received, address=incoming.address() if shared else None)

    def settle(self, model_stage: ModelStage, names: Names, last: bool) -> None:
        """Free the old shard's tensors of a batch; after the last one the new shard, if there is one, is the shard."""
        if (present := self._states.get(model_stage)) is not None:
            present.drop([n for n in present.tensors if names is None or n in names])
        if last:
            self._states.pop(model_stage, None)
            self._arrived.pop(model_stage, None)
            if (incoming := self._incoming.pop(model_stage, None)) is not None:
                self._states[model_stage] = incoming

    def commit(self, version: int, placements: Mapping[ModelStage, Placement]) -> dict[ModelStage, int]:
        """Make units of the shards of these model-stages, which are complete; returns the versions of all units here.

        version: of these units; it grows with every transition.
        """
        for name, placement in placements.items():
            at = placement.position(self.me)
            holding = self.specs[name].position_holding(placement.layout, at.pp_stage, at.tp_rank)
            state = self._with_empty_tensors(name, holding)
            if state.holding != holding or set(state.tensors) != set(holding):
                raise StateError(f"{name}: device {self.me} does not hold the shard of its position")
            self.units[name] = self.make_unit(placement, state)
            self._versions[name] = version
        if self._host is not None:
            self._host.trim(KEPT_SHARE * self._host.spare_bytes)
        return {name: self._versions[name] for name in self.units}

    def consolidate(self) -> dict[ModelStage, Holding]:
        """After a failure: one shard of all that is complete of each model-stage here, old or new; what each holds."""
        for name in {*self._states, *self._incoming}:
            self.units.pop(name, None)
            states = [s for s in (self._states.get(name), self._arrived_shard(name)) if s is not None]
            self._incoming.pop(name, None)
            self._arrived.pop(name, None)
            self._states[name] = states[0] if len(states) == 1 else self._joined(*states)
        return {name: _present(state) for name, state in self._states.items()}

    def addresses(self, names: Sequence[ModelStage]) -> dict[ModelStage, StateAddress]:
        """Where the shards of these model-stages lie, for peers; only with shared memory."""
        return {name: self._states[name].address() for name in names if name in self._states}

    def synchronise(
        self, source: ModelStage, target: ModelStage, moves: Sequence[Move], addresses: Addresses = NO_ADDRESSES
    ) -> int:
        """Overwrite one model-stage's tensors with another's; returns bytes received from other ranks."""
        return self._transport().transfer(
            moves, source=self._states.get(source), target=self._states.get(target), addresses=addresses
        )

    def digest_sums(self, model_stage: ModelStage, regions: Mapping[str, Sequence[Interval]]) -> dict[str, list[int]]:
        """See `core.digest`."""
        return self._states[model_stage].digest_sums(regions)

    def set_counters(self, model_stage: ModelStage, tensor: str, values: Mapping[int, int]) -> None:
        """Set entries of a counter tensor."""
        for index, value in values.items():
            self._states[model_stage].tensors[tensor][index] = value

    def clear_writes(self) -> Room:
        """Forget files that are being written, and what was; how much room there is for copies of the next ones."""
        self.writes.clear()
        return Room(device_bytes=math.inf, host_bytes=_available_bytes())

    def write_gathered(
        self,
        model_stage: ModelStage,
        holding: Holding,
        moves: Sequence[Move],
        path: str,
        addresses: Addresses = NO_ADDRESSES,
    ) -> None:
        """Gather whole tensors on the rank whose `holding` is not empty, which writes them to `path` from then on."""
        target = None
        if holding:
            self._check_written(model_stage, holding, moves)
            memory = self._host or DeviceMemory(self.context.device)
            target = LocalState.empty(self.specs[model_stage], holding, memory)
            target.add(holding, touch=True)
        source = self._states.get(model_stage)
        self._transport().transfer(moves, source=source, target=target, addresses=addresses)
        if target is not None and self._host is None:
            host = {name: tensor.cpu() for name, tensor in target.tensors.items()}
            target = LocalState(self.specs[model_stage], holding, host)
        if target is not None:
            self.writes.add(Path(path), target)

    def written(self, wait: bool) -> WritesReport:
        """What has become of the files since `clear_writes`. wait: until all are on disk, or one has failed."""
        report = self.writes.wait(self.context.flag.check) if wait else self.writes.told()
        if not report.num_left and self._host is not None:
            self._host.trim(KEPT_SHARE * self._host.spare_bytes)
        return report

    def peak_bytes(self) -> int:
        """The most state that was here at once since the last call, and all staging memory."""
        peak, self._peak_bytes = self._peak_bytes, self._held_bytes()
        staged = 0 if self._messages is None else self._messages.staged_bytes
        return max(peak, self._peak_bytes) + staged

    def kept_bytes(self) -> int:
        """Pages in no use, kept for the next shards: no part of any other figure here."""
        return 0 if self._host is None else self._host.kept_bytes

    def trim(self, most_kept_bytes: int = 0) -> None:
        """Give kept pages back to the system, but for so many bytes."""
        if self._host is not None:
            self._host.trim(most_kept_bytes)

    # -- inside --------------------------------------------------------------------------------------------------

    def _incoming_shard(
        self, model_stage: ModelStage, holding: Holding, names: Names, moves: Sequence[Move]
    ) -> LocalState:
        """The new shard with memory for a batch: taken over from the old one where both have the same intervals.

        Raises StateError unless the moves write all of the rest: what memory held before must never become state.
        """
        incoming = self._incoming.get(model_stage)
        if incoming is None:
            incoming = LocalState.empty(self.specs[model_stage], holding, self._allocator)
            self._incoming[model_stage] = incoming
        wanted = [n for n in holding if names is None or n in names]
        if (present := self._states.get(model_stage)) is not None:
            incoming.adopt(present, [n for n in wanted if n in present.tensors])
        fresh = [n for n in wanted if n not in incoming.tensors]
        self._check_written(model_stage, {n: holding[n] for n in fresh}, moves)
        self.admit(self.specs[model_stage].holding_bytes({n: holding[n] for n in fresh}))
        incoming.add(fresh, touch=True)
        self._note_peak()
        return incoming

    def _check_written(self, model_stage: ModelStage, holding: Holding, moves: Sequence[Move]) -> None:
        """Raise StateError unless the moves write all of a holding, once."""
        written: dict[str, list[Interval]] = defaultdict(list)
        for move in moves:
            if move.target == self.me:
                written[move.tensor].append((move.start, move.stop))
        for n, wanted in holding.items():
            counts = [sum(stop - start for start, stop in intervals) for intervals in (written[n], wanted)]
            if merge_intervals(written[n]) != wanted or counts[0] != counts[1]:
                raise StateError(f"{model_stage}: of {n}, {wanted} is to be written, {sorted(written[n])} would be")

    def _with_empty_tensors(self, name: ModelStage, holding: Holding) -> LocalState:
        """The shard, with the tensors that the holding has no indices of: no primitive brings them, having no bytes."""
        state = self._states.setdefault(name, LocalState.empty(self.specs[name], {}, self._allocator))
        if state.holding == holding or _indices(state.holding) != _indices(holding):
            return state
        whole = self._states[name] = LocalState.empty(self.specs[name], holding, self._allocator)
        whole.adopt(state)
        whole.add([n for n in holding if n not in whole.tensors])
        state.drop()
        return whole

    def _arrived_shard(self, name: ModelStage) -> LocalState | None:
        """The part of the new shard that is complete."""
        incoming = self._incoming.get(name)
        if incoming is not None:
            incoming.drop([n for n in incoming.tensors if n not in self._arrived.get(name, ())])
        return incoming

    def _joined(self, a: LocalState, b: LocalState) -> LocalState:
        """All that two shards have; tensors that one of them has whole are not copied."""
        both = LocalState.empty(a.spec, union(_present(a), _present(b)), self._allocator)
        for part in (a, b):
            both.adopt(part, [n for n in part.tensors if n not in both.tensors])
        rest = [n for n in both.holding if n not in both.tensors]
        both.add(rest, touch=True)
        for part in (a, b):
            for name in rest:
                for start, stop in part.holding[name] if name in part.tensors else ():
                    both.region(name, start, stop).copy_(part.region(name, start, stop))
        for part in (a, b):
            part.drop()
        return both

    def _transport(self) -> Transport:
        if self.context.shared_memory:
            return SharedMemoryCopy(self.me, self.context.flag)
        assert self._messages is not None, "connect comes before any transfer"
        return self._messages

    def _held_bytes(self) -> int:
        return sum(state.num_bytes for state in (*self._states.values(), *self._incoming.values()))

    def _note_peak(self) -> None:
        self._peak_bytes = max(self._peak_bytes, self._held_bytes())


def _present(state: LocalState) -> Holding:
    return {name: state.holding[name] for name in state.tensors}


def _indices(holding: Holding) -> Holding:
    """What a holding has any indices of."""
    return {name: intervals for name, intervals in holding.items() if intervals}


def _available_bytes() -> float:
    """Of this machine's memory, what programs could still take."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
