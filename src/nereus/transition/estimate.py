"""From two placements of a model-stage to what each way of changing it moves, without going through tensors.

`direct_flows` decides who sends what by one rule for all GPUs at once: the readers of a position of the old layout take its
replicas in turn, those on their own node where there are any. What each GPU receives, takes over and copies is exact; of
regions that several old positions hold (norms, shared KV heads) the sender is the first of them here, while the moves that
are executed level such regions too (`core.sharding.plan_moves`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import numpy as np

from nereus.core.errors import StateError
from nereus.core.plan import Layout, ModelStage, Placement
from nereus.transition.groups import PrimitiveGroup, Shards, StageChange, destroy, local, part_seconds, parts
from nereus.transition.profile import StateProfile, ordinals
from nereus.transition.rates import Floats, Flows, Ints, Rates, Traffic
from nereus.transition.units import common_layout, factors


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A placement as arrays. gpus: [dp, positions]; position: [GPUs] of the unit's positions, -1 where there is none."""

    layout: Layout
    gpus: Ints
    position: Ints

    @classmethod
    def of(cls, placement: Placement, num_gpus: int) -> Grid:
        gpus = np.array(placement.gpus, dtype=np.int64).reshape(placement.dp, placement.layout.size)
        return cls.laid(placement.layout, gpus, num_gpus)

    @classmethod
    def laid(cls, layout: Layout, gpus: Ints, num_gpus: int) -> Grid:
        position = np.full(num_gpus, -1, dtype=np.int64)
        position[gpus] = np.arange(gpus.shape[1])
        return cls(layout=layout, gpus=gpus, position=position)

    def by_gpu(self, by_position: Floats) -> Floats:
        """[positions] -> [GPUs], zero where there is none."""
        return np.append(by_position, 0.0)[self.position]


def shards_of(profile: StateProfile, old: Grid, new: Grid) -> Shards:
    """What every GPU has and will have of a model-stage."""
    common = profile.common(new.layout, old.layout)
    before = old.by_gpu(profile.position_bytes(old.layout))
    after = new.by_gpu(profile.position_bytes(new.layout))
    both = (new.position >= 0) & (old.position >= 0)
    held, adopted = np.zeros(len(before)), np.zeros(len(before))
    at = (new.position[both], old.position[both])
    held[both], adopted[both] = common.held[at], common.adopted[at]
    return Shards(old_bytes=before, new_bytes=after, adopted_bytes=adopted, received_bytes=after - held)


def direct_flows(profile: StateProfile, old: Grid, new: Grid, shards: Shards, node_of: Ints, staying: bool) -> Flows:
    """Who sends how much to whom. staying: read from units of which a GPU stays only, where there are any."""
    common = profile.common(new.layout, old.layout)
    target = new.gpus.T[common.wants]
    needed = (old.position[target] != common.has[:, None]) & (shards.received_bytes[target] > 0)
    pair, unit = np.nonzero(needed)  # pair by pair, so that what is small (norms) does not come between what is large
    if not len(pair):
        return Flows.none()
    target, has = target[pair, unit], common.has[pair]
    amount = common.lacking[common.wants[pair], has]
    source = old.gpus[_replicas(old, new, has, target, node_of, staying), has]
    total = np.bincount(target, amount, len(node_of))[target]
    exact = amount * shards.received_bytes[target] / total  # the reader's own copies of shared regions are not sent
    return Flows(source=source, target=target, num_bytes=exact)


def _replicas(old: Grid, new: Grid, has: Ints, target: Ints, node_of: Ints, staying: bool) -> Ints:
    """[f] the old unit that is read: those on the reader's node in turn, else all. has, target: [f]."""
    units = np.arange(len(old.gpus))
    if staying:
        kept = np.flatnonzero((new.position[old.gpus] >= 0).any(1))
        units = kept if len(kept) else units[:1]
    gpus = old.gpus[units]
    positions = gpus.shape[1]
    place = (node_of[gpus] * positions + np.arange(positions)).reshape(-1)
    by_place = np.argsort(place, kind="stable")
    count = np.bincount(place, minlength=(int(node_of.max()) + 1) * positions)
    wanted = node_of[target] * positions + has
    first, near = (np.cumsum(count) - count)[wanted], count[wanted]
    far = near == 0
    turn = ordinals(wanted) % np.maximum(near, 1)
    pick = by_place[np.minimum(first + turn, len(by_place) - 1)] // positions
    pick[far] = ordinals(has[far]) % len(units)
    return np.asarray(units[pick])


