"""A run that adapts, as its events: 40 steps of PPO whose lengths grow, whose links slow down, whose devices come and go.

Decisions are those of the real admission code, so that what views read of them is what it writes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from nereus.controller.admission import Decision, Option, Payback, decide
from nereus.controller.monitor import THRESHOLDS, Crossing
from nereus.core.events import (
    CheckpointWritten,
    DecisionMade,
    DeviceFailed,
    Event,
    Moved,
    OutcomeMeasured,
    PlanChosen,
    PoolChanged,
    Recovered,
    RunFinished,
    RunStarted,
    StepFinished,
    TransitionFinished,
)
from nereus.core.plan import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    REFERENCE_INFERENCE,
    Layout,
    Placement,
    Plan,
)

NUM_STEPS = 40
CAPACITY = 4 * 2**30
MARGIN = 0.5


def plan(devices: Iterable[int], tp: int = 1, pp: int = 1, **training: Any) -> Plan:
    """Generation on all devices, training in units of tp x pp, the critic and the reference on a half each."""
    pool = tuple(sorted(devices))
    units = len(pool) // (tp * pp)
    half = max(1, len(pool) // 2)
    return Plan(
        (
            Placement(model_stage=ACTOR_GENERATION, layout=Layout(), dp=len(pool), gpus=pool, micro_batch=32),
            Placement(model_stage=REFERENCE_INFERENCE, layout=Layout(), dp=half, gpus=pool[:half], micro_batch=8),
            Placement(model_stage=CRITIC_TRAINING, layout=Layout(), dp=half, gpus=pool[-half:], micro_batch=4),
            Placement(
                model_stage=ACTOR_TRAINING,
                layout=Layout(tp, pp),
                dp=units,
                gpus=pool[: units * tp * pp],
                **{"micro_batch": 4, **training},
            ),
        )
    )


class AdaptiveRun:
    """Makes the events in order; `events` is the result."""

    def __init__(self) -> None:
        self.devices: tuple[int, ...] = tuple(range(8))
        self.plan = plan(self.devices)
        self.number = 0
        self.slow = 1.0
        self.wrong = 1.0
        self.events: list[Event] = [*self._begin()]
        for step in range(NUM_STEPS):
            self.events += self._before(step)
            self.events.append(self.step(step))
            self.events += self._after(step)
        self.events.append(
            RunFinished(
                summary={"samples_trained": 40 * 64, "samples_repeated": 0, "samples_skipped": 0}, interrupted=False
            )
        )

    def _begin(self) -> Iterator[Event]:
        yield RunStarted(
            run="grow-1", job="grow", algorithm="ppo", first_step=0, num_steps=NUM_STEPS, devices=self.devices,
            plan=self.plan, policy="nereus", emulated=True, capacity_bytes=CAPACITY,
        )  # fmt: skip
        yield PlanChosen(
            step=0, devices=self.devices, plan=self.plan, step_s=1.31, stage_s={"generation": 0.6, "training": 0.5},
            why="3 more were within 5%",
        )  # fmt: skip

    # -- what happens ------------------------------------------------------------------------------------------------

    def _before(self, step: int) -> Iterator[Event]:
        if step == 22:
            self.slow = 0.25
        if step == 32:
            yield from self._death(step, "training", (3,), tp=2, redone=("training",))
        if step == 36:
            yield from self._death(step, "generation", (0, 1), tp=2, restored_from=35)
            yield self.step(35)

    def _after(self, step: int) -> Iterator[Event]:
        if step % 5 == 4:
            yield CheckpointWritten(
                step=step + 1, path=f"runs/grow-1/checkpoints/step-{step + 1}", num_bytes=92_000_000, seconds=0.21
            )
        if step == 6:
            now_s = self.predicted_s(step)
            better = (Option(plan=plan(self.devices, 2), step_latency_s=0.83 * now_s, transition_cost_s=1.4),)
            yield self._decision(step, (self._length(step, 0, 1.0),), now_s, better)
        if step == 18:
            now_s = self.predicted_s(step)
            no_way = "device 2 would hold 4.3 of 4.0 GiB"
            options = (
                Option(plan=plan(self.devices, 4), step_latency_s=0.86 * now_s, transition_cost_s=None, why=no_way),
                Option(plan=plan(self.devices, 2), step_latency_s=0.87 * now_s, transition_cost_s=1.9),
            )
            yield self._decision(step, (self._length(step, 6, 12.0),), now_s, options)
            yield from self._go(step + 1, plan(self.devices, 2), predicted_s=1.9, seconds=2.16)
        if step == 23:
            after = [self.step(s) for s in range(19, 23)]
            yield OutcomeMeasured(
                step=step,
                number=2,
                steps=4,
                before_s=3.02,
                after_s=fmean(s.seconds["step"] for s in after),
                predicted_s=fmean(s.predicted["step"] for s in after),
                transition_s=2.16,
                predicted_transition_s=1.9,
            )
        if step == 24:
            now_s = self.predicted_s(step)
            slow = Crossing(signal="bandwidth", value=2.5e8, reference=1e9, horizon_steps=1.0, threshold=0.2)
            options = (
                Option(plan=plan(self.devices, 1, 2), step_latency_s=0.97 * now_s, transition_cost_s=7.7),
                Option(plan=plan(self.devices), step_latency_s=1.04 * now_s, transition_cost_s=6.9),
            )
            yield self._decision(step, (slow,), now_s, options)
        if step == 27:
            yield PoolChanged(step=step + 1, devices=tuple(range(6)), leaving=(6, 7), notice_s=30.0, why="notice")
            yield from self._move(step + 1, tuple(range(6)), 2, True, 2.41)
            yield PoolChanged(step=step + 1, devices=tuple(range(6)), lost=(6, 7), why="notice")
        if step == 37:
            pool = (*self.devices, 8, 9)
            yield PoolChanged(step=step + 1, devices=pool, joined=(8, 9), why="scale command")
            yield from self._move(step + 1, pool, 2, True, 1.2, urgent=False)

    def _death(
        self, step: int, stage: str, dead: tuple[int, ...], tp: int, restored_from: int | None = None, **facts: Any
    ) -> Iterator[Event]:
        for device in dead:
            yield DeviceFailed(
                step=step, stage=stage, device=device, kind="died", why="killed by SIGKILL", detect_seconds=0.34
            )
        left = tuple(d for d in self.devices if d not in dead)
        yield PoolChanged(step=step, devices=left, lost=dead, why="failure")
        yield from self._move(step, left, tp, False, 1.7, moved=False)
        yield Recovered(
            step=step,
            stage=stage,
            devices=left,
            plan=self.plan,
            seconds=2.2,
            rolled="applied by all" if restored_from is None else "none",
            restored_from=restored_from,
            **facts,
        )

    def _move(
        self,
        step: int,
        pool: tuple[int, ...],
        tp: int,
        valid: bool,
        cost_s: float,
        *,
        urgent: bool = True,
        moved: bool = True,
    ) -> Iterator[Event]:
        """The decision about another pool, and the change of plan, which is part of the recovery where there is one."""
        crossing = Crossing(signal="pool", value=len(pool), reference=len(self.devices), horizon_steps=9.0)
        after = plan(pool, tp, micro_batch=2, recompute=True)
        now_s = self.predicted_s(step) if valid else None
        self.devices = pool
        options = (Option(plan=after, step_latency_s=self.predicted_s(step), transition_cost_s=cost_s),)
        yield self._decision(step, (crossing,), now_s, options, urgent=urgent)
        if moved:
            yield from self._go(step, after, predicted_s=cost_s, seconds=cost_s * 1.1)
        self.plan = after

    def _go(self, step: int, after: Plan, *, predicted_s: float, seconds: float) -> Iterator[Event]:
        yield TransitionFinished(
            step=step,
            before=self.plan,
            after=after,
            devices_before=self.plan.gpus,
            devices_after=self.devices,
            moved={"actor/training": Moved(received_bytes=31_000_000, kept_bytes=61_000_000)},
            lowerings={"actor/training": "direct"},
            predicted_seconds=predicted_s,
            seconds=seconds,
            digest_seconds=0.05,
            digest_before="d0",
            digest_after="d0",
            decision=self.number,
        )
        self.plan, self.wrong = after, 1.03

    # -- its parts ---------------------------------------------------------------------------------------------------

    def _decision(
        self,
        step: int,
        triggers: tuple[Crossing, ...],
        now_s: float | None,
        options: tuple[Option, ...],
        urgent: bool = False,
    ) -> DecisionMade:
        made = decide(
            options,
            step_latency_s=now_s,
            horizon_steps=min(t.horizon_steps for t in triggers),
            urgent=urgent,
            policy=Payback(MARGIN),
        )
        self.number += 1
        return decision_event(made, step=step, number=self.number, triggers=triggers, devices=self.devices)

    def _length(self, step: int, since: int, horizon: float) -> Crossing:
        return Crossing(
            signal="length_mean", value=length(step), reference=length(since), horizon_steps=horizon,
            threshold=THRESHOLDS["length_mean"],
        )  # fmt: skip

    def predicted_s(self, step: int) -> float:
        """Of the present plan on the present devices."""
        return self.step(step).predicted["step"]

    def step(self, step: int) -> StepFinished:
        """A step of the present plan: its times grow with the lengths, less on more devices."""
        wave = math.sin(step * 1.7)
        work = length(step) / 120 * 8 / len(self.devices) * (1 + 0.02 * wave)
        training = 0.55 * work * (1.0 if self.wrong == 1.0 else 0.7)
        predicted = {"generation": 0.6 * work, "inference": 0.18 * work, "training": training}
        seconds = {
            **{stage: s * self.wrong * (1 + 0.05 * wave) for stage, s in predicted.items()},
            "weight_sync": 0.05 / self.slow,
            "controller": 0.004,
        }
        predicted["weight_sync"] = 0.05
        peak = 2**30 * (1.3 + 1.9 * length(step) / length(40))
        return StepFinished(
            step=step,
            metrics={
                "reward": 0.2 + 0.6 * step / NUM_STEPS + 0.03 * wave,
                "kl": 0.002 * step,
                "length_mean": length(step),
                "length_p95": length(step) * 1.7,
                "length_max": length(step) * 2.2,
                "policy_loss": -0.01 * wave,
            },
            seconds={**seconds, "step": sum(seconds.values()) + 0.06},
            sample=f"count to {step}",
            predicted={**predicted, "step": sum(predicted.values()) + 0.06},
            peak_bytes={str(d): int(peak * (1 - 0.03 * i)) for i, d in enumerate(self.devices)},
            signals={"length_mean": length(step), "bandwidth": 1e9 * self.slow, "compute": 0.42},
        )


def length(step: int) -> float:
    """Mean response length, tokens."""
    return 110 * 1.046**step


def decision_event(
    made: Decision, *, step: int, number: int, triggers: Iterable[Crossing], devices: tuple[int, ...]
) -> DecisionMade:
    """What the loop reports of a decision."""
    row: Mapping[str, Any] = made.to_json()
    return DecisionMade(
        step=step,
        number=number,
        devices=devices,
        triggers=tuple(asdict(t) for t in triggers),
        considered=tuple(row["considered"]),
        policy="nereus",
        margin=MARGIN,
        replan_seconds=0.08,
        **{name: row[name] for name in ("verdict", "urgent", "step_latency_s", "horizon_steps")},
    )


def write_log(path: Path, events: Iterable[Event], start_s: float = 1.79e9) -> Path:
    """A run folder with these events, a second between two."""
    path.mkdir(parents=True)
    (path / "job.yaml").write_text("name: grow\n")
    rows = [{"time": start_s + i, **event.to_json()} for i, event in enumerate(events)]
    (path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
