"""A run as one page of HTML that needs nothing else: no network, no script. `page(history)` is all of it.

The page is well-formed XML too, says in words what its charts show, and follows the reader's light or dark theme.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from nereus.core.events import DeviceFailed, PoolChanged, Recovered, TransitionFinished
from nereus.telemetry import decisions, describe, report_charts, report_devices
from nereus.telemetry.describe import known
from nereus.telemetry.history import Decided, History
from nereus.telemetry.progress import finite, first_and_last, mean, total_seconds
from nereus.telemetry.report_charts import Chart

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Of the page's content: what it is made of stands in it, and nothing is fetched or run."""


def page(history: History, state: str) -> str:
    """The whole page. state: running, done, interrupted, stopped."""
    first = history.first
    name = first.job if first else "a run"
    title = f"{name}: report of a run"
    css = (files("nereus.telemetry") / "report.css").read_text()
    body = "\n".join([*_head(history, state), *_charts(history), *_tables(history)])
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}"/>'
        f"<title>{_text(title)}</title><style>\n{css}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def _text(words: object) -> str:
    """Escaped, without the characters that XML cannot say."""
    shown = "".join(c if c.isprintable() else "?" for c in str(words))
    return escape(shown.replace(" -> ", "\N{NO-BREAK SPACE}\N{RIGHTWARDS ARROW} "))


# -- what it is, in figures --------------------------------------------------------------------------------------------


def _head(history: History, state: str) -> Iterator[str]:
    first, progress = history.first, history.progress
    if first is None:
        yield f'<h1>A run <span class="badge {_text(state)}">{_text(state)}</span></h1><p>It has not begun yet.</p>'
        return
    emulated = '<span class="badge emulated">emulated</span>' if history.emulated else ""
    yield f'<h1>{_text(first.job)} <span class="badge {_text(state)}">{_text(state)}</span>{emulated}</h1>'
    policy = progress.run.policy if progress.run else first.policy
    resumed = f", gone on with {len(history.sessions) - 1} times" if len(history.sessions) > 1 else ""
    yield (
        f'<p class="dim">run {_text(first.run)}, {_text(first.algorithm)}, policy {_text(policy)}, started on '
        f"{len(first.devices)} devices{resumed}</p>"
    )
    if history.emulated:
        yield (
            "<p>Devices were paced: all seconds on this page are <strong>emulated</strong>, those of the devices that the "
            "job file describes, not of the machine that it ran on.</p>"
        )
    tiles = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}<small>{_text(more)}</small></dd></div>"
        for name, value, more in _tiles(history)
    )
    yield f'<dl class="tiles">{tiles}</dl>'


def _tiles(history: History) -> Iterator[tuple[str, str, str]]:
    progress, unit = history.progress, history.unit
    yield "steps", f"{progress.num_done} of {progress.num_steps}", f"on {len(progress.devices)} devices now"
    if progress.steps:
        before, after, window = first_and_last([total_seconds(s) for s in progress.steps])
        means = f"first and last {window}-step mean"
        yield (
            "step latency",
            f"{describe.seconds(before)} \N{RIGHTWARDS ARROW} {describe.seconds(after)} s",
            (f"{'emulated; ' if history.emulated else ''}{means}"),
        )
        for label, metric in (("reward", "reward"), ("response length", "length_mean")):
            before, after, _ = first_and_last(progress.values(metric))
            if known(before) and known(after):
                yield label, f"{describe.number(before)} \N{RIGHTWARDS ARROW} {describe.number(after)}", means
        if known(off := prediction_error(history)):
            yield "prediction error", f"{off:.1%}", "mean over steps, of the whole step"
    if history.decisions:
        counts = Counter(d.made.verdict for d in history.decisions)
        urgent = sum(d.made.urgent for d in history.decisions)
        more = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
        yield "decisions", str(len(history.decisions)), f"{more}; {urgent} urgent"
    if progress.transitions:
        taken = sum(finite([t.seconds for t in progress.transitions]))
        equal = all(t.state_equal for t in progress.transitions)
        yield (
            "changes of plan",
            str(len(progress.transitions)),
            (f"{describe.seconds(taken)} {unit} in all, state equal: {'each time' if equal else 'NOT always'}"),
        )
    if progress.failures or progress.recoveries:
        taken = sum(finite([r.seconds for r in progress.recoveries]))
        more = f"{len(progress.recoveries)} recoveries, {describe.seconds(taken)} {unit} in all"
        yield "device failures", str(len(progress.failures)), more
    if progress.peak_bytes is not None:
        peak = max(max(s.peak_bytes.values(), default=0) for s in progress.steps)
        capacity = progress.run.capacity_bytes if progress.run else None
        of = f"of {describe.data_size(capacity)} on the fullest device" if capacity else "on the fullest device"
        yield "memory peak", describe.data_size(peak), of