def streamed_peak(profile: StateProfile, old: Grid, new: Grid, order: Ints) -> Floats:
    """[GPUs] the most bytes of old and new shards together, slot by slot in `order`, a slot's source freed afterwards."""
    pairs = np.stack([old.position, new.position], axis=1)
    kinds, which = np.unique(pairs, axis=0, return_inverse=True)
    nothing = np.zeros((1, len(order)))
    gone = np.vstack([profile.slot_bytes(old.layout), nothing])[kinds[:, 0]]
    come = np.vstack([profile.slot_bytes(new.layout), nothing])[kinds[:, 1]]
    both = (kinds >= 0).all(1)
    once = np.zeros_like(gone)
    once[both] = profile.adopted_slot_bytes(new.layout, old.layout, kinds[both, 1], kinds[both, 0])
    gone, come, once = gone[:, order], come[:, order], once[:, order]
    moment = gone.sum(1, keepdims=True) + np.cumsum(come - gone, axis=1) + gone - once
    return np.asarray(moment.max(1)[which.reshape(-1)])


def stream_order(num_layers: int, old: Layout, new: Layout, slots: int) -> Ints:
    """Slots in an order in which every pp_stage, old or new, gains and loses about evenly: a layer of each in turn."""
    stages = min(num_layers, lcm(old.pp, new.pp))
    layer = np.arange(num_layers)
    stage = layer * stages // num_layers
    first = np.searchsorted(stage, np.arange(stages))
    turn = (layer - first[stage]) * stages + stage
    return np.concatenate([np.argsort(turn, kind="stable"), np.arange(num_layers, slots)])


def staged(
    model_stage: ModelStage, profile: StateProfile, old: Grid, new: Grid, node_of: Ints, rates: Rates
) -> StageChange:
    """Through the largest common layout: blocks gather, positions are copied, blocks slice.

    Raises StateError where a GPU would have to take the shard of another position in the place of its own last copy.
    """
    n, sub = len(node_of), common_layout(old.layout, new.layout)
    was, will = _sub_grid(old, sub, n), _sub_grid(new, sub, n)
    groups: list[PrimitiveGroup] = []
    if sub != old.layout:
        groups.append(_split(model_stage, profile, old, was, node_of, rates))
    groups += _extend(model_stage, profile, was, will, node_of, rates)
    if sub != new.layout:
        groups.append(_merge(model_stage, profile, will, new, rates))
    return StageChange(model_stage=model_stage, lowering="staged", groups=tuple(groups))


def _sub_grid(grid: Grid, sub: Layout, n: int) -> Grid:
    """The units of the smaller layout that a Split makes of `grid` (`units.replica_and_position`)."""
    kp, kt = factors(grid.layout, sub)
    cut = grid.gpus.reshape(-1, sub.pp, kp, sub.tp, kt).transpose(0, 2, 4, 1, 3)
    return Grid.laid(sub, cut.reshape(-1, sub.size), n)


