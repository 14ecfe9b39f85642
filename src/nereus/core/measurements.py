"""What devices measure of themselves in a step, and what that says of the step as a whole.

    DeviceMeasurements    one device: by task seconds, operations, communication, memory
    StepMeasurements      all devices together (`summarise`): what a plan is judged by and a cost model learns from

Tasks are those of `core.graph`; what else devices are told to do (transitions, checkpoints) is not among them.

A call that several ranks make together takes, at each of them, its own time and the time until the last of them has come.
All make their calls in one order, so the least of their times for the same call is the call's own: `summarise` takes that,
call by call, where the ranks agree on what was sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nereus.core.plan import ModelStage, Plan

ALL_REDUCE, ALL_GATHER, BROADCAST = "all_reduce", "all_gather", "broadcast"
GRADIENT_REDUCE, SEND_RECV, TRANSFER = "gradient_reduce", "send_recv", "transfer"
COMM_KINDS = (ALL_REDUCE, ALL_GATHER, BROADCAST, GRADIENT_REDUCE, SEND_RECV, TRANSFER)
"""Inside layers over tp: all_reduce, all_gather (of logits), broadcast (of tokens). gradient_reduce: sums of gradients over
dp and between the ends of a pipeline, and of their norm. send_recv: between pp_stages. transfer: of state (weight_sync)."""

MEMORY_KINDS = ("resident", "gradients", "activations", "boundaries", "logits", "kv_cache", "workspace", "checkpoint")
"""Kinds of memory: the state of all units, the working kinds of `cost.memory`, and copies that are written to files."""

WEIGHT_SYNC = "weight_sync"
TRACED_CALLS = 4096
"""So many calls of a kind are kept one by one, of every task and group: 64 KiB."""

_TASKS: Mapping[tuple[str, str], str] = {
    ("generate", "actor/generation"): "generation",
    ("logprobs", "reference/inference"): "reference_logprobs",
    ("logprobs", "actor/training"): "old_logprobs",
    ("values", "critic/training"): "values",
    ("scores", "reward/inference"): "scores",
    ("gradients", "actor/training"): "actor_update",
    ("update", "actor/training"): "actor_update",
    ("gradients", "critic/training"): "critic_update",
    ("update", "critic/training"): "critic_update",
    ("synchronise", "actor/generation"): WEIGHT_SYNC,
}


def task_of(command: str, model_stage: ModelStage) -> str:
    """The task of a job graph that a worker's command is a part of; COMMAND MODEL/STAGE for one that is in no graph."""
    return _TASKS.get((command, str(model_stage)), f"{command} {model_stage}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Calls of one kind that `ranks` made together, in order: what one of them saw.

    sizes: bytes on the wire of each. seconds: as long each took here. At most TRACED_CALLS; count: how many there were.
    ranks: for send_recv and transfer (sender, receiver).
    """

    kind: str
    ranks: tuple[int, ...]
    count: int
    sizes: Sequence[int]
    seconds: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Calls of one kind. num_bytes: on the wire, as this device sends them (for a transfer: receives). seconds: that this
    device was held up by them, waiting for others included."""

    count: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Computations of one class. flops, num_bytes: counted from shard sizes, tokens and context (`engine.pace`)."""

    count: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    num_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMeasurements:
    """One task on one device, all its commands of a step together.

    seconds: from the beginning to the end of each command. operations: by class (forward, backward, head, decode, sample,
    optimizer). traffic: by kind. memory: bytes by kind when most was in use during the task.
    """

    commands: int
    seconds: float
    operations: Mapping[str, Operations]
    traffic: Mapping[str, Traffic]
    traces: Sequence[Trace]
    memory: Mapping[str, int]

    @property
    def compute_seconds(self) -> float:
        """All but what traffic held up."""
        return max(0.0, self.seconds - sum(t.seconds for t in self.traffic.values()))

    @property
    def flops(self) -> float:
        return sum(o.flops for o in self.operations.values())

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMeasurements:
    """What a device measured since it was last asked. memory: bytes by kind (`MEMORY_KINDS`) when most was in use,
    whatever it was doing; tasks: by name."""

    device: int
    tasks: Mapping[str, TaskMeasurements]
    memory: Mapping[str, int]

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Calls of one kind as the busiest device had them. seconds: their own, without waits for late peers."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSummary:
    """One task over all its devices.

    seconds: of the slowest unit. compute_seconds: of the device that computed longest. flops: of all devices.
    communication: by kind. peak_bytes, memory: of the device that had most in use, in sum and by kind.
    """

    seconds: float
    compute_seconds: float
    flops: float
    communication: Mapping[str, Communication]
    peak_bytes: int
    memory: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasurements:
    """A step as all its devices measured it.

    tasks: by name. bandwidth_bytes_s: by kind, of its large calls. flops_s: FLOP/s while computing, of all tasks and devices
    (0 where nothing was counted). peak_bytes: by device.
    """

    tasks: Mapping[str, TaskSummary] = field(default_factory=dict)
    bandwidth_bytes_s: Mapping[str, float] = field(default_factory=dict)
    flops_s: float = 0.0
    peak_bytes: Mapping[int, int] = field(default_factory=dict)


def summarise(by_device: Mapping[int, DeviceMeasurements], plan: Plan) -> StepMeasurements:
    """Put together what the devices of a plan measured in the same step; others have no part in it."""
    by_device = {device: m for device, m in by_device.items() if device in plan.gpus}
    by_task: dict[str, dict[int, TaskMeasurements]] = defaultdict(dict)
    for device, measured in by_device.items():
        for name, task in measured.tasks.items():
            by_task[name][device] = task
    own = {name: _own_seconds(here) for name, here in by_task.items()}
    operations = [o for here in by_task.values() for t in here.values() for o in t.operations.values() if o.flops]
    seconds = sum(o.seconds for o in operations)
    return StepMeasurements(
        tasks={name: _task(here, own[name]) for name, here in by_task.items()},
        bandwidth_bytes_s=_bandwidth(by_task, own),
        flops_s=sum(o.flops for o in operations) / seconds if seconds else 0.0,
        peak_bytes={device: m.peak_bytes for device, m in by_device.items()},
    )


OwnSeconds = Mapping[tuple[int, str, tuple[int, ...]], Sequence[float]]
"""(device, kind, ranks) -> each traced call's own seconds."""


def _task(here: Mapping[int, TaskMeasurements], own: OwnSeconds) -> TaskSummary:
    fullest = max(here.values(), key=lambda task: task.peak_bytes)
    return TaskSummary(
        seconds=max(task.seconds for task in here.values()),
        compute_seconds=max(task.compute_seconds for task in here.values()),
        flops=sum(task.flops for task in here.values()),
        communication=_communication(here, own),
        peak_bytes=fullest.peak_bytes,
        memory=fullest.memory,
    )


def _communication(here: Mapping[int, TaskMeasurements], own: OwnSeconds) -> dict[str, Communication]:
    found: dict[str, Communication] = {}
    for device, task in here.items():
        seconds: dict[str, float] = defaultdict(float)
        for trace in task.traces:
            if trace.count:
                kept = own[device, trace.kind, trace.ranks]
                seconds[trace.kind] += sum(kept) * trace.count / max(len(kept), 1)
        for kind, traffic in task.traffic.items():
            if kind not in found or traffic.num_bytes > found[kind].num_bytes:
                found[kind] = Communication(num_bytes=traffic.num_bytes, seconds=seconds[kind])
    return found


def _own_seconds(here: Mapping[int, TaskMeasurements]) -> OwnSeconds:
    """The least of the ranks' times for each call; a rank's own times where they do not tell of the same calls."""
    together: dict[tuple[str, tuple[int, ...]], dict[int, Trace]] = defaultdict(dict)
    for device, task in here.items():
        for trace in task.traces:
            together[trace.kind, trace.ranks][device] = trace
    found: dict[tuple[int, str, tuple[int, ...]], Sequence[float]] = {}
    for (kind, ranks), traces in together.items():
        alike = len({tuple(t.sizes) for t in traces.values()}) == 1
        least = [min(times) for times in zip(*(t.seconds for t in traces.values()), strict=True)] if alike else []
        for device, trace in traces.items():
            found[device, kind, ranks] = least if alike else trace.seconds
    return found


def _bandwidth(
    by_task: Mapping[str, Mapping[int, TaskMeasurements]], own: Mapping[str, OwnSeconds]
) -> dict[str, float]:
    """Bytes a second of each kind over its calls of at least a quarter of the largest: of small ones, latency is all."""
    calls: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for name, here in by_task.items():
        for device, task in here.items():
            for trace in task.traces:
                calls[trace.kind] += zip(trace.sizes, own[name][device, trace.kind, trace.ranks], strict=True)
    found = {}
    for kind, rows in calls.items():
        least = max(size for size, _ in rows) / 4
        num_bytes, seconds = (sum(column) for column in zip(*(row for row in rows if row[0] >= least), strict=True))
        if num_bytes and seconds > 0:
            found[kind] = num_bytes / seconds
    return found
