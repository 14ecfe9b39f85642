"""The `nereus` command. Exit codes: 0 done, 1 failed while running, 2 a mistake in what was asked for."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence

import tyro

from nereus.cli.bench_command import Bench
from nereus.cli.failure import RunFailed
from nereus.cli.look_commands import Explain, Report, Status
from nereus.cli.plan_command import Plan
from nereus.cli.run_command import Run
from nereus.cli.scale import Scale
from nereus.core.errors import UserError

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded while a job runs
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    try:
        return _parse(arguments).main()
    except UserError as error:
        print(f"nereus: error: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"nereus: error: {error}", file=sys.stderr)
        if error.details:
            print(f"\n{error.details}", end="", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("nereus: left before anything was started", file=sys.stderr)
        return 130


Command = Run | Status | Explain | Report | Plan | Scale | Bench


def _parse(arguments: Sequence[str] | None) -> Command:
    """The command that was asked for. Raises UserError with tyro's complaint, which is a box, as one line."""
    commands: dict[str, Callable[..., Command]] = {
        "run": Run,
        "status": Status,
        "explain": Explain,
        "report": Report,
        "plan": Plan,
        "scale": Scale,
        "bench": Bench,
    }
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            command: Command = tyro.extras.subcommand_cli_from_dict(
                commands, args=arguments, prog="nereus", description=__doc__, config=(tyro.conf.FlagCreatePairsOff,)
            )
    except SystemExit as error:
        if not error.code:
            raise
        raise UserError(_one_line(said.getvalue())) from error
    return command


def _one_line(box: str) -> str:
    """What tyro says in a box: a title, a rule, the mistake, perhaps more rules and options that were meant."""
    parts: list[list[str]] = [[]]
    for line in box.splitlines():
        if line.startswith("╭") or not any(map(str.isalnum, line)):
            parts.append([])
        else:
            parts[-1].append(line.strip(" │"))
    mistake, *more = [" ".join(part) for part in parts if part][0 if "╭" in box else 1 :]
    meant = [option for part in more if part.startswith("Perhaps") for option in re.findall(r"--[a-z]+", part)]
    return f"{mistake.rstrip('.')}; " + (f"did you mean {meant[0]}?" if meant else "see nereus --help")


if __name__ == "__main__":
    sys.exit(main())
