"""A pass of micro-batches through a unit, and a whole training step: the one place where their work is put together.

Used by the tasks of an RL step (`cost.tasks`) and to predict published training runs (`cost.runs`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nereus.core.shapes import ModelShape
from nereus.cost import work as w
from nereus.cost.work import Array, Machine, Work

DEVICE_AND_HOST = np.stack([~w.IS_HOST, w.IS_HOST]).astype(float)


def contract(work: Work, cost: Array | None) -> Any:
    """Work [C, ...] as it is, or with `cost` [C] = 1 / efficiency as seconds of device and host, [2, ...]."""
    return work if cost is None else np.tensordot(DEVICE_AND_HOST * cost, work, axes=1)


def joined(seconds: Any, cost: Array | None) -> Any:
    """What `contract` gave, summed up by the caller, as work [C, ...] or as seconds [...]."""
    return seconds if cost is None else w.overlapped(seconds[0], seconds[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSetting:
    """What all candidates of one pass have in common. keys: mean keys a token attends to.

    tokens, logit_tokens: of a sequence.
    balanced: layers are cut as nanotron cuts them, else evenly. context: ways that each sequence is cut over devices
    (context parallel).
    """

    shape: ModelShape
    machine: Machine
    tokens: float
    logit_tokens: float
    keys: float
    sequence_parallel: bool = False
    fused_attention: bool = True
    context: int = 1
    balanced: bool = False


def micro_batch_pass(
    setting: PassSetting,
    cost: Array | None,
    *,
    tp: Any,
    pp: Any,
    dp: Any,
    micro_batch: Any,
    micro_batches: Any,
    backward: bool,
    recompute: Any = 0,
) -> Any:
    """All micro-batches forward, and backward where asked; see `contract` for what comes back."""
    shape, machine = setting.shape, setting.machine
    tokens = micro_batch * setting.tokens / setting.context
    forward = w.layer_forward(
        shape,
        machine,
        tokens=tokens,
        keys=setting.keys,
        tp=tp,
        sequence_parallel=setting.sequence_parallel,
        fused_attention=setting.fused_attention,
    )
    logit_tokens = micro_batch * setting.logit_tokens / setting.context
    head_forward = w.head_forward(shape, machine, tokens=logit_tokens, tp=tp)
    head = contract(head_forward, cost)
    first = contract(w.embedding_forward(shape, machine, tokens=tokens, tp=tp), cost)
    layer = contract(forward, cost)
    boundary = contract(w.boundary_transfer(shape, machine, tokens=tokens, tp=tp, pp=pp, dp=dp), cost)
    passes: Any = 1
    if backward:
        layer = layer * (1 + recompute) + contract(w.layer_backward(forward), cost)
        head, first, boundary = 3 * head, 2 * first, 2 * boundary
        passes = 2 + recompute
    partition, head_layers = None, np.inf
    if setting.balanced:
        partition = w.balanced_partition(shape, pp)
        head_layers = 3 * head_forward.sum(0) / (forward.sum(0) + w.layer_backward(forward).sum(0))
    total = w.pipelined(
        layer=layer,
        first=first,
        last=head,
        boundary=boundary,
        num_layers=shape.num_layers,
        pp=pp,
        micro_batches=micro_batches,
        partition=partition,
        head_layers=head_layers,
    )
    issued = w.launches(
        machine,
        passes=passes,
        num_layers=shape.num_layers,
        tp=tp,
        pp=pp,
        dp=dp,
        micro_batches=micro_batches,
        partition=partition,
    )
    return total + contract(issued, cost)


def update(
    setting: PassSetting,
    cost: Array | None,
    *,
    tp: Any,
    pp: Any,
    dp: Any,
    gradient_bytes: float,
    optimizer_bytes: float,
    zero: int,
) -> Any:
    """Sum gradients over dp, then AdamW, on the pp_stage with most parameters; see `contract`."""
    params = np.maximum(*w.stage_params(setting.shape, tp=tp, pp=pp))
    reduction = w.gradient_reduction(
        setting.machine,
        params=params,
        layers=np.ceil(setting.shape.num_layers / pp),
        gradient_bytes=gradient_bytes,
        tp=tp,
        pp=pp,
        dp=dp * setting.context,
        zero=zero,
    )
    updated = params / (dp * setting.context) if zero else params
    return contract(reduction, cost) + contract(
        w.optimizer_update(setting.machine, params=updated, state_bytes=optimizer_bytes), cost
    )
