"""A run in TensorBoard: metrics, times measured and predicted, memory, signals as curves; what happened as text."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nereus.core.errors import UserError
from nereus.core.events import (
    DecisionMade,
    DeviceFailed,
    Event,
    OutcomeMeasured,
    PoolChanged,
    Recovered,
    RunStarted,
    StepFinished,
    TransitionFinished,
)
from nereus.core.plan import Plan
from nereus.telemetry import decisions, describe


class TensorBoardTracker:
    """Writes event files that `tensorboard --logdir` reads, under `path`.

    A run that is resumed writes to the same `path`; TensorBoard then drops the steps that are done over.
    Raises UserError when tensorboard, an extra, is not installed.
    """

    def __init__(self, path: Path) -> None:
        self._writer_class = _summary_writer()
        self._path = path
        self._plan: Plan | None = None
        self._capacity_bytes: int | None = None
        self._writer: Any = None  # RunStarted opens it and says from which step on the curves start anew

    def handle(self, event: Event) -> None:
        """Write what this event adds to a curve; on disk when this returns."""
        match event:
            case RunStarted():
                self.close()
                self._plan = event.plan
                self._capacity_bytes = event.capacity_bytes
                self._writer = self._writer_class(str(self._path), purge_step=event.first_step or None)
                self._writer.add_scalar("plan/num_devices", len(event.devices), event.first_step)
            case StepFinished():
                self._step(event)
            case TransitionFinished():
                self._transition(event)
            case DecisionMade():
                self._writer.add_text("decisions", decisions.line(event, self._plan), event.step)
            case OutcomeMeasured():
                self._writer.add_text("decisions", decisions.outcome(event), event.step)
            case PoolChanged():
                self._writer.add_text("pool", describe.pool(event), event.step)
                self._writer.add_scalar("plan/num_devices", len(event.devices), event.step)
            case DeviceFailed():
                self._writer.add_text("failures", describe.failure(event), event.step)
            case Recovered():
                self._plan = event.plan
                self._writer.add_text("failures", describe.recovery(event), event.step)
                self._writer.add_scalar("recovery/seconds", event.seconds, event.step)
            case _:
                return
        self._writer.flush()

    def _step(self, event: StepFinished) -> None:
        for name, value in event.metrics.items():
            self._writer.add_scalar(f"metrics/{name}", value, event.step)
        for stage, value in event.seconds.items():
            self._writer.add_scalar(f"seconds/{stage}", value, event.step)
        for stage, value in event.predicted.items():
            self._writer.add_scalar(f"predicted_seconds/{stage}", value, event.step)
        for name, value in event.signals.items():
            self._writer.add_scalar(f"signals/{name}", value, event.step)
        if event.peak_bytes:
            self._writer.add_scalar("memory/peak_bytes", max(event.peak_bytes.values()), event.step)
            if self._capacity_bytes is not None:
                self._writer.add_scalar("memory/capacity_bytes", self._capacity_bytes, event.step)

    def _transition(self, event: TransitionFinished) -> None:
        self._plan = event.after
        self._writer.add_text("transitions", describe.transition(event), event.step)
        self._writer.add_scalar("plan/num_devices", len(event.devices_after), event.step)
        self._writer.add_scalar("transition/seconds", event.seconds, event.step)
        self._writer.add_scalar("transition/received_bytes", event.received_bytes, event.step)

    def close(self) -> None:
        """Close the event file; the tracker may be closed more than once."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "TensorBoard was asked for but is not installed: pip install 'nereus-rl[tensorboard]'"
        ) from None
    return SummaryWriter
