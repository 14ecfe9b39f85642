"""The report of a run: one page that needs nothing else, with every number of the run where it belongs."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from adaptive_story import AdaptiveRun, plan, write_log
from hypothesis import given
from hypothesis import strategies as st

from nereus.cli.main import main
from nereus.core.events import Event, RunStarted, StepFinished
from nereus.telemetry.folder import Record, RunFolder
from nereus.telemetry.history import History, look_back
from nereus.telemetry.report import page
from nereus.telemetry.report_charts import MOST_BARS, latency
from nereus.telemetry.report_devices import device_rows, gantt
from nereus.telemetry.svg import Scale, nice_ticks


def history_of(events: list[Event]) -> History:
    return look_back(Record(time_s=float(i), event=event) for i, event in enumerate(events))


@pytest.fixture(scope="module")
def html(adaptive: list[Event]) -> str:
    return page(history_of(adaptive), "done")


def table(html: str, caption: str) -> list[list[str]]:
    """The cells of a table, row by row."""
    for found in ElementTree.fromstring(html).iter("table"):
        if (found.findtext("caption") or "").startswith(caption):
            return [[cell.text or "" for cell in row.iter("td")] for row in found.iter("tr")][1:]
    raise AssertionError(f"no table {caption}")


def test_the_page_is_whole_and_asks_the_network_for_nothing(html: str) -> None:
    root = ElementTree.fromstring(html)
    assert root.get("lang") == "en" and root.findtext("head/title")
    for element in root.iter():
        assert element.tag not in ("script", "link", "img", "iframe", "object")
        assert not {"src", "href", "onclick", "onload"} & set(element.attrib)
    assert "http:" not in html and "https:" not in html and "url(" not in html and "@import" not in html


def test_each_chart_says_in_words_what_it_shows(html: str) -> None:
    root = ElementTree.fromstring(html)
    charts = [svg for svg in root.iter("svg") if svg.get("role") == "img"]
    assert len(charts) == 6
    for chart in charts:
        ids = {e.get("id"): e.text for e in chart if e.tag in ("title", "desc")}
        named = (chart.get("aria-labelledby") or "").split()
        assert len(named) == 2 and all(ids[name] for name in named)
    every = [e.get("id") for e in root.iter() if e.get("id")]
    assert len(every) == len(set(every)), "an id names one thing"


def test_every_colour_of_a_shape_has_a_rule(html: str) -> None:
    root = ElementTree.fromstring(html)
    css = root.findtext("head/style") or ""
    shapes = [e for svg in root.iter("svg") for e in svg.iter() if e.tag in ("rect", "path", "line")]
    used = {name for e in shapes for name in (e.get("class") or "").split()}
    assert used and not {name for name in used if f".{name}" not in css}
    declared = set(re.findall(r"(--[a-z]+):", css.partition("@media")[0]))
    dark = set(re.findall(r"(--[a-z]+):", css.partition("@media")[2]))
    assert set(re.findall(r"var\((--[a-z]+)\)", css)) <= declared == dark, "each colour is there in both themes"


def test_bars_are_as_high_as_the_seconds_they_stand_for(adaptive: list[Event]) -> None:
    history = history_of(adaptive)
    svg = ElementTree.fromstring(latency(history).svg)
    bars = [r for r in svg.iter("rect") if "generation-fill" in (r.get("class") or "")]
    assert len(bars) == 40
    heights = [float(r.get("height") or 0) for r in bars]
    seconds = [s.seconds["generation"] for s in history.progress.steps]
    assert [h / heights[-1] for h in heights] == pytest.approx([s / seconds[-1] for s in seconds], rel=1e-2)


def test_a_gantt_segment_is_where_and_as_long_as_the_plan_was_in_force(adaptive: list[Event]) -> None:
    chart = gantt(history_of(adaptive))
    assert chart is not None
    svg = ElementTree.fromstring(chart.svg)
    found = {}
    for rect in svg.iter("rect"):
        words = rect.findtext("title") or ""
        if words.startswith("actor/training") and "device 5," in words:
            found[words.rpartition(", ")[2]] = float(rect.get("width") or 0)
    assert list(found) == ["steps 0 to 19", "steps 19 to 28", "steps 28 to 32.8", "steps 38 to 40"]
    per_step = (found["steps 0 to 19"] + 1) / 19
    assert [w + 1 for w in found.values()] == pytest.approx([per_step * n for n in (19, 9, 4.8, 2)], abs=0.02)
    crosses = [line for line in svg.iter("line") if line.get("class") == "failed-mark"]
    assert len(crosses) == 2 * 3, "two strokes for each of three devices"


def test_tables_have_all_decisions_transitions_and_failures(html: str, adaptive: list[Event]) -> None:
    decisions = table(html, "All decisions")
    assert [row[0] for row in decisions] == [str(n) for n in range(1, 8)]
    assert [row[8] for row in decisions] == ["refused", "admitted", "refused", *["admitted"] * 4]
    assert decisions[0][6:8] == ["4.89", "0.5"] and decisions[4][3] == "invalid"
    transitions = table(html, "Transitions")
    assert [row[0] for row in transitions] == ["19", "28", "38"] and [row[1] for row in transitions] == ["2", "4", "7"]
    assert all(row[-1] == "yes" and row[5:7] == ["31.0 MB", "61.0 MB"] for row in transitions)
    happened = [row[2] for row in table(html, "In the order")]
    assert happened.count("failure") == 3 and happened.count("recovery") == 2 and happened.count("pool") == 5
    assert html.count("<details>") == 7 and "5.2 steps &lt;= margin x horizon = 0.5 x 12 = 6 steps" in html


def test_emulated_seconds_are_marked_and_real_ones_are_not(html: str, adaptive: list[Event]) -> None:
    assert "all seconds on this page are <strong>emulated</strong>" in html
    real = [replace(e, emulated=False) if isinstance(e, RunStarted) else e for e in adaptive]
    assert "emulated" not in page(history_of(real), "done").partition("<body>")[2]


def test_state_that_is_not_equal_stands_out(story: Any) -> None:
    html = page(history_of(story.whole(equal=False)), "done")
    assert '<td class="no">NO</td>' in html and "NOT always" in html


def test_names_and_words_of_a_job_cannot_break_the_page(adaptive: list[Event]) -> None:
    first = adaptive[0]
    assert isinstance(first, RunStarted)
    nasty = "</title><script>alert(1)</script>\x00\x1b[2J & 'x'"
    html = page(history_of([replace(first, job=nasty, run=nasty), *adaptive[1:]]), "done")
    assert "<script>" not in html and ElementTree.fromstring(html).findtext("head/title")


def test_a_long_run_on_many_devices_stays_a_page_of_reasonable_size() -> None:
    pool = tuple(range(256))
    start = RunStarted(
        run="big", job="big", algorithm="ppo", first_step=0, num_steps=5000, devices=pool, plan=plan(pool, 4, 2)
    )  # fmt: skip
    step = AdaptiveRun().step(5)
    history = history_of([start, *(replace(step, step=i) for i in range(5000))])
    svg = ElementTree.fromstring(latency(history).svg)
    assert len([r for r in svg.iter("rect") if "training-fill" in (r.get("class") or "")]) == MOST_BARS
    rows = device_rows(pool, history.periods, history)
    assert sorted(d for row in rows for d in row) == list(pool) and len(rows) <= 40
    assert len(page(history, "running")) < 1_000_000


def test_a_run_that_has_not_begun_or_has_no_step_yet_has_a_page(adaptive: list[Event]) -> None:
    assert "has not begun yet" in page(history_of([]), "starting")
    assert "No step is done yet" in page(history_of(adaptive[:1]), "running")


def test_the_command_writes_into_the_run_or_where_it_is_told(
    tmp_path: Path, adaptive: list[Event], capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_log(tmp_path / "run", adaptive[:30])
    assert main(["report", str(run)]) == 0
    assert "stopped" in (run / "report.html").read_text()
    with RunFolder.open(run, clock=count().__next__):
        assert main(["report", str(run), "--output", str(tmp_path / "x.html")]) == 0
    assert "running" in (tmp_path / "x.html").read_text()
    capsys.readouterr()
    assert main(["report", str(run), "--output", str(tmp_path / "none" / "x.html")]) == 2
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "cannot be written" in said[0] and "is not the folder of a run" in said[1]


@given(low=st.floats(-1e9, 1e9), size=st.floats(1e-6, 1e9), most=st.integers(2, 12))
def test_ticks_are_few_round_and_inside(low: float, size: float, most: int) -> None:
    high = low + size
    ticks = nice_ticks(low, high, most)
    room = 1e-6 * size + 1e-9 * abs(low)
    assert len(ticks) <= most + 1 and all(low - room <= t <= high + room for t in ticks)


def test_nothing_to_scale_is_no_division_by_zero() -> None:
    assert Scale(3, 3, 10, 20)(3) == 10 and nice_ticks(math.nan, 1) == [] and nice_ticks(2, 2) == [2]


def test_a_step_whose_parts_are_not_known_is_drawn_as_what_is(story: Any) -> None:
    steps = [StepFinished(step=i, metrics={"reward": math.nan}, seconds={"step": 1.0}) for i in range(3)]
    html = page(history_of([story.started(), *steps]), "running")
    assert html.count('class="other-fill"') == 3 + 1, "three bars and the legend"
    assert "memory of devices was not measured" in html
