"""A worker whose files wait, half written, for a test; importable by name in every worker, from the folder of the tests.

Where a file's path has `word` in it, its writer opens a FIFO after the header, and reads until the test closes its end:

    with open(fifo, "w"): ...      the block is entered once a writer has come that far, which goes on after it
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from nereus.rl.worker import RlWorker
from nereus.runtime.background_writes import BackgroundWrites
from nereus.runtime.checkpoint import WrittenFile, write_tensors

PROGRAM = "gated_worker_for_tests:GatedWorker"


class GatedWorker(RlWorker):
    """See the module."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.writes = BackgroundWrites(write=self._write)
        self._gate = ("", "")

    def gate(self, word: str, fifo: str) -> None:
        self._gate = word, fifo

    def limit_files(self, num_bytes: int) -> None:
        """No file may grow larger, as if the disk were full; below zero: as large as it likes."""
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if num_bytes < 0 else num_bytes, hard))

    def _write(
        self, path: Path, tensors: Mapping[str, torch.Tensor], go_on: Callable[[], None] = lambda: None
    ) -> WrittenFile:
        word, fifo = self._gate
        calls = 0

        def gated() -> None:
            nonlocal calls
            calls += 1
            if word and word in str(path) and calls == 2:
                Path(fifo).read_bytes()
            go_on()

        return write_tensors(path, tensors, gated)
