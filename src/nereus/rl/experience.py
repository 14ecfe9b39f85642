"""From a step's responses to what it trains on: the inference tasks of the job graph, then advantages on the controller.

Tasks are all started before any is waited for; where they share devices, each device runs them in this order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nereus.core.graph import job_graph
from nereus.core.job import Job
from nereus.core.plan import ModelStage
from nereus.engine.batch import Sequences
from nereus.engine.generation import Response
from nereus.rl.advantages import gae, group_advantages, kl_estimate, token_rewards, whiten
from nereus.rl.dispatch import answers, deal, start
from nereus.rl.rollouts import Rollouts
from nereus.rl.step import Experience
from nereus.rl.tasks.base import Task
from nereus.runtime.cluster import Call
from nereus.runtime.fleet import Fleet


def compute_experience(job: Job, task: Task, fleet: Fleet, rollouts: Rollouts) -> Experience:
    """Score a step's responses and turn scores into advantages, on the whole batch."""
    a = job.algorithm
    sequences = rollouts.sequences(task.pad_token_id)
    mask = sequences.response_mask()
    computed = _infer(job, fleet, sequences, mask.shape[1])
    true_rewards = torch.tensor(
        [task.reward(p, r.tokens) for p, r in zip(rollouts.prompts, rollouts.responses, strict=True)]
    )
    scores = computed["scores"][:, 0] if "scores" in computed else true_rewards
    old, reference = computed["old_logprobs"], computed["reference_logprobs"]
    kl = kl_estimate(old, reference, kind=a.kl_estimator) * mask
    rewards = token_rewards(scores, kl, mask, kl_coef=a.kl_coef if a.kl_place == "reward" else 0.0)
    values = returns = None
    if a.name == "ppo":
        values = computed["values"]
        advantages, returns = gae(rewards, values, mask, gamma=a.gamma, lam=a.lam)
        if a.whiten:
            advantages = whiten(advantages, mask)
    else:
        grouped = group_advantages(
            rewards.sum(1), group_size=job.batch.samples_per_prompt, normalize_std=a.normalize_std
        )
        advantages = grouped[:, None] * mask
    metrics = _rollout_metrics(job, sequences, true_rewards, scores, kl, mask)
    metrics["sampling_difference"] = _sampling_difference(rollouts.responses, old, mask)
    return Experience(
        sequences=sequences,
        keys=tuple((r.position, r.sample) for r in rollouts.requests),
        old_logprobs=old,
        reference_logprobs=reference,
        advantages=advantages,
        old_values=values,
        returns=returns,
        metrics=metrics,
    )


def _infer(job: Job, fleet: Fleet, sequences: Sequences, width: int) -> dict[str, torch.Tensor]:
    """Run the inference tasks of the job graph, side by side where their devices differ."""
    temperature = job.sampling.temperature
    how = {
        "reference_logprobs": ("logprobs", (temperature,)),
        "old_logprobs": ("logprobs", (temperature,)),
        "values": ("values", ()),
        "scores": ("scores", ()),
    }
    running: list[tuple[str, ModelStage, Call]] = []
    for task in job_graph(job.algorithm.name, reward_model=job.reward is not None):
        if task.stage == "inference":
            method, more = how[task.name]
            parts = deal(fleet, task.model_stage, len(sequences))
            arguments = [(task.model_stage, sequences.rows(torch.tensor(list(p))), *more) for p in parts]
            running.append((task.name, task.model_stage, start(fleet, method, task.model_stage, arguments)))
    found = {}
    for name, model_stage, call in running:
        wide = 1 if name == "scores" else width
        rows = answers(fleet, model_stage, call)
        found[name] = torch.cat([torch.nn.functional.pad(r, (0, wide - r.shape[1])) for r in rows])
    return found


def _rollout_metrics(
    job: Job,
    sequences: Sequences,
    rewards: torch.Tensor,
    scores: torch.Tensor,
    kl: torch.Tensor,
    mask: torch.Tensor,
) -> dict[str, float]:
    lengths = sequences.response_lengths.double()
    metrics = {
        "reward": rewards.double().mean().item(),
        "score": scores.double().mean().item(),
        "kl": (kl.double().sum() / mask.sum()).item(),
        "length_mean": lengths.mean().item(),
        "length_p95": lengths.quantile(0.95).item(),
        "length_max": lengths.max().item(),
    }
    if job.batch.samples_per_prompt > 1:
        groups = rewards.view(-1, job.batch.samples_per_prompt)
        metrics["mixed_groups"] = (groups.amax(1) > groups.amin(1)).double().mean().item()
    return metrics


def _sampling_difference(responses: Sequence[Response], old: torch.Tensor, mask: torch.Tensor) -> float:
    """Largest difference between a log-probability at sampling and as the training units compute it."""
    sampled = torch.tensor([x for r in responses for x in r.logprobs], dtype=torch.float64)
    return (sampled - old[mask].double()).abs().max().item()
