"""What a run reports while it goes on: plain data, made by the loop, shown and stored by telemetry.

Each event turns into one JSON object (`to_json`) with its kind under "event".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
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
    """A run begins, or goes on from a checkpoint (`first_step` > 0).

    emulated: devices are paced (`cluster.pace`): seconds are those of the devices described there.
    capacity_bytes: of a device; None where it is not known.
    """

    run: str
    job: str
    algorithm: str
    first_step: int
    num_steps: int
    devices: tuple[int, ...]
    plan: Plan
    policy: str = "static"
    emulated: bool = False
    capacity_bytes: int | None = None


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
    seconds: by stage, and "step" for the whole; "controller" is what monitoring and deciding took of it.
    predicted: the same stages, and "step", as the plan was predicted to take at these lengths; empty where nobody asked.
    peak_bytes: by device, the most memory it took during the step; empty where it is not known.
    signals: what the monitor watches: lengths, achieved efficiency, achieved bandwidth (bytes a second).
    """

    step: int
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    sample: str = ""
    predicted: Mapping[str, float] = field(default_factory=dict)
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    signals: Mapping[str, float] = field(default_factory=dict)


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

    moved, lowerings: by model-stage, what it moved and how. decision: the number of the one it follows, None for a change
    of the job file. seconds: of the change itself, the digests apart in
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
    decision: int | None = None

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
class PoolChanged(_Event):
    """The devices are others from `step` on. why: supply, scale command, notice, death, node lost.

    devices: that may be used from now on. leaving: that are still there and will vanish in `notice_s` seconds, or (None)
    when the plan has left them.
    """

    step: int
    devices: tuple[int, ...]
    joined: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    notice_s: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionMade(_Event):
    """The controller's answer to a trigger, with all the numbers behind it.

    verdict: admitted, refused, restart. triggers: signal, value, reference, threshold (relative, or None), horizon_steps
    of each that crossed.
    step_latency_s: predicted, of the current plan; None where it is invalid: does not fit or lacks devices.
    considered: in the order they were tried, as `controller.admission.Decision.to_json` has them: plan, step_latency_s,
    savings_s, transition_cost_s, payback_steps, admitted, why.
    replan_seconds: beside the training; cpu_seconds: of it the processor time.
    """

    step: int
    number: int
    verdict: str
    urgent: bool
    devices: tuple[int, ...]
    triggers: tuple[Mapping[str, Any], ...]
    step_latency_s: float | None
    horizon_steps: float
    considered: tuple[Mapping[str, Any], ...]
    policy: str
    margin: float
    replan_seconds: float

    @property
    def chosen(self) -> Mapping[str, Any] | None:
        """The option that was admitted."""
        return next((option for option in self.considered if option["admitted"]), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeMeasured(_Event):
    """What an admitted change brought: `number` is that of its decision, latencies are means over `steps` steps.

    before_s: measured in the steps before the change. None where there were none.
    """

    step: int
    number: int
    steps: int
    before_s: float | None
    after_s: float
    predicted_s: float
    transition_s: float
    predicted_transition_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFailed(_Event):
    """A device died, stopped answering, or ran out of memory, in a stage of a step.

    kind: died, silent, out of memory, error. detect_seconds: from its last sign of life to being noticed; None for what
    it told itself.
    """

    step: int
    stage: str
    device: int
    kind: str
    why: str
    detect_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered(_Event):
    """The job goes on after failures, in the same step, from what the devices that are left hold.

    seconds: from the notice of the failure to the work going on. plan: the one it goes on with.
    rolled: what became of the update in flight: applied by all, discarded by all, none.
    redone: stages of the step that are done again. restored_from: the checkpoint's step where a last copy was gone.
    """

    step: int
    stage: str
    devices: tuple[int, ...]
    plan: Plan
    seconds: float
    rolled: str
    redone: tuple[str, ...] = ()
    restored_from: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWritten(_Event):
    """A complete checkpoint lies at `path`, as of the start of `step`.

    seconds: from the start of the step until it lay there; blocked_seconds: of these the loop waited so many.
    waited: why it waited for the files, where it did.
    """

    step: int
    path: str
    num_bytes: int
    seconds: float
    blocked_seconds: float | None = None
    waited: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(_Event):
    """The checkpoint of the start of `step` could not be written; those before are still there. The run goes on."""

    step: int
    why: str


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
    | PoolChanged
    | DecisionMade
    | OutcomeMeasured
    | DeviceFailed
    | Recovered
    | CheckpointWritten
    | CheckpointFailed
    | RunFinished
)
