"""`nereus plan`: the best plan for a model, a cluster and sequence lengths; the alternatives; why. Nothing is run.

A thin skin over `nereus.cost.CostModel` and `nereus.planner.choose`. What it prints is predicted from data sheets and the
conservative priors of `nereus.cost.calibration`, unless a calibration file is given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from nereus.cli.config import load_job
from nereus.cli.plan_view import choice_view, seconds
from nereus.core.errors import PlanError, UserError
from nereus.core.inventory import ClusterShape, cluster_of
from nereus.core.job import Job
from nereus.core.plan import ModelStage
from nereus.core.shapes import ModelShape
from nereus.core.workload import Workload
from nereus.cost.calibration import Calibration
from nereus.cost.model import CandidateTable, CostModel
from nereus.planner.choice import PlanChoice, choose
from nereus.planner.explain import Explanation, explain
from nereus.planner.problem import GpuPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to plan for. response_length: mean; its 95th percentile and longest are the workload's."""

    name: str
    shapes: Mapping[Any, ModelShape]
    device: str
    gpus: int
    workload: Workload
    algorithm: str
    reward_model: bool
    calibration: Calibration | None = None

    @property
    def cluster(self) -> ClusterShape:
        return cluster_of(self.device, self.gpus)

    def at(self, length: float, gpus: int) -> Question:
        """The same with other mean response lengths and GPUs; percentile and longest keep their ratio to the mean."""
        w, scale = self.workload, length / self.workload.response_length
        return replace(
            self,
            gpus=gpus,
            workload=replace(
                w,
                response_length=length,
                response_p95=None if w.response_p95 is None else w.response_p95 * scale,
                response_max=None if w.response_max is None else w.response_max * scale,
            ),
        )


def question_of_flags(
    *,
    model: str,
    device: str,
    gpus: int,
    prompt: float,
    length: float,
    prompts: int,
    samples: int,
    algorithm: str,
    calibration: Calibration | None = None,
) -> Question:
    """A question without a job file: every model of one shape, a reward model beside it."""
    shape = shape_of(model)
    workload = Workload(
        prompts=prompts,
        samples_per_prompt=samples,
        prompt_length=prompt,
        response_length=length,
        response_p95=2 * length,
        response_max=3 * length,
    )
    shapes = {
        "actor": shape,
        "reference": shape,
        "reward": shape.with_scalar_head(),
        "critic": shape.with_scalar_head(),
    }
    return Question(
        name=shape.name,
        calibration=calibration,
        shapes=shapes,
        device=device,
        gpus=gpus,
        workload=workload,
        algorithm=algorithm,
        reward_model=True,
    )


def question_of_job(
    path: Path,
    overrides: tuple[str, ...],
    *,
    device: str,
    prompt: float,
    length: float | None,
    calibration: Calibration | None = None,
) -> Question:
    """A question about a job file: its models, batch and devices. length None: a third of max_new_tokens."""
    job = load_job(path, overrides)
    mean = job.sampling.max_new_tokens / 3 if length is None else length
    workload = Workload(
        prompts=job.batch.prompts,
        samples_per_prompt=job.batch.samples_per_prompt,
        prompt_length=prompt,
        response_length=mean,
        response_p95=min(2 * mean, job.sampling.max_new_tokens),
        response_max=max(mean, job.sampling.max_new_tokens),
        epochs=job.batch.epochs,
        mini_batches=job.batch.mini_batches,
    )
    return Question(
        name=job.name,
        calibration=calibration,
        shapes=_shapes_of_job(job),
        device=device,
        gpus=job.cluster.devices,
        workload=workload,
        algorithm=job.algorithm.name,
        reward_model=job.reward is not None,
    )


