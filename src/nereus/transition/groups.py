"""Groups of primitives: what one model-stage does in a transition, as arrays over GPUs.

A thousand equal primitives are one `PrimitiveGroup`. Its *parts* touch disjoint GPUs and do not wait for each other: of a
Split, one part is a block that gathers; of a Destroy, one GPU; where shards are copied between units, the GPUs that
exchange anything, directly or through others.

    staged   Split -> Destroy -> Extend -> Destroy -> Merge, through the largest common layout (paper §6.1)
    direct   Destroy -> Reshard: Split, Extend and Merge fused; every GPU receives what it lacks and nothing else
    made     Destroy -> Create: units that weight_sync will fill, made empty

"Take" is what a part allocates on a GPU when it starts, "free" what it gives back when it ends: a source is kept until the
last GPU that reads it has all, and so is every copy on whose account another one was destroyed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from nereus.core.plan import ModelStage
from nereus.transition.rates import Floats, Flows, Ints, Rates, Traffic

Kind = Literal["destroy", "split", "reshard", "extend", "merge", "create"]
"""In the order in which primitives that could all go next do: what releases comes before what acquires."""

Lowering = Literal["direct", "lean", "streamed", "staged", "made"]
"""How a model-stage changes. lean: direct, copying only from GPUs that stay, so that the others are released at once.
streamed: direct, tensor group by tensor group, a group's source freed once it has arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimitiveGroup:
    """Equal primitives of one model-stage. gpus: [n] all that they touch, each once; part: [n] of which primitive.

    take_bytes, free_bytes: [n] at the start and at the end of the part. received_bytes: [n] from other GPUs.
    copied_bytes: [n] on the spot. seconds: [parts].
    """

    kind: Kind
    model_stage: ModelStage
    gpus: Ints
    part: Ints
    take_bytes: Floats
    free_bytes: Floats
    received_bytes: Floats
    copied_bytes: Floats
    seconds: Floats

    @property
    def num_parts(self) -> int:
        return len(self.seconds)

    def part_gpus(self, part: int) -> tuple[int, ...]:
        """The GPUs of one primitive."""
        return tuple(self.gpus[self.part == part].tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChange:
    """One way to change a model-stage: its groups, one after the other on every GPU that they share."""

    model_stage: ModelStage
    lowering: Lowering
    groups: tuple[PrimitiveGroup, ...]

    @property
    def seconds(self) -> float:
        """If nothing else were under way: the slowest part of each group."""
        return float(sum(g.seconds.max(initial=0.0) for g in self.groups))

    @property
    def received_bytes(self) -> float:
        return float(sum(g.received_bytes.sum() for g in self.groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """A model-stage before and after, by GPU, [GPUs] bytes: what it holds, will hold, and takes over without a copy."""

    old_bytes: Floats
    new_bytes: Floats
    adopted_bytes: Floats
    received_bytes: Floats


def direct(
    model_stage: ModelStage,
    lowering: Lowering,
    shards: Shards,
    flows: Flows,
    node_of: Ints,
    rates: Rates,
    streamed_peak: Floats | None = None,
) -> StageChange:
    """Destroy what nobody needs, then everything else in one go.

    streamed_peak: [GPUs] the most that old and new shards take together when they change group by group; None: all of both.
    """
    old, new, adopted = shards.old_bytes, shards.new_bytes, shards.adopted_bytes
    is_source = np.zeros(len(old), dtype=bool)
    is_source[flows.source] = True
    gone = np.flatnonzero((new == 0) & (old > 0) & ~is_source)
    changing = (new != old) | (new != adopted) | is_source
    changing[gone] = False
    gpus = np.flatnonzero(changing)
    take, free = (new - adopted)[gpus], (old - adopted)[gpus]
    if streamed_peak is not None:
        take = np.maximum(streamed_peak - old, 0.0)[gpus]
        free = take + (old - new)[gpus]
    copied = (new - adopted - shards.received_bytes)[gpus]
    part = parts(flows, gpus, len(old))
    busy = rates.seconds(Traffic.of(flows, node_of), np.zeros(len(old)))[gpus] + copied / rates.copy_bytes_s
    groups = [destroy(model_stage, gone, old)] if len(gone) else []
    if len(gpus):
        groups.append(
            PrimitiveGroup(
                kind="reshard",
                model_stage=model_stage,
                gpus=gpus,
                part=part,
                take_bytes=take,
                free_bytes=free,
                received_bytes=shards.received_bytes[gpus],
                copied_bytes=copied,
                seconds=part_seconds(busy, part, rates.setup_s),
            )
        )
    return StageChange(model_stage=model_stage, lowering=lowering, groups=tuple(groups))


def made(model_stage: ModelStage, shards: Shards) -> StageChange:
    """Units whose content does not matter: the old go first, the new are made when there is room."""
    same = (shards.old_bytes == shards.new_bytes) & (shards.adopted_bytes == shards.new_bytes)
    gone = np.flatnonzero((shards.old_bytes > 0) & ~same)
    gpus = np.flatnonzero((shards.new_bytes > 0) & ~same)
    groups = [destroy(model_stage, gone, shards.old_bytes)] if len(gone) else []
    if len(gpus):
        take = shards.new_bytes[gpus]
        nothing = np.zeros(len(gpus))
        groups.append(local(model_stage, "create", gpus, take, nothing, nothing, nothing))
    return StageChange(model_stage=model_stage, lowering="made", groups=tuple(groups))


def destroy(model_stage: ModelStage, gpus: Ints, held: Floats) -> PrimitiveGroup:
    """Give back what GPUs hold; it takes no time. held: [GPUs]."""
    nothing = np.zeros(len(gpus))
    return local(model_stage, "destroy", gpus, nothing, held[gpus], nothing, nothing)


def local(
    model_stage: ModelStage, kind: Kind, gpus: Ints, take: Floats, free: Floats, copied: Floats, seconds: Floats
) -> PrimitiveGroup:
    """A primitive a GPU, without traffic; all arrays [n]."""
    return PrimitiveGroup(
        kind=kind,
        model_stage=model_stage,
        gpus=gpus,
        part=np.arange(len(gpus)),
        take_bytes=take,
        free_bytes=free,
        received_bytes=np.zeros(len(gpus)),
        copied_bytes=copied,
        seconds=seconds,
    )


def parts(flows: Flows, gpus: Ints, num_gpus: int) -> Ints:
    """[n] number of the connected component of the flows that each of `gpus` is in, without gaps."""
    label = np.arange(num_gpus)
    source, target = flows.source, flows.target
    while len(source):
        low = np.minimum(label[source], label[target])
        if (low == label[source]).all() and (low == label[target]).all():
            break
        np.minimum.at(label, source, low)
        np.minimum.at(label, target, low)
        label = label[label]
    numbers = np.zeros(num_gpus, dtype=np.int64)
    numbers[label[gpus]] = 1
    return np.asarray((np.cumsum(numbers) - 1)[label[gpus]])


def part_seconds(busy: Floats, part: Ints, setup_s: float) -> Floats:
    """[parts] the slowest of each part's GPUs, and what it takes to begin if anything is done at all."""
    found = np.zeros(int(part.max(initial=-1)) + 1)
    np.maximum.at(found, part, busy)
    return np.asarray(found + setup_s * (found > 0))
