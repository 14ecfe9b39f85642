"""What is typed after `nereus status`, `explain` and `report`: looking at a run, whether it goes on or has ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from nereus.cli.printing import print_if


@dataclass(frozen=True, kw_only=True)
class Status:
    """Where a run stands: steps, plan, devices, the last decision, memory, losses. It may be going on."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    json: bool = False
    """Print one JSON object on stdout, and nothing else there."""

    def main(self) -> int:
        from nereus.cli.status import show

        print_if(self.json, show(Console(stderr=self.json, highlight=False), self.run))
        return 0


@dataclass(frozen=True, kw_only=True)
class Explain:
    """Why a run changed its plan, or did not: every decision with its numbers, predicted and measured."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    decision: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """The number of one decision; without it: a table of all, and the last one."""
    json: bool = False
    """Print one JSON object on stdout, and nothing else there."""

    def main(self) -> int:
        from nereus.cli.explain import show

        print_if(self.json, show(Console(stderr=self.json, highlight=False), self.run, self.decision))
        return 0


@dataclass(frozen=True, kw_only=True)
class Report:
    """A run as one page of HTML: charts, every decision, changes of plan, failures. It may be going on."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Where to write it (RUN/report.html)."""

    def main(self) -> int:
        from nereus.cli.report import write

        write(Console(highlight=False), self.run, self.output)
        return 0
