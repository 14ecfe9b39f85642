"""The four primitives: exact inverses, every plan within their reach, and what they refuse."""

from __future__ import annotations

import random

import pytest

from nereus.core.errors import PlanError
from nereus.core.plan import ACTOR_TRAINING, CRITIC_TRAINING, Layout, Placement
from nereus.transition.units import (
    ElasticModelUnit,
    Units,
    check_units,
    common_layout,
    destroy,
    extend,
    merge,
    split,
    units_of,
)

DEGREES = (1, 2, 3, 4, 6, 8)


def unit(layout: Layout, gpus: tuple[int, ...], model_stage=ACTOR_TRAINING) -> ElasticModelUnit:
    return ElasticModelUnit(model_stage=model_stage, layout=layout, gpus=gpus)


def random_units(rng: random.Random, pool: int) -> Units:
    while True:
        layout, dp = Layout(rng.choice(DEGREES), rng.choice(DEGREES)), rng.choice(DEGREES)
        if (count := layout.size * dp) <= pool:
            break
    return units_of(
        Placement(model_stage=ACTOR_TRAINING, layout=layout, dp=dp, gpus=tuple(rng.sample(range(pool), count)))
    )


@pytest.mark.parametrize("seed", range(20))
def test_split_and_merge_are_inverse(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        sub = Layout(rng.choice(DEGREES), rng.choice(DEGREES))
        layout = Layout(sub.tp * rng.choice(DEGREES), sub.pp * rng.choice(DEGREES))
        whole = unit(layout, tuple(rng.sample(range(5000), layout.size)))
        parts = split(whole, sub)
        assert len(parts) * sub.size == layout.size
        assert sorted(g for u in parts for g in u.gpus) == sorted(whole.gpus)
        assert merge(parts, layout) == whole
        assert split(merge(parts[::-1], layout), sub) == parts[::-1]


@pytest.mark.parametrize("seed", range(20))
def test_shards_of_a_split_contain_what_was_there(seed: int) -> None:
    """Each GPU's new shard of the (layers x rows) rectangle contains its old one: a Split only gathers."""
    rng = random.Random(seed)
    sub = Layout(rng.choice(DEGREES), rng.choice(DEGREES))
    layout = Layout(sub.tp * rng.choice(DEGREES), sub.pp * rng.choice(DEGREES))

    def rectangle(layout: Layout, index: int) -> tuple[float, float, float, float]:
        pp_stage, tp_rank = divmod(index, layout.tp)
        return pp_stage / layout.pp, (pp_stage + 1) / layout.pp, tp_rank / layout.tp, (tp_rank + 1) / layout.tp

    whole = unit(layout, tuple(range(layout.size)))
    for part in split(whole, sub):
        for at, gpu in enumerate(part.gpus):
            a, b, c, d = rectangle(layout, gpu)
            e, f, g, h = rectangle(sub, at)
            assert e - 1e-9 <= a and b <= f + 1e-9 and g - 1e-9 <= c and d <= h + 1e-9


@pytest.mark.parametrize("seed", range(40))
def test_every_plan_is_reached(seed: int) -> None:
    """Split to the common layout, Extend where something is missing, Destroy what is left over, Merge."""
    rng = random.Random(seed)
    for _ in range(10):
        current, target = random_units(rng, 48), random_units(rng, 48)
        sub = common_layout(current[0].layout, target[0].layout)
        units = tuple(part for u in current for part in split(u, sub))
        wanted = [part for u in target for part in split(u, sub)]
        kept = [u for u in units if u in wanted]
        free = sorted(set(range(1000, 1000 + len(wanted) * sub.size)))
        for part in (w for w in wanted if w not in kept):  # by way of GPUs that are free
            units = extend(units, units[0], [free.pop() for _ in part.gpus])
        for u in [u for u in units if u not in kept and min(u.gpus) < 1000]:
            units = destroy(units, u) if len(units) > 1 else units
        for part in (w for w in wanted if w not in units):
            units = extend(units, units[0], part.gpus)
            units = destroy(units, next(u for u in units if min(u.gpus) >= 1000))
        assert set(units) == set(wanted)
        k = target[0].layout.size // sub.size
        merged = tuple(merge(wanted[i : i + k], target[0].layout) for i in range(0, len(wanted), k))
        assert merged == target


def test_what_is_refused() -> None:
    two = units_of(Placement(model_stage=ACTOR_TRAINING, layout=Layout(2, 1), dp=2, gpus=(0, 1, 2, 3)))
    with pytest.raises(PlanError, match="last"):
        destroy(destroy(two, two[0]), two[1])
    with pytest.raises(PlanError, match="no unit"):
        destroy(two[:1], two[1])
    with pytest.raises(PlanError, match=r"\[3\] are in two units"):
        extend(two, two[0], (3, 4))
    with pytest.raises(PlanError, match="no unit"):
        extend(two[:1], two[1], (4, 5))
    with pytest.raises(PlanError, match="different GPUs"):
        extend(two, two[0], (4, 4))
    with pytest.raises(PlanError, match="different GPUs"):
        unit(Layout(2, 2), (0, 1, 2))
    with pytest.raises(PlanError, match="cannot be split"):
        split(unit(Layout(1, 4), (0, 1, 2, 3)), Layout(1, 3))
    with pytest.raises(PlanError, match="cannot be split"):
        split(two[0], Layout(4, 1))
    with pytest.raises(PlanError, match="merged from 4 units"):
        merge(two, Layout(8, 1))
    with pytest.raises(PlanError, match="two units"):
        merge((two[0], two[0]), Layout(4, 1))
    with pytest.raises(PlanError, match="several kinds"):
        check_units((two[0], unit(Layout(2, 1), (8, 9), CRITIC_TRAINING)))
    with pytest.raises(PlanError, match="several kinds"):
        merge((two[0], unit(Layout(1, 1), (8,))), Layout(4, 1))
