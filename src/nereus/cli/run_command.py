"""What is typed after `nereus run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from nereus.cli.printing import print_json
from nereus.core.job import PolicyName


@dataclass(frozen=True, kw_only=True)
class Run:
    """Run a post-training job, changing its plan where that pays (`adapt` in the job file) or as its `changes` say.

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
    policy: PolicyName | None = None
    """When the plan changes by itself: `adapt.policy` of the job file."""
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

        overrides = self.set if self.policy is None else (*self.set, f"adapt.policy={self.policy}")
        request = RunRequest(
            job=self.job, resume=self.resume, overrides=overrides, static=self.static, replay=self.replay
        )
        summary = run_job(request, Console(stderr=self.json))
        if self.json:
            print_json(summary)
        return 0


def _print_fields() -> None:
    from rich.padding import Padding
    from rich.text import Text

    from nereus.api.schema import list_fields

    console = Console()
    for field in list_fields():
        given = " (required)" if field.default is None else f" = {field.default}"
        console.print(Text.assemble((field.path, "bold"), f": {field.type}{given}"), soft_wrap=True)
        console.print(Padding(Text(field.doc, style="dim"), (0, 0, 0, 4)))
