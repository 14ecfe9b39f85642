"""`nereus bench cost --rl`: predicted against measured seconds of each stage of real RL steps, and the ranking of layouts.

    rl_steps.csv    each run: fitted on its first third, scored on the rest
    rl_plans/*.csv  each measured layout: predicted from all the others of its table and GPU

Most runs vary little in length, so the mean of the first third, blind to lengths, is scored beside (`mape_of_mean`).

Every stage of a framework has its own engine (vLLM or TensorRT-LLM, FSDP or Megatron), so each is fitted for itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nereus.cli.bench import machine
from nereus.cli.bench_cost import read_table
from nereus.core.inventory import cluster_of
from nereus.core.plan import ACTOR_GENERATION, ACTOR_TRAINING, CRITIC_TRAINING, REFERENCE_INFERENCE, Layout, ModelStage
from nereus.core.shapes import ModelShape
from nereus.core.workload import Workload
from nereus.cost.calibration import Calibration
from nereus.cost.model import Candidate, CostModel
from nereus.cost.work import Array

STAGES: Mapping[str, tuple[str, ModelStage, str]] = {
    # stage: (column of rl_steps.csv, model-stage, task)
    "generation": ("t_gen", ACTOR_GENERATION, "generation"),
    "reference": ("t_ref", REFERENCE_INFERENCE, "reference_logprobs"),
    "log-prob": ("t_old_logp", ACTOR_TRAINING, "old_logprobs"),
    "values": ("t_values", CRITIC_TRAINING, "values"),
    "actor update": ("t_update_actor", ACTOR_TRAINING, "actor_update"),
    "critic update": ("t_update_critic", CRITIC_TRAINING, "critic_update"),
}
MICRO_BATCH_TOKENS = 16384
"""Tokens of a micro-batch where a log does not say; a usual setting of verl's dynamic batches."""
RESPONSE_ROWS = 1024
"""Sequences that an inference engine runs at a time (vLLM's usual `max_num_seqs`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RlRun:
    """What a log does not say in columns (rl_runs.csv). sequences: responses a step; updates: mini-batches of them."""

    model: str
    gpu: str
    gpus: int
    sequences: int
    updates: int
    generation_tp: int = 1
    training: Layout = field(default_factory=Layout)
    algorithm: str = "grpo"


RUNS: Mapping[str, RlRun] = {
    "qwen2.5-7b-ppo-16gpu": RlRun(model="Qwen2.5-7B", gpu="H100", gpus=16, sequences=256, updates=4, algorithm="ppo"),
    "qwen2.5-0.5b-ppo-1gpu-p512r256": RlRun(
        model="Qwen2.5-0.5B", gpu="A100-80GB", gpus=1, sequences=256, updates=4, algorithm="ppo"
    ),
    "gemma2-2b-ppo-2gpu": RlRun(
        model="gemma-2-2b", gpu="A100-80GB", gpus=2, sequences=512, updates=4, generation_tp=2, algorithm="ppo"
    ),
    "qwen2.5-7b-grpo-1gpu-v5": RlRun(model="Qwen2.5-7B", gpu="A100-80GB", gpus=1, sequences=2, updates=1),
    "qwen2-7b-grpo-8xh100eos-trtllm-tp4": RlRun(
        model="Qwen2-7B", gpu="H100", gpus=8, sequences=5120, updates=4, generation_tp=4
    ),
    "qwen2-7b-grpo-8xh20-megatron": RlRun(
        model="Qwen2-7B", gpu="H20", gpus=8, sequences=5120, updates=4, generation_tp=2, training=Layout(2, 2)
    ),
    "qwen2-7b-grpo-8xh20-fsdp": RlRun(model="Qwen2-7B", gpu="H20", gpus=8, sequences=5120, updates=4, generation_tp=2),
    "qwen2.5-3b-grpo-8xh20-megatron": RlRun(
        model="Qwen2.5-3B", gpu="H20", gpus=8, sequences=5120, updates=4, generation_tp=2, training=Layout(2, 2)
    ),
}


def bench_cost_rl(folder: Path) -> dict[str, Any]:
    """The JSON of `nereus bench cost --rl FOLDER`.

    folder: with rl_steps.csv, rl_runs.csv and rl_plans/. Raises UserError for tables that cannot be read.
    """
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    logs: dict[str, list[dict[str, str]]] = {}
    for row in read_table(folder / "rl_steps.csv"):
        logs.setdefault(row["run"], []).append(row)
    for name, log in logs.items():
        if name not in RUNS:
            summary[name] = {"skipped": "its configuration is not known"}
            continue
        scored = _score_run(name, RUNS[name], log)
        rows += scored
        summary[name] = _by_stage(scored)
    plans = {path.stem: _rank_plans(path) for path in sorted((folder / "rl_plans").glob("*.csv"))}
    return {"bench": "cost --rl", "machine": machine(), "rows": rows, "summary": {**summary, "rl_plans": plans}}


# -- step logs -----------------------------------------------------------------------------------------------------------


def _score_run(name: str, run: RlRun, log: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    log = [row for row in log if row.get("resp_mean")]
    first = len(log) // 3
    models = [_cost_model(run, row) for row in log]
    scored: list[dict[str, Any]] = []
    parts = np.zeros(len(log))
    for stage, (column, model_stage, task) in STAGES.items():
        measured = np.array([float(row.get(column) or 0) for row in log])
        if (measured[:first] > 0).sum() < 3 or model_stage not in {t.model_stage for t in models[0].graph}:
            continue
        candidate = _candidate(run, model_stage, log)
        work = np.stack([model.work(candidate, task) for model in models])
        known = np.flatnonzero(measured[:first] > 0)
        calibration = Calibration().fit_arrays(work[known], measured[known])
        predicted = calibration.seconds(work.T)
        parts += np.where(measured > 0, predicted, 0.0)
        scored += _rows(name, stage, log, predicted, measured, first, float(measured[known].mean()))
    steps = np.array([float(row.get("t_step") or 0) for row in log])
    if (steps > 0).any():
        tested = np.array([not row.get("t_testing") for row in log])  # a step that also validates is another thing
        steps = np.where(tested, steps, 0.0)
        rest = steps[:first][steps[:first] > 0] - parts[:first][steps[:first] > 0]
        mean = float(steps[:first][steps[:first] > 0].mean())
        scored += _rows(name, "step", log, parts + np.median(rest), steps, first, mean)
    return scored


def _cost_model(run: RlRun, row: Mapping[str, str]) -> CostModel:
    shape = ModelShape.named(run.model)
    mean, longest = float(row["resp_mean"]), float(row.get("resp_max") or 0)
    load = Workload(
        prompts=run.sequences,
        prompt_length=float(row.get("prompt_mean") or 100),
        response_length=mean,
        response_max=max(longest, mean * 1.001),
        mini_batches=run.updates,
    )
    models = dict.fromkeys(("actor", "critic", "reference"), shape)
    return CostModel(models, cluster_of(run.gpu, run.gpus), load, run.algorithm, False)  # type: ignore[arg-type]


def _candidate(run: RlRun, model_stage: ModelStage, log: Sequence[Mapping[str, str]]) -> Candidate:
    """The layout of the run; micro-batches of the usual number of tokens at the run's mean length."""
    if model_stage.stage == "generation":
        dp = run.gpus // run.generation_tp
        return Candidate(model_stage=model_stage, layout=Layout(run.generation_tp, 1), dp=dp, micro_batch=RESPONSE_ROWS)
    length = float(np.mean([float(row["resp_mean"]) + float(row.get("prompt_mean") or 100) for row in log]))
    dp = run.gpus // run.training.size
    per_update = max(1, run.sequences // run.updates // dp)
    size = int(np.clip(MICRO_BATCH_TOKENS // length, 1, per_update))
    return Candidate(model_stage=model_stage, layout=run.training, dp=dp, micro_batch=size, recompute=True)


def _rows(
    run: str,
    stage: str,
    log: Sequence[Mapping[str, str]],
    predicted: Array,
    measured: Array,
    first: int,
    mean_s: float,
) -> list[dict[str, Any]]:
    return [
        {
            "run": run,
            "step": int(float(log[i]["step"])),
            "stage": stage,
            "predicted_s": float(predicted[i]),
            "measured_s": float(measured[i]),
            "mean_of_first_third_s": mean_s,
        }
        for i in range(first, len(log))
        if measured[i] > 0
    ]


def _by_stage(scored: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for stage in (*STAGES, "step"):
        rows = [row for row in scored if row["stage"] == stage]
        if rows:
            errors = np.array([abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows])
            found[stage] = {
                "rows_test": len(rows),
                "mape": float(errors.mean()),
                "median_ape": float(np.median(errors)),
                "mape_of_mean": float(np.mean([abs(r["mean_of_first_third_s"] / r["measured_s"] - 1) for r in rows])),
            }
    return found


# -- measured layouts ----------------------------------------------------------------------------------------------------

PLAN_STAGES: Mapping[str, tuple[ModelStage, str]] = {
    "generation": (ACTOR_GENERATION, "generation"),
    "update_actor": (ACTOR_TRAINING, "actor_update"),
    "old_logp": (ACTOR_TRAINING, "old_logprobs"),
}


def _rank_plans(path: Path) -> dict[str, Any]:
    """For each stage: error of every row predicted from the others, and how many pairs of layouts stand in the right order.

    Rows that differ in software alone (fused kernels, dynamic batches) have one prediction; such pairs do not count.
    """
    found: dict[str, Any] = {}
    rows = [row for row in read_table(path) if row.get("num_gpus")]
    for stage, (model_stage, task) in PLAN_STAGES.items():
        usable, works, seconds = [], [], []
        for row in rows:
            measured, candidate = _seconds(row.get(stage)), _plan_candidate(row, model_stage)
            if measured is not None and candidate is not None:
                usable.append(row)
                works.append(_plan_model(row).work(candidate, task))
                seconds.append(measured)
        if len(usable) < 4:
            continue
        work, measured_s = np.stack(works), np.array(seconds)
        predicted = np.array(
            [
                Calibration().fit_arrays(np.delete(work, i, 0), np.delete(measured_s, i)).seconds(work[i])
                for i in range(len(usable))
            ]
        )
        right, pairs = _ordered_pairs(work, predicted, measured_s)
        errors = np.abs(predicted / measured_s - 1)
        found[stage] = {
            "rows": len(usable),
            "mape": float(errors.mean()),
            "median_ape": float(np.median(errors)),
            "pairs": pairs,
            "pairs_in_order": right,
        }
    return found


def _plan_model(row: Mapping[str, str]) -> CostModel:
    shape = ModelShape.named("Qwen2.5-7B")
    load = Workload(
        prompts=int(row["bs"]),
        samples_per_prompt=8,  # not stated; the measured model FLOP/s utilisation of the updates agrees with it
        prompt_length=300,
        response_length=3000,
        response_max=8192,
        mini_batches=max(1, int(row["bs"]) // int(row["mini_bs"])),
    )
    cluster = cluster_of(row["GPU"], int(row["num_gpus"]))
    return CostModel({"actor": shape, "reference": shape}, cluster, load, "grpo", False)


def _plan_candidate(row: Mapping[str, str], model_stage: ModelStage) -> Candidate | None:
    """Layout from texts like "tp4pp2" or "sp4fsdp8"; None where it says none."""
    training = model_stage.stage == "training"
    text = (row.get("train_parallel" if training else "infer_parallel") or "").lower()
    degrees = {kind: int(number) for kind, number in re.findall(r"(tp|pp|cp|sp)(\d+)", text.replace("vpp", "v_"))}
    if not degrees:
        return None
    gpus = int(row["num_gpus"])
    layout = Layout(degrees.get("tp", 1), degrees.get("pp", 1))
    context = degrees.get("cp", 1) * degrees.get("sp", 1)
    size = 2 if training else RESPONSE_ROWS
    # a sequence that is cut over `context` devices counts as that many replicas with a share of the micro-batch
    return Candidate(
        model_stage=model_stage,
        layout=layout,
        dp=max(1, gpus // layout.size),
        micro_batch=max(1, size // context) if training else size,
        recompute=training,
    )


def _seconds(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None  # OOM, or not measured


def _ordered_pairs(work: Array, predicted: Array, measured: Array) -> tuple[int, int]:
    """(pairs in the right order, pairs) among layouts that differ, and by over 3 % in measured time."""
    right = pairs = 0
    for i in range(len(measured)):
        for j in range(i):
            apart = abs(np.log(measured[i] / measured[j])) > 0.03
            if apart and not np.allclose(work[i], work[j]):
                pairs += 1
                right += int((predicted[i] > predicted[j]) == (measured[i] > measured[j]))
    return right, pairs
