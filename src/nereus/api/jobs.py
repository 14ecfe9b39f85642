"""The scenario of a job file, and what `plan: auto` in it stands for: `nereus plan JOB` and `nereus run JOB` ask here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from nereus.api.machine import available_bytes, cache_folder, device_of, device_type_of, most_devices
from nereus.api.scenario import ENGINE_STATE, Recompute, Scenario, engine_priors, paced_priors, shape_of
from nereus.core.errors import PlanError, UserError
from nereus.core.events import PlanChosen
from nereus.core.inventory import CpuHost, DeviceKind, Link, cpu_device, device_kind
from nereus.core.job import Job, ModelSection, PaceSection, check_plan
from nereus.core.plan import ACTOR_TRAINING, Model, Plan
from nereus.core.shapes import ModelShape
from nereus.core.workload import Workload
from nereus.cost.calibration import Calibration
from nereus.planner.choice import PlanChoice

PROMPTS_READ = 64
"""Prompts of the task that the mean prompt length is taken from."""
FIRST_LENGTH = 1 / 3
"""Mean response length that a run is expected to begin with, of max_new_tokens; memory is planned for the whole of it."""


def scenario_of(
    job: Job,
    *,
    device: str | DeviceKind | CpuHost | None = None,
    gpus: int | None = None,
    prompt_length: float | None = None,
    response_length: float | None = None,
    recompute: Recompute = "auto",
    calibration: Calibration | None = None,
) -> Scenario:
    """What to plan for a job, which this package's engine runs: float32, without CUDA graphs, on one machine's devices.

    device: that of this machine, if not given. gpus: the job's. prompt_length: that of the task's first prompts.
    response_length: mean, a third of max_new_tokens if not given. Raises UserError.
    """
    shapes, longest = _shapes(job), job.sampling.max_new_tokens
    mean = longest * FIRST_LENGTH if response_length is None else response_length
    pace = job.cluster.pace if device is None else None
    kind, source = _device(job, device) if pace is None else _paced_device(job, pace)
    workload = Workload(
        prompts=job.batch.prompts,
        samples_per_prompt=job.batch.samples_per_prompt,
        prompt_length=_prompt_length(job) if prompt_length is None else prompt_length,
        response_length=mean,
        response_p95=min(2 * mean, max(mean, longest)),
        response_max=max(mean, longest),
        epochs=job.batch.epochs,
        mini_batches=job.batch.mini_batches,
        **ENGINE_STATE,
    )
    if calibration is None and not isinstance(kind, CpuHost):
        calibration = engine_priors() if pace is None else paced_priors()
    own_memory = device is None and job.cluster.memory_gib is not None
    return Scenario(
        name=job.name,
        shapes=shapes,
        device=kind,
        gpus=job.cluster.devices if gpus is None else gpus,
        workload=workload,
        algorithm=job.algorithm.name,
        reward_model=job.reward is not None,
        memory_bytes=(job.cluster.memory_gib or 0) * 2**30 if own_memory else None,
        recompute=recompute,
        calibration=calibration,
        source=source,
        link=None if pace is None else Link(bandwidth_bytes_s=pace.link_bytes_s, latency_s=pace.latency_s),
    )


class AutoPlanner:
    """Answers for `plan: auto` in a job: the planner's best plan, or the one that the run has recorded for that step.

    recorded: (step, devices) -> plan. chosen: what was chosen and is not recorded yet. scenario: the job's, if it is known.
    current: what the first plan is to keep state of.
    """

    def __init__(
        self,
        job: Job,
        recorded: Mapping[tuple[int, tuple[int, ...]], Plan] | None = None,
        *,
        scenario: Scenario | None = None,
        current: Plan | None = None,
    ) -> None:
        self.job, self.recorded = job, dict(recorded or {})
        self.chosen: list[PlanChosen] = []
        self._given, self._current = scenario, current

    @cached_property
    def scenario(self) -> Scenario:
        """Of the whole job; made only if something has to be planned, since it may measure the machine."""
        return scenario_of(self.job) if self._given is None else self._given

    def __call__(self, step: int, devices: Sequence[int], current: Plan | None) -> Plan:
        """See `core.job.AutoPlan`."""
        pool = tuple(devices)
        kept = self.recorded.get((step, pool))
        if kept is not None and self._is_possible(kept, pool):
            return kept
        scenario = self.scenario.at(gpus=len(pool))
        choice = scenario.choose(devices=pool, current=current or self._current)
        best = choice.best
        self.chosen.append(
            PlanChosen(
                step=step,
                devices=pool,
                plan=best.plan,
                step_s=best.step_latency_s,
                stage_s=best.stage_seconds,
                why=why(choice, scenario),
            )
        )
        return best.plan

    def _is_possible(self, plan: Plan, pool: tuple[int, ...]) -> bool:
        """Whether the job is still one that the plan was chosen for."""
        try:
            check_plan(self.job, plan, pool)
        except PlanError:
            return False
        return {p.model_stage for p in plan.placements} == set(self.job.model_stages)


def why(choice: PlanChoice, scenario: Scenario) -> str:
    """A choice in a line: the next best plan, the memory that it fills, and where the device's figures are from."""
    best, capacity = choice.best, choice.problem.capacity_bytes
    parts = [f"{best.peak_bytes / capacity:.0%} of {capacity / 2**30:.2g} GiB filled"]
    for other in choice.alternatives[:1]:
        p = other.plan[ACTOR_TRAINING]
        slower = other.step_latency_s / best.step_latency_s - 1
        parts.insert(0, f"with actor/training {p.layout} dp{p.dp} {slower:.1%} slower")
    return ", ".join([*parts, f"{scenario.device_kind.name}: {scenario.source}"])