def read_calibration(path: Path | None) -> Calibration | None:
    """A calibration from its JSON file. Raises UserError."""
    if path is None:
        return None
    try:
        return Calibration.from_json(path.read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--calibration {path} cannot be read: {error!r}") from error


def _shapes_of_job(job: Job) -> dict[str, ModelShape]:
    actor = shape_of(job.model.path)
    critic = shape_of(job.critic.path) if job.critic is not None else actor
    shapes = {"actor": actor, "reference": actor, "critic": critic.with_scalar_head()}
    if job.reward is not None:
        shapes["reward"] = shape_of(job.reward.path).with_scalar_head()
    return shapes


def shape_of(model: str) -> ModelShape:
    """A model's shape from a folder's config.json, or by name. Raises UserError."""
    config = Path(model) / "config.json"
    if not config.is_file():
        return ModelShape.named(model)
    try:
        return ModelShape.from_config(json.loads(config.read_text()), Path(model).name)
    except ValueError as error:
        raise UserError(f"{config} cannot be read: {error}") from error


def answer(question: Question, k: int = 5) -> tuple[PlanChoice, Explanation]:
    """The best plans and why. Raises PlanError saying what does not fit, by how much, and the least pool that would."""
    cluster = question.cluster
    model = CostModel(
        question.shapes,
        cluster,
        question.workload,
        question.algorithm,
        question.reward_model,
        question.calibration,
    )
    stages = {task.model_stage for task in model.graph}

    def tables(gpus: int) -> dict[ModelStage, CandidateTable]:
        return {m: model.table(m, max_gpus=gpus) for m in stages}

    choice = choose(
        tables(question.gpus),
        GpuPool.regular(question.gpus, cluster.gpus_per_node),
        model.graph,
        capacity_bytes=cluster.device.memory_bytes,
        k=k,
        tables_for=tables,
    )
    return choice, explain(choice, tables(question.gpus + cluster.gpus_per_node))


def sweep_axes(texts: tuple[str, ...], question: Question) -> tuple[list[int], list[int]]:
    """`lengths=1024..16384 gpus=8..1024` -> lengths and GPUs, doubling. Raises UserError."""
    axes = {"lengths": [int(question.workload.response_length)], "gpus": [question.gpus]}
    for text in texts:
        name, _, span = text.partition("=")
        first, dots, last = span.partition("..")
        if name not in axes or not first.isdigit() or (dots and not last.isdigit()):
            raise UserError(f"--sweep {text!r} is not of the form lengths=1024..16384 or gpus=8..1024")
        axes[name] = list(_doubling(int(first), int(last or first)))
    return axes["lengths"], axes["gpus"]


def _doubling(first: int, last: int) -> Iterator[int]:
    while first <= last and first > 0:
        yield first
        first *= 2


def sweep(question: Question, lengths: list[int], gpus: list[int]) -> list[dict[str, Any]]:
    """The best plan at every length and pool; where none fits, why."""
    rows = []
    for count in gpus:
        for length in lengths:
            row: dict[str, Any] = {"gpus": count, "length": length}
            try:
                best = answer(question.at(length, count), k=1)[0].best
                row |= best.to_json()
            except PlanError as error:
                row["infeasible"] = str(error)
            rows.append(row)
    return rows


def sweep_view(rows: list[dict[str, Any]]) -> RenderableType:
    """A sweep as a table: a row for every pool and length, a column for every model-stage."""
    names = list(dict.fromkeys(name for row in rows for name in row.get("plan", {})))
    table = Table("GPUs", "length", "step", *names)
    for row in rows:
        if "infeasible" in row:
            table.add_row(str(row["gpus"]), str(row["length"]), "-", "does not fit")
            continue
        cells = [_cell(row["plan"][name]) for name in names]
        table.add_row(str(row["gpus"]), str(row["length"]), seconds(row["step_latency_s"]), *cells)
    return table


def _cell(placement: Mapping[str, Any]) -> str:
    recompute = " r" if placement["recompute"] else ""
    return f"tp{placement['tp']} pp{placement['pp']} dp{placement['dp']} m{placement['micro_batch']}{recompute}"


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Predicted step latency over length, one line a pool, each point labelled with the training layout of the actor."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("--plot needs matplotlib: pip install 'nereus-rl[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for gpus in dict.fromkeys(row["gpus"] for row in rows):
        points = [row for row in rows if row["gpus"] == gpus and "plan" in row]
        axes.plot([p["length"] for p in points], [p["step_latency_s"] for p in points], "o-", label=f"{gpus} GPUs")
        for p in points:
            a = p["plan"]["actor/training"]
            label = f"tp{a['tp']} pp{a['pp']} dp{a['dp']}"
            axes.annotate(
                label, (p["length"], p["step_latency_s"]), fontsize=7, xytext=(3, 5), textcoords="offset points"
            )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="mean response length, tokens",
        ylabel="predicted step latency, s",
        title=title,
    )
    axes.set_xticks(sorted({row["length"] for row in rows}), [str(x) for x in sorted({row["length"] for row in rows})])
    axes.minorticks_off()
    axes.legend()
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def show(console: Console, question: Question) -> dict[str, Any]:
    """Print the answer to a question; returns it as JSON."""
    choice, why = answer(question)
    console.print(choice_view(choice, why))
    return {**choice.to_json(), "why": why.to_json()}
