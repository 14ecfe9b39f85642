"""From a unit's own gradients to an update that is the same on every replica.

    reduce_gradients   adds gradients over tp (tensors several ranks hold), pp ends (tied embeddings) and dp
    gradient_norm      the norm over the whole model, each element counted once
    step               AdamW on local shards; moments and counters are part of the unit's state

The three are apart so that a runtime can let all replicas agree on the first two before any of them steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nereus.core.sharding import subtract
from nereus.engine.architecture import COUNTERS, MOMENTS
from nereus.engine.unit import Unit
from nereus.runtime.communicator import Communicator

TORN = -1
"""The update count of a shard that an error has left in the middle of a step: its values are of no use."""

BUCKET_BYTES = 25 * 2**20
"""Gradients are reduced in flat buckets of about this size: one message costs as much as 100 KB of data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Loshchilov and Hutter 2019, as torch.optim.AdamW. max_grad_norm: clip over the whole model; 0 turns it off."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


def reduce_gradients(unit: Unit) -> None:
    """After this every parameter's gradient is that of the whole batch, bitwise equal wherever it is held twice."""
    parameters = unit.module.parameters
    unit.allow_gradients()
    for parameter in parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    unit.budget.touch("workspace", min(unit.counts.gradient_bytes, 2 * BUCKET_BYTES))
    _reduce_shared(unit)
    embeddings = f"{unit.architecture.prefix}.embed_tokens.weight"
    if unit.architecture.tied and embeddings in parameters:
        gradient = parameters[embeddings].grad
        assert gradient is not None
        unit.groups.ends.all_reduce(gradient)
    _all_reduce_flat([p.grad for p in parameters.values() if p.grad is not None], unit.groups.dp)
    # What the step will need: a rank that has not got it must say so while all can still discard the update.
    unit.budget.touch("workspace", unit.counts.optimizer_working_bytes)


def _reduce_shared(unit: Unit) -> None:
    """Sum over tp what several tp ranks hold: each rank puts its part into a tensor of logical size."""
    shared = [n for n in unit.shared_gradients() if n in unit.module.parameters]
    if not shared:
        return
    whole = []
    for name in shared:
        spec = unit.state.specs[name]
        full = torch.zeros(spec.shape, device=unit.device)
        for start, stop, local in _local_regions(unit, name):
            full.narrow(spec.dim, start, stop - start).copy_(local)
        whole.append(full)
    _all_reduce_flat(whole, unit.groups.tp)
    for name, full in zip(shared, whole, strict=True):
        for start, stop, local in _local_regions(unit, name):
            local.copy_(full.narrow(unit.state.specs[name].dim, start, stop - start))


def _local_regions(unit: Unit, name: str) -> list[tuple[int, int, torch.Tensor]]:
    """(start, stop, view of the gradient) of every interval that this rank holds of a parameter."""
    gradient = unit.module.parameters[name].grad
    assert gradient is not None
    found, offset = [], 0
    for start, stop in unit.state.holding[name]:
        found.append((start, stop, gradient.narrow(unit.state.specs[name].dim, offset, stop - start)))
        offset += stop - start
    return found


def _all_reduce_flat(tensors: Sequence[torch.Tensor], group: Communicator) -> None:
    if group.size == 1:
        return
    bucket: list[torch.Tensor] = []
    for i, tensor in enumerate(tensors):
        bucket.append(tensor)
        if i == len(tensors) - 1 or sum(t.numel() * t.element_size() for t in bucket) >= BUCKET_BYTES:
            flat = group.all_reduce(torch.cat([t.reshape(-1) for t in bucket]))
            for t, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                t.copy_(part.view_as(t))
            bucket = []


def gradient_norm(unit: Unit) -> torch.Tensor:
    """The 2-norm over all logical parameters, float64 scalar, bitwise the same on all ranks and replicas."""
    total = torch.zeros(1, dtype=torch.float64, device=unit.device)
    for name in unit.module.parameters:
        for start, stop, gradient in _local_regions(unit, name):
            if _counted_here(unit, name):
                total += _square_sum(unit, name, start, stop, gradient)
    return unit.groups.unit.all_reduce(total).sqrt()[0]


def _square_sum(unit: Unit, name: str, start: int, stop: int, gradient: torch.Tensor) -> torch.Tensor:
    """Sum of squares of the indices that no lower tp rank of this pp_stage holds."""
    spec, layout = unit.state.specs[name], unit.placement.layout
    lower = [i for rank in range(unit.position.tp_rank) for i in spec.intervals(layout.tp, rank)]
    total = torch.zeros(1, dtype=torch.float64, device=unit.device)
    for first, last in subtract(((start, stop),), lower):
        total += gradient.narrow(spec.dim, first - start, last - first).double().square().sum()
    return total


def _counted_here(unit: Unit, name: str) -> bool:
    """Tied embeddings are counted on the first pp_stage only."""
    return unit.state.specs[name].where != "ends" or unit.position.pp_stage == 0


@torch.no_grad()
def step(unit: Unit, settings: AdamW, norm: torch.Tensor) -> None:
    """Clip, update all local parameters, clear the gradients, count the update: after an error the count is TORN."""
    unit.budget.touch("workspace", unit.counts.optimizer_working_bytes)
    with unit.meter.operation("optimizer", *unit.counts.optimizer()):
        _adamw(unit, settings, norm)
    clear_gradients(unit)


def _adamw(unit: Unit, settings: AdamW, norm: torch.Tensor) -> None:
    names = list(unit.module.parameters)
    parameters = [unit.module.parameters[n] for n in names]
    gradients = [p.grad for p in parameters if p.grad is not None]
    from torch.optim.adamw import adamw

    counters, before = unit.state.tensors[COUNTERS], updates(unit)
    counters[0] = TORN
    if settings.max_grad_norm > 0:
        scale = (settings.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale.float())
    adamw(
        [p.data for p in parameters],
        gradients,
        [unit.state.tensors[f"{MOMENTS[0]}/{n}"] for n in names],
        [unit.state.tensors[f"{MOMENTS[1]}/{n}"] for n in names],
        [],
        [torch.tensor(float(before)) for _ in names],
        foreach=True,
        amsgrad=False,
        beta1=settings.betas[0],
        beta2=settings.betas[1],
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        maximize=False,
    )
    counters[0] = before + 1


def updates(unit: Unit) -> int:
    """How many updates this rank's shard has had."""
    return int(unit.state.tensors[COUNTERS][0])


def clear_gradients(unit: Unit) -> None:
    if unit.has_gradients:
        unit.budget.take("gradients", -unit.counts.gradient_bytes)
    for parameter in unit.module.parameters.values():
        parameter.grad = None
