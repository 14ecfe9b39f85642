"""The `nereus` command. Exit codes: 0 done, 1 failed while running, 2 a mistake in what was asked for."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console

from nereus.cli.failure import RunFailed
from nereus.cli.scale import Scale
from nereus.core.errors import UserError
from nereus.core.job import PolicyName

if TYPE_CHECKING:
    from nereus.api.scenario import Scenario

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
            _print_json(summary)
        return 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The best plan for a model, a cluster and sequence lengths, the alternatives, and why. Predicted; nothing is run."""

    job: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="JOB")] = None
    """Job file, or a folder with a job.yaml in it; without one, the flags below describe the job."""
    set: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FIELD=VALUE"), tyro.conf.UseAppendAction] = ()
    """Override a field of the job file; may be given again."""
    model: str | None = None
    """Name of a usual model (Llama-3.1-8B), or a folder with a config.json; every model of the job has its shape."""
    gpus: int | None = None
    """GPUs of the pool (64)."""
    device: str | None = None
    """Kind of GPU (A100-40GB, A100-80GB, H200, ...), or cpu, which is measured (A100-80GB; of a job file: what is here)."""
    length: float | None = None
    """Mean response length, tokens (2048; of a job file: a third of its max_new_tokens)."""
    longest: float | None = None
    """Longest response, tokens (three times the mean; of a job file: its max_new_tokens)."""
    prompt: float | None = None
    """Mean prompt length, tokens (512; of a job file: of its task's first prompts)."""
    prompts: int | None = None
    """Prompts a step (1024)."""
    samples: int | None = None
    """Responses to each prompt (1)."""
    algorithm: Literal["ppo", "grpo", "remax"] | None = None
    """What is trained (ppo)."""
    recompute: Literal["auto", "on", "off"] = "auto"
    """Recompute activations in the backward pass where it pays, everywhere, or nowhere."""
    calibration: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """JSON of `nereus.cost.Calibration`: efficiencies learned from measurements."""
    sweep: Annotated[tuple[str, ...], tyro.conf.arg(metavar="lengths=A..B gpus=C..D")] = ()
    """How the best plan shifts over lengths and pools, both doubling."""
    transition_to: Annotated[tuple[str, ...], tyro.conf.arg(metavar="OTHER.yaml|length=N|gpus=N")] = ()
    """What it would take to change from this plan to that of another job file, or to the best one at other figures."""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Draw the sweep, or the transition, as a picture."""
    json: bool = False
    """Print one JSON object on stdout, and nothing else there."""

    def main(self) -> int:
        from nereus.cli import plan
        from nereus.cli.plan_view import sweep_view

        scenario = self._scenario()
        console = Console(stderr=self.json, highlight=False)
        if self.transition_to and self.sweep:
            raise UserError("--sweep and --transition-to are two questions: ask one of them")
        if self.transition_to:
            found: dict[str, Any] = plan.show_transition(
                console, scenario, self._plan(scenario), self.transition_to, self.plot
            )
        elif self.sweep or self.plot is not None:
            lengths, gpus = plan.sweep_axes(self.sweep, scenario)
            points = scenario.sweep(response_lengths=lengths, gpus=gpus)
            console.print(sweep_view(points))
            if self.plot is not None:
                title = f"{scenario.name} {scenario.algorithm} on {scenario.device_kind.name}, predicted"
                plan.plot(points, self.plot, title)
            found = {"sweep": [point.to_json() for point in points]}
        else:
            found = plan.show(console, scenario)
        if self.json:
            _print_json(found)
        return 0

    def _plan(self, scenario: Scenario) -> Any:
        """The plan of the job file, or the best one without a file."""
        from nereus.api.job_file import load_job
        from nereus.api.jobs import AutoPlanner
        from nereus.core.job import initial_plan

        if self.job is None:
            return scenario.choose(k=1).best.plan
        overrides = self.set if self.gpus is None else (*self.set, f"cluster.devices={self.gpus}")
        job = load_job(self.job, overrides)
        return initial_plan(job, AutoPlanner(job, scenario=scenario))

    def _scenario(self) -> Scenario:
        from nereus.api.job_file import load_job
        from nereus.api.jobs import scenario_of
        from nereus.api.scenario import describe
        from nereus.cli.plan import read_calibration

        given: dict[str, Any] = {
            "device": self.device,
            "prompt_length": self.prompt,
            "response_length": self.length,
            "recompute": self.recompute,
            "calibration": read_calibration(self.calibration),
        }
        described: dict[str, Any] = {
            "model": self.model,
            "longest": self.longest,
            "prompts": self.prompts,
            "samples": self.samples,
            "algorithm": self.algorithm,
        }
        described = {name: value for name, value in described.items() if value is not None}
        if self.job is not None:
            if described:
                raise UserError(
                    f"--{next(iter(described))} describes a job without a file; with one, use --set to override a field"
                )
            overrides = self.set if self.gpus is None else (*self.set, f"cluster.devices={self.gpus}")
            return scenario_of(load_job(self.job, overrides), **given)
        if self.set:
            raise UserError(f"--set {self.set[0]!r} overrides a field of a job file, and none is given")
        names = {"samples": "samples_per_prompt", "longest": "response_max"}
        given |= {names.get(name, name): value for name, value in described.items()}
        given = {name: value for name, value in given.items() if value is not None}
        return describe(**{"gpus": 64 if self.gpus is None else self.gpus, **given})


@dataclass(frozen=True, kw_only=True)
class Status:
    """Where a run stands: steps, plan, devices, the last decision, memory, losses. It may be going on."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    json: bool = False
    """Print one JSON object on stdout, and nothing else there."""

    def main(self) -> int:
        from nereus.cli.status import show

        _print_if(self.json, show(Console(stderr=self.json, highlight=False), self.run))
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

        _print_if(self.json, show(Console(stderr=self.json, highlight=False), self.run, self.decision))
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


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure what README and docs quote.

    equivalence: that a run which changes its plan trains as one that does not (several runs of --job).
    cost: predicted against measured step times of published runs (--table CSV), or of RL logs (--rl FOLDER).
    planner: milliseconds of a whole replan for pools of 8 to 16,384 GPUs, and SCIP on the same problem.
    dag: milliseconds to plan a transition for pools of 32 to 16,384 GPUs, and its schedule against proven bounds.
    reshard: seconds and bytes of transitions of real processes, beside the least possible and beside other systems.
    coordination: model-stages in each other's way, by one global DAG and by independent ones.
    overhead: what adapting costs: a run of many short steps whose pool follows a spot trace (--supply FILE).
    checkpoint: how long a run waits for the files of a checkpoint, written beside it and not.
    faults: devices fail at random points of runs of --job: what is lost, and how long it takes to go on.
    """

    name: tyro.conf.Positional[
        Literal["equivalence", "cost", "planner", "dag", "reshard", "coordination", "overhead", "checkpoint", "faults"]
    ]
    """Which bench."""
    job: Annotated[Path, tyro.conf.arg(metavar="JOB")] = Path("examples/count/changes.yaml")
    """equivalence, overhead, faults: job file to measure with."""
    set: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FIELD=VALUE"), tyro.conf.UseAppendAction] = ()
    """equivalence, overhead, faults: override a field of the job file; may be given again."""
    seeds: int = 3
    """equivalence: seeds of the free runs."""
    folder: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("runs/bench")
    """equivalence, overhead, faults: where its runs are kept; checkpoint: where its files are written for a while."""
    table: Annotated[Path | None, tyro.conf.arg(metavar="CSV")] = None
    """cost: a table of measured training runs."""
    rl: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """cost: a folder with rl_steps.csv and rl_plans/."""
    peer_python: Annotated[Path | None, tyro.conf.arg(metavar="PYTHON")] = None
    """cost: an interpreter that has llm-analysis, which is then scored on the same rows."""
    scip_limit_s: float = 60.0
    """planner: SCIP's time limit on each problem; 0 leaves it out."""
    pairs: int = 10
    """dag: pairs of plans for each pool."""
    solver_limit_s: float = 5.0
    """dag: the time limit of SCIP and CP-SAT on each pair; 0 leaves them out."""
    devices: tuple[int, ...] = (4, 8)
    """reshard: the most devices that transitions may need."""
    parameters: float = 336e6
    """reshard, checkpoint: of the model, 12 bytes each; reshard: fewer where not all would fit in this machine's memory."""
    peers: tuple[str, ...] = ("dcp", "dtensor")
    """reshard: systems to compare with: dcp, dtensor, torchft, universal (DeepSpeed), refit (megatron-core)."""
    repeats: int = 3
    """reshard, checkpoint: how often each is measured."""
    trials: int = 100
    """coordination: trials of each kind of overlap."""
    supply: Annotated[Path | None, tyro.conf.arg(metavar="JSON")] = None
    """overhead: a trace of spot GPUs."""
    steps: int = 1000
    """overhead: of its run."""
    faults: int = 200
    """faults: how many must have happened."""
    seed: int = 0
    """faults: what they are drawn from."""
    json: bool = False
    """Print one JSON object on stdout, and nothing else there."""

    def main(self) -> int:
        console = Console(stderr=self.json, highlight=False)
        found, lines = self._measure(lambda line: console.print(line, style="dim"))
        if self.json:
            _print_json(found)
        else:
            for line in lines:
                console.print(line, soft_wrap=True)
        return 0 if found["summary"].get("ok", True) else 1

    def _measure(self, say: Callable[[str], None]) -> tuple[dict[str, Any], list[str]]:
        """The bench's JSON object, and the same as lines of text."""
        from nereus.cli import bench

        if self.name == "equivalence":
            from nereus.cli.bench_equivalence import equivalence

            found = equivalence(self.job, self.set, self.seeds, self.folder, say)
            return found, bench.check_lines(found)
        if self.name == "planner":
            from nereus.cli.bench_planner import bench_planner

            found = bench_planner(scip_limit_s=self.scip_limit_s, scip=self.scip_limit_s > 0, say=say)
            return found, bench.row_lines(found)
        if self.name == "dag":
            from nereus.cli.bench_dag import bench_dag

            found = bench_dag(pairs=self.pairs, solver_limit_s=self.solver_limit_s, say=say)
            return found, [*bench.row_lines(found), *bench.summary_lines(found)]
        if self.name == "reshard":
            from nereus.cli.bench_reshard import bench_reshard, lines

            found = bench_reshard(
                self.parameters, devices=self.devices, peers=self.peers, repeats=self.repeats, say=say
            )
            return found, lines(found)
        if self.name == "coordination":
            from nereus.cli.bench_coordination import bench_coordination

            found = bench_coordination(self.trials, say=say)
            return found, [*bench.row_lines(found), *bench.summary_lines(found)]
        if self.name == "overhead":
            from nereus.cli.bench_overhead import bench_overhead

            if self.supply is None:
                raise UserError("bench overhead needs --supply JSON, a trace of spot GPUs")
            found = bench_overhead(
                self.job, self.set, supply=self.supply, steps=self.steps, folder=self.folder, say=say
            )
            return found, bench.row_lines(found)
        if self.name == "checkpoint":
            from nereus.cli.bench_checkpoint import bench_checkpoint

            found = bench_checkpoint(self.parameters, repeats=self.repeats, folder=self.folder, say=say)
            return found, bench.row_lines(found)
        if self.name == "faults":
            from nereus.cli.bench_faults import bench_faults

            found = bench_faults(self.job, self.set, faults=self.faults, seed=self.seed, folder=self.folder, say=say)
            return found, [*bench.row_lines(found), *bench.summary_lines(found)]
        if self.rl is not None:
            from nereus.cli.bench_cost_rl import bench_cost_rl

            found = bench_cost_rl(self.rl)
            return found, bench.summary_lines(found)
        if self.table is None:
            raise UserError("bench cost needs --table CSV or --rl FOLDER")
        from nereus.cli.bench_cost import bench_cost, table_lines

        found = bench_cost(self.table, self.peer_python)
        return found, list(table_lines(found))


def _print_if(wanted: bool, found: dict[str, Any]) -> None:
    if wanted:
        _print_json(found)


def _print_json(found: dict[str, Any]) -> None:
    print(json.dumps(_strict(found), allow_nan=False))


def _strict(value: Any) -> Any:
    """What JSON can say: null for NaN and infinities."""
    if isinstance(value, dict):
        return {name: _strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print_fields() -> None:
    from rich.padding import Padding
    from rich.text import Text

    from nereus.api.schema import list_fields

    console = Console()
    for field in list_fields():
        given = " (required)" if field.default is None else f" = {field.default}"
        console.print(Text.assemble((field.path, "bold"), f": {field.type}{given}"), soft_wrap=True)
        console.print(Padding(Text(field.doc, style="dim"), (0, 0, 0, 4)))


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
