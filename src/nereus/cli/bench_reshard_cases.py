"""The transitions of `nereus bench reshard`, their states, and the fewest bytes that any assignment of GPUs receives.

(tp, pp, dp) before and after. The first seven are those of the table in docs/transitions.md, scaled to at most 8
devices; then the paper's Table 4, data parallelism in and out, and a change of all five model-stages of PPO.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations

import numpy as np

from nereus.core.plan import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    REFERENCE_INFERENCE,
    REWARD_INFERENCE,
    Layout,
    ModelStage,
    Placement,
    Plan,
)
from nereus.core.shapes import ModelShape, state_spec
from nereus.core.sharding import Holding, StateSpec
from nereus.transition.align import align_plan
from nereus.transition.plan import changes_of
from nereus.transition.profile import StateProfile
from nereus.transition.rates import Ints

Ways = tuple[int, int, int]
"""tp, pp, dp."""

TRANSITIONS: Mapping[str, tuple[Ways, Ways]] = {
    "tp4 -> tp2 dp2": ((4, 1, 1), (2, 1, 2)),
    "tp4 -> pp4": ((4, 1, 1), (1, 4, 1)),
    "pp2 dp2 -> tp2 pp2 dp2": ((1, 2, 2), (2, 2, 2)),
    "pp4 dp2 -> tp2 pp4": ((1, 4, 2), (2, 4, 1)),
    "tp8 -> pp8": ((8, 1, 1), (1, 8, 1)),
    "tp2 pp4 -> tp4": ((2, 4, 1), (4, 1, 1)),
    "tp4 dp2 -> tp2 pp2 dp2": ((4, 1, 2), (2, 2, 2)),
    "extend 1 -> 2": ((1, 1, 1), (1, 1, 2)),
    "extend 2 -> 4": ((1, 1, 2), (1, 1, 4)),
    "extend 4 -> 8": ((1, 1, 4), (1, 1, 8)),
    "dp in": ((2, 2, 1), (2, 2, 2)),
    "dp out": ((2, 2, 2), (2, 2, 1)),
}

FIVE: Mapping[ModelStage, tuple[tuple[Ways, range], tuple[Ways, range]]] = {
    ACTOR_GENERATION: (((1, 1, 4), range(0, 4)), ((2, 1, 2), range(4, 8))),
    REFERENCE_INFERENCE: (((1, 1, 2), range(4, 6)), ((1, 2, 1), range(0, 2))),
    REWARD_INFERENCE: (((1, 1, 2), range(6, 8)), ((2, 1, 1), range(2, 4))),
    ACTOR_TRAINING: (((4, 1, 1), range(0, 4)), ((2, 2, 1), range(4, 8))),
    CRITIC_TRAINING: (((2, 2, 1), range(4, 8)), ((1, 2, 2), range(0, 4))),
}
FIVE_NAME = "five model-stages"
NAMES = (*TRANSITIONS, FIVE_NAME)
PARAMETERS_ONLY = ", parameters only"
"""After the name of a transition of a single model: without Adam's moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One transition. parameters: of each of its models."""

    name: str
    parameters: int
    specs: Mapping[ModelStage, StateSpec]
    current: Plan
    target: Plan

    @property
    def devices(self) -> int:
        return 1 + max(*self.current.gpus, *self.target.gpus)

    @property
    def state_fraction(self) -> float:
        """Bytes of the state, of those with all that training keeps."""
        return 1 / 3 if self.name.endswith(PARAMETERS_ONLY) else 1.0

    @property
    def node_of(self) -> Ints:
        """Of all devices of this machine."""
        return np.zeros(self.devices, dtype=np.int64)

    @property
    def moved(self) -> list[ModelStage]:
        """Model-stages whose state counts: actor/generation gets its own by weight_sync."""
        return [p.model_stage for p in self.target.placements if p.model_stage != ACTOR_GENERATION]

    @property
    def lower_bound_bytes(self) -> int:
        """See `least_bytes`; over all model-stages."""
        both = [(m, old, new) for m, old, new in changes_of(self.current, self.target) if m != ACTOR_GENERATION]
        return sum(least_bytes(self.specs[m], old, new) for m, old, new in both if old is not None and new is not None)


