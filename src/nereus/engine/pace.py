"""A CPU device that takes at least the time that another device would: a pool of slow processes stands for a real one.

A declared device (`core.job.PaceSection`) takes for a computation the longer of FLOPs / flops and bytes / memory_bytes_s,
for a message latency_s + bytes on the wire / link_bytes_s. What the process itself took less than that, it sleeps; while it
sleeps, other processes have the cores, so that eight devices on two cores come as close to eight devices as their own
computations are short against the declared ones.

Sleeping is not exact to the microsecond, and operations may be shorter than that. So what is owed is added up, slept when it
is worth a sleep, and paid in full before anything that a peer can see: a message, a collective, the end of a command. What a
sleep takes too long is taken off the next one. Sums are exact, and no single message is early.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from nereus.core.job import PaceSection

WORTH_A_SLEEP_S = 1e-3
"""Less than this is owed on. A sleep of this length is about 0.06 ms too long (measured here)."""

SLEEP_S = 0.02
"""Between two looks at the abort flag."""


class Pace:
    """The declared device. check: raises when a wait is to end; clock, sleep: seconds.

    link_factor: what is left of the links' bandwidth. slept_s: in all.
    """

    def __init__(
        self,
        declared: PaceSection,
        *,
        check: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.declared, self.link_factor, self.slept_s = declared, 1.0, 0.0
        self._check, self._clock, self._sleep = check, clock, sleep
        self._owed_s = 0.0

    def compute_seconds(self, flops: float, num_bytes: float) -> float:
        """Of a computation on the declared device."""
        return max(flops / self.declared.flops, num_bytes / self.declared.memory_bytes_s)

    def link_seconds(self, num_bytes: float) -> float:
        """Of a message on its links as they are now."""
        return self.declared.latency_s + num_bytes / (self.declared.link_bytes_s * self.link_factor)

    def owe(self, seconds: float) -> None:
        """So much more is to be slept, now or before `settle` returns."""
        self._owed_s += seconds
        if self._owed_s >= WORTH_A_SLEEP_S:
            self.settle()

    def settle(self) -> None:
        """Sleep what is owed. Raises Aborted when the controller calls the work off."""
        while self._owed_s > 0:
            began = self._clock()
            self._sleep(min(self._owed_s, SLEEP_S))
            took = self._clock() - began
            self._owed_s -= took
            self.slept_s += took
            self._check()

    def wait(self, seconds: float) -> float:
        """Sleep at least so long, debts apart; returns how long it was. Raises Aborted."""
        began = self._clock()
        while (left := began + seconds - self._clock()) > 0:
            self._sleep(min(left, SLEEP_S))
            self._check()
        return self._clock() - began

    def forgive(self) -> None:
        """Nothing is owed any more: what was going on has failed."""
        self._owed_s = min(self._owed_s, 0.0)
