"""`nereus bench equivalence`: that a run which changes its plan trains as one that does not.

replay    the static run's recorded rollouts through the changing plan: loss, KL, value loss, final weights
sampling  from equal weights, the same requests under every plan of the job: sequences, and where they differ, how far
          the draw was from a boundary of its distribution
free      both runs sampling for themselves, several seeds: reward curves against the spread of the seeds
ledger    every (position, sample, epoch) exactly once, in all of these runs
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from safetensors.torch import load_file

from nereus.api.job_file import load_job
from nereus.api.jobs import AutoPlanner
from nereus.api.machine import cache_folder, device_type_of
from nereus.cli.bench import Check, report
from nereus.cli.run import RunRequest, run_job
from nereus.core.errors import UserError
from nereus.core.job import Job, initial_plan, planned_changes
from nereus.core.plan import ACTOR_GENERATION, Plan
from nereus.engine.generation import Request, Response
from nereus.rl.rollouts import UnitGenerator
from nereus.rl.saving import newest_checkpoint
from nereus.rl.setup import Prepared, prepare
from nereus.rl.worker import PRELOAD, PROGRAM
from nereus.runtime.cluster import LocalCluster
from nereus.runtime.fleet import Fleet, Source

SAME = 1e-4
"""Largest difference of a loss, KL or weight between two runs on the same rollouts."""
SAMPLED_STEPS = 4
"""Steps' worth of requests that are sampled under every plan."""

Say = Callable[[str], None]


def equivalence(path: Path, overrides: Sequence[str], seeds: int, folder: Path, say: Say) -> dict[str, Any]:
    """Run the bench on a job file. folder: where its run folders are made. say: takes one line of progress.

    Raises UserError for a job without changes of plan.
    """
    if not load_job(path, overrides).changes:
        raise UserError(f"{path}: changes: is empty, so there is nothing to compare")
    with open(os.devnull, "w") as nowhere:
        silent = Console(file=nowhere)

        def run(*more: str, **how: Any) -> dict[str, Any]:
            settings = (*overrides, f"run.folder={folder}", *more)
            return run_job(RunRequest(job=path, overrides=settings, **how), silent)

        say("the static run, its rollouts recorded")
        static = run("run.record_rollouts=true", static=True)
        say("its rollouts through the changing plan")
        replayed = run(replay=Path(static["run"]))
        say("the same requests under every plan, from the weights that were trained")
        sampled = _sample_under_all_plans(load_job(path, overrides), Path(static["run"]))
        curves: dict[str, list[list[float]]] = {"static": [], "adaptive": []}
        runs = [static, replayed]
        for seed in range(seeds):
            for name in curves:
                say(f"free run, {name}, seed {seed}")
                runs.append(run(f"seed={seed}", static=name == "static"))
                curves[name].append([step["reward"] for step in runs[-1]["history"]])
    checks = [*_replay_checks(static, replayed), *_sampling_checks(sampled)]
    if seeds > 1:
        checks.append(_curve_check(np.array(curves["static"]), np.array(curves["adaptive"])))
    for name in ("repeated", "skipped"):
        checks.append(Check(check=f"samples {name}, all runs", value=sum(r["samples"][name] for r in runs), limit=0))
    unequal = sum(not t["state_equal"] for r in runs for t in r["transitions"])
    checks.append(Check(check="transitions with unequal state, all runs", value=unequal, limit=0))
    summary = {
        "job": str(path),
        "runs": len(runs),
        "transitions": sum(len(r["transitions"]) for r in runs),
        "samples_trained": sum(r["samples"]["trained"] for r in runs),
        "reward_static": [curve[-1] for curve in curves["static"]],
        "reward_adaptive": [curve[-1] for curve in curves["adaptive"]],
        "ok": all(check.ok for check in checks),
    }
    return report("equivalence", checks, summary)


