"""Which devices to use when there are more, and which to give up when there are fewer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from nereus.core.plan import ACTOR_GENERATION, ModelStage, Plan


def joining(known: Collection[int], count: int) -> tuple[int, ...]:
    """Ids for so many new devices: the least that are not in use."""
    found: list[int] = []
    candidate = 0
    while len(found) < count:
        if candidate not in known:
            found.append(candidate)
        candidate += 1
    return tuple(found)


def giving_up(
    plan: Plan, pool: Sequence[int], count: int, held_bytes: Mapping[ModelStage, Mapping[int, float]]
) -> tuple[int, ...]:
    """The `count` devices of a pool that cost least to lose.

    One after another: the one with the fewest bytes that no other device has, then the fewest bytes at all, then the
    highest id. held_bytes: model-stage -> device -> bytes. Generation units do not count: their weights are the actor's.
    """
    if not 0 <= count < len(pool):
        raise ValueError(f"of {len(pool)} devices {count} cannot be given up: one must be left")
    left = set(pool)
    given: list[int] = []
    for _ in range(count):
        sole = _sole_bytes(plan, left, held_bytes)
        total = {
            gpu: sum(rows.get(gpu, 0.0) for m, rows in held_bytes.items() if m != ACTOR_GENERATION) for gpu in left
        }
        used = set(plan.gpus)
        cheapest = min(left, key=lambda gpu: (sole.get(gpu, 0.0), gpu in used, total[gpu], -gpu))
        left.remove(cheapest)
        given.append(cheapest)
    return tuple(sorted(given))


def _sole_bytes(
    plan: Plan, left: Collection[int], held_bytes: Mapping[ModelStage, Mapping[int, float]]
) -> dict[int, float]:
    """By device, the bytes of shards of which it has the only copy among those that are left."""
    found: dict[int, float] = {}
    for placement in plan.placements:
        if placement.model_stage == ACTOR_GENERATION:
            continue
        holders: dict[int, list[int]] = {}
        for i, gpu in enumerate(placement.gpus):
            if gpu in left:
                holders.setdefault(i % placement.layout.size, []).append(gpu)
        for gpus in holders.values():
            if len(gpus) == 1:
                held = held_bytes.get(placement.model_stage, {}).get(gpus[0], 0.0)
                found[gpus[0]] = found.get(gpus[0], 0.0) + held
    return found
