"""What a run reports while it goes on: plain data, made by the loop, shown and stored by telemetry.

Each event turns into one JSON object (`to_json`) with its kind under "event".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nereus.core.plan import Plan


def _plain(value: Any) -> Any:
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return value


class _Event:
    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {"event": type(self).__name__}
        row.update({f.name: _plain(getattr(self, f.name)) for f in fields(self)})  # type: ignore[arg-type]
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(_Event):
    """A run begins, or goes on from a checkpoint (`first_step` > 0)."""

    run: str
    job: str
    algorithm: str
    first_step: int
    num_steps: int
    devices: tuple[int, ...]
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChosen(_Event):
    """What `plan: auto` stands for from `step` on, on these devices: the planner's choice. A resume goes by it.

    step_s, stage_s: predicted. why: in words, what else there was.
    """

    step: int
    devices: tuple[int, ...]
    plan: Plan
    step_s: float
    stage_s: Mapping[str, float]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStarted(_Event):
    """The loop enters a stage of a step: generation, inference, training, transition, weight_sync, checkpoint."""

    step: int
    stage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished(_Event):
    """One step is trained and in the ledger.

    metrics: by name, among them reward, score, kl, length_mean, length_p95, length_max, policy_loss, grad_norm.
    seconds: by stage, and "step" for the whole.
    """

    step: int
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    sample: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What one model-stage's change moved: bytes that ranks received from others, and bytes that stayed."""

    received_bytes: int
    kept_bytes: int

    def to_json(self) -> dict[str, int]:
        return {"received_bytes": self.received_bytes, "kept_bytes": self.kept_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimitiveFinished(_Event):
    """One primitive of a transition is done, `number` of `total`. received_bytes: from other devices, by device."""

    step: int
    model_stage: str
    kind: str
    devices: tuple[int, ...]
    seconds: float
    received_bytes: Mapping[str, int]
    number: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionFinished(_Event):
    """The plan changed before `step`. Digests are of the logical state, whatever the layout.

    moved, lowerings: by model-stage, what it moved and how. seconds: of the change itself, the digests apart in
    `digest_seconds`; predicted_seconds: the same, before it began.
    """

    step: int
    before: Plan
    after: Plan
    devices_before: tuple[int, ...]
    devices_after: tuple[int, ...]
    moved: Mapping[str, Moved]
    lowerings: Mapping[str, str]
    predicted_seconds: float
    seconds: float
    digest_seconds: float
    digest_before: str
    digest_after: str

    @property
    def state_equal(self) -> bool:
        return self.digest_before == self.digest_after

    @property
    def received_bytes(self) -> int:
        return sum(m.received_bytes for m in self.moved.values())

    @property
    def kept_bytes(self) -> int:
        return sum(m.kept_bytes for m in self.moved.values())

    def to_json(self) -> dict[str, Any]:
        return {**_Event.to_json(self), "state_equal": self.state_equal}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWritten(_Event):
    """A complete checkpoint lies at `path`, as of the start of `step`."""

    step: int
    path: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished(_Event):
    """The run ended: all steps done, or stopped early by the user (`interrupted`)."""

    summary: Mapping[str, Any]
    interrupted: bool


Event = (
    RunStarted
    | PlanChosen
    | StageStarted
    | StepFinished
    | PrimitiveFinished
    | TransitionFinished
    | CheckpointWritten
    | RunFinished
)