def _replay_checks(static: dict[str, Any], replayed: dict[str, Any]) -> list[Check]:
    found = []
    for metric in ("policy_loss", "value_loss", "kl"):
        pairs = [(a.get(metric, 0.0), b.get(metric, 0.0)) for a, b in _steps(static, replayed)]
        worst = max(abs(a - b) for a, b in pairs)
        found.append(Check(check=f"replay: largest difference of {metric} in a step", value=worst, limit=SAME))
    for model in ("actor", "critic"):
        a, b = (weights_of(Path(run["run"]), model) for run in (static, replayed))
        if a:
            worst = max((a[name] - b[name]).abs().max().item() for name in a)
            found.append(Check(check=f"replay: largest difference of a final {model} weight", value=worst, limit=SAME))
    return found


def _steps(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[dict[str, float], dict[str, float]]]:
    return list(zip(a["history"], b["history"], strict=True))


def weights_of(run: Path, model: str) -> dict[str, torch.Tensor]:
    """The parameters in a run's newest checkpoint, by name."""
    folder = sorted((run / "checkpoints").glob("step-*"))[-1] / model
    return {
        name: tensor for file in sorted(folder.glob("model-*.safetensors")) for name, tensor in load_file(file).items()
    }


def _sample_under_all_plans(job: Job, trained: Path) -> list[list[Response]]:
    """The responses under the job's first plan and under each of its changes, all from one set of weights."""
    prepared = prepare(job, cache_folder())
    auto, pool = AutoPlanner(job), tuple(range(job.cluster.devices))
    first = initial_plan(job, auto)
    plans = [first, *(change.plan for change in planned_changes(job, first, pool, auto=auto))]
    source = newest_checkpoint(trained / "checkpoints").sources
    files = next(iter(source.values())).files
    devices = range(max([job.cluster.devices, *(c.devices or 0 for c in job.changes)]))
    found = []
    for plan in plans:
        cluster = LocalCluster(PROGRAM, (prepared.architectures,), preload=PRELOAD, device_type=device_type_of(job))
        try:
            cluster.start(devices)
            fleet = Fleet(cluster, prepared.specs)
            fleet.create(Plan((plan[ACTOR_GENERATION],)), {ACTOR_GENERATION: Source(files=files)})
            found.append(_sample(fleet, job, prepared))
        finally:
            cluster.close()
    return found


def _sample(fleet: Fleet, job: Job, prepared: Prepared) -> list[Response]:
    prompts = [prepared.task.prompt(i) for i in range(SAMPLED_STEPS * job.batch.prompts)]
    samples = range(job.batch.samples_per_prompt)
    requests = [Request(prompt=p.token_ids, position=p.position, sample=s) for p in prompts for s in samples]
    return UnitGenerator(job, prepared.task, fleet)(0, requests)


def _sampling_checks(by_plan: list[list[Response]]) -> list[Check]:
    first, *others = by_plan
    equal = total = 0
    margins = [0.0]
    for other in others:
        for a, b in zip(first, other, strict=True):
            total += 1
            equal += a.tokens == b.tokens
            if a.tokens != b.tokens:
                at = next(i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y)
                margins.append(min(a.margins[at], b.margins[at]))
    return [
        Check(
            check=f"sampling: share of {total} sequences equal between plans",
            value=equal / total,
            limit=0.99,
            at_least=True,
        ),
        Check(check="sampling: largest distance of a first difference from a boundary", value=max(margins), limit=1e-5),
    ]


def _curve_check(static: np.ndarray, adaptive: np.ndarray) -> Check:
    """Difference of the mean reward curves, over the spread (largest minus smallest) of the static seeds, step mean."""
    gap = np.abs(static.mean(0) - adaptive.mean(0)).mean()
    spread = (static.max(0) - static.min(0)).mean()
    name = f"free: gap of mean reward curves over the spread of {len(static)} seeds ({spread:.3f})"
    return Check(check=name, value=float(gap / spread), limit=1.0)
