"""The one flag that ends every wait of a worker."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from nereus.core.errors import Aborted


class AbortFlag:
    """Raised by the controller, through the worker's listener thread; seen by every wait of the main thread.

    Waits on Gloo poll the flag. Waits on a GPU stream cannot, so a communicator subscribes to have its kernels
    ended when the flag goes up.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._reason = ""

    def raise_flag(self, reason: str) -> None:
        """End all waits, now and until `clear`. Safe from any thread, more than once."""
        with self._lock:
            if not self._event.is_set():
                self._reason = reason
                self._event.set()
            callbacks = list(self._callbacks)
        for callback in callbacks:
            with contextlib.suppress(Exception):  # one that fails must not keep the others from ending
                callback()

    def clear(self) -> None:
        """Allow waits again; communicators that existed while the flag was up stay unusable."""
        with self._lock:
            self._event.clear()
            self._reason = ""

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def check(self) -> None:
        """Raise Aborted, with the reason, if the flag is up."""
        if self._event.is_set():
            raise Aborted(self._reason)

    def subscribe(self, callback: Callable[[], None]) -> None:
        with self._lock:
            self._callbacks.append(callback)

    def unsubscribe(self, callback: Callable[[], None]) -> None:
        with self._lock:
            self._callbacks = [c for c in self._callbacks if c != callback]
