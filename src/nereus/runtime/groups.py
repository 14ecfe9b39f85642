"""Which communicators a plan needs, in the one order in which all ranks make them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nereus.core.plan import Placement, Plan
from nereus.runtime.abort import AbortFlag
from nereus.runtime.communicator import Communicator, Watcher

Purpose = str
"""tp, down and up (activations and gradients along pp), unit, ends (tied embeddings), dp, pool (state transfers)."""


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that talk to each other for one purpose. name: unique in the life of the store."""

    purpose: Purpose
    ranks: tuple[int, ...]
    name: str


def placement_groups(placement: Placement) -> list[tuple[Purpose, tuple[int, ...]]]:
    """All groups of one placement that have more than one rank."""
    layout, found = placement.layout, []
    for unit in range(placement.dp):
        found.append(("unit", placement.unit_gpus(unit)))
        for pp_stage in range(layout.pp):
            found.append(("tp", tuple(placement.gpu(unit, pp_stage, t) for t in range(layout.tp))))
        for tp_rank in range(layout.tp):
            column = tuple(placement.gpu(unit, p, tp_rank) for p in range(layout.pp))
            # One communicator a direction: on a GPU, sends and receives of one pair run in the order of issue.
            found += [("down", column), ("up", column), ("ends", (column[0], column[-1]))]
    for pp_stage in range(layout.pp):
        for tp_rank in range(layout.tp):
            found.append(("dp", tuple(placement.gpu(u, pp_stage, tp_rank) for u in range(placement.dp))))
    return [(purpose, ranks) for purpose, ranks in found if len(set(ranks)) > 1]


class GroupDirectory:
    """The controller's list of open groups: names each one once, and again when it has to be made anew."""

    def __init__(self) -> None:
        self._prefix = uuid.uuid4().hex[:8]  # another directory may have used the same store
        self._open: dict[tuple[Purpose, tuple[int, ...], tuple[int, ...]], Group] = {}
        self._made = 0

    def change(self, plan: Plan, pool: Sequence[int], incarnations: Mapping[int, int]) -> tuple[tuple[Group, ...], int]:
        """Every group of a plan once, in order, and how many of them are new; model-stages with equal ranks share one.

        incarnations: how often each device id was started before. Groups that were open stay so under their name.
        """
        wanted: list[tuple[Purpose, tuple[int, ...]]] = [("pool", tuple(sorted(pool)))] if len(pool) > 1 else []
        for placement in plan.placements:
            wanted += placement_groups(placement)
        now = {}
        for purpose, ranks in dict.fromkeys(wanted):
            key = (purpose, ranks, tuple(incarnations[r] for r in ranks))
            now[key] = self._open.get(key) or self._new(purpose, ranks)
        opened = len(now.keys() - self._open.keys())
        self._open = now
        return tuple(now.values()), opened

    def forget(self) -> None:
        """All communicators are broken: the next change makes every group anew."""
        self._open = {}

    def _new(self, purpose: Purpose, ranks: tuple[int, ...]) -> Group:
        self._made += 1
        return Group(purpose, ranks, f"{self._prefix}/{self._made}/{purpose}")


class GroupTable:
    """The open communicators of one rank. watcher: of all that are opened from then on."""

    def __init__(self, *, me: int, store: dist.Store, flag: AbortFlag, device: torch.device, timeout_s: float) -> None:
        self._me, self._store, self._flag, self._device, self._timeout_s = me, store, flag, device, timeout_s
        self.watcher: Watcher | None = None
        self._open: dict[str, Communicator] = {}
        self._by_use: dict[tuple[Purpose, tuple[int, ...]], Communicator] = {}

    def change(self, groups: Sequence[Group]) -> None:
        """Close what is not listed, open what is new. All ranks call this with the same list."""
        mine = [g for g in groups if self._me in g.ranks]
        names = {g.name for g in mine}
        for name in [n for n in self._open if n not in names]:
            self._open.pop(name).close()
        for group in mine:
            if group.name not in self._open:
                self._open[group.name] = self._create(group.name, group.ranks, group.purpose)
        self._by_use = {(g.purpose, g.ranks): self._open[g.name] for g in mine}

    def get(self, purpose: Purpose, ranks: Sequence[int]) -> Communicator:
        """The communicator for a purpose; a rank that is alone needs none and gets one of size 1."""
        unique = tuple(dict.fromkeys(ranks))
        return self._create("alone", unique, purpose) if len(unique) == 1 else self._by_use[(purpose, unique)]

    def _create(self, name: str, ranks: tuple[int, ...], purpose: Purpose) -> Communicator:
        return Communicator.create(
            store=self._store,
            name=name,
            ranks=ranks,
            rank=self._me,
            timeout_s=self._timeout_s,
            flag=self._flag,
            device=self._device,
            purpose=purpose,
            watcher=self.watcher,
        )