def prediction_error(history: History) -> float:
    """The mean of |predicted / measured - 1| of whole steps; NaN where nothing was predicted."""
    pairs = [(s.predicted.get("step", math.nan), total_seconds(s)) for s in history.progress.steps]
    return mean([abs(p / m - 1) for p, m in pairs if known(p) and known(m) and m > 0])


# -- charts ------------------------------------------------------------------------------------------------------------


def _charts(history: History) -> Iterator[str]:
    if not history.progress.steps:
        yield "<p>No step is done yet.</p>"
        return
    yield "<h2>Over the steps</h2>"
    yield _figure(report_charts.latency(history))
    if (chart := report_devices.gantt(history)) is not None:
        yield _figure(chart)
    if (chart := report_charts.lengths(history)) is not None:
        yield _figure(chart)
    halves = [_figure(c) for c in (report_charts.reward(history), report_charts.divergence(history)) if c is not None]
    if halves:
        yield f'<div class="pair">{"".join(halves)}</div>'
    if (chart := report_charts.memory(history)) is not None:
        yield _figure(chart)
    else:
        yield '<p class="dim">The memory of devices was not measured.</p>'


def _figure(chart: Chart) -> str:
    legend = "".join(f"<li>{_swatch(style)}{_text(words)}</li>" for style, words in chart.legend)
    note = f'<p class="note">{_text(chart.note)}</p>' if chart.note else ""
    items = f'<ul class="legend">{legend}</ul>' if legend else ""
    return f"<figure><figcaption>{_text(chart.title)}</figcaption>{chart.svg}{items}{note}</figure>"


def _swatch(style: str) -> str:
    if style.endswith("-fill") or style in ("joined-mark", "left-mark"):
        shape = f'<rect class="{style}" x="2" y="1" width="16" height="9" rx="1.5"/>'
    elif style == "failed-mark":
        shape = f'<line class="{style}" x1="6" y1="1" x2="14" y2="10"/><line class="{style}" x1="14" y1="1" x2="6" y2="10"/>'
    else:
        kind = "mark" if style in ("change-line", "failure-line") else "curve"
        shape = f'<path class="{kind} {style}" d="M1 5.5L19 5.5"/>'
    return f'<svg viewBox="0 0 20 11" aria-hidden="true">{shape}</svg>'


# -- tables ------------------------------------------------------------------------------------------------------------

Cell = tuple[str, str]
"""(class, words)"""

TRANSITION_HEADINGS = (
    "step", "decision", "devices", "what changed", "how", "received", "kept", "predicted", "measured", "state equal",
)  # fmt: skip
DECISION_HEADINGS = (
    "no", "step", "triggered by", "step now", "saves a step", "costs", "payback", "at most", "verdict", "predicted",
    "measured",
)  # fmt: skip
HAPPENING_HEADINGS = ("step", "stage", "what", "details")
OPTION_HEADINGS = ("what differs from the plan in force", "step", "saves", "costs", "payback", "judged")


def _tables(history: History) -> Iterator[str]:
    unit = history.unit
    yield f"<h2>Decisions</h2>{_decisions(history)}"
    yield from (_details(decided, unit) for decided in history.decisions)
    rows = [_transition(t, unit) for t in history.progress.transitions]
    yield "<h2>Changes of plan</h2>"
    yield (
        _table(f"Transitions; times in {unit}", TRANSITION_HEADINGS, rows)
        if rows
        else "<p>The plan has not changed.</p>"
    )
    yield "<h2>Failures, recoveries, pool</h2>"
    rows = [list(_happening(e, unit)) for e in history.happenings]
    yield (
        _table("In the order they happened", HAPPENING_HEADINGS, rows)
        if rows
        else "<p>Nothing was lost, nothing joined.</p>"
    )
    names, plans = report_devices.plan_rows(history)
    if plans:
        yield "<h2>Plans</h2>"
        rows = [[("", plan.get(name, "-")) for name in names] for plan in plans]
        yield _table("Each plan in force, and from when", names, rows)


