"""The order of the global DAG: what comes first, who waits for whom, and when there is no order at all."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from transition_cases import FIVE, RATES, Case, random_case, random_placement, random_state

from nereus.core.plan import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    REFERENCE_INFERENCE,
    ModelStage,
    Plan,
)
from nereus.transition.dag import InfeasibleTransition, TransitionDag, Ways, build
from nereus.transition.groups import Kind, PrimitiveGroup, StageChange
from nereus.transition.plan import compare, plan_transition

STAGES = ("generation", "inference", "training")


def group(
    m: ModelStage,
    kind: Kind,
    gpus: Sequence[int],
    take: float,
    free: float,
    seconds: float = 1.0,
    part: Sequence[int] | None = None,
) -> PrimitiveGroup:
    """Every GPU takes and frees the same; one part if not said otherwise."""
    number = np.zeros(len(gpus), dtype=int) if part is None else np.array(part)
    return PrimitiveGroup(
        kind=kind,
        model_stage=m,
        gpus=np.array(gpus),
        part=number,
        take_bytes=np.full(len(gpus), take),
        free_bytes=np.full(len(gpus), free),
        received_bytes=np.zeros(len(gpus)),
        copied_bytes=np.zeros(len(gpus)),
        seconds=np.full(number.max() + 1, seconds),
    )


def change(m: ModelStage, *groups: PrimitiveGroup) -> StageChange:
    return StageChange(model_stage=m, lowering="direct", groups=groups)


def built(held: Sequence[float], usable: float, *changes: StageChange) -> TransitionDag:
    return build([Ways([c]) for c in changes], np.array(held, dtype=float), usable)


def issued(dag: TransitionDag) -> list[tuple[str, str]]:
    return [(g.kind, str(g.model_stage)) for g in dag.groups]


def test_release_comes_before_acquire_and_stages_break_ties() -> None:
    dag = built(
        [0.0] * 4,
        100,
        change(ACTOR_GENERATION, group(ACTOR_GENERATION, "create", [0, 1], 5, 0)),
        change(REFERENCE_INFERENCE, group(REFERENCE_INFERENCE, "reshard", [0, 1], 5, 5)),
        change(
            ACTOR_TRAINING,
            group(ACTOR_TRAINING, "split", [0, 1], 5, 5),
            group(ACTOR_TRAINING, "destroy", [1], 0, 5),
            group(ACTOR_TRAINING, "merge", [0], 0, 5),
        ),
        change(
            CRITIC_TRAINING, group(CRITIC_TRAINING, "destroy", [2], 0, 5), group(CRITIC_TRAINING, "reshard", [3], 1, 1)
        ),
    )
    assert issued(dag) == [
        ("destroy", "critic/training"),
        ("split", "actor/training"),
        ("destroy", "actor/training"),
        ("reshard", "reference/inference"),
        ("reshard", "critic/training"),
        ("merge", "actor/training"),
        ("create", "actor/generation"),
    ]
    assert not dag.edges


def test_an_acquisition_waits_for_what_releases_its_gpu_and_for_nothing_else() -> None:
    actor = change(ACTOR_TRAINING, group(ACTOR_TRAINING, "reshard", [0, 1], 0, 60, part=[0, 1]))
    critic = change(CRITIC_TRAINING, group(CRITIC_TRAINING, "reshard", [1, 2], 50, 0))
    dag = built([80, 80, 10], 100, actor, critic)
    (edge,) = dag.edges
    assert (edge.release, edge.acquire, edge.gpus.tolist()) == (0, 1, [1])
    nodes = dag.primitives()
    assert [n.after for n in nodes] == [(), (), (1,)]
    assert dag.seconds == 2
    assert dag.peak_bytes.tolist() == [80, 80, 60]
    assert not built([50, 50, 10], 100, actor, critic).edges


def test_a_swap_of_full_gpus_is_infeasible_and_says_where() -> None:
    """Each needs the other's place: GPUs 0 and 1, not GPU 2."""
    first = change(
        ACTOR_TRAINING, group(ACTOR_TRAINING, "extend", [0, 2], 60, 0), group(ACTOR_TRAINING, "destroy", [1], 0, 60)
    )
    second = change(
        CRITIC_TRAINING, group(CRITIC_TRAINING, "extend", [1, 2], 60, 0), group(CRITIC_TRAINING, "destroy", [0], 0, 60)
    )
    with pytest.raises(InfeasibleTransition, match=r"GPUs 0, 1 are short") as caught:
        built([60, 60, 0], 100, first, second)
    assert caught.value.gpus == (0, 1)
    assert built([60, 60, 0], 120, first, second).seconds == 2


