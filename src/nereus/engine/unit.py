"""One rank's part of a unit: its state, its module, and the communicators of its position.

A unit is one replica of a model-stage (`core.plan`). Everything here is about one rank of it; ranks of a unit call the
same methods with the same sequences, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from nereus.core.plan import Placement
from nereus.engine.architecture import Architecture, shares_gradient
from nereus.engine.batch import MicroBatch, Sequences, micro_batches, scatter_rows
from nereus.engine.budget import Budget, LayerSavings, storages
from nereus.engine.counts import Counts
from nereus.engine.meter import Meter
from nereus.engine.module import UnitModule
from nereus.runtime.communicator import Communicator, Pending
from nereus.runtime.groups import GroupTable
from nereus.runtime.state import LocalState

Head = Callable[[MicroBatch, torch.Tensor], torch.Tensor]
"""(micro-batch, hidden states [b, t, h] of the last pp_stage) -> [b, w]."""

Loss = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(micro-batch, hidden states) -> (scalar to differentiate, statistics [k] that are summed)."""


@dataclass(frozen=True, slots=True)
class UnitGroups:
    """The communicators of one position."""

    tp: Communicator
    down: Communicator
    up: Communicator
    ends: Communicator
    unit: Communicator
    dp: Communicator

    @classmethod
    def of(cls, placement: Placement, me: int, table: GroupTable) -> UnitGroups:
        at, layout = placement.position(me), placement.layout
        column = [placement.gpu(at.unit, p, at.tp_rank) for p in range(layout.pp)]
        ends = [column[0], column[-1]] if me in (column[0], column[-1]) else [me]
        return cls(
            tp=table.get("tp", [placement.gpu(at.unit, at.pp_stage, t) for t in range(layout.tp)]),
            down=table.get("down", column),
            up=table.get("up", column),
            ends=table.get("ends", ends),
            unit=table.get("unit", placement.unit_gpus(at.unit)),
            dp=table.get("dp", [placement.gpu(u, at.pp_stage, at.tp_rank) for u in range(placement.dp)]),
        )


class Sends:
    """Sends under way, each beside its buffer, which must live until the send has completed and no longer."""

    def __init__(self) -> None:
        self._going: list[tuple[torch.Tensor, Pending]] = []

    def add(self, send: tuple[torch.Tensor, Pending]) -> None:
        """Let go of those that have completed; raises Aborted when one has failed."""
        while self._going and self._going[0][1].done:
            self._going.pop(0)[1].wait()
        self._going.append(send)

    def wait(self) -> None:
        """Wait for all. Raises Aborted or PeerTimeout."""
        for _, pending in self._going:
            pending.wait()
        self._going = []


@dataclass(slots=True)
class _Pass:
    """A micro-batch between its forward and its backward pass: input, output, what it keeps by kind of memory, and what a
    layer that is computed again will keep for a moment."""

    x: torch.Tensor
    y: torch.Tensor
    kept: dict[str, int]
    layer_bytes: int


@dataclass(frozen=True, slots=True)
class _Kept:
    """What autograd keeps of the layers at one shape of a micro-batch: in all; of a layer that is computed again;
    whether the output is a part of it."""

    num_bytes: int
    layer_bytes: int
    has_output: bool


