"""Whether sets of GPUs, some of which must be disjoint, have starts on the line."""

from __future__ import annotations

from collections.abc import Sequence

Set = tuple[int, int, int]
"""GPUs, alignment, reach."""


def pack(sets: Sequence[Set], disjoint: Sequence[int], stages: Sequence[str]) -> tuple[int, ...] | None:
    """Starts, or None. disjoint: bits of the earlier sets each must not touch. stages: of each set.

    Sets of one stage that are not disjoint start at the same place. Whatever placement exists, laying its sets out in
    the order of their starts, each as far left as those before allow, gives starts that are no greater; so trying every
    order decides the question.
    """
    apart = list(disjoint)
    for i, bits in enumerate(disjoint):
        for j in range(i):
            apart[j] |= (bits >> j & 1) << i
    groups = _groups(apart, stages)
    if groups is None:
        return None
    starts = [0] * len(sets)
    crowded = []
    for group in groups:
        if any(apart[i] for i in group):
            crowded.append(group)
        elif any(sets[i][0] > sets[i][2] for i in group):
            return None
    crowded.sort(key=lambda group: max((sets[i][1], sets[i][0]) for i in group), reverse=True)
    return tuple(starts) if _leftmost(starts, 0, crowded, sets, apart) else None


def _groups(apart: Sequence[int], stages: Sequence[str]) -> list[list[int]] | None:
    """Which sets start at the same place; None if one would with both of two that are disjoint."""
    groups: list[list[int]] = []
    for i, bits in enumerate(apart):
        for group in groups:
            touching = [bits >> j & 1 for j in group]
            if stages[group[0]] == stages[i] and not all(touching):
                if any(touching):
                    return None
                group.append(i)
                break
        else:
            groups.append([i])
    return groups


def _leftmost(starts: list[int], placed: int, left: list[list[int]], sets: Sequence[Set], apart: Sequence[int]) -> bool:
    """Put the remaining groups after those that have their starts (bits of `placed`), or say that it cannot be done."""
    if not left:
        return True
    options = []
    for group in left:
        align, low = 1, 0
        for i in group:
            align = max(align, sets[i][1])
            for j in range(len(sets)):
                if apart[i] & placed & (1 << j):
                    low = max(low, starts[j] + sets[j][0])
        start = -(-low // align) * align
        if any(start + sets[i][0] > sets[i][2] for i in group):
            return False  # and putting others before it only moves it further
        options.append(start)
    for group, start in zip(left, options, strict=True):
        for i in group:
            starts[i] = start
        now = placed | sum(1 << i for i in group)
        if _leftmost(starts, now, [other for other in left if other is not group], sets, apart):
            return True
    return False