def test_another_order_is_tried_before_giving_up() -> None:
    """In stage order A's second group comes before B's, which then has no room on GPU 1."""
    a = change(
        ACTOR_TRAINING, group(ACTOR_TRAINING, "reshard", [0], 30, 60), group(ACTOR_TRAINING, "merge", [1], 30, 0)
    )
    b = change(
        CRITIC_TRAINING, group(CRITIC_TRAINING, "reshard", [0], 60, 60), group(CRITIC_TRAINING, "merge", [1], 50, 50)
    )
    dag = built([70, 50], 100, a, b)
    assert [g.model_stage for g in dag.groups if 1 in g.gpus] == [CRITIC_TRAINING, ACTOR_TRAINING]


@pytest.mark.parametrize("chunk", range(5))
def test_infeasible_is_right(chunk: int) -> None:
    """Against all orders of groups in all combinations of ways, on small cases with little room."""
    seen: Counter[tuple[bool, bool]] = Counter()
    for seed in range(80 * chunk, 80 * chunk + 80):
        rng = random.Random(seed)
        pool, stages = rng.randint(2, 8), rng.sample(FIVE[1:], rng.randint(2, 4))
        old, new = (Plan(tuple(random_placement(rng, m, pool) for m in stages)) for _ in range(2))
        states = {m: random_state(rng) for m in stages}
        case = Case(states=states, current=old, target=new, node_of=np.arange(pool) // 4)
        usable = float(int(case.resting_bytes * (1 + rng.choice([0, 0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5]))))
        how = {"node_of": case.node_of, "rates": RATES}
        ways = [list(compare(m, case.profiles[m], old[m], new[m], **how).values()) for m in stages]
        held = case.at_rest(old)
        possible = any(some_order_fits(combination, held, usable) for combination in product(*ways))
        found = True
        try:
            build([Ways(w) for w in ways], held, usable)
        except InfeasibleTransition as error:
            found = False
            most = held + np.max([sum(_takes(c, pool) for c in combination) for combination in product(*ways)], axis=0)
            assert error.gpus and all(most[gpu] > usable for gpu in error.gpus)
        seen[possible, found] += 1
    assert not seen[True, False] and not seen[False, True], seen
    assert seen[True, True] > 10 and seen[False, False] > 5


def some_order_fits(changes: Sequence[StageChange], held: np.ndarray, usable: float) -> bool:
    """Groups one after the other, in any order that keeps each model-stage's own."""
    waiting, seen = [((0,) * len(changes), held)], set()
    while waiting:
        done, now = waiting.pop()
        if done in seen:
            continue
        seen.add(done)
        if all(n == len(c.groups) for n, c in zip(done, changes, strict=True)):
            return True
        for i, c in enumerate(changes):
            if done[i] == len(c.groups):
                continue
            g, after = c.groups[done[i]], now.copy()
            after[g.gpus] += g.take_bytes
            if not any(after[gpu] > usable and take > 0 for gpu, take in zip(g.gpus, g.take_bytes, strict=True)):
                after[g.gpus] -= g.free_bytes
                waiting.append(((*done[:i], done[i] + 1, *done[i + 1 :]), after))
    return False


def _takes(c: StageChange, pool: int) -> np.ndarray:
    total = np.zeros(pool)
    for g in c.groups:
        total[g.gpus] += g.take_bytes
    return total


@pytest.mark.parametrize("seed", range(60))
def test_order_of_issue_and_bounds_of_the_schedule(seed: int) -> None:
    """With room for all: kinds in order, then stages, unless another order is shorter; no schedule beats its bounds."""
    case = random_case(random.Random(seed))
    dag = plan_transition(
        case.profiles, case.current, case.target, node_of=case.node_of, rates=RATES, usable_bytes=1e12
    )
    assert not dag.edges
    first = [g for g in dag.groups if g.kind == "destroy"]
    assert list(dag.groups[: len(first)]) == first
    assert [STAGES.index(g.model_stage.stage) for g in first] == sorted(
        STAGES.index(g.model_stage.stage) for g in first
    )
    creates = [g for g in dag.groups if g.kind == "create"]
    assert list(dag.groups[len(dag.groups) - len(creates) :]) == creates
    busy = np.zeros(case.num_gpus)
    for g in dag.groups:
        busy[g.gpus] += g.seconds[g.part]
    assert busy.max() - 1e-9 <= dag.seconds <= sum(g.seconds.max(initial=0.0) for g in dag.groups) + 1e-9


def test_the_longest_goes_first_where_that_is_shorter() -> None:
    """Stage order: GPU 1 does 1 s, then 1 s with GPU 0, then 3 s: 5 s. The long one at once: 4 s."""
    reference = change(REFERENCE_INFERENCE, group(REFERENCE_INFERENCE, "reshard", [0, 1], 0, 0, 1.0))
    actor = change(ACTOR_TRAINING, group(ACTOR_TRAINING, "reshard", [1, 2], 0, 0, 1.0))
    critic = change(CRITIC_TRAINING, group(CRITIC_TRAINING, "reshard", [2], 0, 0, 3.0))
    dag = built([0, 0, 0], 1, reference, actor, critic)
    assert dag.seconds == 4
