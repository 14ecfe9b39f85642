"""What a candidate would cost: seconds of each of its tasks, bytes on each of its GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from nereus.core.errors import UserError
from nereus.core.graph import StepTask, job_graph
from nereus.core.inventory import ClusterShape
from nereus.core.plan import ACTOR_GENERATION, Layout, Model, ModelStage
from nereus.core.shapes import ModelShape
from nereus.core.workload import Workload
from nereus.cost import memory as mem
from nereus.cost.calibration import Calibration
from nereus.cost.compiled import Candidates, CompiledTable
from nereus.cost.tasks import Cut, Lengths, TaskWork
from nereus.cost.work import CLASSES, Array, Machine

TP_DEGREES = (1, 2, 4, 8)
PP_DEGREES = (1, 2, 4, 8, 16, 32, 64)
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
LEAST_GENERATION_BATCH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run a model-stage, before it has GPUs."""

    model_stage: ModelStage
    layout: Layout
    dp: int
    micro_batch: int
    recompute: bool = False

    @property
    def num_gpus(self) -> int:
        return self.dp * self.layout.size


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateTable:
    """n candidates of one model-stage, column by column, [n] each.

    resident_bytes: on each GPU even while the model-stage is idle, at most. working_bytes: what comes on top at the peak of
    the fullest GPU. seconds: task name -> time. weight_sync_seconds: generation only, 0 elsewhere.
    """

    model_stage: ModelStage
    tp: npt.NDArray[np.int64]
    pp: npt.NDArray[np.int64]
    dp: npt.NDArray[np.int64]
    micro_batch: npt.NDArray[np.int64]
    recompute: npt.NDArray[np.bool_]
    gpus: npt.NDArray[np.int64]
    resident_bytes: Array
    working_bytes: Array
    seconds: Mapping[str, Array]
    weight_sync_seconds: Array

    def __len__(self) -> int:
        return len(self.tp)

    def candidate(self, row: int) -> Candidate:
        return Candidate(
            model_stage=self.model_stage,
            layout=Layout(int(self.tp[row]), int(self.pp[row])),
            dp=int(self.dp[row]),
            micro_batch=int(self.micro_batch[row]),
            recompute=bool(self.recompute[row]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEstimate:
    """Predicted time of one task. by_class: operation class -> seconds; they add up to `seconds`."""

    task: str
    seconds: float
    by_class: Mapping[str, float]


class CostModel:
    """Seconds and bytes of candidates, for one job on one cluster.

    shapes: of every model that the algorithm runs; a critic or reward model is given with its trunk's shape.
    """

    def __init__(
        self,
        shapes: Mapping[Model, ModelShape],
        cluster: ClusterShape,
        workload: Workload,
        algorithm: str,
        reward_model: bool,
        calibration: Calibration | None = None,
    ) -> None:
        self.cluster, self.workload, self.algorithm, self.reward_model = cluster, workload, algorithm, reward_model
        self.calibration = calibration or Calibration()
        self.graph: tuple[StepTask, ...] = job_graph(algorithm, reward_model=reward_model)
        self.shapes: dict[str, ModelShape] = {}
        for model in dict.fromkeys(task.model_stage.model for task in self.graph):
            if model not in shapes:
                raise UserError(f"{algorithm} needs the shape of the {model} model; given are {', '.join(shapes)}")
            value_model = model in ("critic", "reward")
            self.shapes[model] = shapes[model].with_scalar_head() if value_model else shapes[model]
        self.machine = Machine.of(cluster, workload.dtype)
        self._given = dict(shapes)
        self._compiled: dict[Any, CompiledTable] = {}

    def updated(
        self,
        *,
        workload: Workload | None = None,
        cluster: ClusterShape | None = None,
        calibration: Calibration | None = None,
    ) -> CostModel:
        """The same job with other lengths, another pool or better efficiencies. What depends on none of them is kept."""
        new = CostModel(
            self._given,
            cluster or self.cluster,
            workload or self.workload,
            self.algorithm,
            self.reward_model,
            calibration or self.calibration,
        )
        new._compiled = self._compiled
        return new

    @cached_property
    def lengths(self) -> Lengths:
        greedy = self.workload.prompts if self.algorithm == "remax" else 0
        return Lengths.of(self.workload, self.workload.sequences + greedy)

    # -- many at once --------------------------------------------------------------------------------------------

    def table(
        self,
        model_stage: ModelStage,
        *,
        max_gpus: int,
        tp: Sequence[int] | None = None,
        pp: Sequence[int] | None = None,
        dp: Sequence[int] | None = None,
        micro_batches: Sequence[int] | None = None,
        recompute: Sequence[bool] = (False, True),
    ) -> CandidateTable:
        """Every candidate of at most `max_gpus` GPUs whose batch divides exactly.

        The first call for a pool takes milliseconds; later ones with other lengths or efficiencies a tenth of it
        (`cost.compiled`, `updated`).

        tp defaults to the powers of two within a node that divide the heads, pp to powers of two up to the layers, dp to
        the divisors of the batch. A generation micro-batch need not divide: it is the most rows that run together. Powers of
        two by default, the largest of which holds all rows of a unit.
        Recomputation is a choice in training only.
        """
        axes = self._axes(model_stage, max_gpus, tp, pp, dp, micro_batches, recompute)
        key = (model_stage, self.shapes[model_stage.model], self._static, axes)
        compiled = self._compiled.get(key)
        if compiled is None or compiled.max_gpus < max_gpus:
            compiled = self._compiled[key] = self._compile(model_stage, axes, max_gpus)
        cost = self._cost
        columns = dict(compiled.columns)
        seconds = compiled.seconds(self.lengths, cost)
        resident = compiled.most_resident
        work = self._task_work(model_stage)
        peak = compiled.memory.peak(work.memory_lengths(self.lengths), self._memory_scale)
        columns |= {
            "resident_bytes": resident,
            "working_bytes": peak - resident,
            "weight_sync_seconds": compiled.weight_sync_seconds(cost),
        }
        if compiled.max_gpus > max_gpus:
            fits = columns["gpus"] <= max_gpus
            columns = {name: values[fits] for name, values in columns.items()}
            seconds = {name: values[fits] for name, values in seconds.items()}
        return CandidateTable(model_stage=model_stage, seconds=seconds, **columns)

    def _axes(
        self,
        model_stage: ModelStage,
        max_gpus: int,
        tp: Sequence[int] | None,
        pp: Sequence[int] | None,
        dp: Sequence[int] | None,
        micro_batches: Sequence[int] | None,
        recompute: Sequence[bool],
    ) -> tuple[tuple[int, ...], ...]:
        """(tp, pp, dp, micro-batch, recompute) degrees to combine."""
        shape, stage = self.shapes[model_stage.model], model_stage.stage
        batch = self._batch(model_stage)
        usual = self._generation_batches if stage == "generation" else MICRO_BATCHES
        return (
            tuple(t for t in tp or TP_DEGREES if shape.num_heads % t == 0 and t <= self.cluster.gpus_per_node),
            tuple(p for p in pp or PP_DEGREES if p <= shape.num_layers),
            tuple(d for d in dp or divisors(batch) if batch % d == 0),
            tuple(sorted(micro_batches or usual)),
            tuple(int(r) for r in recompute) if stage == "training" else (0,),
        )

    def _compile(self, model_stage: ModelStage, axes: tuple[tuple[int, ...], ...], max_gpus: int) -> CompiledTable:
        units = [(t, p, d) for t, p, d in product(*axes[:3]) if t * p * d <= max_gpus]
        tp, pp, dp = np.array(units, dtype=np.int64).reshape(-1, 3).T[:, :, None, None]
        size, recompute = np.array(axes[3])[:, None], np.array(axes[4])
        if model_stage.stage == "generation":
            smaller = np.array([0, *axes[3][:-1]])[:, None]
            possible = smaller < self._generated / dp  # while some of the rows would have to wait for the next wave
        else:
            possible = self._batch(model_stage) // dp % size == 0
        shape = (len(units), len(axes[3]), len(axes[4]))
        rows = np.flatnonzero(np.broadcast_to(possible, shape))
        cut = Cut(tp=tp, pp=pp, dp=dp, micro_batch=size, recompute=recompute)
        names = [task.name for task in self._tasks(model_stage)]
        return CompiledTable.of(self._task_work(model_stage), Candidates(cut, shape, rows), names, max_gpus)

    # -- one ---------------------------------------------------------------------------------------------------------

    def work(self, candidate: Candidate, task: str) -> Array:
        """Seconds at peak rates of each operation class in a task, [C] in the order of `CLASSES`."""
        found = self._task_work(candidate.model_stage).of(task, Cut.of(candidate), self.lengths)
        return found.array((1,))[:, 0]

    def estimate(self, candidate: Candidate) -> dict[str, TaskEstimate]:
        """Task name -> its predicted time, split by operation class; with a generation candidate weight_sync too."""
        names = [task.name for task in self._tasks(candidate.model_stage)]
        if candidate.model_stage == ACTOR_GENERATION:
            names.append("weight_sync")
        found = {}
        for name in names:
            seconds, split = self.calibration.split(self.work(candidate, name))
            by_class = {c: float(s) for c, s in zip(CLASSES, split, strict=True) if s > 0}
            found[name] = TaskEstimate(task=name, seconds=seconds, by_class=by_class)
        return found

    def memory(self, candidate: Candidate) -> dict[str, float]:
        """Kind -> bytes on the fullest GPU: resident kinds, then the working set of the task that needs most."""
        work = self._task_work(candidate.model_stage)
        scale = dict(zip(mem.WORKING_KINDS, self._memory_scale, strict=True))
        first, last = work.memory_ends(Cut.of(candidate), *work.memory_lengths(self.lengths))
        found = mem.fullest(first.scaled(scale), last.scaled(scale))
        return {name: float(np.asarray(value).reshape(())) for name, value in found.kinds().items()}

    @cached_property
    def _cost(self) -> Array:
        return self.calibration.cost

    @cached_property
    def _memory_scale(self) -> Array:
        return np.array([self.calibration.memory_scale(kind) for kind in mem.WORKING_KINDS])

    # -- parts -------------------------------------------------------------------------------------------------------

    def _batch(self, model_stage: ModelStage) -> int:
        """What dp must divide: the sequences of an update, or of a step. ReMax's greedy ones no one trains on."""
        return self.workload.mini_batch if model_stage.stage == "training" else self.workload.sequences

    @property
    def _generated(self) -> int:
        """Sequences that a step generates."""
        return self._task_work(ACTOR_GENERATION).sequences

    @property
    def _generation_batches(self) -> tuple[int, ...]:
        """Powers of two, the last of which holds all that a step generates."""
        least = LEAST_GENERATION_BATCH
        doublings = max(0, math.ceil(math.log2(self._generated / least)))
        return tuple(least << i for i in range(doublings + 1))

    @cached_property
    def _static(self) -> tuple[Any, ...]:
        """All but lengths and calibration that a compiled table depends on."""
        load, across = self.workload, self.cluster.num_nodes > 1
        sizes = (load.prompts, load.samples_per_prompt, load.epochs, load.mini_batches)
        state = (load.dtype, load.parameter_bytes, load.gradient_bytes, load.optimizer_bytes, load.zero)
        return (self.algorithm, self.machine, across, sizes, state, load.sequence_parallel, self.cluster.device.name)

    def _tasks(self, model_stage: ModelStage) -> list[StepTask]:
        return [t for t in self.graph if t.model_stage == model_stage and t.stage != "weight_sync"]

    def _task_work(self, model_stage: ModelStage) -> TaskWork:
        return TaskWork(
            shape=self.shapes[model_stage.model],
            machine=self.machine,
            workload=self.workload,
            stage=model_stage.stage,
            greedy=self.algorithm == "remax",
            across_nodes=self.cluster.num_nodes > 1,
            workspace_bytes=0.0 if self.cluster.device.name == "cpu" else mem.WORKSPACE_BYTES,
        )


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // s for s in small)})
