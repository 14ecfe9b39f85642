"""Devices of one process: the executor and the workers' stores as they are, real tensors, no processes.

New shards start as poison, so that what nobody has written is seen. A call runs at once; what a device must have, and what
it contains, is found without the interval code of the library (`state_cases`).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from state_cases import ITEM_SIZE, State, Tensor, axis

from nereus.core.plan import ModelStage, Placement, Plan
from nereus.core.sharding import Holding, Move
from nereus.runtime.abort import AbortFlag
from nereus.runtime.executor import Executor, Owners
from nereus.runtime.memory import Block, DeviceMemory
from nereus.runtime.state import LocalState
from nereus.runtime.transport import InProcess
from nereus.runtime.unit_store import NO_ADDRESSES, Addresses, Built, Names, UnitStore
from nereus.runtime.worker import WorkerContext
from nereus.transition.groups import Lowering
from nereus.transition.plan import LOWERINGS
from nereus.transition.program import Program, program
from nereus.transition.rates import Rates

CPU = torch.device("cpu")
POISON = 0xA5
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
RATES = Rates(
    intra_bytes_s=100.0, inter_bytes_s=10.0, copy_bytes_s=1e3, intra_latency_s=1e-3, inter_latency_s=2e-3, setup_s=1e-2
)


# -- contents --------------------------------------------------------------------------------------------------------


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(BITS[tensor.element_size()])


def contents(state: State) -> dict[str, torch.Tensor]:
    """Every logical tensor, of random bits."""
    return {t.spec.name: _random_bits(t) for t in state.tensors}


def _random_bits(t: Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(t.spec.name.encode()))
    num_bytes = int(np.prod(t.spec.shape)) * ITEM_SIZE[t.spec.dtype]
    random_bytes = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    return random_bytes.view(getattr(torch, t.spec.dtype)).view(t.spec.shape)


def expected(
    state: State, placement: Placement, logical: Mapping[str, torch.Tensor]
) -> dict[int, dict[str, torch.Tensor]]:
    """What every device must have, cut out of the logical tensors row by row."""
    dims = {t.spec.name: axis(t) for t in state.tensors}
    return {
        gpu: {
            name: logical[name].index_select(dims[name], torch.tensor(rows, dtype=torch.long))
            for name, rows in h.items()
        }
        for gpu, h in state.held(placement).items()
    }


# -- devices ---------------------------------------------------------------------------------------------------------


class PoisonedMemory(DeviceMemory):
    """Memory of which no byte is what it is to become."""

    def _block(self, shape: tuple[int, ...], dtype: torch.dtype, zero: bool) -> Block:
        block = super()._block(shape, dtype, zero)
        if not zero:
            block.tensor.view(-1).view(torch.uint8).fill_(POISON)
        return block


class Store(UnitStore[Placement]):
    """A worker's store that reads the others' directly. `units` are placements."""

    def __init__(self, device: int, stores: Mapping[int, Store], specs: Mapping[ModelStage, Any]) -> None:
        context = WorkerContext(
            device_id=device, device=CPU, store=dist.HashStore(), flag=AbortFlag(), timeout_s=1.0, shared_memory=False
        )
        super().__init__(context, specs)
        self._allocator = PoisonedMemory(CPU)
        self._stores = stores
        self._reading: ModelStage | None = None

    def make_unit(self, placement: Placement, state: LocalState) -> Placement:
        return placement

    def build(
        self,
        model_stage: ModelStage,
        holding: Holding | None,
        names: Names,
        moves: Sequence[Move],
        addresses: Addresses = NO_ADDRESSES,
    ) -> Built:
        self._reading = model_stage
        return super().build(model_stage, holding, names, moves, addresses)

    def _transport(self) -> InProcess:
        states = {d: s._states.get(self._reading) for d, s in self._stores.items()}
        return InProcess(self.me, {d: s for d, s in states.items() if s is not None})

    def state(self, model_stage: ModelStage) -> LocalState:
        return self._states[model_stage]

    def holds(self, model_stage: ModelStage) -> bool:
        return model_stage in self._states


@dataclass
class Answered:
    """A call that has run."""

    found: dict[int, Any]

    def results(self) -> dict[int, Any]:
        return self.found


class Cluster:
    """Stores by device, behind what the executor asks of a cluster."""

    shared_memory = False

    def __init__(self, num_devices: int, specs: Mapping[ModelStage, Any]) -> None:
        self.stores: dict[int, Store] = {}
        self.stores.update({d: Store(d, self.stores, specs) for d in range(num_devices)})

    def call(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> Answered:
        return Answered({d: getattr(self.stores[d], method)(*a) for d, a in arguments.items()})

    def wait_any(self, calls: Sequence[Answered]) -> int:
        return 0


class World:
    """Model-stages on devices, and transitions between plans. states: what each model-stage's state is made of."""

    def __init__(self, num_devices: int, states: Mapping[ModelStage, State]) -> None:
        self.states, self.specs = states, {m: s.spec for m, s in states.items()}
        self.cluster = Cluster(num_devices, self.specs)
        self.owners = Owners()
        self.plan = Plan(())
        self.logical = {m: contents(s) for m, s in states.items()}

    def put(self, plan: Plan) -> None:
        """Start here: every device is given what it must have."""
        self.plan = plan
        for placement in plan.placements:
            m = placement.model_stage
            for gpu, tensors in expected(self.states[m], placement, self.logical[m]).items():
                holding = self.specs[m].holdings(placement)[gpu]
                self.cluster.stores[gpu].create(m, holding)
                self.owners.set(m, gpu, holding, None)
                for name, tensor in tensors.items():
                    self.local(m, gpu)[name].copy_(tensor)

    def program(self, target: Plan, lowerings: Sequence[Lowering] = LOWERINGS, usable_bytes: float = 1e15) -> Program:
        return program(
            self.specs,
            {m: self.owners.of(m) for m in self.specs},
            self.plan,
            target,
            node_of=np.zeros(len(self.cluster.stores), dtype=np.int64),
            rates=RATES,
            usable_bytes=usable_bytes,
            lowerings=lowerings,
        )

    def go(self, target: Plan, lowerings: Sequence[Lowering] = LOWERINGS, usable_bytes: float = 1e15) -> None:
        """A transition; the shards become units."""
        self.run(self.program(target, lowerings, usable_bytes), target)

    def run(self, found: Program, target: Plan) -> None:
        Executor(self.cluster, self.owners).run(found)  # type: ignore[arg-type]  # all that it uses is there
        self.plan = target
        for gpu in target.gpus:
            placements = {p.model_stage: p for p in target.placements if gpu in p.gpus}
            self.cluster.stores[gpu].commit(1, placements)

    def local(self, model_stage: ModelStage, gpu: int) -> dict[str, torch.Tensor]:
        """A device's tensors of a model-stage."""
        return self.cluster.stores[gpu].state(model_stage).tensors

    def holders(self, model_stage: ModelStage) -> list[int]:
        return [d for d, store in self.cluster.stores.items() if store.holds(model_stage)]

    def check(self, model_stage: ModelStage) -> None:
        """Every device has all that the plan says and nothing else, bit for bit."""
        assert self.holders(model_stage) == sorted(self.plan[model_stage].gpus)
        self.check_units(model_stage)

    def check_units(self, model_stage: ModelStage) -> None:
        """Every device of the plan has all that it says, bit for bit."""
        wanted = expected(self.states[model_stage], self.plan[model_stage], self.logical[model_stage])
        for gpu, tensors in wanted.items():
            found = self.local(model_stage, gpu)
            assert found.keys() == tensors.keys(), gpu
            for name, tensor in tensors.items():
                assert torch.equal(as_bits(found[name]), as_bits(tensor)), (name, gpu, str(self.plan[model_stage]))
