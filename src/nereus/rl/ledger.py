"""What was trained: one line for every optimizer update of the actor, with each (position, sample) and the epoch.

A line is written when the update it describes has been applied on every replica; an update that was discarded, because
its gradient was not finite, has none. A checkpoint records how long the ledger was; a resumed run cuts it back to that,
as the weights are.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nereus.core.errors import UserError

Key = tuple[int, int, int]
"""(position, sample, epoch)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One update. samples: (position, sample) of every sequence in it."""

    step: int
    epoch: int
    mini_batch: int
    samples: tuple[tuple[int, int], ...]

    def trained(self) -> Iterable[Key]:
        return ((position, sample, self.epoch) for position, sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """trained: distinct keys. repeated: updates beyond the first of a key. skipped: keys that should be there."""

    trained: int
    repeated: int
    skipped: int


def account(entries: Iterable[LedgerEntry], *, positions: int, samples_per_prompt: int, epochs: int) -> Account:
    """Compare a ledger with every key of the first `positions` prompts."""
    seen = Counter(key for entry in entries for key in entry.trained())
    wanted = {(p, s, e) for p in range(positions) for s in range(samples_per_prompt) for e in range(epochs)}
    return Account(
        trained=len(seen),
        repeated=sum(seen.values()) - len(seen),
        skipped=len(wanted - set(seen)),
    )


class Ledger:
    """The ledger file of a run. size: bytes to keep of a file that is there; all else is cut off.

    Raises UserError when the file is shorter than that.
    """

    def __init__(self, path: Path, *, size: int = 0) -> None:
        found = path.stat().st_size if path.exists() else 0
        if found < size:
            raise UserError(f"{path} is damaged: it has {found} bytes, at the checkpoint it had {size}")
        self._file: IO[bytes] = path.open("ab")
        self._file.truncate(size)
        self._file.seek(0, os.SEEK_END)

    def commit(self, entry: LedgerEntry) -> None:
        """Append one update, on disk when this returns."""
        row = {"step": entry.step, "epoch": entry.epoch, "mini_batch": entry.mini_batch, "samples": entry.samples}
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def cut(self, size: int) -> None:
        """Forget all updates after the first `size` bytes, as the weights do when a checkpoint is restored."""
        self._file.truncate(size)
        self._file.seek(size)
        os.fsync(self._file.fileno())

    @property
    def size(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


def read_ledger(path: Path) -> list[LedgerEntry]:
    """All whole lines of a ledger file."""
    rows: Sequence[bytes] = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [
        LedgerEntry(
            step=row["step"],
            epoch=row["epoch"],
            mini_batch=row["mini_batch"],
            samples=tuple((p, s) for p, s in row["samples"]),
        )
        for row in map(json.loads, rows)
    ]
