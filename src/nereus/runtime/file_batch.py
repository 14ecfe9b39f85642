"""Files that the devices of a fleet write together, seen from the controller.

    batch = FileBatch(fleet, parts)
    batch.start()         gathers copies of all files; devices write them while they do other work
    batch.look(wait)      whether all are on disk; then `files` and `sums` say what lies there
    batch.give_up()

Where copies of everything do not fit beside what devices hold, `start` gathers file by file and waits for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from nereus.core.plan import ModelStage
from nereus.runtime.background_writes import FileReport
from nereus.runtime.checkpoint import WrittenFile
from nereus.runtime.fleet import Fleet
from nereus.runtime.tensor_files import LEAST_FILE_BYTES, MOST_FILE_BYTES, Part, deal_out

HOST_SHARE = 1 / 2
"""Of a machine's available memory, the most that copies take together."""


class WriterLost(RuntimeError):
    """A device that was writing is gone, and its files with it."""


class FileBatch:
    """See the module. files: to be written. waited: why `start` waits for them; empty if it does not."""

    def __init__(self, fleet: Fleet, parts: Iterable[Part], *, wait: str = "") -> None:
        """Devices forget what they wrote before. wait: a reason to wait also where there is room.

        Raises WorkerDied or WorkerFailed.
        """
        self._fleet, parts = fleet, list(parts)
        self.files = deal_out(parts)
        self._writers = {file.writer: fleet.cluster.incarnation(file.writer) for file in self.files}
        self._reports: dict[str, FileReport] = {}
        too_large, most_bytes = self._room()
        self.waited = wait or too_large
        if self.waited:
            self.files = deal_out(parts, most_bytes)

    @property
    def writers(self) -> frozenset[int]:
        return frozenset(self._writers)

    def start(self) -> None:
        """Raises, where it waits for files, as `look`; WorkerDied, WorkerFailed."""
        if self.waited:
            for file in self.files:
                self._fleet.gather(file).results()
                self.look(wait=True)
        else:
            for call in [self._fleet.gather(file) for file in self.files]:
                call.results()

    def look(self, *, wait: bool, within_s: float | None = None) -> bool:
        """Whether all files are on disk. wait: until those are that have been gathered, or `within_s` have passed.

        Raises OSError, in one line, where one cannot be written; WriterLost; WorkerDied, WorkerFailed.
        """
        writing = {file.writer for file in self.files if str(file.path) not in self._reports}
        if lost := sorted(writing - self._alive()):
            raise WriterLost(f"device {lost[0]} is gone, which was writing a part of it")
        call = self._fleet.cluster.call("written", dict.fromkeys(sorted(writing), (wait,)))
        if within_s is not None and not call.within(within_s):
            return False
        reports = call.results()
        for device, report in reports.items():
            if report.error:
                raise OSError(f"device {device} cannot write {report.error}")
            self._reports |= report.files
        return all(str(file.path) in self._reports for file in self.files)

    def give_up(self) -> None:
        """Nobody wants the files any more. Raises WorkerDied, WorkerFailed."""
        if alive := self._alive():
            self._fleet.cluster.call("clear_writes", dict.fromkeys(alive, ())).results()

    def written(self) -> Mapping[Path, WrittenFile]:
        """Once `look` has said that all are on disk."""
        return {file.path: self._reports[str(file.path)].written for file in self.files}

    def sums(self, name: ModelStage) -> dict[str, int]:
        """Of a model-stage's tensors, as they lie in the files (see `core.digest`)."""
        reports = [self._reports[str(file.path)] for file in self.files if file.model_stage == name]
        return {tensor: value for report in reports for tensor, value in report.sums.items()}

    def _alive(self) -> frozenset[int]:
        cluster = self._fleet.cluster
        return frozenset(g for g, n in self._writers.items() if g in cluster.devices and cluster.incarnation(g) == n)

    def _room(self) -> tuple[str, int]:
        """(Why copies of all files do not fit, or nothing; how large a file may then be)."""
        rooms = self._fleet.cluster.call("clear_writes", dict.fromkeys(self._writers, ())).results()
        needed: dict[int, int] = dict.fromkeys(self._writers, 0)
        for file in self.files:
            needed[file.writer] += file.num_bytes
        on_node: dict[int, int] = {}
        why = ""
        for device, num_bytes in needed.items():
            node = self._fleet.cluster.node_of(device)
            on_node[node] = on_node.get(node, 0) + num_bytes
            room = rooms[device]
            if num_bytes > room.device_bytes:
                why = f"device {device} has room for {_mib(room.device_bytes)} of a copy of {_mib(num_bytes)}"
            elif on_node[node] > HOST_SHARE * room.host_bytes:
                why = f"node {node} has {_mib(room.host_bytes)} of memory for copies of {_mib(on_node[node])}"
        least = min((room.device_bytes for room in rooms.values()), default=MOST_FILE_BYTES)
        return why, int(min(MOST_FILE_BYTES, max(LEAST_FILE_BYTES, least)))


def _mib(num_bytes: float) -> str:
    return f"{max(0.0, num_bytes) / 2**20:.1f} MiB"
