"""What two runs of a job are compared by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

SAME = 1e-4
"""The most by which a weight may differ between runs that trained on the same."""


def weights(summary: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The final parameters of both trained models."""
    folder = sorted((Path(summary["run"]) / "checkpoints").glob("step-*"))[-1]
    files = folder.rglob("model-*.safetensors")
    return {f"{file.parent.name}/{name}": t for file in files for name, t in load_file(file).items()}


def difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference of a final weight."""
    left, right = weights(a), weights(b)
    assert left.keys() == right.keys() and left
    return max((left[name] - right[name]).abs().max().item() for name in left)
