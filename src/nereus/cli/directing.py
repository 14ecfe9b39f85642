"""Who decides on a run's plans: the changes of its job file, or the controller with all that it needs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from nereus.api.jobs import AutoPlanner, scenario_of
from nereus.api.replan import JobPlanner
from nereus.api.scenario import Scenario
from nereus.cli.start import Start
from nereus.controller.admission import AnyGain, Payback, Policy
from nereus.controller.controller import Controller
from nereus.controller.log import started
from nereus.controller.monitor import Monitor
from nereus.core.errors import UserError
from nereus.core.events import DecisionMade, Event, StageStarted
from nereus.core.job import Job, SupplyPoint
from nereus.core.plan import Plan
from nereus.rl.adapt import AdaptiveDirector
from nereus.rl.direction import Director, FixedDirector
from nereus.rl.supply import SCALE, News, Supply, read_trace
from nereus.runtime.cluster import Cluster, PoolEvents
from nereus.runtime.fleet import LOCAL_RATES, Fleet
from nereus.telemetry.folder import Record
from nereus.transition.rates import Rates

CONTROLLER_LOG = "controller.jsonl"
"""In a run folder: what the controller was told and what it answered (`controller.log`)."""

DIGESTS_S = 0.1
"""What a change takes beside its primitives, before any has been seen: two digests of all state."""


def make_director(
    stack: ExitStack, start: Start, fleet: Fleet, folder: Path, emit: Callable[[Event], None], records: Sequence[Record]
) -> tuple[Director, Callable[[Event], None]]:
    """(the director of a run, what must hear of the run's events). records: of sessions before this one.

    Raises UserError where the job's plans cannot be predicted, unless it has a plan and asks for no policy.
    """
    job = start.job
    scenario = _scenario(job, fleet.usable_bytes)
    if job.changes or scenario is None:
        return FixedDirector(start.changes, _replan(job, scenario), fleet), lambda event: None
    began, elapsed_s = time.monotonic(), _elapsed_s(records)
    decided = max((r.event.number for r in records if isinstance(r.event, DecisionMade)), default=0)
    supply = Supply(
        supply_points(job),
        elapsed_s=lambda: elapsed_s + time.monotonic() - began,
        requests=folder / SCALE,
        kill=fleet.cluster.kill,
        cluster_news=lambda: _news(fleet.cluster),
        startable=fleet.cluster.available if isinstance(fleet.cluster, PoolEvents) else None,
        first_step=start.first_step,
    )
    log = stack.enter_context((folder / CONTROLLER_LOG).open("a", buffering=1))

    def record(row: Mapping[str, Any]) -> None:
        log.write(json.dumps(row) + "\n")

    record(started(start.devices, decided))
    director = AdaptiveDirector(
        fleet=fleet,
        controller=make_controller(job, start.devices, decided),
        planner=JobPlanner(
            scenario,
            longest=job.sampling.max_new_tokens,
            static=job.policy == "static",
            overhead_s=DIGESTS_S,
        ),
        supply=supply,
        emit=emit,
        policy=job.policy,
        margin=job.adapt.margin,
        record=record,
    )
    stack.callback(director.close)

    def heard(event: Event) -> None:
        if isinstance(event, StageStarted):
            supply.stage_began(event.step, event.stage)

    return director, heard


def make_controller(job: Job, devices: tuple[int, ...], decided: int) -> Controller:
    """The controller of a job's policy. decided: the number of the last decision."""
    a = job.adapt
    lengths = dict.fromkeys(("length_mean", "length_p95", "length_max"), a.length)
    thresholds = {**lengths, "compute": a.efficiency, "bandwidth": a.bandwidth}
    policies: dict[str, Policy] = {"nereus": Payback(a.margin), "static": Payback(0.0)}
    watched = job.policy in ("nereus", "any-gain")
    return Controller(
        devices,
        policy=policies.get(job.policy, AnyGain()),
        monitor=Monitor(thresholds=thresholds if watched else {}),
        every=a.every if job.policy == "every-k-steps" else 0,
        decided=decided,
    )


def link_factors(job: Job, cluster: Cluster) -> Callable[[int], None]:
    """What must be done before each step so that the job's emulated links are as slow as it says."""
    slow = job.cluster.pace.slow if job.cluster.pace is not None else ()

    def before_step(step: int) -> None:
        factor = max(((s.step, s.factor) for s in slow if s.step <= step), default=(0, 1.0))[1]
        cluster.call("set_link_factor", dict.fromkeys(cluster.devices, (factor,))).results()

    return before_step if slow else lambda step: None


def transition_rates(job: Job) -> Rates:
    """What transitions are planned with before any was made."""
    pace = job.cluster.pace
    if pace is None:
        return LOCAL_RATES
    link = {"intra_bytes_s": pace.link_bytes_s, "inter_bytes_s": pace.link_bytes_s}
    return replace(LOCAL_RATES, **link, intra_latency_s=pace.latency_s, inter_latency_s=pace.latency_s)


def supply_points(job: Job) -> tuple[SupplyPoint, ...]:
    """How the pool changes by the job file. Raises UserError for a trace that cannot be read."""
    trace = job.cluster.supply_trace
    return (*job.cluster.supply, *(read_trace(Path(trace)) if trace is not None else ()))


def _elapsed_s(records: Sequence[Record]) -> float:
    """Seconds between the first and the last that earlier sessions of a run wrote down."""
    return records[-1].time_s - records[0].time_s if records else 0.0


def _scenario(job: Job, capacity_bytes: float) -> Scenario | None:
    """The job's, if it can be predicted. capacity_bytes: of a GPU, where by now the run's own processes hold memory."""
    try:
        scenario = scenario_of(job)
    except UserError:
        if job.plan == "auto" or job.adapt.policy is not None:
            raise
        return None
    return scenario if scenario.device_kind.name == "cpu" else replace(scenario, memory_bytes=capacity_bytes)


def _replan(job: Job, scenario: Scenario | None) -> Callable[[Sequence[int], Plan], Plan]:
    return lambda devices, current: AutoPlanner(job, scenario=scenario)(0, devices, current)


def _news(cluster: Cluster) -> list[News]:
    """Devices that the cluster itself has won or lost."""
    if not isinstance(cluster, PoolEvents):
        return []
    return [News(joined=news.appeared, gone=news.vanished, why="the cluster") for news in cluster.poll()]
