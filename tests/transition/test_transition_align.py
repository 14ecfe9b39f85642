"""`align` keeps the most bytes: equal to trying every exchange that it may make."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from transition_cases import Elements, lower_bound, random_placement, random_state

from nereus.core.plan import ACTOR_GENERATION, ACTOR_TRAINING, Layout, Placement, Plan
from nereus.transition.align import align, align_plan, received_bytes
from nereus.transition.profile import StateProfile


def exchanges(placement: Placement, node_of: np.ndarray) -> Iterator[Placement]:
    """Nodes with equally many GPUs exchanged, and GPUs within a node."""
    slots: dict[int, list[int]] = {}
    for slot, gpu in enumerate(placement.gpus):
        slots.setdefault(int(node_of[gpu]), []).append(slot)
    nodes = list(slots.values())
    for order in permutations(nodes):
        if [len(n) for n in order] != [len(n) for n in nodes]:
            continue
        for inner in product(*(permutations(n) for n in order)):
            gpus = list(placement.gpus)
            for to, froms in zip(nodes, inner, strict=True):
                for a, b in zip(to, froms, strict=True):
                    gpus[a] = placement.gpus[b]
            yield replace(placement, gpus=tuple(gpus))


@pytest.mark.parametrize("seed", range(60))
def test_equal_to_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    state = random_state(rng)
    pool, node = rng.choice([(4, 2), (5, 5), (6, 3), (6, 2), (6, 6), (8, 4), (8, 2)])
    node_of = np.arange(pool) // node
    old, new = (random_placement(rng, ACTOR_TRAINING, pool) for _ in range(2))
    elements, profile = Elements.of(state), StateProfile.of(state.spec)
    found = align(new, old, profile, node_of)
    best = min(_total(elements, old, other) for other in exchanges(new, node_of))
    assert _total(elements, old, found) == best == received_bytes(found, old, profile)
    assert sorted(found.gpus) == sorted(new.gpus)
    if _total(elements, old, new) == best:
        assert found == new


def _total(elements: Elements, old: Placement, new: Placement) -> int:
    return sum(lower_bound(elements, old, new).values())


def test_generation_follows_training() -> None:
    """Where actor/training has been laid, not where actor/generation was: weights come from there at every step."""
    state = random_state(random.Random(3))
    profile = StateProfile.of(state.spec)
    profiles = {ACTOR_GENERATION: profile, ACTOR_TRAINING: profile}

    def plan(generation: tuple[int, ...], training: tuple[int, ...]) -> Plan:
        layout = Layout(2, 2)
        return Plan(
            tuple(
                Placement(model_stage=m, layout=layout, dp=1, gpus=gpus)
                for m, gpus in ((ACTOR_GENERATION, generation), (ACTOR_TRAINING, training))
            )
        )

    current, target = plan((0, 1, 2, 3), (3, 1, 0, 2)), plan((0, 1, 2, 3), (0, 1, 2, 3))
    found = align_plan(target, current, profiles, np.zeros(4, dtype=np.int64))
    assert found == plan((3, 1, 0, 2), (3, 1, 0, 2))
    assert received_bytes(found[ACTOR_GENERATION], found[ACTOR_TRAINING], profile) == 0
