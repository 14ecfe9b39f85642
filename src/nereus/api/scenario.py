"""What to plan for, and the questions that can be asked about it: candidates, estimates, the best plan and why.

describe(...) or jobs.scenario_of(job) -> Scenario
    .candidates(model_stage)  every way to run one model-stage
    .estimate(plan)           what one plan would cost, by operation class and kind of memory
    .choose()                 the best plan and the next ones
    .explain(choice)          why
    .sweep(...)               how the best plan shifts over lengths and pools
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from nereus.api.machine import cpu_host
from nereus.core.errors import PlanError, UserError
from nereus.core.inventory import ClusterShape, CpuHost, DeviceKind, Link, cluster_of, device_kind
from nereus.core.plan import ACTOR_TRAINING, Model, ModelStage, Placement, Plan
from nereus.core.shapes import ModelShape
from nereus.core.workload import Workload
from nereus.cost.calibration import EAGER_DECODING, PRIORS, Calibration
from nereus.cost.model import Candidate, CandidateTable, CostModel, TaskEstimate, divisors
from nereus.planner.choice import PlanChoice, PlannedPlan, choose
from nereus.planner.explain import Explanation, explain
from nereus.planner.problem import STAGE_ORDER, GpuPool

Recompute = Literal["auto", "on", "off"]
RECOMPUTE: Mapping[Recompute, tuple[bool, ...]] = {"auto": (False, True), "on": (True,), "off": (False,)}

ENGINE_STATE: Mapping[str, Any] = {
    "dtype": "float32",
    "parameter_bytes": 4,
    "gradient_bytes": 4,
    "optimizer_bytes": 8,
    "zero": 0,
}
"""The `Workload` of this package's own engine: float32 parameters are their own master weights, beside two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEstimate:
    """What one plan would cost, predicted.

    tasks: by name, seconds and their split by operation class. memory_bytes: kind -> bytes on the fullest GPU of each
    model-stage while it works. peak_bytes: device id -> all that lies on it, and the largest working set.
    """

    step_latency_s: float
    tasks: Mapping[str, TaskEstimate]
    memory_bytes: Mapping[ModelStage, Mapping[str, float]]
    peak_bytes: Mapping[int, float]

    def to_json(self) -> dict[str, Any]:
        return {
            "step_latency_s": self.step_latency_s,
            "tasks": {n: {"seconds": t.seconds, "by_class": dict(t.by_class)} for n, t in self.tasks.items()},
            "memory_bytes": {str(m): dict(kinds) for m, kinds in self.memory_bytes.items()},
            "peak_bytes": {str(gpu): value for gpu, value in self.peak_bytes.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """The best plan at one mean response length on one pool; where there is none, why."""

    gpus: int
    response_length: float
    best: PlannedPlan | None
    infeasible: str = ""

    def to_json(self) -> dict[str, Any]:
        row = {"gpus": self.gpus, "length": self.response_length}
        return row | ({"infeasible": self.infeasible} if self.best is None else self.best.to_json())


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What to plan for. Nothing is run, and all seconds are predictions.

    device: of the pool; a CpuHost's devices share its cores. gpus: devices of the pool. memory_bytes: of each device, where
    it is not the device's own. calibration: learned efficiencies; the conservative priors where there are none.
    source: where the device's figures are from, and what else should be said of them.
    link: between any two devices, where it is not that of the device's usual machine. link_factor: what is left of all
    bandwidths.
    """

    name: str
    shapes: Mapping[Model, ModelShape]
    device: DeviceKind | CpuHost
    gpus: int
    workload: Workload
    algorithm: str
    reward_model: bool
    memory_bytes: float | None = None
    recompute: Recompute = "auto"
    calibration: Calibration | None = None
    source: str = "data sheet"
    link: Link | None = None
    link_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise UserError(f"gpus: {self.gpus} must be at least 1")
        if self.recompute not in RECOMPUTE:
            raise UserError(f"recompute: {self.recompute!r} must be one of {', '.join(RECOMPUTE)}")

    def at(self, *, response_length: float | None = None, gpus: int | None = None) -> Scenario:
        """The same with another mean response length or pool; percentile and longest keep their ratio to the mean."""
        w = self.workload
        length = w.response_length if response_length is None else response_length
        if length <= 0:
            raise UserError(f"response_length: {length} must be above 0")
        p95, longest = (None if x is None else x / w.response_length * length for x in (w.response_p95, w.response_max))
        workload = replace(w, response_length=length, response_p95=p95, response_max=longest)
        return replace(self, gpus=self.gpus if gpus is None else gpus, workload=workload)

    def updated(
        self,
        *,
        workload: Workload | None = None,
        gpus: int | None = None,
        memory_bytes: float | None = None,
        calibration: Calibration | None = None,
        link_factor: float | None = None,
    ) -> Scenario:
        """The same job as it is now. What depends on none of these is not worked out again."""
        new = replace(
            self,
            workload=workload or self.workload,
            gpus=gpus or self.gpus,
            memory_bytes=memory_bytes or self.memory_bytes,
            calibration=calibration or self.calibration,
            link_factor=link_factor or self.link_factor,
        )
        kept = self.cost.updated(workload=new.workload, cluster=new.cluster, calibration=new._calibration)
        new.__dict__["cost"] = kept  # where cached_property looks
        return new

    def to_json(self) -> dict[str, Any]:
        kind = self.device_kind
        return {
            "name": self.name,
            "algorithm": self.algorithm,
            "device": kind.name,
            "device_source": self.source,
            "memory_bytes": kind.memory_bytes,
            "gpus": self.gpus,
            "recompute": self.recompute,
            "workload": asdict(self.workload),
        }

    # -- parts -------------------------------------------------------------------------------------------------------

    @cached_property
    def device_kind(self) -> DeviceKind:
        """One device of the pool."""
        kind = self.device.device(self.gpus) if isinstance(self.device, CpuHost) else self.device
        return kind if self.memory_bytes is None else replace(kind, memory_bytes=int(self.memory_bytes))

    @cached_property
    def cluster(self) -> ClusterShape:
        usual = cluster_of(self.device_kind, self.gpus)
        intra, inter = (self.link, self.link) if self.link is not None else (usual.intra_node, usual.inter_node)
        return replace(usual, intra_node=self._as_now(intra), inter_node=self._as_now(inter))

    def _as_now(self, link: Link) -> Link:
        return replace(link, bandwidth_bytes_s=link.bandwidth_bytes_s * self.link_factor)

    @cached_property
    def cost(self) -> CostModel:
        """The cost model behind all answers."""
        return CostModel(self.shapes, self.cluster, self.workload, self.algorithm, self.reward_model, self._calibration)

    @property
    def _calibration(self) -> Calibration | None:
        if self.calibration is None and isinstance(self.device, CpuHost):
            return engine_priors(self.device.share(self.gpus))
        return self.calibration

    @property
    def model_stages(self) -> tuple[ModelStage, ...]:
        return tuple(dict.fromkeys(task.model_stage for task in self.cost.graph))

    # -- answers -----------------------------------------------------------------------------------------------------

    def candidates(self, model_stage: ModelStage | str, max_gpus: int | None = None) -> CandidateTable:
        """Every way to run a model-stage ("actor/training") on at most `max_gpus` (all) of the GPUs, as columns."""
        name = self._model_stage(model_stage)
        return self.cost.table(name, max_gpus=max_gpus or self.gpus, recompute=RECOMPUTE[self.recompute])

    def estimate(self, plan: Plan) -> PlanEstimate:
        """What a plan would cost. Raises PlanError where it lacks a model-stage or has one that it cannot have."""
        rows = {m: self._row(plan, m) for m in self.model_stages}
        candidates = {m: candidate_of(self.as_run(plan[m])) for m in rows}
        tasks = {name: t for c in candidates.values() for name, t in self.cost.estimate(c).items()}
        return PlanEstimate(
            step_latency_s=self._step_latency(plan, {name: t.seconds for name, t in tasks.items()}),
            tasks={task.name: tasks[task.name] for task in self.cost.graph},
            memory_bytes={m: self.cost.memory(c) for m, c in candidates.items()},
            peak_bytes=_peak_bytes(plan, rows),
        )

    def choose(
        self,
        *,
        k: int = 5,
        devices: Sequence[int] | None = None,
        current: Plan | None = None,
        previous: PlanChoice | None = None,
    ) -> PlanChoice:
        """The best plan, and up to k - 1 slower ones that differ in actor/training; none on 5, 7, 11, ... GPUs of a node.

        devices: ids of the pool, 0 .. gpus - 1 if not given. current: a plan whose state should stay where it is.
        previous: see `planner.choice.choose`.
        Raises Infeasible (a PlanError) if nothing fits: what does not, by how much, and the least pool that would do.
        """
        ids = sorted(devices) if devices is not None else range(self.gpus)
        per_node = self.cluster.gpus_per_node
        nodes = tuple(tuple(ids[i : i + per_node]) for i in range(0, len(ids), per_node))
        if len(nodes) == 1 and per_node > 3 and per_node % 2 and per_node % 3:
            # A node that has lost one is cut as the whole one is, or nothing but single GPUs would line up. Its best plan
            # is found in milliseconds; to prove the order of those after it can take a minute.
            per_node, k = per_node + 1, 1
        return choose(
            self._tables(self.gpus),
            GpuPool(nodes=nodes, gpus_per_node=per_node),
            self.cost.graph,
            capacity_bytes=self.device_kind.memory_bytes,
            k=k,
            current=current,
            tables_for=self._tables,
            distinct_in=(ACTOR_TRAINING,),
            previous=previous,
        )

    def explain(self, choice: PlanChoice) -> Explanation:
        """Why the best plan of a choice is what it is, and what one more node would give, or the next pool that helps."""
        larger = max(2 * self.gpus, self.gpus + self.cluster.gpus_per_node)
        return explain(choice, self._tables(larger))

    def sweep(
        self, *, response_lengths: Sequence[float] | None = None, gpus: Sequence[int] | None = None
    ) -> list[SweepPoint]:
        """The best plan at every pool and mean response length, pool by pool."""
        lengths = response_lengths or [self.workload.response_length]
        return [self.at(response_length=length, gpus=n)._point() for n in gpus or [self.gpus] for length in lengths]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _point(self) -> SweepPoint:
        best, reason = None, ""
        try:
            best = self.choose(k=1).best
        except PlanError as error:
            reason = str(error)
        return SweepPoint(gpus=self.gpus, response_length=self.workload.response_length, best=best, infeasible=reason)

    def _tables(self, max_gpus: int) -> dict[ModelStage, CandidateTable]:
        return {m: self.candidates(m, max_gpus) for m in self.model_stages}

    def _model_stage(self, name: ModelStage | str) -> ModelStage:
        found = ModelStage.parse(name) if isinstance(name, str) else name
        if found not in self.model_stages:
            raise PlanError(
                f"{found} is not a model-stage of this job; it has {', '.join(map(str, self.model_stages))}"
            )
        return found

    def _row(self, plan: Plan, model_stage: ModelStage) -> CandidateTable:
        """The placement of a model-stage as a table of one row."""
        if model_stage not in plan:
            raise PlanError(f"plan: {model_stage} is not placed")
        p = self.as_run(plan[model_stage])
        table = self.cost.table(
            model_stage,
            max_gpus=len(p.gpus),
            tp=[p.layout.tp],
            pp=[p.layout.pp],
            dp=[p.dp],
            micro_batches=[p.micro_batch],
            recompute=[p.recompute],
        )
        if not len(table):
            raise PlanError(
                f"plan: {model_stage}: {p.layout} dp{p.dp} is not possible: tp must divide the attention heads and fit a "
                "node, pp be the layers at most, dp divide the batch"
            )
        return table

    def as_run(self, p: Placement) -> Placement:
        """With micro-batches of one size, the largest that p allows: a unit's batch need not be a multiple of p's."""
        training = p.model_stage.stage == "training"
        batch = self.workload.mini_batch if training else self.workload.sequences
        if p.model_stage.stage == "generation" or batch % p.dp:
            return p
        return replace(p, micro_batch=max(d for d in divisors(batch // p.dp) if d <= p.micro_batch))

    def _step_latency(self, plan: Plan, seconds: Mapping[str, float]) -> float:
        """The longest path: a task waits for what it needs and, on its GPUs, for what comes earlier in the step."""
        ends: dict[str, float] = {}
        done: list[Any] = []
        for task in sorted(self.cost.graph, key=lambda t: STAGE_ORDER.index(t.stage)):
            gpus = set(plan[task.model_stage].gpus)
            before = [t for t in done if t.name in task.after or gpus & set(plan[t.model_stage].gpus)]
            ends[task.name] = max([0.0, *(ends[t.name] for t in before)]) + seconds[task.name]
            done.append(task)
        return max(ends.values())


def candidate_of(p: Placement) -> Candidate:
    """A placement without its GPUs."""
    return Candidate(
        model_stage=p.model_stage, layout=p.layout, dp=p.dp, micro_batch=p.micro_batch, recompute=p.recompute
    )


def _peak_bytes(plan: Plan, rows: Mapping[ModelStage, CandidateTable]) -> dict[int, float]:
    peaks = {}
    for gpu in plan.gpus:
        here = [table for m, table in rows.items() if gpu in plan[m].gpus]
        if here:
            working = max(float(table.working_bytes[0]) for table in here)
            peaks[gpu] = sum(float(table.resident_bytes[0]) for table in here) + working
    return peaks


def engine_priors(share: float = 1.0) -> Calibration:
    """Of this package's engine, which decodes without CUDA graphs.

    share: that a device has of a CPU core. There it issues its operations itself, and for that too has only its share.
    """
    found = {"launch": Calibration().efficiency("launch"), **EAGER_DECODING}
    return Calibration(
        log_cost={name: -math.log(value * (share if "launch" in name else 1.0)) for name, value in found.items()}
    )


DECLARED = ("gemm", "weights", "attention_decode", "all_reduce", "gradient_reduce", "send_recv", "message")
"""Classes whose peak rates a paced device has by declaration, without their link."""

NOT_DECLARED = 1000.0
"""Efficiency of what a paced device does not have to take time for."""


def paced_priors() -> Calibration:
    """Of devices that keep a declared pace (`engine.pace`): what is declared is reached, the rest costs next to nothing.

    A sum while decoding is one message, as of an engine that has one kernel for it (`PRIORS`).
    """
    found = {name: 1.0 if name.partition("/")[0] in DECLARED else NOT_DECLARED for name in PRIORS}
    found["decode_message"] = PRIORS["decode_message"][0]
    return Calibration(log_cost={name: -math.log(value) for name, value in found.items() if "launch" not in name})


def describe(
    model: str = "Llama-3.1-8B",
    *,
    device: str | DeviceKind | CpuHost = "A100-80GB",
    gpus: int = 8,
    response_length: float = 2048,
    response_p95: float | None = None,
    response_max: float | None = None,
    prompt_length: float = 512,
    prompts: int = 1024,
    samples_per_prompt: int = 1,
    mini_batches: int = 1,
    epochs: int = 1,
    algorithm: str = "ppo",
    reward_model: bool = True,
    recompute: Recompute = "auto",
    calibration: Calibration | None = None,
) -> Scenario:
    """A scenario without a job file: every model has the shape of `model`, a usual name or a folder with a config.json.

    Lengths are means, in tokens; response_p95 and response_max are twice and three times the mean if not given.
    device: a kind by name, or "cpu", which is measured. State is bf16 with fp32 master weights on GPUs, float32 on CPUs.
    Raises UserError.
    """
    shape = shape_of(model)
    longest = 3 * response_length if response_max is None else response_max
    kind: DeviceKind | CpuHost = _device(device) if isinstance(device, str) else device
    workload = Workload(
        prompts=prompts,
        samples_per_prompt=samples_per_prompt,
        prompt_length=prompt_length,
        response_length=response_length,
        response_p95=min(2 * response_length, longest) if response_p95 is None else response_p95,
        response_max=longest,
        epochs=epochs,
        mini_batches=mini_batches,
        **(ENGINE_STATE if isinstance(kind, CpuHost) else {}),
    )
    models: tuple[Model, ...] = ("actor", "reference", "reward", "critic")
    return Scenario(
        name=shape.name,
        shapes=dict.fromkeys(models, shape),
        device=kind,
        gpus=gpus,
        workload=workload,
        algorithm=algorithm,
        reward_model=reward_model,
        recompute=recompute,
        calibration=calibration,
        source="measured" if isinstance(kind, CpuHost) else "data sheet",
    )


def _device(name: str) -> DeviceKind | CpuHost:
    return cpu_host() if name.lower() == "cpu" else device_kind(name)


def shape_of(model: str) -> ModelShape:
    """A model's shape from a folder's config.json, or by name. Raises UserError."""
    file = Path(model) / "config.json"
    if not file.is_file():
        return ModelShape.named(model)
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    try:
        return ModelShape.from_config(config, Path(model).name)
    except UserError:
        if _WIDTHS - set(config) or any("experts" in name for name in config):
            raise
        return _plain_decoder(config, Path(model).name)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} is not a decoder's: {error!r}") from error


_WIDTHS = {"num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"}


def _plain_decoder(config: Mapping[str, Any], name: str) -> ModelShape:
    """A kind of decoder that is not known by name: what its matrices are taken for, biases and more norms left out."""
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    return ModelShape(
        name=name,
        num_layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        intermediate=int(config["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocab=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", True)),
    )
