"""`nereus report`: a run as one page of HTML."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from nereus.cli.status import state_of
from nereus.core.errors import UserError
from nereus.runtime.files import write_atomically
from nereus.telemetry.folder import holder_of, read_events
from nereus.telemetry.history import look_back
from nereus.telemetry.report import page

REPORT = "report.html"


def write(console: Console, path: Path, output: Path | None) -> Path:
    """Write the report of the run in folder `path`, into it unless `output` says where. Raises UserError."""
    running = holder_of(path) is not None
    history = look_back(read_events(path))
    output = path / REPORT if output is None else output
    try:
        write_atomically(output, page(history, state_of(history, running)))
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error.strerror}") from None
    console.print(f"report of {history.progress.num_done} steps: {output}", soft_wrap=True, markup=False)
    return output
