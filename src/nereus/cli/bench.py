"""`nereus bench NAME`: the measurements behind the figures that README and docs quote.

Every bench returns {bench, machine, rows, summary}; rows of checks are {check, value, limit, ok}.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A figure and what it must not exceed (`at_least`: fall short of)."""

    check: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def ok(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def to_json(self) -> dict[str, Any]:
        return {"check": self.check, "value": self.value, "limit": self.limit, "ok": self.ok}


def report(name: str, checks: Sequence[Check], summary: dict[str, Any]) -> dict[str, Any]:
    """The JSON object of a bench."""
    return {"bench": name, "machine": machine(), "rows": [check.to_json() for check in checks], "summary": summary}


def machine() -> dict[str, Any]:
    """What a figure was measured on."""
    import torch

    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "gpus": gpus,
        "torch": torch.__version__,
    }


def check_lines(found: dict[str, Any]) -> list[str]:
    """A bench of checks as text."""
    return [
        f"{'[green]ok[/green]' if row['ok'] else '[red]NO[/red]'}  {row['check']}: {row['value']:.3g} "
        f"(limit {row['limit']:.3g})"
        for row in found["rows"]
    ]


def row_lines(found: dict[str, Any]) -> list[str]:
    """Rows with equal keys as text."""
    return ["  ".join(f"{key} {_short(value)}" for key, value in row.items()) for row in found["rows"]]


def summary_lines(found: dict[str, Any]) -> list[str]:
    """A summary by name as text."""
    return [f"{name}: {_short(value)}" for name, value in found["summary"].items()]


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(inner)}" for key, inner in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
