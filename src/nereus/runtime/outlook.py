"""What processes of another machine do, for the judgement of `runtime.heartbeat`.

    controller   Outlook ── watch, forget, kill ──> keep_looking   one on each machine with devices but the controller's;
                         <── a look at each ───────                idle but for this, so it answers when they do not

A machine that does not answer at all is for Ray to judge.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Literal

from nereus.runtime.heartbeat import Look, look_at
from nereus.runtime.worker import pack, unpack

Order = tuple[Literal["watch", "forget", "kill"], int]
"""What to do about a process."""


def keep_looking(connection: Connection, look_s: float) -> None:
    """Look at the processes that the controller names, on this machine, and tell it; returns when it has gone."""
    watched: set[int] = set()
    with contextlib.suppress(EOFError, OSError):
        while True:
            if connection.poll(look_s):
                what, pid = unpack(connection.recv_bytes())
                if what == "watch":
                    watched.add(pid)
                elif what == "forget":
                    watched.discard(pid)
                elif pid in watched:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            connection.send_bytes(pack({pid: look for pid in watched if (look := look_at(pid)) is not None}))


class Outlook:
    """The controller's end. fresh_s: a look that is older says nothing.

    Whatever it is asked to do is done when there is a connection; `connected` may be called again, with a new one.
    """

    def __init__(self, fresh_s: float) -> None:
        self._fresh_s = fresh_s
        self._lock = threading.Lock()
        self._watched: set[int] = set()
        self._connection: Connection | None = None
        self._seen: tuple[float, Mapping[int, Look]] = 0.0, {}

    def connected(self, connection: Connection) -> None:
        with self._lock:
            self._connection = connection
            for pid in self._watched:
                self._send(("watch", pid))
        threading.Thread(target=self._take, args=(connection,), name="outlook", daemon=True).start()

    def watch(self, pid: int) -> None:
        with self._lock:
            self._watched.add(pid)
            self._send(("watch", pid))

    def forget(self, pid: int) -> None:
        with self._lock:
            self._watched.discard(pid)
            self._send(("forget", pid))

    def kill(self, pid: int) -> None:
        """If it is watched."""
        with self._lock:
            self._send(("kill", pid))

    def look(self, pid: int) -> Look | None:
        """The newest look at a process; None where there is none, or nothing new has come."""
        at, looks = self._seen
        return looks.get(pid) if time.monotonic() - at < self._fresh_s else None

    def _send(self, order: Order) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):  # it has gone: another may come
                self._connection.send_bytes(pack(order))

    def _take(self, connection: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                looks = unpack(connection.recv_bytes())
                self._seen = time.monotonic(), looks
