"""A job, as its file describes it: plain frozen dataclasses, one section each.

The annotations are the schema: types, bounds (`annotated_types`) and a line of documentation (`Doc`). The command line
validates YAML against them and prints them with `nereus run --fields`; nothing else reads a job file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, MinLen
from typing_extensions import Doc

from nereus.core.errors import PlanError, UserError
from nereus.core.graph import job_graph, model_stages
from nereus.core.plan import Layout, ModelStage, Placement, Plan

FORBID_UNKNOWN = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    path: Annotated[
        str,
        MinLen(1),
        Doc(
            "Folder (config.json, safetensors) or .gguf file, from the job file on; or package:NAME/FILE.gguf, of a package."
        ),
    ]
    __pydantic_config__ = FORBID_UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSection:
    name: Annotated[str, MinLen(1), Doc("count, or reasoning_gym/NAME for a data set of reasoning-gym.")]
    args: Annotated[Mapping[str, Any], Doc("What the task takes besides; see its own documentation.")] = field(
        default_factory=dict
    )
    __pydantic_config__ = FORBID_UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSection:
    name: Annotated[Literal["ppo", "grpo"], Doc("ppo: a critic and GAE. grpo: advantages within each prompt's group.")]
    gamma: Annotated[float, Ge(0), Le(1), Doc("Discount (ppo).")] = 1.0
    lam: Annotated[float, Ge(0), Le(1), Doc("GAE lambda (ppo).")] = 0.95
    clip_low: Annotated[float, Ge(0), Le(1), Doc("Lower clip of the policy ratio.")] = 0.2
    clip_high: Annotated[float, Ge(0), Doc("Upper clip of the policy ratio.")] = 0.2
    value_clip: Annotated[float | None, Ge(0), Doc("Clip of the value's change (ppo); null: none.")] = 0.2
    kl_coef: Annotated[float, Ge(0), Doc("Weight of the KL divergence from the reference model.")] = 0.01
    kl_in: Annotated[
        Literal["reward", "loss"] | None, Doc("Where the KL penalty goes; null: reward for ppo, loss for grpo.")
    ] = None
    kl_kind: Annotated[
        Literal["k1", "k2", "k3"] | None, Doc("Estimator of the KL per token; null: k1 in the reward, k3 in the loss.")
    ] = None
    whiten: Annotated[bool, Doc("Whiten advantages over the tokens of the batch (ppo).")] = True
    normalize_std: Annotated[bool, Doc("Divide group advantages by their deviation (grpo).")] = True
    entropy_coef: Annotated[float, Ge(0), Doc("Weight of the entropy bonus.")] = 0.0
    __pydantic_config__ = FORBID_UNKNOWN

    @property
    def kl_place(self) -> Literal["reward", "loss"]:
        return self.kl_in or ("reward" if self.name == "ppo" else "loss")

    @property
    def kl_estimator(self) -> Literal["k1", "k2", "k3"]:
        return self.kl_kind or ("k1" if self.kl_place == "reward" else "k3")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSection:
    prompts: Annotated[int, Ge(1), Doc("Prompts a step.")]
    samples_per_prompt: Annotated[int, Ge(1), Doc("Responses to each prompt.")] = 1
    mini_batches: Annotated[int, Ge(1), Doc("Optimizer updates an epoch; divides the sequences of a step.")] = 1
    epochs: Annotated[int, Ge(1), Doc("How often each response is trained on.")] = 1
    __pydantic_config__ = FORBID_UNKNOWN

    @property
    def sequences(self) -> int:
        """Responses a step."""
        return self.prompts * self.samples_per_prompt

    @property
    def mini_batch(self) -> int:
        """Responses an update."""
        return self.sequences // self.mini_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSection:
    max_new_tokens: Annotated[int, Ge(1), Doc("Longest response.")]
    temperature: Annotated[float, Gt(0), Doc("Of sampling, and of the policy that is trained.")] = 1.0
    top_p: Annotated[float, Gt(0), Le(1), Doc("Probability mass that is sampled from.")] = 1.0
    __pydantic_config__ = FORBID_UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection:
    lr: Annotated[float, Ge(0), Doc("Learning rate of the actor.")]
    critic_lr: Annotated[float | None, Ge(0), Doc("Learning rate of the critic; null: the actor's.")] = None
    betas: Annotated[tuple[float, float], Doc("Of AdamW.")] = (0.9, 0.999)
    eps: Annotated[float, Gt(0), Doc("Of AdamW.")] = 1e-8
    weight_decay: Annotated[float, Ge(0), Doc("Of AdamW.")] = 0.0
    max_grad_norm: Annotated[float, Ge(0), Doc("Clip of the gradient over the whole model; 0: none.")] = 1.0
    __pydantic_config__ = FORBID_UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLinks:
    step: Annotated[int, Ge(0), Doc("From this step on.")]
    factor: Annotated[float, Gt(0), Doc("What is left of the bandwidth of all links: 0.25 is a quarter, 1 all of it.")]
    __pydantic_config__ = FORBID_UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceSection:
    flops: Annotated[float, Gt(0), Doc("FLOP/s of a device.")]
    memory_bytes_s: Annotated[float, Gt(0), Doc("Bytes a second of a device's memory.")]
    link_bytes_s: Annotated[float, Gt(0), Doc("Bytes a second between two devices, one way.")]
    latency_s: Annotated[float, Ge(0), Doc("Of a message.")] = 0.0
    slow: Annotated[Sequence[SlowLinks], Doc("Links that get slower, or recover.")] = ()
    __pydantic_config__ = FORBID_UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class SupplyPoint:
    step: Annotated[int | None, Ge(0), Doc("When: before this step ...")] = None
    time_s: Annotated[float | None, Ge(0), Doc("... or so many seconds after the run began.")] = None
    devices: Annotated[int | None, Ge(1), Doc("How many devices there are from then on ...")] = None
    gone: Annotated[Sequence[int] | None, Doc("... or which of them go.")] = None
    notice_s: Annotated[
        float | None, Ge(0), Doc("Seconds until they vanish, whatever they do; null: they wait for the boundary.")
    ] = None
    during: Annotated[
        Literal["generation", "inference", "training"] | None,
        Doc("They vanish without notice as this stage of the step begins (with gone)."),
    ] = None
    __pydantic_config__ = FORBID_UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSection:
    devices: Annotated[int, Ge(1), Doc("Devices at the start.")]
    memory_gib: Annotated[
        float | None, Gt(0), Doc("Memory of each device; null: a GPU's own, for cpu its share of what is free.")
    ] = None
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Doc("cpu: a process of one core over Gloo; cuda: a GPU over NCCL.")
    ] = "auto"
    timeout_s: Annotated[float, Gt(0), Doc("How long a rank waits for another before it gives up.")] = 600.0
    heartbeat_s: Annotated[float, Gt(0), Doc("A device that is silent for so long is taken for dead.")] = 1.5
    backend: Annotated[
        Literal["local", "ray"], Doc("local: processes of this machine; ray: actors of a Ray cluster.")
    ] = "local"
    address: Annotated[
        str | None, Doc("Of a Ray cluster; auto: of the one here; local: a new one; null: auto, else local.")
    ] = None
    pace: Annotated[
        PaceSection | None, Doc("CPU devices take at least the time of the device described here: emulated.")
    ] = None
    supply: Annotated[Sequence[SupplyPoint], Doc("How the pool changes.")] = ()
    supply_trace: Annotated[
        str | None, Doc("The same from a file: CSV with the columns step or time_s, devices, perhaps notice_s.")
    ] = None
    __pydantic_config__ = FORBID_UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSection:
    tp: Annotated[int, Ge(1), Doc("Ways to cut each layer.")] = 1
    pp: Annotated[int, Ge(1), Doc("Ways to cut the layers' sequence.")] = 1
    dp: Annotated[int, Ge(1), Doc("Replicas.")] = 1
    gpus: Annotated[
        Sequence[int] | None, Doc("Devices, tp fastest, then pp, then dp; null: the first tp*pp*dp of the pool.")
    ] = None
    micro_batch: Annotated[int, Ge(1), Doc("Most sequences that a unit runs at a time.")] = 32
    recompute: Annotated[bool, Doc("Recompute activations in the backward pass.")] = False
    __pydantic_config__ = FORBID_UNKNOWN


PlanSection = Literal["auto"] | Mapping[str, PlacementSection]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeSection:
    step: Annotated[int, Ge(1), Doc("The change happens before this step.")]
    devices: Annotated[int | None, Doc("Devices from then on; null: as before.")] = None
    plan: Annotated[
        PlanSection | None, Doc("New placements; model-stages that are not named keep theirs; null with devices: auto.")
    ] = None
    __pydantic_config__ = FORBID_UNKNOWN


PolicyName = Literal["nereus", "any-gain", "every-k-steps", "static"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptSection:
    policy: Annotated[
        PolicyName | None,
        Doc(
            "nereus: change the plan where that repays itself; any-gain: wherever it is faster; every-k-steps: the same, "
            "but asked every so often; static: keep the plan. null: static where changes are given, else nereus."
        ),
    ] = None
    margin: Annotated[
        float, Ge(0), Le(1), Doc("Share of the horizon in which a change must repay itself; 0: only urgent ones.")
    ] = 0.5
    every: Annotated[int, Ge(1), Doc("Steps between replans (every-k-steps).")] = 10
    length: Annotated[float, Gt(0), Doc("Relative change of the response length that is worth a replan.")] = 0.30
    efficiency: Annotated[float, Gt(0), Doc("The same of achieved compute.")] = 0.20
    bandwidth: Annotated[float, Gt(0), Doc("The same of achieved bandwidth.")] = 0.20
    metrics_port: Annotated[int | None, Ge(0), Doc("Serve Prometheus metrics on this port of localhost; 0: any.")] = (
        None
    )
    __pydantic_config__ = FORBID_UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    folder: Annotated[str, Doc("Where run folders are made.")] = "runs"
    checkpoint_every: Annotated[int, Ge(0), Doc("Steps between checkpoints; 0: only at the end.")] = 0
    keep_checkpoints: Annotated[int, Ge(1), Doc("How many checkpoints are kept.")] = 2
    record_rollouts: Annotated[bool, Doc("Keep every step's responses, so that they can be replayed.")] = False
    tensorboard: Annotated[bool, Doc("Also write TensorBoard files.")] = False
    __pydantic_config__ = FORBID_UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One post-training job."""

    name: Annotated[str, MinLen(1), Doc("Names the run folder.")]
    steps: Annotated[int, Ge(1), Doc("Steps to train.")]
    seed: Annotated[int, Doc("Of sampling and of fresh value heads.")] = 0
    model: Annotated[ModelSection, Doc("The actor, and the reference model.")]
    critic: Annotated[ModelSection | None, Doc("The critic's first weights (ppo); null: the actor's.")] = None
    reward: Annotated[ModelSection | None, Doc("A reward model; null: the task's own reward is what is trained.")] = (
        None
    )
    task: Annotated[TaskSection, Doc("Prompts, and the reward of an answer.")]
    algorithm: Annotated[AlgorithmSection, Doc("What is optimised.")]
    batch: Annotated[BatchSection, Doc("How many prompts and responses, and how often each is trained on.")]
    sampling: Annotated[SamplingSection, Doc("How responses are drawn.")]
    optimizer: Annotated[OptimizerSection, Doc("AdamW.")]
    cluster: Annotated[ClusterSection, Doc("The devices.")]
    plan: Annotated[
        PlanSection, Doc("auto: the planner's; or MODEL/STAGE: placement, `all` for those that are not named.")
    ] = "auto"
    changes: Annotated[Sequence[ChangeSection], Doc("Changes of plan and pool at given steps.")] = ()
    adapt: Annotated[AdaptSection, Doc("When the plan changes by itself.")] = field(default_factory=AdaptSection)
    run: Annotated[RunSection, Doc("What a run leaves behind.")] = field(default_factory=RunSection)
    __pydantic_config__ = FORBID_UNKNOWN

    def __post_init__(self) -> None:
        if self.batch.sequences % self.batch.mini_batches:
            raise UserError(
                f"batch.mini_batches: {self.batch.mini_batches} does not divide the {self.batch.sequences} sequences "
                "of a step (prompts x samples_per_prompt)"
            )
        if self.algorithm.name == "grpo" and self.batch.samples_per_prompt < 2:
            raise UserError("batch.samples_per_prompt: 1 gives grpo no group to compare in; it must be at least 2")
        if not all(0 <= beta < 1 for beta in self.optimizer.betas):
            raise UserError(f"optimizer.betas: {list(self.optimizer.betas)} must be at least 0 and below 1")
        if not -(2**63) <= self.seed < 2**63:
            raise UserError(f"seed: {self.seed} does not fit into 64 bits")
        for i, point in enumerate(self.cluster.supply):
            _check_supply(f"cluster.supply.{i}", point)
        if self.changes and self.policy != "static":
            raise UserError(
                f"changes: they are for a plan that changes by nothing else, and adapt.policy is {self.adapt.policy}; "
                "leave one of the two out"
            )
        if self.changes and (self.cluster.supply or self.cluster.supply_trace):
            raise UserError("changes: they name the devices themselves; leave out cluster.supply and its trace")
        if self.cluster.pace is not None and self.cluster.device == "cuda":
            raise UserError("cluster.pace: it is for cpu devices, and cluster.device is cuda")
        steps = [change.step for change in self.changes]
        if sorted(set(steps)) != steps:
            raise UserError(f"changes: steps {steps} must ascend, each once")

    @property
    def policy(self) -> PolicyName:
        """The policy that `adapt.policy` stands for."""
        return self.adapt.policy or ("static" if self.changes else "nereus")

    @property
    def model_stages(self) -> tuple[ModelStage, ...]:
        """What has to be placed, in the order of the job graph."""
        return model_stages(job_graph(self.algorithm.name, reward_model=self.reward is not None))