def _split(
    model_stage: ModelStage, profile: StateProfile, old: Grid, sub: Grid, node_of: Ints, rates: Rates
) -> PrimitiveGroup:
    shards = shards_of(profile, old, sub)
    kp, kt = factors(old.layout, sub.layout)
    blocks = old.gpus.reshape(-1, sub.layout.pp, kp, sub.layout.tp, kt).transpose(0, 1, 3, 2, 4).reshape(-1, kp * kt)
    gpus, part = blocks.reshape(-1), np.arange(len(blocks)).repeat(kp * kt)
    others = np.array([[j for j in range(kp * kt) if j != i] for i in range(kp * kt)], dtype=np.int64)
    target = blocks.repeat(max(kp * kt - 1, 0), axis=1).reshape(-1)
    source = blocks[:, others.reshape(-1)].reshape(-1)
    lacking = profile.common(sub.layout, old.layout).lacking[sub.position[target], old.position[source]]
    flows = Flows(source=source, target=target, num_bytes=lacking)
    copied = (shards.new_bytes - shards.adopted_bytes - shards.received_bytes)[gpus]
    busy = rates.seconds(Traffic.of(flows, node_of), np.zeros(len(node_of)))[gpus] + copied / rates.copy_bytes_s
    return PrimitiveGroup(
        kind="split",
        model_stage=model_stage,
        gpus=gpus,
        part=part,
        take_bytes=(shards.new_bytes - shards.adopted_bytes)[gpus],
        free_bytes=(shards.old_bytes - shards.adopted_bytes)[gpus],
        received_bytes=shards.received_bytes[gpus],
        copied_bytes=copied,
        seconds=part_seconds(busy, part, rates.setup_s),
    )


def _extend(
    model_stage: ModelStage, profile: StateProfile, was: Grid, will: Grid, node_of: Ints, rates: Rates
) -> list[PrimitiveGroup]:
    """Destroy, Extend, Destroy: positions that a GPU lacks are copied whole from GPUs that have and keep them."""
    n, size = len(node_of), profile.position_bytes(was.layout)
    target = np.flatnonzero((will.position >= 0) & (will.position != was.position))
    misplaced = target[was.position[target] >= 0]
    if len(misplaced):
        raise StateError(
            f"{model_stage}: GPUs {misplaced[:8].tolist()} would change their position in {was.layout}, which no chain of "
            "Split, Destroy, Extend and Merge does on the same GPUs"
        )
    source = _holders(was, will, target, node_of)
    flows = Flows(source=source, target=target, num_bytes=size[will.position[target]])
    held = was.by_gpu(size)
    leaving = np.flatnonzero((was.position >= 0) & (will.position < 0))
    early = leaving[~np.isin(leaving, source)]
    late = leaving[np.isin(leaving, source)]
    groups = [destroy(model_stage, early, held)] if len(early) else []
    if len(target):
        gpus = np.union1d(source, target)
        received = flows.received(n)
        part = parts(flows, gpus, n)
        busy = rates.seconds(Traffic.of(flows, node_of), np.zeros(n))[gpus]
        groups.append(
            PrimitiveGroup(
                kind="extend",
                model_stage=model_stage,
                gpus=gpus,
                part=part,
                take_bytes=received[gpus],
                free_bytes=np.zeros(len(gpus)),
                received_bytes=received[gpus],
                copied_bytes=np.zeros(len(gpus)),
                seconds=part_seconds(busy, part, rates.setup_s),
            )
        )
    return groups + ([destroy(model_stage, late, held)] if len(late) else [])


def _holders(was: Grid, will: Grid, target: Ints, node_of: Ints) -> Ints:
    """[t] whom each target copies its position from: a holder that stays, on its node if there is one, in turn."""
    source = np.zeros(len(target), dtype=np.int64)
    for position in np.unique(will.position[target]):
        holders = was.gpus[:, position]
        staying = holders[will.position[holders] == position]
        holders = staying if len(staying) else holders
        readers = np.flatnonzero(will.position[target] == position)
        for turn, reader in enumerate(readers):
            near = holders[node_of[holders] == node_of[target[reader]]]
            among = near if len(near) else holders
            source[reader] = among[turn % len(among)]
    return source


def _merge(model_stage: ModelStage, profile: StateProfile, sub: Grid, new: Grid, rates: Rates) -> PrimitiveGroup:
    """Every GPU keeps a slice of what it has."""
    shards = shards_of(profile, sub, new)
    gpus = new.gpus.reshape(-1)
    take = (shards.new_bytes - shards.adopted_bytes)[gpus]
    free = (shards.old_bytes - shards.adopted_bytes)[gpus]
    return local(model_stage, "merge", gpus, take, free, take, take / rates.copy_bytes_s)
