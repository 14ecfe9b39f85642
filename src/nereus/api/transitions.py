"""What a change of plan would cost: `transition(scenario, current, target)`, predicted from data sheets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from nereus.api.scenario import Scenario
from nereus.core.inventory import CpuHost
from nereus.core.plan import ModelStage, Plan
from nereus.core.shapes import state_spec
from nereus.cost.memory import WORKSPACE_BYTES
from nereus.planner.problem import HEADROOM
from nereus.transition.align import align_plan
from nereus.transition.dag import TransitionDag
from nereus.transition.groups import Lowering, StageChange
from nereus.transition.plan import LOWERINGS, changes_of, compare, plan_transition
from nereus.transition.profile import StateProfile
from nereus.transition.rates import Ints, Rates


@dataclass(frozen=True, kw_only=True)
class TransitionEstimate:
    """A change from one plan to another. ways: of each model-stage that moves state, every way to do it, alone.

    usable_bytes: of a GPU's memory. The target's GPUs are in the order that keeps the most bytes where they are.
    """

    current: Plan
    target: Plan
    dag: TransitionDag
    ways: dict[ModelStage, dict[Lowering, StageChange]]
    usable_bytes: float

    def to_json(self) -> dict[str, Any]:
        return {
            "current": self.current.to_json(),
            "target": self.target.to_json(),
            **self.dag.to_json(),
            "usable_bytes": self.usable_bytes,
            "ways": {
                str(m): {
                    way: {"seconds": change.seconds, "received_bytes": change.received_bytes}
                    for way, change in ways.items()
                }
                for m, ways in self.ways.items()
            },
        }


@dataclass(frozen=True)
class Transitions:
    """Answers about changes of plan in a scenario."""

    scenario: Scenario

    def estimate(self, current: Plan, target: Plan, *, lowerings: Sequence[Lowering] = LOWERINGS) -> TransitionEstimate:
        """What it takes to get from one plan to another. Raises InfeasibleTransition (a PlanError)."""
        node_of = self._node_of(max((*current.gpus, *target.gpus)) + 1)
        if target != current:
            target = align_plan(target, current, self._profiles, node_of)
        dag = plan_transition(
            self._profiles,
            current,
            target,
            node_of=node_of,
            rates=self._rates,
            usable_bytes=self.usable_bytes,
            base_bytes=0.0 if isinstance(self.scenario.device, CpuHost) else WORKSPACE_BYTES,
            lowerings=lowerings,
        )
        ways = {
            m: compare(m, self._profiles[m], old, new, node_of=node_of, rates=self._rates)
            for m, old, new in changes_of(current, target)
            if old is not None and new is not None and dag.lowerings[m] != "made" and dag.changes(m)
        }
        return TransitionEstimate(current=current, target=target, dag=dag, ways=ways, usable_bytes=self.usable_bytes)

    @property
    def usable_bytes(self) -> float:
        """What plan and transition may fill of each GPU."""
        return self.scenario.device_kind.memory_bytes * (1 - HEADROOM)

    @property
    def _rates(self) -> Rates:
        return Rates.of(self.scenario.cluster)

    @cached_property
    def _profiles(self) -> dict[ModelStage, StateProfile]:
        load, found = self.scenario.workload, {}
        for m in self.scenario.model_stages:
            shape = self.scenario.shapes[m.model]
            if m.model in ("reward", "critic"):
                shape = replace(shape, scalar_head=True)
            trained = m.stage == "training"
            spec = state_spec(
                shape, dtype=load.dtype, trained=trained, master_weights=trained and load.optimizer_bytes >= 12
            )
            found[m] = StateProfile.of(spec)
        return found

    def _node_of(self, num_gpus: int) -> Ints:
        return np.arange(num_gpus) // self.scenario.cluster.gpus_per_node
