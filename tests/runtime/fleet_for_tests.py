"""One small model-stage, and plans of it on the first devices."""

from __future__ import annotations

from nereus.core.plan import ACTOR_TRAINING, Layout, Placement, Plan
from nereus.core.sharding import Cut, Segment, StateSpec, TensorSpec

SPEC = StateSpec(
    tuple(
        TensorSpec(name=f"t{i}", shape=(6, 4), dtype="float32", where="layer", layer=i, cut=Cut(0, (Segment.rows(6),)))
        for i in range(4)
    ),
    4,
)


def plan(tp: int, pp: int, dp: int) -> Plan:
    gpus = tuple(range(tp * pp * dp))
    return Plan((Placement(model_stage=ACTOR_TRAINING, layout=Layout(tp, pp), dp=dp, gpus=gpus),))
