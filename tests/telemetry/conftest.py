"""A run to look at: the events that a loop would report, with one change of plan on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from adaptive_story import AdaptiveRun
from hypothesis import settings

from nereus.core.events import (
    CheckpointWritten,
    Event,
    Moved,
    RunFinished,
    RunStarted,
    StageStarted,
    StepFinished,
    TransitionFinished,
)
from nereus.core.plan import ACTOR_GENERATION, ACTOR_TRAINING, REFERENCE_INFERENCE, Layout, Placement, Plan

settings.register_profile("unhurried", deadline=None)  # a busy machine is no bug of a view
settings.load_profile("unhurried")


def _plan(num_devices: int, tp: int, pp: int) -> Plan:
    gpus = tuple(range(num_devices))
    return Plan(
        (
            Placement(model_stage=ACTOR_GENERATION, layout=Layout(), dp=num_devices, gpus=gpus),
            Placement(model_stage=REFERENCE_INFERENCE, layout=Layout(), dp=2, gpus=gpus[:2]),
            Placement(
                model_stage=ACTOR_TRAINING,
                layout=Layout(tp, pp),
                dp=num_devices // (tp * pp),
                gpus=gpus,
                micro_batch=4,
            ),
        )
    )


def _started(first_step: int = 0) -> RunStarted:
    return RunStarted(
        run="r1", job="count", algorithm="grpo", first_step=first_step, num_steps=8, devices=tuple(range(8)),
        plan=_plan(8, 1, 1),
    )  # fmt: skip


def _step(step: int, **metrics: float) -> StepFinished:
    return StepFinished(
        step=step,
        metrics={"reward": step / 10, "kl": 0.01, "length_mean": 10.0 + step, "policy_loss": -0.1, **metrics},
        seconds={"generation": 1.0, "inference": 0.25, "training": 0.5, "weight_sync": 0.125, "step": 2.0},
        sample=f"sample {step}",
    )


def _transition(step: int, *, equal: bool = True) -> TransitionFinished:
    return TransitionFinished(
        step=step,
        before=_plan(8, 1, 1),
        after=_plan(4, 2, 1),
        devices_before=tuple(range(8)),
        devices_after=tuple(range(4)),
        moved={"actor/training": Moved(received_bytes=3_200_000, kept_bytes=1_100_000)},
        lowerings={"actor/training": "direct"},
        predicted_seconds=0.25,
        seconds=0.31,
        digest_seconds=0.05,
        digest_before="d0",
        digest_after="d0" if equal else "d1",
    )


def _finished() -> RunFinished:
    summary = {"samples_trained": 512, "samples_repeated": 0, "samples_skipped": 3}
    return RunFinished(summary=summary, interrupted=False)


class Story:
    """Builders of events; see the functions above for what they hold."""

    plan: Callable[..., Plan] = staticmethod(_plan)
    started: Callable[..., RunStarted] = staticmethod(_started)
    step: Callable[..., StepFinished] = staticmethod(_step)
    transition: Callable[..., TransitionFinished] = staticmethod(_transition)
    finished: Callable[..., RunFinished] = staticmethod(_finished)

    def whole(self, **options: Any) -> list[Event]:
        """A run of eight steps whose plan changes before step 4."""
        events: list[Event] = [_started()]
        for step in range(8):
            if step == 4:
                events.append(_transition(step, **options))
            events += [StageStarted(step=step, stage="generation"), _step(step)]
        checkpoint = CheckpointWritten(step=8, path="runs/r1/checkpoints/8", num_bytes=5_000_000, seconds=0.12)
        return [*events, checkpoint, _finished()]


@pytest.fixture(scope="session")
def story() -> Story:
    return Story()


@pytest.fixture(scope="session")
def adaptive() -> list[Event]:
    """The events of a run that adapts."""
    return AdaptiveRun().events
