"""What a user sees of a run: everything that matters, once, on lines that fit, whatever the numbers are."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nereus.core.events import Event, RunFinished, StepFinished
from nereus.core.plan import (
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    MODELS,
    STAGES,
    Layout,
    ModelStage,
    Placement,
    Plan,
    Position,
)
from nereus.telemetry import describe
from nereus.telemetry.console import BLOCKS, LiveView, PlainView, sparkline, view_for
from nereus.telemetry.plan_table import plan_table
from nereus.telemetry.progress import Progress, first_and_last, stage_seconds


def log_of(events: Iterable[Event], *, history: Iterable[Event] = ()) -> list[str]:
    """The lines of a plain view."""
    out = io.StringIO()
    console = Console(file=out, width=80)
    with PlainView(console, clock=count().__next__, folder=Path("runs/r1"), history=history) as view:
        for event in events:
            view.handle(event)
    return out.getvalue().splitlines()


def picture_of(events: Iterable[Event], width: int, height: int = 40) -> list[str]:
    """The lines of a live view at the end of these events."""
    out = io.StringIO()
    console = Console(file=out, width=width, height=height)
    view = LiveView(Console(file=io.StringIO()), clock=count().__next__)
    for event in events:
        view.handle(event)
    console.print(view)
    return out.getvalue().splitlines()


def lines_with(lines: list[str], word: str) -> list[str]:
    return [line for line in lines if word in line]


# plain lines


def test_a_log_has_one_line_for_each_thing_that_happened(story: Any) -> None:
    lines = log_of(story.whole())
    for step in range(8):
        [line] = lines_with(lines, f"] step {step}: ")
        assert line.startswith(f"[{step + 1}/8]") and f"reward {step / 10:.3f}" in line
        assert f"length {10 + step}.0" in line and "KL 0.010" in line and "2.00 s" in line
        assert "generation 1.00, inference 0.25, training 0.50, other 0.25" in line
    [change] = lines_with(lines, "plan changed")
    for words in (
        "step 4: devices 8 -> 4, plan changed in 0.31 s",
        "actor/training tp1 pp1 dp8 -> tp2 pp1 dp2",
        "received 3.2 MB, kept in place 1.1 MB, state equal: yes",
    ):
        assert words in change
    assert "reference/inference" not in change, "what did not change is not named"
    assert lines.index(change) < lines.index(lines_with(lines, "] step 4: ")[0])
    assert len(lines_with(lines, "checkpoint of 5.0 MB")) == 1
    assert "\n".join(lines).isascii()


def test_the_first_lines_of_a_log_say_what_runs_where(story: Any) -> None:
    lines = log_of([story.started()])
    assert "count" in lines[0] and "grpo" in lines[0] and "8 devices" in lines[0]
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "actor/generation",
        "reference/inference",
        "actor/training",
    ]


def test_the_summary_has_the_means_the_transitions_the_samples_and_the_folder(story: Any) -> None:
    lines = log_of(story.whole(equal=False))
    end = lines[next(i for i, line in enumerate(lines) if "8 of 8 steps" in line) :]
    assert lines_with(end, "reward 0.100 -> 0.600"), "means of 0.0 0.1 0.2 and of 0.5 0.6 0.7"
    assert lines_with(end, "length 11.0 -> 16.0")
    assert len(lines_with(end, "state equal: NO")) == 1
    assert lines_with(end, "trained 512, repeated 0, skipped 3")
    assert lines_with(end, "runs/r1")


def test_an_interrupted_run_without_a_step_still_ends_well(story: Any) -> None:
    lines = log_of([story.started(), RunFinished(summary={}, interrupted=True)])
    assert lines_with(lines, "interrupted") and lines_with(lines, "0 of 8 steps")
    assert not lines_with(lines, "nan")


def test_numbers_that_are_not_finite_are_shown_reported_once_and_kept_out_of_means(story: Any) -> None:
    steps = [story.step(s, kl=math.nan if s >= 2 else 0.01, reward=math.inf if s == 0 else 0.5) for s in range(6)]
    lines = log_of([story.started(), *steps, story.finished()])
    assert lines_with(lines, "not finite") == ["step 0: not finite: reward", "step 2: not finite: kl"]
    assert "KL nan" in lines_with(lines, "] step 3: ")[0]
    assert lines_with(lines, "reward 0.500 -> 0.500")


def test_steps_done_over_after_a_resume_count_once(story: Any) -> None:
    history = [story.started(), *(story.step(s, reward=0.0) for s in range(6))]
    progress = Progress()
    for event in (*history, story.started(first_step=4)):
        progress = progress.after(event, 0.0)
    assert progress.num_done == 4, "steps after the checkpoint are to be done again"
    lines = log_of([story.started(first_step=4), story.step(4, reward=1.0), story.finished()], history=history)
    assert "goes on at step 4" in lines[0]
    assert lines_with(lines, "] step 4: ")[0].startswith("[5/8]")
    assert lines_with(lines, "reward 0.000 -> 0.500 (first and last 2-step mean)")


def test_without_history_the_steps_before_a_resume_count_as_done(story: Any) -> None:
    assert Progress().after(story.started(first_step=5), 0.0).num_done == 5


def test_the_time_left_goes_by_the_steps_since_the_plan_changed(story: Any) -> None:
    def step(number: int, step_s: float) -> StepFinished:
        return StepFinished(step=number, metrics={}, seconds={"step": step_s})

    progress = Progress()
    for event in (story.started(), *(step(s, 10.0) for s in range(4)), story.transition(4), step(4, 1.0)):
        progress = progress.after(event, 100.0)
    assert progress.left_s(100.0) == pytest.approx(3.0)
    assert progress.left_s(102.0) == pytest.approx(1.0), "it runs down within a step"
    assert progress.left_s(200.0) == 0.0


@given(
    seconds=st.dictionaries(st.sampled_from(["generation", "inference", "training", "weight_sync"]), st.floats(0, 1e6)),
    step_s=st.none() | st.floats(0, 1e6),
)
def test_the_parts_of_a_step_are_never_negative_and_cover_it(seconds: dict[str, float], step_s: float | None) -> None:
    whole = {} if step_s is None else {"step": step_s}
    parts = stage_seconds(StepFinished(step=0, metrics={}, seconds={**seconds, **whole}))
    known = [value for value in parts.values() if not math.isnan(value)]
    assert min(known) >= 0
    assert sum(known) >= (sum(seconds.values()) if step_s is None else step_s) * (1 - 1e-9)


@given(values=st.lists(st.floats(-1e6, 1e6), max_size=12))
def test_first_and_last_means_never_share_a_step(values: list[float]) -> None:
    first, last, window = first_and_last(values)
    assert window <= 3 and (2 * window <= len(values) or window == 1)
    if len(values) >= 6:
        assert first == pytest.approx(sum(values[:3]) / 3) and last == pytest.approx(sum(values[-3:]) / 3)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (describe.number(0.00002), "2e-05"),
        (describe.number(-12345.0), "-12,345"),
        (describe.number(-math.inf), "-inf"),
        (describe.seconds(math.nan), "-"),
        (describe.duration(59.9), "0:59"),
        (describe.duration(3 * 3600 + 61), "3:01:01"),
        (describe.duration(2 * 86400 + 3600), "2d 01:00"),
        (describe.duration(None), "?"),
        (describe.data_size(512), "512 B"),
        (describe.data_size(3_200_000), "3.2 MB"),
        (describe.data_size(7e15), "7000.0 TB"),
        (describe.count(2.8384e9), "2.84 G"),
        (describe.count(7e18), "7e+03 P"),
        (describe.ranges([3, 0, 1, 2, 6]), "0-3,6"),
    ],
)
def test_words_for_numbers(shown: str, expected: str) -> None:
    assert shown == expected


# the live display


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_picture_fits_its_terminal_and_shows_the_run(story: Any, width: int) -> None:
    lines = picture_of(story.whole()[:-1], width)
    assert max(map(len, lines)) <= width
    assert not lines_with(lines, "…"), "nothing is cut off"
    picture = "\n".join(lines)
    for words in ("count", "r1", "8/8 steps", "4 devices", "checkpoint at step 8", "sample 7"):
        assert words in picture
    for step in range(8):
        mark = r"\* " if step == 4 else ""
        assert re.search(rf"^ *{mark}{step} .* 0\.{step}00 .* 1{step}\.0 .* 2\.00 ", picture, re.MULTILINE)
    for trend in ("reward", "length"):
        assert re.search(rf"^{trend} +{BLOCKS[0]}.*{BLOCKS[-1]} ", picture, re.MULTILINE)


@pytest.mark.parametrize("height", [18, 24, 50])
def test_a_picture_is_no_taller_than_its_terminal_and_ends_with_the_newest_step(story: Any, height: int) -> None:
    lines = picture_of(story.whole()[:-1], 100, height)
    assert len(lines) <= height
    assert [line for line in lines if re.match(r"^ *7 ", line)]


def test_a_picture_is_possible_at_any_moment(story: Any) -> None:
    events = story.whole()[:-1]
    for seen in range(len(events)):
        assert picture_of(events[:seen], 40)


def test_escape_codes_in_a_sample_do_not_reach_the_terminal(story: Any) -> None:
    nasty = StepFinished(step=0, metrics={}, seconds={}, sample="a\x1b[2Jb\r\nc [bold]d")
    [line] = lines_with(picture_of([story.started(), nasty], 100), "sample")
    assert "\x1b" not in line and line.rstrip().endswith("b c [bold]d")


def test_a_live_run_leaves_its_news_and_the_cursor_behind(story: Any) -> None:
    out = io.StringIO()
    console = Console(file=out, width=200, height=50, force_terminal=True, color_system=None)
    with LiveView(console, clock=count().__next__, folder=Path("runs/r1")) as view:
        for event in story.whole():
            view.handle(event)
    written = out.getvalue()
    assert written.count("plan changed in 0.31 s") == 1
    assert written.count("run folder runs/r1") == 1
    assert written.rindex("run folder") > written.rindex("8/8 steps"), "the summary comes last"
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l"), "the cursor is shown again"


def test_the_cursor_comes_back_after_an_error(story: Any) -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    with pytest.raises(KeyboardInterrupt), LiveView(console, clock=count().__next__) as view:
        view.handle(story.started())
        raise KeyboardInterrupt
    assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l")


def test_the_view_suits_the_console() -> None:
    def kind(**options: Any) -> type:
        return type(view_for(Console(**options), clock=count().__next__))

    utf8 = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    terminal = {"TERM": "xterm-256color"}
    assert kind(file=utf8, force_terminal=True, _environ=terminal) is LiveView
    assert kind(file=utf8, _environ=terminal) is PlainView
    assert kind(file=utf8, force_terminal=True, _environ={"TERM": "dumb"}) is PlainView
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert kind(file=ascii_only, force_terminal=True, _environ=terminal) is PlainView


# the table of a plan


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, tuple[int, ...]]:
    """A plan, and the devices of its pool."""
    devices = tuple(draw(st.lists(st.integers(0, 40), unique=True, min_size=1, max_size=10)))
    names = st.builds(ModelStage, st.sampled_from(MODELS), st.sampled_from(STAGES))
    placements = []
    for name in draw(st.lists(names, unique=True, min_size=1, max_size=4)):
        tp = draw(st.integers(1, len(devices)))
        pp = draw(st.integers(1, len(devices) // tp))
        dp = draw(st.integers(1, len(devices) // (tp * pp)))
        gpus = tuple(draw(st.permutations(devices))[: dp * tp * pp])
        placements.append(Placement(model_stage=name, layout=Layout(tp, pp), dp=dp, gpus=gpus))
    return Plan(tuple(placements)), devices


@given(plans())
def test_a_plan_table_says_of_every_device_what_it_holds(case: tuple[Plan, tuple[int, ...]]) -> None:
    plan, devices = case
    headings, *lines = cells(plan, devices, width=1000)
    assert headings[:6] == ["plan", "tp", "pp", "dp", "micro-batch", "recompute"]
    assert headings[6:] == [str(device) for device in sorted(devices)]
    assert [line[0] for line in lines] == [str(p.model_stage) for p in plan.placements]
    for placement, line in zip(plan.placements, lines, strict=True):
        assert line[1:4] == [str(placement.layout.tp), str(placement.layout.pp), str(placement.dp)]
        for device, cell in zip(sorted(devices), line[6:], strict=True):
            assert read_cell(cell) == (placement.position(device) if device in placement.gpus else None)


@given(plans(), st.integers(60, 140))
def test_a_plan_table_fits_and_names_every_model_stage_once(case: tuple[Plan, tuple[int, ...]], width: int) -> None:
    plan, devices = case
    lines = rendered(plan, devices, width)
    assert max(len(line.rstrip()) for line in lines) <= width and "…" not in "".join(lines)
    rows = [line.split()[0] for line in lines if not line.startswith(" ")]  # long ranges go on in a second line
    assert rows == ["plan", *(str(p.model_stage) for p in plan.placements)]


def test_a_plan_table_of_a_thousand_devices_still_fits() -> None:
    gpus = tuple(range(1024))
    plan = Plan((Placement(model_stage=ACTOR_TRAINING, layout=Layout(8, 4), dp=32, gpus=gpus),))
    lines = rendered(plan, gpus, 80)
    assert len(lines) == 2 and lines[1].split() == ["actor/training", "8", "4", "32", "8", "-", "0-1023"]


def test_idle_devices_have_a_column_too() -> None:
    plan = Plan((Placement(model_stage=CRITIC_TRAINING, layout=Layout(), dp=1, gpus=(2,), recompute=True),))
    assert cells(plan, range(4), width=100)[1][4:] == ["8", "yes", ".", ".", "u0", "."]


def cells(plan: Plan, devices: Iterable[int], width: int) -> list[list[str]]:
    """Headings and rows of the table, as text."""
    table = plan_table(plan, devices, width=width)
    columns = [[str(column.header), *(str(cell).strip() for cell in column.cells)] for column in table.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def rendered(plan: Plan, devices: Iterable[int], width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(plan_table(plan, devices, width=width))
    return out.getvalue().splitlines()


def read_cell(cell: str) -> Position | None:
    if cell == ".":
        return None
    found = {label[0]: int(label[1:]) for label in cell.split()}
    return Position(found["u"], found.get("p", 0), found.get("t", 0))


# sparklines


@given(st.lists(st.floats(-1e9, 1e9), min_size=2, max_size=40, unique=True))
def test_a_sparkline_keeps_the_order_and_uses_the_whole_height(values: list[float]) -> None:
    line = sparkline(values, 40)
    heights = [BLOCKS.index(block) for block in line]
    assert len(line) == len(values) and (min(heights), max(heights)) == (0, len(BLOCKS) - 1)
    pairs = sorted(zip(values, heights, strict=True))
    assert [height for _, height in pairs] == sorted(heights)


@given(st.lists(st.floats(), max_size=300), st.integers(1, 60))
def test_a_sparkline_of_anything_fits_and_leaves_gaps_for_what_is_not_finite(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(len(values), width)
    if len(values) <= width:
        assert [block == " " for block in line] == [not abs(value) < 1e300 for value in values]
