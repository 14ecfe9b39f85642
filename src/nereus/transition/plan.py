"""`plan_transition`: two plans in, a transition DAG out, with the first way that fits for every model-stage.

    direct     the least bytes, everything at once; old and new shards side by side
    lean       the same, read only from GPUs that stay: others give their memory back at the start
    streamed   tensor group by tensor group: little more memory than the larger of old and new
    staged     the paper's, through the largest common layout: more bytes, and memory for the whole of that layout

No way receives fewer bytes than direct, on any GPU, so it comes first; `compare` costs all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from nereus.core.errors import StateError
from nereus.core.plan import ACTOR_GENERATION, STAGES, ModelStage, Placement, Plan
from nereus.transition.dag import TransitionDag, Ways, build
from nereus.transition.estimate import Grid, direct_flows, shards_of, staged, stream_order, streamed_peak
from nereus.transition.groups import Lowering, Shards, StageChange, direct, made
from nereus.transition.profile import StateProfile
from nereus.transition.rates import Ints, Rates

LOWERINGS: tuple[Lowering, ...] = ("direct", "lean", "streamed", "staged")


def plan_transition(
    profiles: Mapping[ModelStage, StateProfile],
    current: Plan,
    target: Plan,
    *,
    node_of: Ints,
    rates: Rates,
    usable_bytes: float,
    base_bytes: float = 0.0,
    lowerings: Sequence[Lowering] = LOWERINGS,
    setup_s: float = 0.0,
) -> TransitionDag:
    """How to get from one plan to another, and what it costs.

    node_of: [GPUs] node of each GPU id. usable_bytes: of a GPU's memory; base_bytes: what is on it in any case.
    Model-stages of only one of the plans are made, or destroyed. actor/generation is only made: weight_sync fills it.
    Raises InfeasibleTransition (a PlanError), with the GPUs and what they are short of.
    """
    held = np.full(len(node_of), float(base_bytes))
    ways = []
    for m, old, new in changes_of(current, target):
        change = _Change(m, profiles[m], old, new, node_of, rates)
        held += change.held_bytes
        ways.append(Ways(change.ways(lowerings)))
    return build(ways, held, usable_bytes, setup_s=setup_s, node_of=node_of, rates=rates)


def compare(
    model_stage: ModelStage,
    profile: StateProfile,
    old: Placement,
    new: Placement,
    *,
    node_of: Ints,
    rates: Rates,
) -> dict[Lowering, StageChange]:
    """Every way to change one model-stage that leads there."""
    change = _Change(model_stage, profile, old, new, node_of, rates)
    return {way.lowering: way for way in change.ways(LOWERINGS)}


def changes_of(current: Plan, target: Plan) -> list[tuple[ModelStage, Placement | None, Placement | None]]:
    """Every model-stage of either plan, in stage order, with its placement before and after."""
    before, after = ({p.model_stage: p for p in plan.placements} for plan in (current, target))
    names = sorted({*before, *after}, key=lambda m: (STAGES.index(m.stage), m.model))
    return [(m, before.get(m), after.get(m)) for m in names]


class _Change:
    """One model-stage from a placement, or none, to another, or none."""

    def __init__(
        self,
        model_stage: ModelStage,
        profile: StateProfile,
        old: Placement | None,
        new: Placement | None,
        node_of: Ints,
        rates: Rates,
    ) -> None:
        self.model_stage, self.profile, self.node_of, self.rates = model_stage, profile, node_of, rates
        self.old, self.new = (None if p is None else Grid.of(p, len(node_of)) for p in (old, new))
        self.same = old is not None and new is not None and (old.layout, old.gpus) == (new.layout, new.gpus)
        nothing = np.zeros(len(node_of))
        self.held_bytes = nothing if self.old is None else self.old.by_gpu(profile.position_bytes(self.old.layout))

    def ways(self, lowerings: Sequence[Lowering]) -> Iterator[StageChange]:
        """In the order of `lowerings`; staged is left out where it does not lead to the target."""
        if self.same:
            yield StageChange(model_stage=self.model_stage, lowering="direct", groups=())
        elif self.old is None or self.new is None or self.model_stage == ACTOR_GENERATION:
            yield made(self.model_stage, self._one_sided())
        else:
            shards = shards_of(self.profile, self.old, self.new)
            for lowering in lowerings:
                with contextlib.suppress(StateError):
                    yield self._lowered(lowering, self.old, self.new, shards)

    def _lowered(self, lowering: Lowering, old: Grid, new: Grid, shards: Shards) -> StageChange:
        profile, node_of = self.profile, self.node_of
        if lowering == "staged":
            return staged(self.model_stage, profile, old, new, node_of, self.rates)
        flows = direct_flows(profile, old, new, shards, node_of, staying=lowering == "lean")
        peak = None
        if lowering == "streamed":
            order = stream_order(profile.num_layers, old.layout, new.layout, profile.weights.shape[1])
            peak = streamed_peak(profile, old, new, order)
        return direct(self.model_stage, lowering, shards, flows, node_of, self.rates, peak)

    def _one_sided(self) -> Shards:
        """For units that are only made, or only destroyed: nothing is received."""
        nothing = np.zeros(len(self.node_of))
        if self.old is not None and self.new is not None:
            return replace(shards_of(self.profile, self.old, self.new), received_bytes=nothing)
        after = nothing if self.new is None else self.new.by_gpu(self.profile.position_bytes(self.new.layout))
        return Shards(old_bytes=self.held_bytes, new_bytes=after, adopted_bytes=nothing, received_bytes=nothing)
