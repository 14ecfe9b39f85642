"""The paper's Figure 12, estimated: models of 8B to 70B parameters on 8 to 64 H200, from one (tp, pp) to another.

Every pair of layouts that the GPUs' memory allows, over all GPUs and by as many replicas as there is room for; parameters
and Adam's moments with master weights, 14 bytes a parameter. Rates are data sheets' (`Rates.of`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any

import numpy as np

from nereus.core.errors import PlanError
from nereus.core.inventory import ClusterShape, cluster_of
from nereus.core.plan import ACTOR_TRAINING, Layout, Placement, Plan
from nereus.core.shapes import ModelShape, state_spec
from nereus.transition.align import align_plan
from nereus.transition.plan import plan_transition
from nereus.transition.profile import StateProfile
from nereus.transition.rates import Rates

MODELS = ("Llama-3.1-8B", "Qwen3-14B", "Qwen3-32B", "Llama-3.1-70B")
GPUS = (8, 16, 32, 64)
TP = (1, 2, 4, 8)
PP = (1, 2, 4, 8)
USABLE = 0.9
"""Of a GPU's memory."""


def figure_12(models: Sequence[str] = MODELS, gpus: Sequence[int] = GPUS) -> list[dict[str, Any]]:
    """Rows {model, gpus, transitions, seconds, staged_s, ...}; means over the transitions."""
    rows = []
    for model in models:
        profile = StateProfile.of(state_spec(ModelShape.named(model), master_weights=True))
        for count in gpus:
            cluster = cluster_of("H200", count)
            found = [row for pair in _pairs(profile, cluster) if (row := _estimate(profile, cluster, *pair))]
            rows.append({"model": model, "gpus": count, "transitions": len(found)} | _means(found))
    return rows


def _pairs(profile: StateProfile, cluster: ClusterShape) -> Iterator[tuple[Placement, Placement]]:
    """Every two layouts that fit on all GPUs."""
    count, usable = cluster.num_gpus, USABLE * cluster.device.memory_bytes
    layouts = [Layout(tp, pp) for tp in TP for pp in PP if tp * pp <= count]
    fitting = [layout for layout in layouts if profile.position_bytes(layout).max() <= usable]
    for old, new in permutations(fitting, 2):
        yield _placement(old, count), _placement(new, count)


def _placement(layout: Layout, count: int) -> Placement:
    return Placement(model_stage=ACTOR_TRAINING, layout=layout, dp=count // layout.size, gpus=tuple(range(count)))


def _estimate(profile: StateProfile, cluster: ClusterShape, old: Placement, new: Placement) -> dict[str, float] | None:
    """One transition; None where no lowering fits in memory."""
    profiles = {ACTOR_TRAINING: profile}
    node_of = np.arange(cluster.num_gpus) // cluster.gpus_per_node
    current = Plan((old,))
    target = align_plan(Plan((new,)), current, profiles, node_of)
    found: dict[str, float] = {}
    for name, ways in (("seconds", ("direct", "lean", "streamed")), ("staged_s", ("staged",))):
        try:
            dag = plan_transition(
                profiles,
                current,
                target,
                node_of=node_of,
                rates=Rates.of(cluster),
                usable_bytes=USABLE * cluster.device.memory_bytes,
                lowerings=ways,  # type: ignore[arg-type]
            )
        except PlanError:
            continue
        found[name] = dag.seconds
        if name == "seconds":
            found["bytes_received"] = dag.received_bytes
    return found or None


def _means(found: Sequence[dict[str, float]]) -> dict[str, float | None]:
    """staged_s: of those that can be staged; staged_over: of these, staged over direct seconds."""
    listed = {key: [row[key] for row in found if key in row] for key in ("seconds", "staged_s", "bytes_received")}
    both = [row["staged_s"] / row["seconds"] for row in found if row.get("staged_s") and row.get("seconds")]
    return {key: statistics.mean(values) if values else None for key, values in listed.items()} | {
        "staged_transitions": len(listed["staged_s"]),
        "staged_over": statistics.mean(both) if both else None,
    }
