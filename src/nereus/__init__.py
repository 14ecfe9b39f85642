"""Nereus: RL post-training of language models that changes its parallelism while it runs.

The names of docs/python-api.md. They are imported when they are first used, so that `import nereus` takes no time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nereus.api.job_file import load_job
    from nereus.api.jobs import scenario_of
    from nereus.api.scenario import PlanEstimate, Scenario, SweepPoint, describe
    from nereus.core.errors import PlanError, UserError
    from nereus.core.inventory import CpuHost, DeviceKind
    from nereus.core.job import Job
    from nereus.core.plan import Layout, ModelStage, Placement, Plan
    from nereus.core.shapes import ModelShape
    from nereus.core.workload import Workload
    from nereus.cost.calibration import Calibration
    from nereus.cost.model import Candidate, CandidateTable, TaskEstimate
    from nereus.planner.choice import PlanChoice, PlannedPlan
    from nereus.planner.explain import Explanation
    from nereus.planner.infeasible import Infeasible

_MODULES = {
    "nereus.api.job_file": ("load_job",),
    "nereus.api.jobs": ("scenario_of",),
    "nereus.api.scenario": ("PlanEstimate", "Scenario", "SweepPoint", "describe"),
    "nereus.core.errors": ("PlanError", "UserError"),
    "nereus.core.inventory": ("CpuHost", "DeviceKind"),
    "nereus.core.job": ("Job",),
    "nereus.core.plan": ("Layout", "ModelStage", "Placement", "Plan"),
    "nereus.core.shapes": ("ModelShape",),
    "nereus.core.workload": ("Workload",),
    "nereus.cost.calibration": ("Calibration",),
    "nereus.cost.model": ("Candidate", "CandidateTable", "TaskEstimate"),
    "nereus.planner.choice": ("PlanChoice", "PlannedPlan"),
    "nereus.planner.explain": ("Explanation",),
    "nereus.planner.infeasible": ("Infeasible",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Calibration",
    "Candidate",
    "CandidateTable",
    "CpuHost",
    "DeviceKind",
    "Explanation",
    "Infeasible",
    "Job",
    "Layout",
    "ModelShape",
    "ModelStage",
    "Placement",
    "Plan",
    "PlanChoice",
    "PlanError",
    "PlanEstimate",
    "PlannedPlan",
    "Scenario",
    "SweepPoint",
    "TaskEstimate",
    "UserError",
    "Workload",
    "describe",
    "load_job",
    "scenario_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'nereus' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
