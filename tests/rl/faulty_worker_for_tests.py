"""A worker that fails where a test says: by device, command, how often that was called, and when in it.

Importable by name in every worker: pytest puts this folder on sys.path, and workers get the controller's sys.path.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

from nereus.core.errors import Aborted, OutOfMemory, PeerTimeout
from nereus.rl.worker import RlWorker
from nereus.runtime.abort import AbortFlag

PROGRAM = "faulty_worker_for_tests:FaultyWorker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """At the nth call of a command: moment is before, after, or module:function that the command then calls.

    action: kill; stop; oom; error; timeout; refuse (wait until an abort comes, as a command that it overtakes); orphan (stop
    the process `peer`, and be the first to know).
    """

    device: int
    command: str
    nth: int = 1
    moment: str = "before"
    action: str = "kill"
    peer: int = 0

    def strike(self, flag: AbortFlag) -> None:
        match self.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "oom":
                raise OutOfMemory(f"device {self.device} is full")
            case "error":
                raise ZeroDivisionError("on purpose")
            case "timeout":
                raise PeerTimeout("nobody answers")
            case "orphan":
                os.kill(self.peer, signal.SIGSTOP)
                raise Aborted("the device that is read from does not answer")
            case "refuse":
                while True:
                    flag.check()
                    time.sleep(0.0001)


class FaultyWorker(RlWorker):
    """See the module."""

    _faults: tuple[Fault, ...] = ()
    _calls: Counter[str]

    def arm(self, faults: Sequence[Fault]) -> None:
        self._calls = Counter()
        self._faults = tuple(fault for fault in faults if fault.device == self.me)

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or all(fault.command != name for fault in self._faults):
            return found
        return partial(self._called, name, found)

    def _called(self, name: str, command: Callable[..., Any], *arguments: Any) -> Any:
        self._calls[name] += 1
        due = [fault for fault in self._faults if (fault.command, fault.nth) == (name, self._calls[name])]
        with ExitStack() as stack:
            for fault in due:
                if fault.moment == "before":
                    fault.strike(self.context.flag)
                elif fault.moment != "after":
                    stack.enter_context(self._striking(fault))
            result = command(*arguments)
        for fault in due:
            fault.strike(self.context.flag)
        return result

    def _striking(self, fault: Fault) -> Any:
        """The function of the fault's moment does its work, and then it strikes."""
        module, _, name = fault.moment.partition(":")
        real = getattr(importlib.import_module(module), name)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            fault.strike(self.context.flag)
            return result

        return mock.patch(f"{module}.{name}", replaced)
