"""A worker's thread that writes copies of state to files, while the worker goes on.

    main thread    add(path, copy) ─> queue        told(), wait(), clear()
    the thread          queue ─> write, fsync, SHA-256, digest sums ─> told(); then the copy is let go

The copies belong to the thread: nobody else writes to them, and their memory counts in `held_bytes` until the file is on
disk. The first error ends the batch: what is not written of it is let go, until `clear` begins another one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from nereus.core.errors import Aborted
from nereus.runtime.checkpoint import WrittenFile, write_tensors
from nereus.runtime.state import LocalState

LOOK_S = 0.005
"""How often a wait looks whether it is to end."""

Write = Callable[[Path, Mapping[str, torch.Tensor], Callable[[], None]], WrittenFile]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """A file that is on disk. sums: by tensor, that of all of its elements (see `core.digest`)."""

    written: WrittenFile
    sums: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WritesReport:
    """What a worker says of its batch. files: by path. num_left: files to come. error: in one line, or nothing."""

    files: Mapping[str, FileReport]
    num_left: int
    error: str


@dataclass(eq=False, slots=True)
class _Batch:
    """Files that are wanted together. dropped: nobody wants them any more."""

    files: dict[str, FileReport] = field(default_factory=dict)
    error: str = ""
    dropped: bool = False

    def check(self) -> None:
        if self.dropped:
            raise Aborted("nobody wants this file any more")


class BackgroundWrites:
    """See the module. write: puts tensors into a file, asking every few MiB whether to go on."""

    def __init__(self, write: Write = write_tensors) -> None:
        self._write = write
        self._changed = threading.Condition()
        self._queue: deque[tuple[_Batch, Path, LocalState]] = deque()
        self._busy: tuple[_Batch, int] | None = None  # and the bytes of its copy
        self._batch = _Batch()
        self._thread: threading.Thread | None = None

    @property
    def held_bytes(self) -> int:
        """Of copies whose files are not on disk yet."""
        with self._changed:
            busy = 0 if self._busy is None else self._busy[1]
            return busy + sum(copy.present_bytes for _, _, copy in self._queue)

    def add(self, path: Path, copy: LocalState) -> None:
        """Have all tensors of a copy written to `path`, after what was added before."""
        with self._changed:
            if not self._batch.error:
                self._queue.append((self._batch, path, copy))
                self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="files", daemon=True)
            self._thread.start()

    def told(self) -> WritesReport:
        """Of the batch, as far as it is known."""
        with self._changed:
            return WritesReport(files=dict(self._batch.files), num_left=self._num_left(), error=self._batch.error)

    def wait(self, check: Callable[[], None]) -> WritesReport:
        """Until all of the batch is on disk, or failed. check: raises to end the wait."""
        with self._changed:
            while self._num_left():
                if not self._changed.wait(LOOK_S):
                    check()
        return self.told()

    def clear(self) -> None:
        """Forget the batch; what is being written of it ends soon."""
        with self._changed:
            self._batch.dropped = True
            self._batch = _Batch()
            self._queue.clear()

    def _num_left(self) -> int:
        return len(self._queue) + (self._busy is not None and self._busy[0] is self._batch)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                batch, path, copy = self._queue.popleft()
                self._busy = batch, copy.present_bytes
            report, error = self._one(batch, path, copy)
            del copy  # its memory is free before anybody hears that it is
            with self._changed:
                self._busy = None
                if report is not None:
                    batch.files[str(path)] = report
                elif batch is self._batch:
                    batch.error = error
                    self._queue.clear()
                self._changed.notify_all()

    def _one(self, batch: _Batch, path: Path, copy: LocalState) -> tuple[FileReport | None, str]:
        try:
            written = self._write(path, copy.tensors, batch.check)
            whole = {name: [(0, copy.specs[name].length)] for name in copy.tensors}
            sums = {name: found[0] for name, found in copy.digest_sums(whole).items()}
        except OSError as error:
            return None, f"{path.name}: {error.strerror or error}"
        except Exception as error:  # whatever it is, it is the controller that must know
            return None, f"{path.name}: {type(error).__name__}: {' '.join(str(error).split())}"
        return FileReport(written=written, sums=sums), ""
