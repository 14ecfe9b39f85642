"""The Python code of docs/python-api.md and of the README runs, block after block, beside a job file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("page", "num_blocks"), [("docs/python-api.md", 9), ("README.md", 1)])
def test_the_code_of_a_page_runs(
    page: str, num_blocks: int, write_job: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_job(plan="auto").parent)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert len(blocks) == num_blocks
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"block {number} of {page}", "exec"), names)
