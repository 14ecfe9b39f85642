"""Published training runs, one row each: what the cost model says of them, so that it can be fitted and judged on them.

A row is a mapping of strings, as `csv.DictReader` gives it, with the columns listed in docs/cost-model.md. Columns
that a table lacks, or leaves empty, take their usual value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nereus.core.errors import UserError
from nereus.core.inventory import GIB, ClusterShape, cluster_of
from nereus.core.plan import split_evenly
from nereus.core.shapes import ModelShape
from nereus.cost import work as w
from nereus.cost.calibration import MEMORY_KINDS
from nereus.cost.memory import WORKSPACE_BYTES, layer_activation_bytes, logit_bytes
from nereus.cost.training import PassSetting, micro_batch_pass, update
from nereus.cost.work import Array, Machine

SECOND_SERIES = 14_017_000
"""Job numbers of the published nanotron runs rise with time. From here on (all trusted runs with PP > 1, some with PP = 1)
every collective of a run on several nodes seems to take time in proportion to its ranks: the host 2.5 ms more for every
layer, micro-batch and tp rank, a gradient sum without ZeRO 0.6 ms more for every layer and dp rank, whatever the width of
the model, with or without a pipeline. The border is where runs of one layout change: docs/cost-model.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """One measured run. step_s, memory_gib: None where not measured. context: ways the sequence is cut over devices.
    second_series: of the nanotron runs, see `SECOND_SERIES`.

    memory_gib: the most reserved by the allocator; allocated where only that is given (nanotron's is that after the step).
    """

    source: str
    gpu: str
    framework: str
    shape: ModelShape
    num_gpus: int
    tp: int
    pp: int
    dp: int
    context: int
    chunks: int
    sequence: int
    micro_batch: int
    batch: int
    zero: int
    sequence_parallel: bool
    recompute: bool
    fused_attention: bool
    dtype: str
    float32_gradients: bool
    step_s: float | None
    memory_gib: float | None
    out_of_memory: bool
    quality: str
    second_series: bool = False

    @property
    def model(self) -> tuple[int, ...]:
        """What tells models apart."""
        s = self.shape
        return (s.num_layers, s.hidden, s.intermediate, s.num_heads, s.num_kv_heads, s.vocab)

    @property
    def layout(self) -> tuple[int, ...]:
        return (self.tp, self.pp, self.dp, self.context, self.chunks)

    @property
    def micro_batches(self) -> float:
        return max(1.0, self.batch / (self.dp * self.micro_batch))

    @property
    def cluster(self) -> ClusterShape:
        return cluster_of(self.gpu, self.num_gpus)

    @property
    def setting(self) -> PassSetting:
        return PassSetting(
            shape=self.shape,
            machine=Machine.of(self.cluster, self.dtype, unit_first=False),
            tokens=self.sequence,
            logit_tokens=self.sequence,
            keys=self.sequence / 2,
            sequence_parallel=self.sequence_parallel,
            fused_attention=self.fused_attention,
            context=self.context,
            balanced=self.framework == "nanotron",
            slow_collectives=self.second_series and self.cluster.num_nodes > 1,
        )

    @property
    def gradient_overlap(self) -> float:
        """The share of forward and backward time beside which gradients are summed: the last micro-batch's backward pass.

        nanotron wraps a model in DDP, which does so, where ZeRO is off (huggingface/nanotron, `trainer.py`: make_ddp);
        with a pipeline too, but there both halves of the runs are fitted better without it.
        """
        if self.framework != "nanotron" or self.zero or self.pp > 1:
            return 0.0
        return (2 + self.recompute) / (3 + self.recompute) / self.micro_batches

    @classmethod
    def from_row(cls, row: Mapping[str, str]) -> TrainingRun:
        """Raises UserError naming the column that cannot be read."""

        def number(name: str, default: float | None = None) -> float:
            text = (row.get(name) or "").strip()
            if not text:
                if default is None:
                    raise UserError(f"column {name} is empty or missing in row {row.get('row_id', '?')}")
                return default
            try:
                return float(text)
            except ValueError:
                raise UserError(f"column {name}: {text!r} is not a number in row {row.get('row_id', '?')}") from None

        memory = row.get("mem_res_gib") or row.get("mem_alloc_gib")
        framework = row.get("framework", "")
        tp, pp = int(number("tp", 1)), int(number("pp", 1))
        # torchtitan states the batch of a replica, and pipelines it in micro-batches of one sequence
        whole_batch = framework.startswith("torchtitan") and pp > 1
        return cls(
            source=row.get("source", ""),
            gpu=row.get("gpu", ""),
            framework=framework,
            shape=_shape(number, int(number("seq"))),
            num_gpus=int(number("n_gpus")),
            tp=tp,
            pp=pp,
            dp=int(number("dp", 1)),
            context=int(number("cp", 1)),
            chunks=int(number("vp", 1)),
            sequence=int(number("seq")),
            micro_batch=1 if whole_batch else int(number("mbs")),
            batch=int(number("gbs")),
            zero=int(number("zero", 0)),
            sequence_parallel=bool(number("sp", 0)) and tp > 1,
            recompute=row.get("recompute", "") == "full",
            fused_attention="unfused" not in row.get("attn", ""),
            dtype="float8" if "fp8" in row.get("precision", "") else "bfloat16",
            float32_gradients="fp32 grad" in row.get("precision", ""),
            step_s=float(row["step_s"]) if row.get("step_s") else None,
            memory_gib=float(memory) if memory else None,
            out_of_memory=row.get("status") == "oom",
            quality=row.get("quality") or "",
            second_series=framework == "nanotron" and _job_number(row.get("row_id", "")) >= SECOND_SERIES,
        )


