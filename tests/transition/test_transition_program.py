"""Programs, executed on arrays in random legal orders: every element arrives, once, and memory and copies suffice.

Orders: any that the nodes' `after` allows, several under way at once also on one GPU; and those in which a GPU does one
thing at a time. Between any two events memory and copies are looked at.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from transition_cases import RATES, Case, Simulation, random_case, random_placement

from nereus.core.errors import StateError
from nereus.core.plan import ACTOR_GENERATION, ModelStage, Plan
from nereus.core.sharding import Holdings
from nereus.transition.dag import InfeasibleTransition
from nereus.transition.groups import Lowering
from nereus.transition.program import Program, missing, program

ROOM = (0.0, 0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0)
"""Above what the fullest GPU holds at rest."""
WAYS: tuple[tuple[Lowering, ...], ...] = (
    *[("direct", "lean", "streamed", "staged")] * 4,
    ("direct",),
    ("lean",),
    ("streamed",),
    ("staged", "direct"),
)


def holdings_of(case: Case) -> dict[ModelStage, Holdings]:
    return {p.model_stage: case.specs[p.model_stage].holdings(p) for p in case.current.placements}


def program_of(case: Case, holdings: dict[ModelStage, Holdings], usable: float, ways: tuple[Lowering, ...]) -> Program:
    return program(
        case.specs,
        holdings,
        case.current,
        case.target,
        node_of=case.node_of,
        rates=RATES,
        usable_bytes=usable,
        lowerings=ways,
    )


def execute(simulation: Simulation, rng: random.Random, *, exclusive: bool, until: int = 10**9) -> int:
    """Events of a random legal order; the number of them."""
    count = 0
    while count < until and (able := list(simulation.events(exclusive=exclusive))):
        simulation.advance(rng.choice(able))
        simulation.check_memory()
        simulation.check_covered()
        simulation.check_one_more_loss(rng.randrange(simulation.case.num_gpus))
        count += 1
    return count


@pytest.mark.parametrize("chunk", range(10))
def test_any_legal_order(chunk: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(120 * chunk, 120 * chunk + 120):
        rng = random.Random(seed)
        case, ways = random_case(rng), rng.choice(WAYS)
        usable = float(int(case.resting_bytes * (1 + rng.choice(ROOM))))
        try:
            found = program_of(case, holdings_of(case), usable, ways)
        except InfeasibleTransition:
            seen["infeasible"] += 1
            continue
        for exclusive in (False, True):
            simulation = Simulation(case, found, usable)
            execute(simulation, rng, exclusive=exclusive)
            assert len(simulation.done) == len(found.steps), "some primitives wait for each other"
            simulation.check_arrived()
        seen.update(found.dag.lowerings.values())
        seen["edges"] += bool(found.dag.edges)
        seen["feasible"] += 1
    tight = ("direct", "lean", "streamed", "staged", "made", "edges", "infeasible")
    assert all(seen[what] >= 3 for what in tight), seen
    assert seen["feasible"] > 60


@pytest.mark.parametrize("chunk", range(4))
def test_the_schedule(chunk: int) -> None:
    """Steps come after what they wait for; at no time are two on a GPU; peaks are those of the steps in this order."""
    for seed in range(50 * chunk, 50 * chunk + 50):
        rng = random.Random(seed)
        case = random_case(rng)
        usable = float(int(case.resting_bytes * (1 + rng.choice(ROOM))))
        try:
            found = program_of(case, holdings_of(case), usable, rng.choice(WAYS))
        except InfeasibleTransition:
            continue
        order = [s.primitive.number for s in found.steps]
        assert sorted(order) == list(range(len(order)))
        for i, step in enumerate(found.steps):
            assert set(step.primitive.after) <= set(order[:i])
        by_gpu: dict[int, list[tuple[float, float]]] = {}
        for step in found.steps:
            p = step.primitive
            for gpu in p.gpus:
                by_gpu.setdefault(gpu, []).append((p.start_s, p.start_s + p.seconds))
        for spans in by_gpu.values():
            assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(spans))
        assert max((e for s in by_gpu.values() for _, e in s), default=0.0) == pytest.approx(found.dag.seconds)
        _check_peaks(case, found, usable)


def _check_peaks(case: Case, found: Program, usable: float) -> None:
    """One primitive after the other, as issued: on every GPU the most that is there is what the DAG says."""
    simulation = Simulation(case, found, usable)
    peak = np.sum(list(simulation.used.values()), axis=0)
    for step in found.steps:
        while step.primitive.number not in simulation.done:
            simulation.advance(step.primitive.number)
            peak = np.maximum(peak, np.sum(list(simulation.used.values()), axis=0))
    simulation.check_arrived()
    assert np.array_equal(peak, found.dag.peak_bytes)


@pytest.mark.parametrize("chunk", range(4))
def test_from_what_a_failure_has_left(chunk: int) -> None:
    """Cut off anywhere, with a GPU lost: from the parts of shards that survive, another plan is reached, or what is
    missing was on the lost GPU alone."""
    reached = lost = 0
    for seed in range(40 * chunk, 40 * chunk + 40):
        rng = random.Random(10_000 + seed)
        case = random_case(rng)
        room = case.resting_bytes * 4
        simulation = Simulation(case, program_of(case, holdings_of(case), room, rng.choice(WAYS)), room)
        total = 3 * len(simulation.steps)
        execute(simulation, rng, exclusive=False, until=rng.randint(0, total))
        dead = rng.randrange(case.num_gpus)
        has = {m: held.copy() for m, held in simulation.has.items() if m in simulation.moved}
        gone = {m: held[dead] & (held.sum(0) == 1) for m, held in has.items()}
        for held in has.values():
            held[dead] = False
        kept = {m: s for m, s in case.states.items() if m in has}
        if not kept or case.num_gpus == 1:
            continue
        after = replace(case, states=kept, current=_only(case.current, kept), target=_replanned(rng, case, kept, dead))
        found: dict[ModelStage, Holdings] = {
            m: {gpu: case.elements[m].holding(row) for gpu, row in enumerate(held) if row.any()}
            for m, held in has.items()
        }
        for m in kept:
            assert bool(missing(case.specs[m], found[m])) == bool(gone[m].any())
        if any(mask.any() for mask in gone.values()):
            lost += 1
            with pytest.raises(StateError, match="held by no device"):
                program_of(after, found, 1e12, ("direct",))
            continue
        again = Simulation(after, program_of(after, found, 1e12, rng.choice(WAYS[:-1])), 1e12, initial=has)
        execute(again, rng, exclusive=True)
        again.check_arrived()
        reached += 1
    assert reached >= 10 and lost >= 3


def _only(plan: Plan, model_stages: dict[ModelStage, object]) -> Plan:
    return Plan(tuple(p for p in plan.placements if p.model_stage in model_stages))


def _replanned(rng: random.Random, case: Case, model_stages: dict[ModelStage, object], dead: int) -> Plan:
    """Any plan without the lost GPU."""
    left = [gpu for gpu in range(case.num_gpus) if gpu != dead]
    placements = (random_placement(rng, m, len(left)) for m in model_stages)
    return Plan(tuple(replace(p, gpus=tuple(left[g] for g in p.gpus)) for p in placements))


def test_generation_is_not_moved() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        case = random_case(rng, stages=5)
        if ACTOR_GENERATION in case.target:
            found = program_of(case, holdings_of(case), 1e12, ("direct",))
            kinds = {s.primitive.kind for s in found.steps if s.primitive.model_stage == ACTOR_GENERATION}
            assert kinds <= {"destroy", "create"}
