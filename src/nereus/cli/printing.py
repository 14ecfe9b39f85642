"""One JSON object on stdout, for whoever asked with --json."""

from __future__ import annotations

import json
import math
from typing import Any


def print_if(wanted: bool, found: dict[str, Any]) -> None:
    if wanted:
        print_json(found)


def print_json(found: dict[str, Any]) -> None:
    print(json.dumps(_strict(found), allow_nan=False))


def _strict(value: Any) -> Any:
    """What JSON can say: null for NaN and infinities."""
    if isinstance(value, dict):
        return {name: _strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
