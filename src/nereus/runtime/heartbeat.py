"""Which devices are dead although their process is still there: a stopped one answers nobody, and its peers wait for it.

Every device is asked for a sign of life again as soon as it has answered (`Watch` in runtime.cluster). What is known of one
is a `Pulse`, brought up to date at each look (`after`); `verdict` reads it. Both are functions of data.

Only what was watched counts: a look that comes late, since the machine slept or the controller had no core, adds as little
as one that comes in time. And a device that is silent is not dead for that: its listener may wait for a core, or for the
interpreter while the main thread is in a long call. So the operating system is asked what its process does:

    stopped (T, t)                                 dead as soon as it has been silent for `heartbeat_s`
    runs, waits for a core or a disk, uses time    busy: `busy_s`
    sleeps, uses no time; or cannot be seen        `quiet_s`
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STOPPED = frozenset("Tt")
ASLEEP = frozenset("SI")
ENDED = frozenset("ZX")

LOOKS = 10
"""Looks at a device in `heartbeat_s`."""

QUIET = 40.0
"""`quiet_s`, in heartbeats: how long a call that sleeps may keep the interpreter to itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What the operating system says of a process. state: the letter of /proc/PID/stat; cpu_ticks: used so far."""

    state: str
    cpu_ticks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """What is known of one device. Seconds are watched ones (see the module), since its last sign of life.

    stopped_s, idle_s: how long until now each look has found it stopped, or asleep without having used CPU time.
    look: the last one of a silent device; None where the process cannot be seen.
    """

    silent_s: float = 0.0
    stopped_s: float = 0.0
    idle_s: float = 0.0
    look: Look | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """See the module; `longest_look_s`: the most that one look adds."""

    heartbeat_s: float
    quiet_s: float
    busy_s: float

    @classmethod
    def of(cls, heartbeat_s: float, timeout_s: float) -> Limits:
        """timeout_s: how long ranks wait for each other; one that is busy for longer is of no use to them."""
        quiet_s = QUIET * heartbeat_s
        return cls(heartbeat_s=heartbeat_s, quiet_s=quiet_s, busy_s=max(quiet_s, timeout_s))

    @property
    def look_s(self) -> float:
        """From look to look."""
        return self.heartbeat_s / LOOKS

    @property
    def longest_look_s(self) -> float:
        return 2 * self.look_s


def after(pulse: Pulse, elapsed_s: float, *, answered: bool, look: Look | None, limits: Limits) -> Pulse:
    """The pulse at a look, `elapsed_s` after the one before. look: of no account where it has answered."""
    if answered:
        return Pulse()
    watched_s = min(elapsed_s, limits.longest_look_s)
    before = pulse.look
    stopped = look is not None and before is not None and look.state in STOPPED and before.state in STOPPED
    idle = look is not None and before is not None and look.state in ASLEEP and look.cpu_ticks == before.cpu_ticks
    return Pulse(
        silent_s=pulse.silent_s + watched_s,
        stopped_s=pulse.stopped_s + watched_s if stopped else 0.0,
        idle_s=pulse.idle_s + watched_s if idle else 0.0,
        look=look,
    )


def is_dead(pulse: Pulse, limits: Limits) -> bool:
    """Whether a device is to be given up. One that has ended is not our affair: whoever waits for its process knows."""
    if pulse.look is None:
        return pulse.silent_s >= limits.quiet_s
    if pulse.look.state in ENDED:
        return False
    if pulse.stopped_s > 0:
        return pulse.silent_s >= limits.heartbeat_s
    return pulse.idle_s >= limits.quiet_s or pulse.silent_s >= limits.busy_s


def look_at(pid: int) -> Look | None:
    """What a process of this machine does; None where that cannot be seen."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, field 2, may hold anything, blanks and parentheses too. utime and stime are fields 14 and 15.
    fields = text.rpartition(")")[2].split()
    return Look(state=fields[0], cpu_ticks=int(fields[11]) + int(fields[12]))
