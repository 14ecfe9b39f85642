"""The code of docs/python-api.md runs, block after block, beside a job file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "python-api.md"


def test_the_code_of_the_page_runs(write_job: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_job(plan="auto").parent)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 4
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"block {number} of {PAGE.name}", "exec"), names)
