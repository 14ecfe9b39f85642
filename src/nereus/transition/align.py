"""The same plan on the same GPUs, laid so that the fewest bytes must move.

Which shard of which unit goes on which GPU of a model-stage costs a step nothing as long as nodes keep their shape: GPUs
may be exchanged within a node, and nodes on which the model-stage has equally many GPUs with each other; units, being
replicas, with both. Two nested assignments (`scipy.optimize.linear_sum_assignment`) find the best of all: which GPU of a
node takes which shard, for every pair of a node's shards and a node's GPUs; then which node takes which shards. Worth is
`StateProfile.common`, so bytes are exact, and any replica of the old plan counts.

    received by a GPU = bytes of its new position - bytes that this has in common with its old position
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from nereus.core.plan import ACTOR_GENERATION, ACTOR_TRAINING, ModelStage, Placement, Plan
from nereus.transition.profile import StateProfile
from nereus.transition.rates import Floats, Ints

Places = tuple[int, ...]
"""Positions, in the order in which they stand on a node."""


def align_plan(target: Plan, current: Plan, profiles: Mapping[ModelStage, StateProfile], node_of: Ints) -> Plan:
    """Every model-stage over what its own GPUs hold; actor/generation over what actor/training will hold: the first
    has its weights from the second, step after step.

    node_of: [GPUs] node of each GPU id. Nothing is exchanged between model-stages.
    """
    found: dict[ModelStage, Placement] = {}
    before = {p.model_stage: p for p in current.placements}
    for placement in sorted(target.placements, key=lambda p: p.model_stage == ACTOR_GENERATION):
        m = placement.model_stage
        source = before.get(m)
        if m == ACTOR_GENERATION and ACTOR_TRAINING in target:
            source = found[ACTOR_TRAINING]
        found[m] = placement if source is None else align(placement, source, profiles[m], node_of)
    return Plan(tuple(found[p.model_stage] for p in target.placements))


def align(placement: Placement, source: Placement, profile: StateProfile, node_of: Ints) -> Placement:
    """The placement with its GPUs in the order in which `source` has left the most on them; unchanged where it is best."""
    worth = _worth(placement, source, profile)
    before = {gpu: i % source.layout.size for i, gpu in enumerate(source.gpus)}
    slots: dict[int, list[int]] = {}
    for slot, gpu in enumerate(placement.gpus):
        slots.setdefault(int(node_of[gpu]), []).append(slot)
    size = placement.layout.size
    wanted = [tuple(slot % size for slot in listed) for listed in slots.values()]
    offered = [tuple(before.get(placement.gpus[slot], -1) for slot in listed) for listed in slots.values()]
    inner = {(w, o): _assigned(worth, w, o) for w in set(wanted) for o in set(offered) if len(w) == len(o)}
    to = _matched(wanted, offered, {pair: kept for pair, (kept, _) in inner.items()})
    nodes, gpus = list(slots.values()), list(placement.gpus)
    for i, j in enumerate(to):
        _, order = inner[wanted[i], offered[j]]
        for slot, k in zip(nodes[i], order, strict=True):
            gpus[slot] = placement.gpus[nodes[j][k]]
    aligned = replace(placement, gpus=tuple(gpus))
    better = received_bytes(aligned, source, profile) < received_bytes(placement, source, profile)
    return aligned if better else placement


def received_bytes(placement: Placement, source: Placement, profile: StateProfile) -> float:
    """Bytes that all GPUs of a placement together need and do not hold."""
    worth = _worth(placement, source, profile)
    before = {gpu: i % source.layout.size for i, gpu in enumerate(source.gpus)}
    kept = [worth[i % placement.layout.size, before.get(gpu, -1)] for i, gpu in enumerate(placement.gpus)]
    return float(placement.dp * profile.position_bytes(placement.layout).sum() - sum(kept))


def _worth(placement: Placement, source: Placement, profile: StateProfile) -> Floats:
    """[new positions, old positions + 1] bytes in common; the last column, which -1 picks, is zero."""
    return np.pad(profile.common(placement.layout, source.layout).held, ((0, 0), (0, 1)))


def _assigned(worth: Floats, wanted: Places, offered: Places) -> tuple[float, Ints]:
    """(bytes kept, [n] which of the offered each wanted position takes)."""
    table = worth[np.ix_(wanted, offered)]
    rows, order = linear_sum_assignment(table, maximize=True)
    return float(table[rows, order].sum()), order


def _matched(wanted: list[Places], offered: list[Places], kept: Mapping[tuple[Places, Places], float]) -> Ints:
    """[nodes] which node's GPUs take each node's positions; those of equal size are exchanged."""
    to = np.arange(len(wanted))
    rows, columns = list(dict.fromkeys(wanted)), list(dict.fromkeys(offered))
    worth = np.array([[kept.get((w, o), 0.0) for o in columns] for w in rows])
    table = worth[np.ix_([rows.index(w) for w in wanted], [columns.index(o) for o in offered])]
    sizes = np.array([len(w) for w in wanted])
    for size in np.unique(sizes):
        here = np.flatnonzero(sizes == size)
        to[here] = here[linear_sum_assignment(table[np.ix_(here, here)], maximize=True)[1]]
    return to
