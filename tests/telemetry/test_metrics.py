"""What Prometheus reads of a run, over HTTP."""

from __future__ import annotations

import math
import socket
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nereus.core.errors import UserError
from nereus.core.events import Event, StepFinished
from nereus.telemetry.metrics import MetricsServer, check_port

parser = pytest.importorskip("prometheus_client.parser")

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(server: MetricsServer) -> Samples:
    with urllib.request.urlopen(server.address, timeout=10) as answer:
        text = answer.read().decode()
    families = parser.text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"nereus_{name}", tuple(sorted(labels.items()))]


def test_a_whole_run_can_be_read_over_http_at_its_end(adaptive: list[Event]) -> None:
    with MetricsServer(0) as server:
        for event in adaptive:
            server.handle(event)
        found = read(server)
    steps = [e for e in adaptive if isinstance(e, StepFinished)]
    assert value(found, "steps_done") == 40 == value(found, "steps_planned")
    assert value(found, "step_seconds_count", stage="step") == len(steps) == 41
    total = sum(e.seconds["training"] for e in steps)
    assert value(found, "step_seconds_sum", stage="training") == pytest.approx(total)
    last = steps[-1]
    assert value(found, "last_step_seconds", stage="generation") == pytest.approx(last.seconds["generation"])
    error = last.predicted["step"] / last.seconds["step"] - 1
    assert value(found, "step_prediction_error_ratio") == pytest.approx(error)
    assert value(found, "reward_mean") == pytest.approx(last.metrics["reward"])
    assert value(found, "response_length_mean_tokens") == pytest.approx(last.metrics["length_mean"])
    assert value(found, "decisions_total", verdict="refused", urgent="false") == 2
    assert value(found, "decisions_total", verdict="admitted", urgent="true") == 3
    assert value(found, "decision_payback_limit_steps") == 4.5
    assert value(found, "transitions_total") == 3 and value(found, "transition_received_bytes_total") == 3 * 31_000_000
    assert value(found, "device_failures_total", kind="died") == 3
    assert value(found, "devices_lost_total") == 5 and value(found, "devices_joined_total") == 2
    assert value(found, "devices") == 5 and value(found, "recoveries_total") == 2
    assert value(found, "run_info", run="grow-1", job="grow", algorithm="ppo", policy="nereus", emulated="true") == 1
    plans = [dict(labels) for name, labels in found if name == "nereus_plan_info"]
    assert {p["model_stage"]: (p["tp"], p["pp"], p["dp"]) for p in plans} == {
        "actor/generation": ("1", "1", "5"),
        "reference/inference": ("1", "1", "2"),
        "critic/training": ("1", "1", "2"),
        "actor/training": ("2", "1", "2"),
    }, "the plan in force alone"
    devices = {dict(labels)["device"] for name, labels in found if name == "nereus_memory_peak_bytes"}
    assert devices == {"2", "4", "5", "8", "9"}, "devices that are gone are not served"


def test_a_step_that_is_not_finite_spoils_no_sum(story: Any) -> None:
    with MetricsServer(0) as server:
        server.handle(story.started())
        server.handle(story.step(0))
        server.handle(replace(story.step(1, reward=math.nan), seconds={"step": math.nan}, predicted={"step": 1.0}))
        found = read(server)
    assert value(found, "step_seconds_sum", stage="step") == 2.0
    assert math.isnan(value(found, "reward_mean")) and math.isnan(value(found, "step_prediction_error_ratio"))


def test_a_port_that_is_taken_is_told_and_let_go_when_the_run_ends() -> None:
    with MetricsServer(0) as server:
        for attempt in (lambda: MetricsServer(server.port), lambda: check_port(server.port)):
            with pytest.raises(UserError, match=f"adapt.metrics_port: {server.port} .*in use") as caught:
                attempt()
            assert "\n" not in str(caught.value)
    check_port(server.port)
    MetricsServer(server.port).close()
    with pytest.raises(UserError, match="70000"):
        check_port(70000)


def test_a_run_whose_port_is_taken_does_not_begin(run: Any, write_job: Any, tmp_path: Path) -> None:
    with MetricsServer(0) as server, pytest.raises(UserError, match=f"adapt.metrics_port: {server.port}"):
        run(write_job(adapt={"metrics_port": server.port}))
    assert not (tmp_path / "runs").exists()


def test_it_listens_on_this_machine_alone() -> None:
    with MetricsServer(0) as server:
        assert server._server.server_address[0] == "127.0.0.1"
        with socket.create_connection(("127.0.0.1", server.port), timeout=5):
            pass


def test_without_the_package_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for attempt in (lambda: MetricsServer(0), lambda: check_port(0)):
        with pytest.raises(UserError, match=r"pip install 'nereus-rl\[metrics\]'"):
            attempt()
