"""A whole run on a Ray that it starts itself: what it does is what it does on local processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")


def test_a_run_on_ray_is_the_run_on_local_processes(nereus: Callable[..., Any], write_job: Callable[..., Path]) -> None:
    job = write_job(steps=2)
    found = {}
    for backend in ("local", "ray"):
        answer = nereus("run", job, "--set", f"cluster.backend={backend}", "--set", "cluster.address=local", "--json")
        assert answer.exit_code == 0, answer.stderr
        assert answer.stdout.count("\n") == 1, "Ray has written to standard output"
        found[backend] = json.loads(answer.stdout)
    assert found["ray"]["history"] == found["local"]["history"]
    assert not ray.is_initialized()