class Unit:
    """See the module. `state` holds the tensors; the module's parameters are views of them.

    meter, budget: the device's, where it has them: they measure, and may delay or refuse an operation, but change none.
    """

    def __init__(
        self,
        architecture: Architecture,
        placement: Placement,
        me: int,
        state: LocalState,
        groups: UnitGroups,
        *,
        trainable: bool = False,
        meter: Meter | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.architecture, self.placement, self.state, self.groups = architecture, placement, state, groups
        self.position = placement.position(me)
        self.module = UnitModule(
            architecture,
            placement.layout,
            self.position.pp_stage,
            self.position.tp_rank,
            state.tensors,
            groups.tp,
            recompute=placement.recompute,
            trainable=trainable,
        )
        self.device = self.module.device
        self.meter, self.budget = meter or Meter(me), budget or Budget(me)
        self.counts = Counts.of(self.module, recompute=placement.recompute)
        self._known = storages(self.module.parameters.values())
        self._savings = LayerSavings(self.module.layers if placement.recompute and trainable else ())
        self._kept: dict[torch.Size, _Kept] = {}

    @property
    def answers(self) -> bool:
        """Whether this rank returns the unit's results."""
        return self.module.is_last and self.position.tp_rank == 0

    # -- forward only --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, sequences: Sequences, head: Head) -> torch.Tensor | None:
        """Run all sequences through the unit; on the answering rank `head`'s results, [n, w]."""
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        sends = Sends()
        for micro in micro_batches(sequences, self.placement.micro_batch, self.device):
            with self.budget.passing("activations", self.counts.working_bytes(micro.sequences.tokens.numel())):
                hidden = self.run_layers(self._input(micro))
                if self.module.is_last:
                    with self.meter.operation("head", *self.counts.head(micro.num_places)):
                        parts.append((micro.index, head(micro, hidden)))
                    self.budget.hold("logits", 0)
                else:
                    sends.add(self.send(self.groups.down, hidden, +1))
        sends.wait()
        return scatter_rows(parts, len(sequences)) if self.answers else None

    def logprobs(self, temperature: float) -> Head:
        """Head: log-probabilities of the response tokens, response-aligned."""

        def head(micro: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
            return self.response_statistics(micro, hidden, temperature)[0]

        return head

    def response_statistics(
        self, micro: MicroBatch, hidden: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probabilities, entropies) of the response tokens, [b, r], zero where there is no token."""
        mask = micro.sequences.response_mask()
        tokens = micro.sequences.response_tokens()[mask]
        self.budget.take("logits", self.counts.softmax_bytes(len(tokens), kept=torch.is_grad_enabled()))
        values = self.module.token_statistics(hidden[micro.sequences.response_places()], tokens, temperature)
        empty = torch.zeros(mask.shape, device=self.device)
        return empty.masked_scatter(mask, values[0]), empty.masked_scatter(mask, values[1])

    def response_values(self, micro: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
        """Head: the value before each response token, [b, r], zero where there is no token."""
        mask = micro.sequences.response_mask()
        values = self.module.scores(hidden[micro.sequences.response_places()])
        return torch.zeros(mask.shape, device=self.device).masked_scatter(mask, values)

    def final_scores(self, micro: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
        """Head: the score at the last token of each sequence, [b, 1]."""
        rows = torch.arange(len(micro.index), device=self.device)
        return self.module.scores(hidden[rows, micro.sequences.lengths - 1])[:, None]

    # -- training ------------------------------------------------------------------------------------------------

    def accumulate(self, sequences: Sequences, loss: Loss) -> torch.Tensor | None:
        """Forward and backward of all sequences, 1F1B over pp_stages; gradients add up in the parameters.

        Returns the summed statistics [k] on the ranks of the last pp_stage, else None. Gradients are this unit's own:
        `engine.optimizer.reduce_gradients` adds those of other ranks.
        """
        micros = micro_batches(sequences, self.placement.micro_batch, self.device)
        live: dict[int, _Pass] = {}
        sends, statistics = Sends(), None
        for action, i in one_forward_one_backward(len(micros), self.placement.layout.pp, self.position.pp_stage):
            if action == "forward":
                live[i], row = self._forward(micros[i], loss)
                if row is not None:
                    statistics = row if statistics is None else statistics + row
                else:
                    sends.add(self.send(self.groups.down, live[i].y.detach(), +1))
            else:
                gradient = self._backward(micros[i], live.pop(i))
                if gradient is not None:
                    sends.add(self.send(self.groups.up, gradient, -1))
        sends.wait()
        return statistics

    def _forward(self, micro: MicroBatch, loss: Loss) -> tuple[_Pass, torch.Tensor | None]:
        """One micro-batch through the layers; on the last pp_stage through the loss too, whose statistics are second."""
        before, known = dict(self.budget.held), set(self._known)
        x, y = self._through_layers(micro, known)
        row = None
        if self.module.is_last:
            with (
                self.budget.saved("logits", known),
                self.meter.operation("head", *self.counts.head(micro.num_places)),
            ):
                y, row = loss(micro, y)
        else:
            self.budget.keep("boundaries", y, known)
        kept = {kind: held - before[kind] for kind, held in self.budget.held.items()}
        return _Pass(x, y, kept, self._kept[micro.sequences.tokens.shape].layer_bytes), row

    def _through_layers(self, micro: MicroBatch, known: set[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and output of the layers. known: storages that are accounted for.

        What autograd keeps of them is counted the first time that a shape comes, and is the same from then on: counting it
        takes 0.3 ms, a tenth of a small micro-batch's time.
        """
        shape = micro.sequences.tokens.shape
        seen, before = self._kept.get(shape), self.budget.held["activations"]
        if seen is not None:
            self.budget.take("activations", seen.num_bytes)
        with self._counting(seen is None, known):
            x = self._input(micro, with_gradient=True)
        if not self.module.is_first:
            self.budget.keep("boundaries", x, known)
        with self._counting(seen is None, known), self._savings.counted(self.budget, known, seen is None):
            y = self.run_layers(x)
        if seen is None:
            kept_bytes = self.budget.held["activations"] - before
            self._kept[shape] = _Kept(kept_bytes, self._savings.most_bytes, bool(storages([y]) & known))
        elif seen.has_output:
            known |= storages([y])
        return x, y

    def _counting(self, new: bool, known: set[int]) -> AbstractContextManager[None]:
        return self.budget.saved("activations", known) if new else nullcontext()

    def _backward(self, micro: MicroBatch, one: _Pass) -> torch.Tensor | None:
        """The backward pass of a micro-batch; the gradient of its input, but on the first pp_stage."""
        received = None if self.module.is_last else self.receive(self.groups.up, one.y.shape, -1)
        self.allow_gradients()
        ends = [t for t, here in ((one.x, self.module.is_first), (one.y, self.module.is_last)) if not here]
        rows, width = micro.sequences.tokens.shape
        places = micro.num_places if self.module.is_last else 0
        with (
            self.budget.passing("boundaries", sum(t.numel() * t.element_size() for t in ends)),
            self.budget.passing("activations", one.layer_bytes),
            self.meter.operation("backward", *self.counts.backward(rows, width, places)),
        ):
            torch.autograd.backward(one.y, received)
        for kind, num_bytes in one.kept.items():
            self.budget.take(kind, -num_bytes)
        if self.module.is_first:
            return None
        assert one.x.grad is not None
        return one.x.grad

    def allow_gradients(self) -> None:
        """Memory for all gradients, from the first backward pass on."""
        if not self.has_gradients:
            self.budget.take("gradients", self.counts.gradient_bytes)

    @property
    def has_gradients(self) -> bool:
        return any(p.grad is not None for p in self.module.parameters.values())

    def shared_gradients(self) -> list[str]:
        """Parameters whose gradient is spread over several tp ranks that hold the same indices."""
        tp = self.placement.layout.tp
        return [s.name for s in self.architecture.parameters.tensors if shares_gradient(self.architecture, s, tp)]

    # -- through the module, measured ----------------------------------------------------------------------------

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `UnitModule.embed`."""
        with self.meter.operation("embedding", *self.counts.embedding(*tokens.shape)):
            return self.module.embed(tokens)

    def run_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `UnitModule.run_layers`."""
        rows, width, _ = hidden.shape
        with self.meter.operation("forward", *self.counts.layers(rows, width)):
            return self.module.run_layers(hidden)

    # -- between pp_stages ---------------------------------------------------------------------------------------

    def _input(self, micro: MicroBatch, *, with_gradient: bool = False) -> torch.Tensor:
        tokens = micro.sequences.tokens
        if self.module.is_first:
            return self.embed(tokens)
        hidden = self.receive(self.groups.down, (*tokens.shape, self.hidden_size), +1)
        return hidden.requires_grad_(with_gradient)

    @property
    def hidden_size(self) -> int:
        return int(self.architecture.config.hidden_size)

    def send(self, group: Communicator, tensor: torch.Tensor, step: Literal[1, -1]) -> tuple[torch.Tensor, Pending]:
        """The tensor is kept beside the send, which reads it until it has completed."""
        tensor = tensor.contiguous()
        return tensor, group.isend(tensor, group.ranks[group.index + step])

    def receive(self, group: Communicator, shape: tuple[int, ...], step: Literal[1, -1]) -> torch.Tensor:
        buffer = torch.empty(shape, dtype=getattr(torch, self.architecture.dtype), device=self.device)
        group.irecv(buffer, group.ranks[group.index - step]).wait()
        return buffer


def one_forward_one_backward(
    num_micro_batches: int, pp: int, pp_stage: int
) -> Iterator[tuple[Literal["forward", "backward"], int]]:
    """The 1F1B order of one pp_stage (PipeDream-Flush, Narayanan et al. 2021): at most pp - pp_stage are in flight."""
    warmup = min(pp - pp_stage - 1, num_micro_batches)
    for i in range(warmup):
        yield "forward", i
    for i in range(warmup, num_micro_batches):
        yield "forward", i
        yield "backward", i - warmup
    for i in range(num_micro_batches - warmup, num_micro_batches):
        yield "backward", i