def _check_supply(where: str, point: SupplyPoint) -> None:
    if (point.step is None) == (point.time_s is None):
        raise UserError(f"{where}: it must have step or time_s, one of the two")
    if (point.devices is None) == (point.gone is None):
        raise UserError(f"{where}: it must have devices or gone, one of the two")
    if point.during is not None and (point.gone is None or point.step is None or point.notice_s is not None):
        raise UserError(f"{where}: during goes with step and gone, and without notice_s")


@dataclass(frozen=True, slots=True)
class PlannedChange:
    """A change of plan made concrete, before `step`. decision: its number, None for a change of the job file.

    restart: by way of a checkpoint, since the plan cannot be reached from where the state lies.
    """

    step: int
    devices: tuple[int, ...]
    plan: Plan
    decision: int | None = None
    restart: bool = False


AutoPlan = Callable[[int, Sequence[int], Plan | None], Plan]
"""What `auto` stands for: (the step from which it counts, the pool, the plan before) -> plan. Raises PlanError."""


def initial_plan(job: Job, auto: AutoPlan) -> Plan:
    """The plan of step 0. Raises PlanError."""
    return resolve_plan(job, job.plan, range(job.cluster.devices), None, auto=auto)


def planned_changes(
    job: Job, plan: Plan, pool: Sequence[int], *, auto: AutoPlan, after: int = 0
) -> tuple[PlannedChange, ...]:
    """The changes after step `after` in order, each on top of the one before, the first on top of `plan` and `pool`.

    Raises PlanError naming the step.
    """
    found: list[PlannedChange] = []
    pool = tuple(pool)
    for change in (c for c in job.changes if c.step > after):
        if change.devices is not None:
            if change.devices < 1:
                raise PlanError(f"changes: step {change.step}: devices: {change.devices} must be at least 1")
            pool = tuple(range(change.devices))
        section = change.plan
        if section is None:
            if change.devices is None:
                raise PlanError(f"changes: step {change.step}: neither devices nor plan is given")
            section = "auto"
        try:
            plan = resolve_plan(job, section, pool, plan, auto=auto, step=change.step)
        except PlanError as error:
            raise PlanError(f"changes: step {change.step}: {error}") from error
        found.append(PlannedChange(change.step, pool, plan))
    return tuple(found)


