"""Dealing a batch out over the units of a model-stage, and collecting what they answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nereus.core.plan import ModelStage, split_evenly
from nereus.runtime.cluster import Call
from nereus.runtime.fleet import Fleet


def deal(fleet: Fleet, name: ModelStage, total: int) -> list[range]:
    """The rows of each unit, contiguous and as equal as can be."""
    return split_evenly(total, fleet.plan[name].dp)


def start(fleet: Fleet, method: str, name: ModelStage, per_unit: Sequence[tuple[object, ...]]) -> Call:
    """Call a method on all ranks of a model-stage, each unit's ranks with that unit's arguments."""
    placement = fleet.plan[name]
    arguments = {gpu: row for unit, row in enumerate(per_unit) for gpu in placement.unit_gpus(unit)}
    return fleet.cluster.call(method, arguments)


def answers(fleet: Fleet, name: ModelStage, call: Call) -> list[Any]:
    """What each unit's answering rank returned, in the order of units."""
    placement, results = fleet.plan[name], call.results()
    return [results[placement.output_gpu(unit)] for unit in range(placement.dp)]
