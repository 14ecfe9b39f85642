"""What is typed after `nereus plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console

from nereus.cli.printing import print_json
from nereus.core.errors import UserError

if TYPE_CHECKING:
    from nereus.api.scenario import Scenario


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
            print_json(found)
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