def _decisions(history: History) -> str:
    if not history.decisions:
        return "<p>Nothing was decided.</p>"
    rows = []
    for decided in history.decisions:
        made, outcome = decided.made, decided.outcome
        option = made.chosen or decisions.best(made) or {}
        valid = made.step_latency_s is not None
        payback = decisions.steps(option.get("payback_steps")).replace("?", "never")
        rows.append([
            ("number", str(made.number)),
            ("number", str(made.step)),
            ("", decisions.reason(made, short=True)),
            ("number", describe.precise(made.step_latency_s) if valid else "invalid"),
            ("number", describe.precise(option.get("savings_s")) if valid else "-"),
            ("number", describe.precise(option.get("transition_cost_s"))),
            ("number", "urgent" if made.urgent else payback),
            ("number", "-" if made.urgent else decisions.steps(decisions.limit(made))),
            (made.verdict, made.verdict),
            ("number", describe.precise(option.get("step_latency_s")) if made.chosen else "-"),
            ("number", describe.precise(outcome.after_s) if outcome else "-"),
        ])  # fmt: skip
    return _table(f"All decisions, refused ones too; times in {history.unit}", DECISION_HEADINGS, rows)


def _details(decided: Decided, unit: str) -> str:
    """A decision to be opened: the equation, the options, what came of it."""
    made = decided.made
    option = made.chosen or decisions.best(made)
    rows = [_option(decided, o) for o in made.considered]
    parts = []
    if option is not None:
        parts.append(f'<p class="equation">{_text(decisions.equation(made, option, unit))}</p>')
    if rows:
        parts.append(_table(f"Considered, in this order; times in {unit}", OPTION_HEADINGS, rows))
    if decided.current is not None:
        parts.append(f'<p class="dim">Plan in force: {_text(describe.plan_words(decided.current))}</p>')
    if decided.transition is not None:
        parts.append(f"<p>{_text(describe.transition_outcome(decided.transition, unit))}</p>")
    if decided.recovery is not None:
        parts.append(f"<p>{_text(describe.recovery(decided.recovery, unit))}</p>")
    if decided.outcome is not None:
        parts.append(f"<p>{_text(decisions.outcome(decided.outcome, unit))}</p>")
    head = f"Decision {made.number}, step {made.step}: {decisions.reason(made)}"
    verdict = f'<span class="{_text(made.verdict)}">{_text(made.verdict)}</span>'
    return f"<details><summary>{_text(head)}: {verdict}</summary>{''.join(parts)}</details>"


def _option(decided: Decided, option: Mapping[str, Any]) -> list[Cell]:
    valid = decided.made.step_latency_s is not None
    return [
        ("", "; ".join(decisions.differences(decided.current, option)) or "nothing"),
        ("number", describe.precise(option.get("step_latency_s"))),
        ("number", describe.precise(option.get("savings_s")) if valid else "-"),
        ("number", describe.precise(option.get("transition_cost_s"))),
        ("number", decisions.steps(option.get("payback_steps")).replace("?", "never") if valid else "-"),
        ("admitted" if option.get("admitted") else "", str(option.get("why", ""))),
    ]


def _transition(t: TransitionFinished, unit: str) -> list[Cell]:
    before, after = t.devices_before, t.devices_after
    devices = f"{len(before)} \N{RIGHTWARDS ARROW} {len(after)}" if set(before) != set(after) else str(len(after))
    return [
        ("number", str(t.step)),
        ("number", str(t.decision) if t.decision is not None else "job file"),
        ("number", devices),
        ("", "; ".join(describe.plan_changes(t.before, t.after)) or "nothing but the devices"),
        ("", ", ".join(sorted(set(t.lowerings.values())))),
        ("number", describe.data_size(t.received_bytes)),
        ("number", describe.data_size(t.kept_bytes)),
        ("number", describe.seconds(t.predicted_seconds)),
        ("number", describe.seconds(t.seconds)),
        ("yes", "yes") if t.state_equal else ("no", "NO"),
    ]


def _happening(event: PoolChanged | DeviceFailed | Recovered, unit: str) -> Sequence[Cell]:
    match event:
        case PoolChanged():
            return ("number", str(event.step)), ("", ""), ("", "pool"), ("", _after_colon(describe.pool(event)))
        case DeviceFailed():
            words = _after_colon(describe.failure(event, unit))
            return ("number", str(event.step)), ("", event.stage), ("no", "failure"), ("", words)
        case Recovered():
            words = _after_colon(describe.recovery(event, unit))
            return ("number", str(event.step)), ("", event.stage), ("yes", "recovery"), ("", words)


def _after_colon(line: str) -> str:
    """A line without its `step N: `, which has a column of its own."""
    return line.partition(": ")[2]


def _table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    styles = [style if style == "number" else "" for style, _ in rows[0]] if rows else [""] * len(headings)
    head = "".join(
        f'<th scope="col" class="{style}">{_text(h)}</th>' for style, h in zip(styles, headings, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(f'<td class="{_text(style)}">{_text(words)}</td>' for style, words in row) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><caption>{_text(caption)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
