"""The other systems of `nereus bench reshard` that are no part of our installation: left out in one line, or they arrive."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from nereus.cli.bench_reshard import bench_reshard
from nereus.cli.bench_reshard_cases import PARAMETERS_ONLY, case_of
from nereus.cli.bench_reshard_peers import peers_named
from nereus.core.plan import ACTOR_TRAINING

PACKAGES = {"universal": "deepspeed", "refit": "megatron"}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_peer_that_is_not_installed_says_how_it_would_be(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("bench_reshard_universal", "bench_reshard_refit"):
        monkeypatch.setattr(f"nereus.cli.{module}.find_spec", lambda name: None)
    said: list[str] = []
    found = bench_reshard(2e6, devices=(2,), transitions=(), peers=(name,), repeats=1, figure=False, say=said.append)
    assert found["summary"]["notes"] == said == [peers_named([name])[0].missing()]
    assert "\n" not in said[0] and said[0].startswith(f"{name} is left out") and "pip install" in said[0]


def test_parameters_only_is_the_same_model_without_its_moments() -> None:
    whole, alone = (case_of("extend 1 -> 2" + kind, 2_000_000) for kind in ("", PARAMETERS_ONLY))
    assert (whole.parameters, whole.target) == (alone.parameters, alone.target)
    counters = 24
    whole_bytes, alone_bytes = (case.specs[ACTOR_TRAINING].num_bytes - counters for case in (whole, alone))
    assert alone_bytes == 4 * alone.parameters == whole_bytes * alone.state_fraction
    assert alone.lower_bound_bytes == alone_bytes + counters


@pytest.mark.parametrize(
    ("name", "transition", "found"),
    [
        ("universal", "tp4 -> tp2 dp2", {"save", "convert", "load", "checkpoint"}),
        ("universal", "tp4 -> pp4", set()),
        ("refit", "tp4 -> pp4" + PARAMETERS_ONLY, {"refit"}),
        ("refit", "extend 1 -> 2" + PARAMETERS_ONLY, {"refit"}),
    ],
)
def test_a_peer_brings_the_state_to_the_new_layout(name: str, transition: str, found: set[str]) -> None:
    """It compares what arrived itself, and raises."""
    if find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed")
    before = dict(os.environ)
    (peer,) = peers_named([name])
    measured = {
        key: seconds
        for _, seconds in peer.measure([case_of(transition, 2_000_000)], 1)
        for key, seconds in seconds.items()
    }
    prefix = {"universal": "universal", "refit": "megatron"}[name]
    assert {f"{prefix}_{stage}_s" for stage in found} <= set(measured)
    assert bool(measured) == bool(found) and all(value > 0 for value in measured.values())
    assert dict(os.environ) == before
