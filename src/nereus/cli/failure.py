"""What is said of a run that ended before its time."""

from __future__ import annotations


class RunFailed(RuntimeError):
    """A run that began and did not end as it should. The message is one line: what happened, what is lost, what next.

    details: a worker's traceback, or nothing.
    """

    def __init__(self, message: str, *, details: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.details, self.exit_code = details, exit_code
