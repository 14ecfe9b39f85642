"""The `nereus` command. Exit codes: 0 done, 1 failed while running, 2 a mistake in what was asked for."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from nereus.core.errors import UserError

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded while a job runs
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Run a post-training job, changing its plan as the job file says.

    Ctrl-C lets the running step end, writes a checkpoint and leaves; --resume goes on from there.
    """

    job: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="JOB")] = None
    """Job file, or a folder with a job.yaml in it."""
    set: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FIELD=VALUE"), tyro.conf.UseAppendAction] = ()
    """Override a field of the job file, as in --set batch.prompts=64; may be given again."""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="RUN")] = None
    """Go on with this run folder from its newest checkpoint; --set plan=..., --set cluster.devices=N change its plan."""
    static: bool = False
    """Leave out the job's changes of plan."""
    replay: Annotated[Path | None, tyro.conf.arg(metavar="RUN")] = None
    """Train on the recorded rollouts of this run folder instead of generating."""
    json: bool = False
    """Print one JSON object on stdout, and nothing else there."""
    fields: bool = False
    """List every field of a job file, with its default, and leave."""

    def main(self) -> int:
        if self.fields:
            _print_fields()
            return 0
        from nereus.cli.run import RunRequest, run_job

        request = RunRequest(
            job=self.job, resume=self.resume, overrides=self.set, static=self.static, replay=self.replay
        )
        summary = run_job(request, Console(stderr=self.json))
        if self.json:
            print(json.dumps(summary))
        return 0


def _print_fields() -> None:
    from rich.table import Table

    from nereus.cli.config import describe_fields

    table = Table("field", "type", "default", "", box=None, header_style="bold")
    for row in describe_fields():
        table.add_row(*row)
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    commands: dict[str, Callable[..., Run]] = {"run": Run}
    try:
        command: Run = tyro.extras.subcommand_cli_from_dict(
            commands, args=arguments, prog="nereus", description=__doc__, config=(tyro.conf.FlagCreatePairsOff,)
        )
        return command.main()
    except UserError as error:
        print(f"nereus: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("nereus: left at once; the last checkpoint is whole, go on with --resume", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