def _device(job: Job, device: str | DeviceKind | CpuHost | None) -> tuple[DeviceKind | CpuHost, str]:
    if device is None:
        try:
            return device_of(device_type_of(job), most_devices(job))
        except UserError as error:
            raise UserError(
                f"{error}; to plan for GPUs that are not here, name their kind, as in --device H200"
            ) from error
    if not isinstance(device, str):
        return device, "given"
    return device_of("cpu") if device.lower() == "cpu" else (device_kind(device), "data sheet")


def _paced_device(job: Job, pace: PaceSection) -> tuple[DeviceKind, str]:
    """The device that CPU devices keep the pace of."""
    gib = job.cluster.memory_gib
    memory = available_bytes() / job.cluster.devices if gib is None else gib * 2**30
    return cpu_device(pace.flops, pace.memory_bytes_s, int(memory)), "emulated"


def _prompt_length(job: Job) -> float:
    from nereus.rl.setup import build_task, resolve_model

    try:
        needs_tokenizer = job.task.name != "count"
        folder = resolve_model(job.model.path, cache_folder()) if needs_tokenizer else Path(job.model.path)
        task = build_task(job.task, job, folder)
    except UserError as error:
        raise UserError(f"{error}; to plan without the task, give the mean length of its prompts (--prompt)") from error
    return sum(len(task.prompt(i).token_ids) for i in range(PROMPTS_READ)) / PROMPTS_READ


def _shapes(job: Job) -> dict[Model, ModelShape]:
    """Critic and reward model by their trunks."""
    sections: dict[Model, ModelSection] = {
        "actor": job.model,
        "reference": job.model,
        "critic": job.critic or job.model,
    }
    if job.reward is not None:
        sections["reward"] = job.reward
    return {model: _shape(model, section.path) for model, section in sections.items()}


def _shape(model: str, path: str) -> ModelShape:
    """Of a folder or a .gguf file; of a model that is not here, by its name."""
    from nereus.rl.setup import resolve_model

    field = "model" if model in ("actor", "reference") else model
    try:
        if Path(path).is_dir():
            return shape_of(path)
        try:
            return ModelShape.named(path)
        except UserError:
            return shape_of(str(resolve_model(path, cache_folder())))
    except UserError as error:
        raise UserError(f"{field}.path: {error}") from error
