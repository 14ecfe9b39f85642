"""Placement keeps as much state in place as any exchange of nodes and GPUs can."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest
from planner_cases import random_problem
from scipy.optimize import linear_sum_assignment

from nereus.core.plan import Layout, ModelStage, Plan
from nereus.planner.placement import kept_bytes, match_pieces, place, shared, state_bytes
from nereus.planner.problem import GpuPool, Problem, Selection
from nereus.planner.search import solve


def changes(seed: int, count: int) -> Iterator[tuple[Problem, Selection, Plan]]:
    """A selection for a pool, and the plan of another problem on GPUs that partly are the same."""
    rng = random.Random(seed)
    made = 0
    while made < count:
        node = rng.choice([2, 4])
        old_pool = GpuPool.regular(node * rng.choice([1, 2]), node)
        ids = rng.sample(range(old_pool.size + 2), old_pool.size)
        pool = GpuPool(nodes=tuple(tuple(ids[i : i + node]) for i in range(0, len(ids), node)), gpus_per_node=node)
        before = replace(random_problem(rng, stages=4, rows=8), pool=old_pool, capacity_bytes=50.0, asynchronous=False)
        after = replace(random_problem(rng, stages=4, rows=8), pool=pool, capacity_bytes=50.0, asynchronous=False)
        old, new = solve(before, 1), solve(after, 3)
        if old and new:
            made += 1
            yield after, rng.choice(new).selection, place(before, old[0].selection)


def relabelled(plan: Plan, pool: GpuPool) -> Iterator[Plan]:
    """The same plan with whole nodes exchanged, and GPUs within a node."""
    line = [gpu for chunk in pool.chunks for gpu in chunk]
    for nodes in itertools.permutations(pool.chunks):
        for orders in itertools.product(*(itertools.permutations(node) for node in nodes)):
            to = dict(zip(line, [gpu for order in orders for gpu in order], strict=True))
            yield Plan(tuple(replace(p, gpus=tuple(to[g] for g in p.gpus)) for p in plan.placements))


def refined(plan: Plan, pool: GpuPool, current: Plan, sizes: Mapping[ModelStage, float]) -> float:
    """The most that stays if each model-stage may also exchange its own GPUs within a node."""
    node_of = {gpu: i for i, chunk in enumerate(pool.chunks) for gpu in chunk}
    total = 0.0
    for m, size in sizes.items():
        if m not in current:
            continue
        placement, old = plan[m], current[m]
        part = shared(placement.layout, old.layout) * size
        for node in set(node_of.values()):
            at = [i for i, gpu in enumerate(placement.gpus) if node_of[gpu] == node]
            devices = [placement.gpus[i] for i in at]
            held = {g: old.gpus.index(g) % old.layout.size for g in devices if g in old.gpus}
            total += max(
                sum(part[i % placement.layout.size, held[g]] for i, g in zip(at, order, strict=True) if g in held)
                for order in itertools.permutations(devices)
            )
    return total


@pytest.mark.parametrize("seed", range(8))
def test_placement_keeps_the_most_that_any_relabelling_keeps(seed: int) -> None:
    for problem, selection, current in changes(seed, 6):
        naive, placed = place(problem, selection), place(problem, selection, current)
        sizes = state_bytes(problem, selection)
        kept = kept_bytes(placed, current, sizes)
        assert kept >= kept_bytes(naive, current, sizes) - 1e-9
        by_hand = list(relabelled(naive, problem.pool))
        if len(by_hand) > 400:
            by_hand = random.Random(seed).sample(by_hand, 100)
            assert kept >= max(kept_bytes(plan, current, sizes) for plan in by_hand) - 1e-9
            continue
        best = max(refined(plan, problem.pool, current, sizes) for plan in by_hand)
        assert kept == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_placement_is_the_plan_that_was_selected(seed: int) -> None:
    for problem, selection, current in changes(100 + seed, 10):
        naive, placed = place(problem, selection), place(problem, selection, current)
        node_of = {gpu: i for i, node in enumerate(problem.pool.nodes) for gpu in node}
        for a, b in zip(naive.placements, placed.placements, strict=True):
            assert (a.model_stage, a.layout, a.dp, a.micro_batch) == (b.model_stage, b.layout, b.dp, b.micro_batch)
            assert set(b.gpus) <= set(node_of)
            for low in range(0, len(b.gpus), b.layout.tp):
                same = len({node_of[g] for g in a.gpus[low : low + a.layout.tp]})
                assert len({node_of[g] for g in b.gpus[low : low + b.layout.tp]}) == same
        for x, y in itertools.combinations(selection, 2):
            assert len(set(naive[x].gpus) & set(naive[y].gpus)) == len(set(placed[x].gpus) & set(placed[y].gpus))


def test_an_unchanged_plan_stays_where_it_is() -> None:
    for problem, selection, _ in changes(7, 10):
        plan = place(problem, selection)
        assert place(problem, selection, plan) == plan
        sizes = state_bytes(problem, selection)
        whole = sum(size * plan[m].dp for m, size in sizes.items())
        assert kept_bytes(plan, plan, sizes) == pytest.approx(whole)


def test_a_pool_that_lost_its_first_node_keeps_what_the_second_holds() -> None:
    seen = 0
    for problem, selection, _ in changes(9, 30):
        if problem.pool.size < 8:
            continue
        survivors = GpuPool(nodes=((), problem.pool.nodes[1]), gpus_per_node=4)
        smaller = replace(problem, pool=survivors)
        found = solve(smaller, 1)
        if not found:
            continue
        seen += 1
        plan = place(problem, selection)
        placed = place(smaller, found[0].selection, plan)
        assert set(placed.gpus) <= set(problem.pool.nodes[1])
        sizes = state_bytes(smaller, found[0].selection)
        assert kept_bytes(placed, plan, sizes) >= kept_bytes(place(smaller, found[0].selection), plan, sizes) - 1e-9
    assert seen > 3


@pytest.mark.parametrize("count", [40, 600])
def test_pieces_are_matched_for_the_greatest_benefit(count: int) -> None:
    rng = np.random.default_rng(count)
    for _ in range(5):
        benefit = rng.random((3, 4))
        new, old = (
            rng.permutation(np.arange(count) * 5 // count % 3),
            rng.permutation(np.arange(count) * 8 // count % 4),
        )
        to = match_pieces(benefit, new, old)
        assert sorted(to) == list(range(count))
        best = benefit[np.ix_(new, old)]
        rows, columns = linear_sum_assignment(best, maximize=True)
        assert benefit[new, old[to]].sum() == pytest.approx(best[rows, columns].sum())


@pytest.mark.parametrize(("new", "old"), [((1, 1), (2, 4)), ((4, 2), (2, 1)), ((2, 3), (2, 2)), ((8, 1), (1, 8))])
def test_shares_of_a_shard_add_up(new: tuple[int, int], old: tuple[int, int]) -> None:
    part = shared(Layout(*new), Layout(*old))
    assert np.allclose(part.sum(axis=1), 1 / Layout(*new).size)
    assert np.allclose(part.sum(axis=0), 1 / Layout(*old).size)
