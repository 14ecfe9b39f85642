"""What TensorBoard reads back of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from nereus.core.errors import UserError
from nereus.core.events import Event, StepFinished
from nereus.telemetry.tracker import TensorBoardTracker

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def curves(path: Path) -> Any:
    return accumulator.EventAccumulator(str(path)).Reload()


def test_every_metric_and_time_of_every_step_is_a_curve(tmp_path: Path, story: Any) -> None:
    with TensorBoardTracker(tmp_path) as tracker:
        for event in story.whole():
            tracker.handle(event)
    read = curves(tmp_path)
    for prefix, values in (("metrics", story.step(0).metrics), ("seconds", story.step(0).seconds)):
        for name in values:
            assert [point.step for point in read.Scalars(f"{prefix}/{name}")] == list(range(8))
    rewards = [point.value for point in read.Scalars("metrics/reward")]
    assert rewards == pytest.approx([step / 10 for step in range(8)])
    assert [(p.step, p.value) for p in read.Scalars("plan/num_devices")] == [(0, 8.0), (4, 4.0)]


def test_a_transition_is_text_at_its_step(tmp_path: Path, story: Any) -> None:
    with TensorBoardTracker(tmp_path) as tracker:
        for event in story.whole(equal=False):
            tracker.handle(event)
    [entry] = curves(tmp_path).Tensors("transitions/text_summary")
    assert entry.step == 4
    [text] = entry.tensor_proto.string_val
    assert "actor/training tp1 pp1 dp8 -> tp2 pp1 dp2" in text.decode() and "state equal: NO" in text.decode()


def test_what_was_predicted_and_memory_are_curves_and_decisions_are_text(tmp_path: Path, adaptive: list[Event]) -> None:
    with TensorBoardTracker(tmp_path) as tracker:
        for event in adaptive:
            tracker.handle(event)
    read = curves(tmp_path)
    steps = {e.step: e for e in adaptive if isinstance(e, StepFinished)}
    for tag, value in (
        ("predicted_seconds/step", lambda e: e.predicted["step"]),
        ("memory/peak_bytes", lambda e: max(e.peak_bytes.values())),
        ("signals/bandwidth", lambda e: e.signals["bandwidth"]),
    ):
        assert {p.step: p.value for p in read.Scalars(tag)} == pytest.approx({s: value(e) for s, e in steps.items()})
    assert {p.value for p in read.Scalars("memory/capacity_bytes")} == {4.0 * 2**30}
    texts = [e.tensor_proto.string_val[0].decode() for e in read.Tensors("decisions/text_summary")]
    assert len(texts) == 8 and "actor/training tp1 pp1 dp8 -> tp2 pp1 dp4" in texts[1]
    assert len(read.Tensors("failures/text_summary")) == 5


def test_a_step_is_on_disk_as_soon_as_it_was_handled(tmp_path: Path, story: Any) -> None:
    with TensorBoardTracker(tmp_path) as tracker:
        tracker.handle(story.started())
        tracker.handle(story.step(0))
        assert len(curves(tmp_path).Scalars("metrics/reward")) == 1


def test_steps_done_over_after_a_resume_replace_the_first_try(tmp_path: Path, story: Any) -> None:
    for events in (
        [story.started(), *(story.step(s) for s in range(5))],
        [story.started(first_step=3), story.step(3, reward=9.0)],
    ):
        with TensorBoardTracker(tmp_path) as tracker:
            for event in events:
                tracker.handle(event)
    points = [(point.step, point.value) for point in curves(tmp_path).Scalars("metrics/reward")]
    assert points == [(0, 0.0), (1, pytest.approx(0.1)), (2, pytest.approx(0.2)), (3, 9.0)]


def test_without_tensorboard_the_user_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"pip install 'nereus-rl\[tensorboard\]'") as caught:
        TensorBoardTracker(tmp_path / "tb")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "tb").exists()