def resolve_plan(
    job: Job, section: PlanSection, pool: Sequence[int], current: Plan | None, *, auto: AutoPlan, step: int = 0
) -> Plan:
    """Placements for all model-stages of a job on a pool; those not named keep their current one.

    Raises PlanError when one is missing, unknown, or needs more devices than the pool has.
    """
    if section == "auto":
        return auto(step, tuple(pool), current)
    names = {str(m): m for m in job.model_stages}
    for key in section:
        if key != "all" and key not in names:
            raise PlanError(f"plan: {key!r} is not a model-stage of this job; it has {', '.join(names)}, or `all`")
    placements = []
    for key, model_stage in names.items():
        given = section.get(key, section.get("all"))
        if given is not None:
            placements.append(_placement(model_stage, given, pool))
        elif current is not None and model_stage in current:
            placements.append(current[model_stage])
        else:
            raise PlanError(f"plan: {key} is not placed; name it, or `all`")
    plan = Plan(tuple(placements))
    check_plan(job, plan, pool)
    return plan


def _placement(model_stage: ModelStage, section: PlacementSection, pool: Sequence[int]) -> Placement:
    needed = section.tp * section.pp * section.dp
    gpus = tuple(section.gpus) if section.gpus is not None else tuple(sorted(pool)[:needed])
    if section.gpus is None and needed > len(pool):
        raise PlanError(
            f"{model_stage}: tp{section.tp} x pp{section.pp} x dp{section.dp} needs {needed} devices, "
            f"the pool has {len(pool)}"
        )
    return Placement(
        model_stage=model_stage,
        layout=Layout(section.tp, section.pp),
        dp=section.dp,
        gpus=gpus,
        micro_batch=section.micro_batch,
        recompute=section.recompute,
    )


def check_plan(job: Job, plan: Plan, pool: Sequence[int]) -> None:
    """Raise PlanError unless devices are in the pool and dp divides the batch exactly."""
    for placement in plan.placements:
        beyond = sorted(set(placement.gpus) - set(pool))
        if beyond:
            raise PlanError(
                f"{placement.model_stage}: devices {beyond} are not in the pool, which has {len(pool)}: {list(pool)}"
            )
        training = placement.model_stage.stage == "training"
        sequences = job.batch.mini_batch if training else job.batch.sequences
        if sequences % placement.dp:
            what = "a mini-batch" if training else "a step"
            raise PlanError(
                f"{placement.model_stage}: dp={placement.dp} does not divide the {sequences} sequences of {what}; "
                f"possible are {[d for d in range(1, sequences + 1) if sequences % d == 0]}"
            )
