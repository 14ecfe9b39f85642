"""A run as Prometheus metrics, on http://127.0.0.1:PORT/metrics while it goes on.

Names are `nereus_...`; those of seconds are what the run measured, which are emulated where `nereus_run_info` says so.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from nereus.core.errors import UserError
from nereus.core.events import (
    DecisionMade,
    DeviceFailed,
    Event,
    PoolChanged,
    Recovered,
    RunStarted,
    StepFinished,
    TransitionFinished,
)
from nereus.core.plan import Plan
from nereus.telemetry import decisions
from nereus.telemetry.describe import known
from nereus.telemetry.progress import total_seconds

HOST = "127.0.0.1"
BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Upper bounds of the histogram of seconds."""


def check_port(port: int) -> None:
    """Raises UserError where the metrics cannot be served: the package is missing, or the port is taken."""
    _package()
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise _taken(port, error) from None


class MetricsServer:
    """Serves the metrics of a run; a listener of its events. port: 0 takes any that is free, `port` says which.

    Raises UserError, see `check_port`.
    """

    def __init__(self, port: int) -> None:
        prometheus = _package()
        self._registry = prometheus.CollectorRegistry()
        self._metrics = _Metrics(prometheus, self._registry)
        try:
            self._server, self._thread = prometheus.start_http_server(port, addr=HOST, registry=self._registry)
        except (OSError, OverflowError) as error:
            raise _taken(port, error) from None
        self.port: int = self._server.server_port

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}/metrics"

    def handle(self, event: Event) -> None:
        """Count the event in."""
        self._metrics.handle(event)

    def close(self) -> None:
        """Stop serving; the port is free when this returns."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Metrics:
    """The metrics themselves, in a registry."""

    def __init__(self, prometheus: Any, registry: Any) -> None:
        def gauge(name: str, words: str, *labels: str) -> Any:
            return prometheus.Gauge(f"nereus_{name}", words, labels, registry=registry)

        def counter(name: str, words: str, *labels: str) -> Any:
            return prometheus.Counter(f"nereus_{name}", words, labels, registry=registry)

        self.info = gauge("run_info", "The run; always 1.", "run", "job", "algorithm", "policy", "emulated")
        self.step = gauge("steps_done", "Steps that are trained.")
        self.num_steps = gauge("steps_planned", "Steps that the job has.")
        self.stage_s = prometheus.Histogram(
            "nereus_step_seconds", "Seconds of a step by stage, and of the whole step.", ["stage"], registry=registry,
            buckets=BUCKETS,
        )  # fmt: skip
        self.last_s = gauge("last_step_seconds", "The same of the last step.", "stage")
        self.predicted_s = gauge("last_step_predicted_seconds", "As the plan was predicted to take.", "stage")
        self.error = gauge("step_prediction_error_ratio", "Predicted over measured seconds of the last step, less 1.")
        self.metric = {
            "reward": gauge("reward_mean", "Mean reward of the last step."),
            "kl": gauge("kl_mean", "Mean KL divergence from the reference model."),
            "length_mean": gauge("response_length_mean_tokens", "Mean response length of the last step."),
            "length_p95": gauge("response_length_p95_tokens", "95th percentile of it."),
            "length_max": gauge("response_length_max_tokens", "Longest response of it."),
        }
        self.memory = gauge("memory_peak_bytes", "Most memory that a device took in the last step.", "device")
        self.capacity = gauge("memory_capacity_bytes", "Memory of a device.")
        self.plan = gauge(
            "plan_info", "The plan in force: 1 for each model-stage.", "model_stage", "tp", "pp", "dp", "micro_batch",
            "recompute",
        )  # fmt: skip
        self.devices = gauge("devices", "Devices that may be used.")
        self.transitions = counter("transitions", "Changes of plan.")
        self.transition_s = counter("transition_seconds", "Seconds of changes of plan.")
        self.transition_bytes = counter("transition_received_bytes", "Bytes that devices received in changes of plan.")
        self.decisions = counter("decisions", "Decisions of the controller.", "verdict", "urgent")
        self.payback = gauge("decision_payback_steps", "Until the last decision's best change is repaid; NaN: never.")
        self.limit = gauge("decision_payback_limit_steps", "The most steps that it might take: margin x horizon.")
        self.failures = counter("device_failures", "Devices that failed.", "kind")
        self.lost = counter("devices_lost", "Devices that left the pool.")
        self.joined = counter("devices_joined", "Devices that came into the pool.")
        self.recoveries = counter("recoveries", "Recoveries from failures.")
        self.recovery_s = counter("recovery_seconds", "Seconds of recoveries.")

    def handle(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._started(event)
            case StepFinished():
                self._step(event)
            case TransitionFinished():
                self.transitions.inc()
                _add(self.transition_s, event.seconds)
                self.transition_bytes.inc(event.received_bytes)
                self._in_force(event.after, event.devices_after)
            case DecisionMade():
                self.decisions.labels(event.verdict, str(event.urgent).lower()).inc()
                option = event.chosen or decisions.best(event) or {}
                payback = option.get("payback_steps")
                self.payback.set(payback if known(payback) else math.nan)
                self.limit.set(decisions.limit(event))
            case PoolChanged():
                self.devices.set(len(event.devices))
                self.lost.inc(len(event.lost))
                self.joined.inc(len(event.joined))
            case DeviceFailed():
                self.failures.labels(event.kind).inc()
            case Recovered():
                self.recoveries.inc()
                _add(self.recovery_s, event.seconds)
                self._in_force(event.plan, event.devices)

    def _started(self, event: RunStarted) -> None:
        self.info.clear()
        self.info.labels(event.run, event.job, event.algorithm, event.policy, str(event.emulated).lower()).set(1)
        self.num_steps.set(event.num_steps)
        self.step.set(event.first_step)
        if event.capacity_bytes is not None:
            self.capacity.set(event.capacity_bytes)
        self._in_force(event.plan, event.devices)

    def _step(self, event: StepFinished) -> None:
        self.step.set(event.step + 1)
        seconds = {**event.seconds, "step": total_seconds(event)}
        _replace(self.last_s, seconds)
        for stage, value in seconds.items():
            if known(value):  # one NaN would spoil a histogram's sum for good
                self.stage_s.labels(stage).observe(value)
        _replace(self.predicted_s, event.predicted)
        predicted, measured = event.predicted.get("step"), total_seconds(event)
        right = known(predicted) and known(measured) and measured > 0
        self.error.set(predicted / measured - 1 if right and predicted is not None else math.nan)
        for name, gauge in self.metric.items():
            if name in event.metrics:
                gauge.set(event.metrics[name])
        _replace(self.memory, event.peak_bytes)

    def _in_force(self, plan: Plan, devices: tuple[int, ...]) -> None:
        self.devices.set(len(devices))
        self.plan.clear()
        for p in plan.placements:
            recompute = str(p.recompute).lower()
            self.plan.labels(str(p.model_stage), p.layout.tp, p.layout.pp, p.dp, p.micro_batch, recompute).set(1)


def _add(counter: Any, value: float) -> None:
    if known(value):
        counter.inc(max(0.0, value))


def _replace(gauge: Any, values: Mapping[str, float]) -> None:
    """Those of the last step alone: what is not there any more (a device) is not served any more."""
    gauge.clear()
    for name, value in values.items():
        gauge.labels(name).set(value)


def _taken(port: int, error: Exception) -> UserError:
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return UserError(
        f"adapt.metrics_port: {port} cannot be served on {HOST}: {words.lower()}; 0 takes any that is free"
    )


def _package() -> Any:
    try:
        import prometheus_client
    except ImportError:
        raise UserError(
            "adapt.metrics_port was given but prometheus-client is not installed: pip install 'nereus-rl[metrics]'"
        ) from None
    return prometheus_client