def _job_number(row_id: str) -> int:
    """Of "job14098833" or "14098833_2"; 0 where there is none."""
    found = re.search(r"\d+", row_id)
    return int(found.group()) if found else 0


def _shape(number: Any, sequence: int) -> ModelShape:
    """From the columns; head tied or not is told by the published size, else by the kind of MLP (GPT ties it)."""
    hidden, heads, gated = int(number("hidden")), int(number("heads")), bool(number("gated", 1))
    usual = 8 * hidden // 3 if gated else 4 * hidden
    shapes = [
        ModelShape(
            name="table",
            num_layers=int(number("layers")),
            hidden=hidden,
            intermediate=int(number("ffn", usual)),
            num_heads=heads,
            num_kv_heads=int(number("kv_heads", heads)),
            head_dim=hidden // heads,
            vocab=int(number("vocab")),
            gated=gated,
            tied=tied,
            linear_bias=not gated,
            num_positions=0 if gated else sequence,
        )
        for tied in (gated, not gated)
    ]
    published = number("params_b", 0.0) * 1e9
    if published > 0:
        return min(shapes, key=lambda s: abs(s.num_params - published))
    return next(s for s in shapes if s.tied != gated)


def step_work(runs: Sequence[TrainingRun]) -> Array:
    """Work of a whole training step of each run, [N, C]."""
    found = np.zeros((len(runs), len(w.CLASSES)))
    groups: dict[Any, list[int]] = {}
    for index, run in enumerate(runs):
        groups.setdefault((run.setting, run.zero, run.float32_gradients), []).append(index)
    for (setting, zero, float32), members in groups.items():
        tp, pp, dp, micro_batch, count, recompute = np.array(
            [(r.tp, r.pp, r.dp, r.micro_batch, r.micro_batches, r.recompute) for r in (runs[i] for i in members)],
            dtype=float,
        ).T
        work = micro_batch_pass(
            setting,
            tp=tp,
            pp=pp,
            dp=dp,
            micro_batch=micro_batch,
            micro_batches=count,
            backward=True,
            recompute=recompute,
        )
        work = work + update(
            setting, tp=tp, pp=pp, dp=dp, gradient_bytes=4 if float32 else 2, optimizer_bytes=12, zero=zero
        )
        found[members] = work.array((len(members),)).T
    return found


def step_memory(run: TrainingRun) -> Array:
    """Counted bytes by kind (`MEMORY_KINDS`) on the first pp_stage and on the one with the head, [2, K].

    pp_stage s holds min(pp - s, micro-batches) micro-batches (1F1B), so one of these two is the fullest.
    """
    shape, tp, pp = run.shape, run.tp, run.pp
    if run.framework == "nanotron":
        layers, head_stage = w.balanced_layers(shape, pp)
    else:
        layers, head_stage = [len(r) for r in split_evenly(shape.num_layers, pp)], pp - 1
    layer, embedding, head = w.local_params(shape, tp=tp)
    tokens = run.micro_batch * run.sequence / run.context
    kept = layer_activation_bytes(
        shape,
        keys=run.sequence,
        tp=tp,
        element_bytes=2,
        sequence_parallel=run.sequence_parallel,
        fused_attention=run.fused_attention,
    )
    inputs = 2 * shape.hidden / (tp if run.sequence_parallel else 1)
    replicas = run.dp * run.context
    share, sharded = (replicas if run.zero else 1), (replicas if run.zero == 3 else 1)
    found = np.zeros((2, len(MEMORY_KINDS)))
    for end, stage in enumerate((0, head_stage)):
        is_first, is_last = stage == 0, stage == head_stage
        params = layers[stage] * layer + is_first * embedding + is_last * head
        params += embedding if shape.tied and is_last and not is_first else 0
        in_flight = min(pp - stage, run.micro_batches)
        per_layer = inputs if run.recompute else kept
        kinds = {
            "resident": params * (2 / sharded + 12 / share),
            "gradients": params * (4 if run.float32_gradients else 2) / sharded,
            "activations": tokens * (in_flight * layers[stage] * per_layer + run.recompute * kept),
            "boundaries": tokens * in_flight * inputs,
            "logits": is_last * tokens * shape.vocab / tp * logit_bytes(2),
            "workspace": WORKSPACE_BYTES,
        }
        found[end] = [kinds.get(kind, 0.0) for kind in MEMORY_KINDS]
    return found


def capacity_bytes(run: TrainingRun) -> float:
    """Memory of the run's device; a number of GB in its name wins over the usual one."""
    for part in run.gpu.replace("(", "-").replace("_", "-").split("-"):
        if part.lower().endswith("gb") and part[:-2].isdigit():
            return float(part[:-2]) * GIB * 0.99  # what CUDA reports
    return float(run.cluster.device.memory_bytes)
