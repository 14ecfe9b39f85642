"""Who is taken for dead: a table of what was seen of a device, look by look."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from nereus.runtime.heartbeat import Limits, Look, Pulse, after, is_dead, look_at

LIMITS = Limits(heartbeat_s=1.25, quiet_s=10.0, busy_s=60.0)
"""A look each 0.125 s; one that comes later than 0.25 s after the last counts as 0.25 s."""


@dataclass(frozen=True)
class Seen:
    """One look: whether an answer had come, and the process, if it can be seen."""

    state: str = ""
    cpu_ticks: int = 0
    answered: bool = False
    elapsed_s: float = 0.125


def dead_at(looks: list[Seen]) -> float | None:
    """After how many seconds, by the watch, a device is taken for dead; None: at no look."""
    pulse, now = Pulse(), 0.0
    for seen in looks:
        now += seen.elapsed_s
        look = Look(state=seen.state, cpu_ticks=seen.cpu_ticks) if seen.state else None
        pulse = after(pulse, seen.elapsed_s, answered=seen.answered, look=look, limits=LIMITS)
        if is_dead(pulse, LIMITS):
            return now
    return None


ANSWER = Seen(answered=True)
CASES: dict[str, tuple[list[Seen], float | None]] = {
    "answers": ([ANSWER] * 1000, None),
    "stopped": ([ANSWER, *[Seen("T")] * 100], 1.375),
    "in a debugger": ([ANSWER, *[Seen("t")] * 100], 1.375),
    "stopped from the start": ([Seen("T")] * 100, 1.25),
    "stopped for a moment, and again": ([*[Seen("T")] * 9, ANSWER] * 100, None),
    "found stopped once, after long silence": (
        [*[Seen("S", i) for i in range(300)], Seen("T", 300), Seen("S", 301)],
        None,
    ),
    "stopped after long work": ([*[Seen("R", i) for i in range(400)], *[Seen("T", 400)] * 100], 50.25),
    "works": ([Seen("R", i) for i in range(479)], None),
    "works for ever": ([Seen("R", i) for i in range(500)], 60.0),
    "waits for a core": ([Seen("R", 7)] * 479, None),
    "waits for a disk": ([Seen("D", 7)] * 479, None),
    "asleep, while other threads work": ([Seen("S", i) for i in range(479)], None),
    "asleep for good": ([ANSWER, *[Seen("S", 7)] * 300], 10.25),
    "asleep, with work now and then": ([Seen("S", i // 79) for i in range(479)], None),
    "unseen": ([ANSWER, *[Seen()] * 300], 10.125),
    "unseen, with an answer now and then": ([*[Seen()] * 79, ANSWER] * 10, None),
    "has ended": ([Seen("Z")] * 1000, None),
    "the watch was away": ([ANSWER, Seen("S", 7, elapsed_s=3600.0), ANSWER, Seen(elapsed_s=3600.0), ANSWER], None),
    "all were away, and the device comes late": ([Seen("T", elapsed_s=3600.0), *[Seen("S", 7)] * 20, ANSWER], None),
    "the watch is starved": ([ANSWER, *[Seen("T", elapsed_s=1.0)] * 100], 5.125),
}


@pytest.mark.parametrize("case", CASES)
def test_verdicts(case: str) -> None:
    looks, expected = CASES[case]
    assert dead_at(looks) == expected


def test_the_limits_follow_from_two_settings() -> None:
    limits = Limits.of(1.5, 600.0)
    assert (limits.heartbeat_s, limits.quiet_s, limits.busy_s) == (1.5, 60.0, 600.0)
    assert Limits.of(1.5, 0.3).busy_s == 60.0  # ranks that wait for each other for a moment only say nothing of this
    assert limits.heartbeat_s + 2 * limits.look_s < 2.0  # from the stop to the kill


def test_a_process_that_is_not_there_is_not_seen() -> None:
    assert look_at(2**22 + 1) is None  # beyond the largest process id of Linux
