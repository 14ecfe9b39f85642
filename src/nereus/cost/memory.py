"""Bytes on the fullest GPU of a candidate, kind by kind.

Activations follow Korthikanti et al. 2022 (arXiv:2205.05198), counted anew for gated MLPs and fused attention: what each
layer must keep for its backward pass, in bytes a token. With recomputation a layer keeps only its input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nereus.core.shapes import ModelShape
from nereus.cost.work import stage_params

RESIDENT_KINDS = ("parameters", "optimizer")
WORKING_KINDS = ("gradients", "activations", "boundaries", "logits", "kv_cache", "workspace")
WORKSPACE_BYTES = 1.5 * 2**30
"""CUDA context, NCCL buffers, cuBLAS workspaces of one process; measured peaks correct it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes by kind on one pp_stage; arrays that broadcast together.

    elsewhere: what is resident on another pp_stage, which may be more.
    """

    parameters: Any
    optimizer: Any
    gradients: Any = 0.0
    activations: Any = 0.0
    boundaries: Any = 0.0
    logits: Any = 0.0
    kv_cache: Any = 0.0
    workspace: Any = 0.0
    elsewhere: Any = 0.0

    def kinds(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*RESIDENT_KINDS, *WORKING_KINDS)}

    @property
    def most_resident(self) -> Any:
        return np.maximum(self.resident, self.elsewhere)

    @property
    def resident(self) -> Any:
        return sum(getattr(self, name) for name in RESIDENT_KINDS)

    @property
    def working(self) -> Any:
        return sum(getattr(self, name) for name in WORKING_KINDS)

    @property
    def total(self) -> Any:
        return self.resident + self.working

    def scaled(self, scale: Mapping[str, float]) -> Footprint:
        """Each working kind times its learned correction, 1 where there is none."""
        return Footprint(
            parameters=self.parameters,
            optimizer=self.optimizer,
            **{name: getattr(self, name) * scale.get(name, 1.0) for name in WORKING_KINDS},
        )


def fullest(first: Footprint, last: Footprint) -> Footprint:
    """The fuller of two pp_stages, candidate by candidate."""
    wins = np.asarray(first.total) > np.asarray(last.total)
    ours, theirs = first.kinds(), last.kinds()
    elsewhere = np.where(wins, last.resident, first.resident)
    return Footprint(**{name: np.where(wins, ours[name], theirs[name]) for name in ours}, elsewhere=elsewhere)


def logit_bytes(element_bytes: float) -> float:
    """Per logit at the peak of the loss: the logit as computed, its float32 log-probability, the float32 gradient of it."""
    return element_bytes + 8


def layer_activation_bytes(
    shape: ModelShape,
    *,
    keys: Any,
    tp: Any,
    element_bytes: float,
    sequence_parallel: bool = False,
    fused_attention: bool = True,
) -> Any:
    """Kept by one layer for its backward pass, per token, without recomputation.

    Whole on each tp rank unless cut over the sequence: inputs of the norms and of the two column-cut products (4 x hidden).
    Cut over tp: q, k, v before and after rotation, attention's output, and the MLP's intermediates (gate, up, activation,
    product when gated). Unfused attention also keeps scores, softmax and dropout mask: 5 bytes x heads x keys.
    """
    whole = 4 * shape.hidden * element_bytes / (tp if sequence_parallel else 1.0)
    mlp = (4 if shape.gated else 2) * shape.intermediate
    attention = 3 * shape.q_width + 3 * shape.kv_width
    cut = (mlp + attention) * element_bytes / tp
    scores = 0.0 if fused_attention else 5 * shape.num_heads * keys / tp
    return whole + cut + scores


def training_ends(
    shape: ModelShape,
    *,
    tp: Any,
    pp: Any,
    dp: Any,
    tokens: Any,
    logit_tokens: Any,
    keys: Any,
    micro_batches: Any,
    recompute: Any,
    element_bytes: float,
    parameter_bytes: float,
    gradient_bytes: float,
    optimizer_bytes: float,
    zero: int = 0,
    sequence_parallel: bool = False,
    fused_attention: bool = True,
    workspace_bytes: float = WORKSPACE_BYTES,
) -> tuple[Footprint, Footprint]:
    """A training unit's GPU during the update, on the first and on the last pp_stage.

    tokens: of one micro-batch; the longest one decides.

    Under 1F1B pp_stage s holds min(pp - s, micro_batches) of them (Narayanan et al. 2021), so either the first or the last,
    with the head, is the fullest (`fullest`).
    """
    params_first, params_last = stage_params(shape, tp=tp, pp=pp)
    per_layer = layer_activation_bytes(
        shape,
        keys=keys,
        tp=tp,
        element_bytes=element_bytes,
        sequence_parallel=sequence_parallel,
        fused_attention=fused_attention,
    )
    kept_input = shape.hidden * element_bytes / (tp if sequence_parallel else 1.0)
    kept = np.where(recompute, kept_input, per_layer)
    once = np.where(recompute, per_layer, 0.0)
    share = np.where(zero >= 1, dp, 1.0)

    def at(params: Any, layers: Any, in_flight: Any, head: bool) -> Footprint:
        outputs = shape.head_width / (tp if shape.head_width > 1 else 1.0)
        return Footprint(
            parameters=params * parameter_bytes,
            optimizer=params * optimizer_bytes / share,
            gradients=params * gradient_bytes,
            activations=tokens * (in_flight * layers * kept + once),
            boundaries=tokens * in_flight * kept_input,
            logits=logit_tokens * outputs * logit_bytes(element_bytes) if head else 0.0,
            workspace=workspace_bytes,
        )

    first = at(params_first, np.floor(shape.num_layers / pp), np.minimum(pp, micro_batches), False)
    last = at(params_last, np.ceil(shape.num_layers / pp), 1.0, True)
    return first, last


def forward_ends(
    shape: ModelShape,
    *,
    tp: Any,
    pp: Any,
    tokens: Any,
    logit_tokens: Any,
    kv_tokens: Any,
    element_bytes: float,
    parameter_bytes: float,
    workspace_bytes: float = WORKSPACE_BYTES,
) -> tuple[Footprint, Footprint]:
    """A unit that only runs forward, on the first and on the last pp_stage: one layer's intermediates at a time, and the
    key-value cache of its layers.

    kv_tokens: tokens that the cache holds at its fullest.
    """
    params_first, params_last = stage_params(shape, tp=tp, pp=pp)
    per_layer = layer_activation_bytes(shape, keys=0.0, tp=tp, element_bytes=element_bytes)
    kv_width = shape.kv_width / np.minimum(tp, shape.num_kv_heads)
    kv_layer = kv_tokens * 2 * kv_width * element_bytes
    outputs = shape.head_width / (tp if shape.head_width > 1 else 1.0)

    def at(params: Any, layers: Any, head: bool) -> Footprint:
        return Footprint(
            parameters=params * parameter_bytes,
            optimizer=0.0,
            activations=tokens * per_layer,
            logits=logit_tokens * outputs * logit_bytes(element_bytes) if head else 0.0,
            kv_cache=layers * kv_layer,
            workspace=workspace_bytes,
        )

    first = at(params_first, np.floor(shape.num_layers / pp), False)
    return first, at(params_last, np.ceil(shape.num_layers / pp), True)
