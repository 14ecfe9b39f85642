"""A pass of micro-batches through a unit, and a whole training step: the one place where their work is put together.

Used by the tasks of an RL step (`cost.tasks`) and to predict published training runs (`cost.runs`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nereus.core.shapes import ModelShape
from nereus.cost import work as w
from nereus.cost.work import Machine, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSetting:
    """What all candidates of one pass have in common. keys: mean keys a token attends to.

    tokens, logit_tokens: of a sequence.
    balanced: layers are cut as nanotron cuts them, else evenly. context: ways that each sequence is cut over devices
    (context parallel). slow_collectives: see `cost.runs.SECOND_SERIES`.
    """

    shape: ModelShape
    machine: Machine
    tokens: Any
    logit_tokens: Any
    keys: Any
    sequence_parallel: bool = False
    fused_attention: bool = True
    context: int = 1
    balanced: bool = False
    slow_collectives: bool = False


def micro_batch_pass(
    setting: PassSetting,
    *,
    tp: Any,
    pp: Any,
    dp: Any,
    micro_batch: Any,
    micro_batches: Any,
    backward: bool,
    recompute: Any = 0,
) -> Work:
    """All micro-batches forward, and backward where asked."""
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
    head = w.head_forward(shape, machine, tokens=logit_tokens, tp=tp)
    first = w.embedding_forward(shape, machine, tokens=tokens, tp=tp)
    boundary = w.boundary_transfer(shape, machine, tokens=tokens, tp=tp, pp=pp, dp=dp)
    layer = forward
    passes: Any = 1
    if backward:
        layer = forward * (1 + recompute) + w.layer_backward(forward)
        head, first, boundary = 3 * head, 2 * first, 2 * boundary
        passes = 2 + recompute
    partition, head_layers = None, np.inf
    if setting.balanced:
        partition = w.balanced_partition(shape, pp)
        head_layers = head.total() / layer.total()
    repeats = w.pipelined(
        num_layers=shape.num_layers, pp=pp, micro_batches=micro_batches, partition=partition, head_layers=head_layers
    )
    total: Work = repeats.of(layer=layer, first=first, last=head, boundary=boundary)
    issued = w.launches(
        machine,
        passes=passes,
        num_layers=shape.num_layers,
        tp=tp,
        pp=pp,
        dp=dp,
        micro_batches=micro_batches,
        partition=partition,
        slow_host=setting.slow_collectives,
    )
    return total + issued


def update(
    setting: PassSetting,
    *,
    tp: Any,
    pp: Any,
    dp: Any,
    gradient_bytes: float,
    optimizer_bytes: float,
    zero: int,
) -> Work:
    """Sum gradients over dp, then AdamW, on the pp_stage with most parameters."""
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
        slow=setting.slow_collectives and not zero,
    )
    updated = params / (dp * setting.context) if zero else params
    return reduction + w.optimizer_update(setting.machine, params=updated, state_bytes=optimizer_bytes)