def case_of(name: str, parameters: int, memory_bytes: float = float("inf")) -> Case:
    """A transition by name; its models made smaller if old and new shards together are more than `memory_bytes`.

    The target's units and positions are where the least must move (`transition.align`).
    """
    whole = not name.endswith(PARAMETERS_ONLY)
    placed = _five() if name == FIVE_NAME else _alone(*TRANSITIONS[name.removesuffix(PARAMETERS_ONLY)])
    copies = sum((12 if "training" in str(p.model_stage) else 4) * p.dp for plan in placed for p in plan.placements)
    shape = decoder(min(parameters, memory_bytes / copies))
    specs = {
        p.model_stage: state_spec(shape, dtype="float32", trained=whole and p.model_stage.stage == "training")
        for p in placed[0].placements
    }
    case = Case(name=name, parameters=shape.num_params, specs=specs, current=placed[0], target=placed[1])
    profiles = {m: StateProfile.of(spec) for m, spec in specs.items()}
    return replace(case, target=align_plan(case.target, case.current, profiles, case.node_of))


def decoder(parameters: float) -> ModelShape:
    """A decoder like Llama's with 16 layers, of about that many parameters: they are 244 x hidden^2."""
    hidden = 64 * max(1, round((parameters / 244) ** 0.5 / 64))
    return ModelShape(
        name=f"decoder-{hidden}",
        num_layers=16,
        hidden=hidden,
        intermediate=11 * hidden // 4,
        num_heads=16,
        num_kv_heads=8,
        head_dim=hidden // 16,
        vocab=32 * hidden,
    )


def _alone(old: Ways, new: Ways) -> tuple[Plan, Plan]:
    return (
        Plan((placement(ACTOR_TRAINING, old, range(old[0] * old[1] * old[2])),)),
        Plan((placement(ACTOR_TRAINING, new, range(new[0] * new[1] * new[2])),)),
    )


def _five() -> tuple[Plan, Plan]:
    return (
        Plan(tuple(placement(m, *old) for m, (old, _) in FIVE.items())),
        Plan(tuple(placement(m, *new) for m, (_, new) in FIVE.items())),
    )


def placement(m: ModelStage, ways: Ways, gpus: Sequence[int]) -> Placement:
    """In the order of the GPUs."""
    tp, pp, dp = ways
    return Placement(model_stage=m, layout=Layout(tp, pp), dp=dp, gpus=tuple(gpus))


# -- the fewest bytes ------------------------------------------------------------------------------------------------


def least_bytes(spec: StateSpec, old: Placement, new: Placement) -> int:
    """What the GPUs of `new` must receive, whichever of them takes which position of which unit: every order is tried.

    Counted index by index, with none of the code that plans a transition. At most 8 GPUs.
    """
    size, was = new.layout.size, {gpu: i % old.layout.size for i, gpu in enumerate(old.gpus)}
    lacking = np.array(
        [[_lacking(spec, new.layout, i, old.layout, was.get(gpu)) for gpu in new.gpus] for i in range(size)]
    )
    slots = np.arange(len(new.gpus)) % size
    return int(lacking[slots, _orders(len(new.gpus))].sum(1).min())


@cache
def _orders(count: int) -> Ints:
    """[count!, count] every order of so many GPUs."""
    return np.array(list(permutations(range(count))), dtype=np.int64)


@cache
def _lacking(spec: StateSpec, new: Layout, at: int, old: Layout, was: int | None) -> int:
    """Bytes of a position of `new` that a position of `old`, or nothing, does not have."""
    wanted, held = _position(spec, new, at), {} if was is None else _position(spec, old, was)
    total = 0
    for t in spec.tensors:
        want, have = (np.zeros(t.length, dtype=bool) for _ in range(2))
        for mask, holding in ((want, wanted), (have, held)):
            for start, stop in holding.get(t.name, ()):
                mask[start:stop] = True
        total += t.index_bytes * int((want & ~have).sum())
    return total


def _position(spec: StateSpec, layout: Layout, index: int) -> Holding:
    return spec.position_holding(layout, *divmod(index, layout.tp))
