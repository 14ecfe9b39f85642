"""The faults of a run of `nereus bench faults`, drawn from its seed before it starts.

At every step one group of faults: one device, two at once, one and then another in the recovery from the first, or one
that is just being started. Every command that devices get in a step, a change of plan, a checkpoint or a recovery can be the
one, before it, after it, or at any function call in it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from nereus.cli.bench_faults_worker import ANY, Fault, Kind, Phase
from nereus.runtime.worker import START

GROUPS: Mapping[str, float] = {
    "SIGKILL": 4,
    "SIGSTOP": 1.5,
    "error": 1.5,
    "out of memory": 1.5,
    "slow link": 3,
    "two at once": 2,
    "in a recovery": 3,
    "in its start": 2,
}
"""What comes at a step, and how often."""

IN_A_STEP: Mapping[str, tuple[float, int]] = {
    "synchronise": (1, 1),
    "generate": (1, 1),
    "logprobs": (1, 2),
    "values": (1, 1),
    "scores": (1, 1),
    "gradients": (4, 4),
    "update": (4, 4),
    "set_counters": (1, 2),
    "measurements": (1, 1),
    "write_gathered": (1, 2),
    "written": (0.5, 2),
}
"""Command -> (how often it is drawn, calls that a device gets)."""

IN_A_CHANGE: Mapping[str, tuple[float, int]] = {
    "connect": (1, 1),
    "addresses": (0.5, 1),
    "retire": (1, 1),
    "build": (3, 5),
    "settle": (3, 5),
    "commit": (1, 1),
    "digest_sums": (1, 8),
}

DEADLY: tuple[Kind, ...] = ("SIGKILL", "SIGSTOP", "error")

USING_LINKS = ("synchronise", "logprobs", "gradients", "build")
ALLOCATING = ("generate", "logprobs", "values", "scores", "gradients", "update", "build")

IN_A_RECOVERY = 14
"""The most commands after the first fault at which a second one comes."""

CALLS = 200
"""The most function calls into a command."""

LATE_CALLS = 25
"""The same for sends and receives, of which there are fewer."""


def draw_faults(seed: str, *, steps: int, devices: int, numbers: Iterator[int], director: str) -> tuple[Fault, ...]:
    """One group for each step. numbers: of faults and of groups. director: changes of plan come under "mixed" alone."""
    draw = random.Random(seed)
    groups = dict(GROUPS)
    if director == "static":
        del groups["out of memory"]  # ends such a run, as it should
    if director != "mixed":
        del groups["in its start"]  # it is not known when it would be
    found: list[Fault] = []
    for step in range(steps):
        (kind,) = draw.choices(list(groups), list(groups.values()))
        if kind == "out of memory" and director != "mixed":
            del groups[kind]  # each one makes the plans that may be chosen smaller
        if kind == "in its start":
            if lost := [f for f in found if f.step == step - 1 and f.kind in DEADLY]:
                found.append(_in_its_start(draw, lost[0], next(numbers)))
                continue
            kind = "SIGKILL"
        found += _group(draw, kind, step, devices, numbers, changing=director == "mixed" and step > 0)
    return tuple(found)


def _group(
    draw: random.Random, kind: str, step: int, devices: int, numbers: Iterator[int], *, changing: bool
) -> Iterator[Fault]:
    phase: Phase = "transition" if changing and draw.random() < 0.4 else "step"
    commands = IN_A_CHANGE if phase == "transition" else IN_A_STEP
    if among := {"slow link": USING_LINKS, "out of memory": ALLOCATING}.get(kind):
        commands = {name: commands[name] for name in among if name in commands}
    (command,) = draw.choices(list(commands), [share for share, _ in commands.values()])
    nth, moment = draw.randint(1, commands[command][1]), _moment(draw, LATE_CALLS if kind == "slow link" else CALLS)
    if kind == "slow link" and isinstance(moment, str):
        moment = 1
    first, second = draw.sample(range(devices), 2)
    number = next(numbers)
    one: Kind = _alone(draw, kind)

    def fault(number: int, device: int, **other: object) -> Fault:
        facts = {"kind": one, "phase": phase, "command": command, "nth": nth, "moment": moment, **other}
        return Fault(number=number, group=group, device=device, step=step, **facts)  # type: ignore[arg-type]

    group = number
    yield fault(number, first)
    if kind == "two at once":
        yield fault(next(numbers), second)
    if kind == "in a recovery":
        late = {"phase": "recovery", "command": ANY, "nth": draw.randint(1, IN_A_RECOVERY)}
        yield fault(next(numbers), second, **late, kind=_alone(draw, kind), moment=_moment(draw, CALLS))


def _in_its_start(draw: random.Random, lost: Fault, number: int) -> Fault:
    """Of the device that takes the place of one that was lost in the step before."""
    where = {"step": lost.step + 1, "phase": "transition", "command": START, "nth": 1, "moment": "before"}
    return replace(lost, number=number, group=number, kind=draw.choice(DEADLY), **where)  # type: ignore[arg-type]


def _alone(draw: random.Random, kind: str) -> Kind:
    """What a device does in a group."""
    if kind in ("two at once", "in a recovery"):
        return "SIGSTOP" if draw.random() < 0.15 else "SIGKILL"
    return kind  # type: ignore[return-value]  # the other groups are named for it


def _moment(draw: random.Random, calls: int) -> int | Literal["before", "after"]:
    """In the middle as often as at either end; early calls as often as late ones."""
    return draw.choice(("before", "after", int(calls ** draw.random()), int(calls ** draw.random())))


def kind_of(fault: Fault, faults: Sequence[Fault]) -> str:
    """The row that a fault is counted in."""
    if fault.command == START:
        return f"{fault.kind} in its start"
    together = [f for f in faults if f.group == fault.group]
    if fault.phase == "recovery":
        return f"{fault.kind} in a recovery"
    if len(together) > 1 and all(f.phase == fault.phase for f in together):
        return "two at once"
    return fault.kind
