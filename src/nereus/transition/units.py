"""Units and the four primitives over them (paper §5.2): collections of units in, collections out.

    Split(unit, layout)      one unit -> k units of a smaller layout, on the same GPUs
    Merge(units, layout)     k units -> one unit of a larger layout, on the same GPUs
    Extend(unit, gpus)       a further replica on GPUs that have none
    Destroy(unit)            one replica less; never the last

Split and Merge are each other's inverse. Position (pp_stage, tp_rank) of the larger layout is, with kp = pp / sub.pp and
kt = tp / sub.tp, position (pp_stage // kp, tp_rank // kt) of replica (pp_stage % kp) * kt + tp_rank % kt: the GPUs that
share a position of the smaller layout are a *block*, which gathers within itself when split.

    Layout(tp=2, pp=2) on 0 1 2 3   --Split to (1, 1)-->   0 | 1 | 2 | 3        one block {0, 1, 2, 3}
    Layout(tp=2, pp=2) on 0 1 2 3   --Split to (1, 2)-->   0 2 | 1 3            blocks {0, 1} and {2, 3}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from nereus.core.errors import PlanError
from nereus.core.plan import Layout, ModelStage, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticModelUnit:
    """One replica of a model-stage. gpus: by position, tp fastest, then pp."""

    model_stage: ModelStage
    layout: Layout
    gpus: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.gpus) != self.layout.size or len(set(self.gpus)) != len(self.gpus):
            raise PlanError(
                f"{self.model_stage}: a unit of {self.layout} needs {self.layout.size} different GPUs: {self.gpus}"
            )


Units = tuple[ElasticModelUnit, ...]
"""The replicas of one model-stage."""


def units_of(placement: Placement) -> Units:
    """The units that a placement stands for."""
    return tuple(
        ElasticModelUnit(model_stage=placement.model_stage, layout=placement.layout, gpus=placement.unit_gpus(u))
        for u in range(placement.dp)
    )


def check_units(units: Sequence[ElasticModelUnit]) -> None:
    """Raise PlanError unless these are replicas of one model-stage in one layout, on disjoint GPUs."""
    kinds = {(u.model_stage, u.layout) for u in units}
    if len(kinds) > 1:
        raise PlanError(f"units of several kinds: {', '.join(f'{m} {layout}' for m, layout in sorted(kinds, key=str))}")
    gpus = [gpu for u in units for gpu in u.gpus]
    twice = sorted({gpu for gpu in gpus if gpus.count(gpu) > 1})
    if twice:
        raise PlanError(f"{units[0].model_stage}: GPUs {twice} are in two units")


def common_layout(a: Layout, b: Layout) -> Layout:
    """The largest layout that both can be split to."""
    return Layout(gcd(a.tp, b.tp), gcd(a.pp, b.pp))


def replica_and_position(layout: Layout, sub: Layout, index: int) -> tuple[int, int]:
    """(replica, index in it) that position `index` of a unit has after a Split to `sub`."""
    kp, kt = factors(layout, sub)
    pp_stage, tp_rank = divmod(index, layout.tp)
    return (pp_stage % kp) * kt + tp_rank % kt, (pp_stage // kp) * sub.tp + tp_rank // kt


def factors(layout: Layout, sub: Layout) -> tuple[int, int]:
    """(pp, tp) factors between two layouts. Raises PlanError unless they are whole numbers."""
    if layout.pp % sub.pp or layout.tp % sub.tp:
        raise PlanError(f"{layout} cannot be split to {sub}: tp and pp must be divided by whole numbers")
    return layout.pp // sub.pp, layout.tp // sub.tp


def split(unit: ElasticModelUnit, sub: Layout) -> Units:
    """k units of a smaller layout on the same GPUs."""
    kp, kt = factors(unit.layout, sub)
    gpus = [[0] * sub.size for _ in range(kp * kt)]
    for index, gpu in enumerate(unit.gpus):
        replica, at = replica_and_position(unit.layout, sub, index)
        gpus[replica][at] = gpu
    return tuple(ElasticModelUnit(model_stage=unit.model_stage, layout=sub, gpus=tuple(g)) for g in gpus)


def merge(units: Sequence[ElasticModelUnit], layout: Layout) -> ElasticModelUnit:
    """One unit of a larger layout on the GPUs of k replicas."""
    check_units(units)
    sub = units[0].layout
    kp, kt = factors(layout, sub)
    if len(units) != kp * kt:
        raise PlanError(f"{units[0].model_stage}: {layout} is merged from {kp * kt} units of {sub}, not {len(units)}")
    places = (replica_and_position(layout, sub, index) for index in range(layout.size))
    gpus = tuple(units[replica].gpus[at] for replica, at in places)
    return ElasticModelUnit(model_stage=units[0].model_stage, layout=layout, gpus=gpus)


def extend(units: Units, source: ElasticModelUnit, gpus: Sequence[int]) -> Units:
    """A replica of `source` more, on GPUs that hold no unit of this model-stage."""
    if source not in units:
        raise PlanError(f"{source.model_stage}: there is no unit on {source.gpus} to extend")
    made = ElasticModelUnit(model_stage=source.model_stage, layout=source.layout, gpus=tuple(gpus))
    check_units((*units, made))
    return (*units, made)


def destroy(units: Units, unit: ElasticModelUnit) -> Units:
    """A replica less. Raises PlanError for the last one: its logical state would be gone."""
    if unit not in units:
        raise PlanError(f"{unit.model_stage}: there is no unit on {unit.gpus} to destroy")
    if len(units) == 1:
        raise PlanError(f"{unit.model_stage}: the unit on {unit.gpus} is the last one")
    return tuple(u for u in units if u != unit)
