"""What is typed after `nereus bench`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from nereus.cli.printing import print_json
from nereus.core.errors import UserError


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
            print_json(found)
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
