"""The synchronous loop: generate, score, compute advantages, train, at step boundaries change the plan, sync weights.

    step:   [change of plan] -> weight_sync -> generation -> inference (reference, reward model, values, old log-probs)
            -> training, counters
    then:   [checkpoint], which so is always from before the next step's change

The loop holds no tensors of any model. It deals a batch out over the units of each model-stage, collects the answers, and
decides nothing about layouts: any plan gives the same numbers. Tasks of the inference stage are all started before any
is waited for; where they share devices, each device runs them in this order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from nereus.core.errors import StateError
from nereus.core.events import Event, PrimitiveFinished, StageStarted, StepFinished, TransitionFinished
from nereus.core.graph import job_graph
from nereus.core.job import Job, PlannedChange
from nereus.core.plan import ACTOR_GENERATION, ACTOR_TRAINING, CRITIC_TRAINING, ModelStage
from nereus.core.randomness import hash_words
from nereus.engine.architecture import COUNTERS
from nereus.engine.batch import Sequences
from nereus.engine.generation import Request, Response
from nereus.engine.optimizer import AdamW
from nereus.rl.advantages import gae, group_advantages, kl_estimate, token_rewards, whiten
from nereus.rl.dispatch import answers, deal, start
from nereus.rl.ledger import Ledger, LedgerEntry
from nereus.rl.objectives import POLICY_STATISTICS, VALUE_STATISTICS, PolicyTargets, Targets, ValueTargets
from nereus.rl.rollouts import Generator, Rollouts, UnitGenerator, record
from nereus.rl.tasks.base import Task
from nereus.runtime.cluster import Call
from nereus.runtime.executor import OnSpan, Span
from nereus.runtime.fleet import Fleet

POLICY_VERSION, NEXT_POSITION = 1, 2
"""Entries of the counters tensor, beside 0, the optimizer updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """A step's sequences with all that training needs, response-aligned [n, r]."""

    sequences: Sequences
    keys: tuple[tuple[int, int], ...]
    old_logprobs: torch.Tensor
    reference_logprobs: torch.Tensor
    advantages: torch.Tensor
    old_values: torch.Tensor | None
    returns: torch.Tensor | None
    metrics: Mapping[str, float]


@dataclass
class Trainer:
    """See the module. emit: takes events. stop: asked at each step boundary. rollout_folder: None keeps no rollouts."""

    job: Job
    task: Task
    fleet: Fleet
    ledger: Ledger
    emit: Callable[[Event], None]
    changes: Sequence[PlannedChange] = ()
    generator: Generator | None = None
    rollout_folder: Path | None = None
    stop: Callable[[], bool] = lambda: False
    at_boundary: Callable[[int], None] = lambda step: None
    clock: Callable[[], float] = time.monotonic
    _seconds: dict[str, float] = field(default_factory=dict)

    def run(self, first_step: int) -> int:
        """Train from `first_step` to the job's last; returns the next step, earlier where `stop` said so."""
        changes = {change.step: change for change in self.changes}
        step = first_step
        while step < self.job.steps and not self.stop():
            started = self.clock()
            if step in changes:
                self._change(step, changes[step])
            self._weight_sync(step)
            if step in changes:
                self.fleet.check_generation_weights()
            metrics, sample = self._step(step)
            seconds = {**self._seconds, "step": self.clock() - started}
            self._seconds = {}
            self.emit(StepFinished(step=step, metrics=metrics, seconds=seconds, sample=sample))
            step += 1
            self.at_boundary(step)
        return step

    def _step(self, step: int) -> tuple[dict[str, float], str]:
        with self._stage(step, "generation"):
            rollouts = self._generate(step)
        if self.rollout_folder is not None:
            record(self.rollout_folder, step, rollouts)
        with self._stage(step, "inference"):
            experience = self._experience(rollouts)
        with self._stage(step, "training"):
            trained = self._train(step, experience)
        first = rollouts.responses[0]
        return {**experience.metrics, **trained}, self.task.describe([*rollouts.requests[0].prompt, *first.tokens])

    # -- generation ----------------------------------------------------------------------------------------------

    def _generate(self, step: int) -> Rollouts:
        batch = self.job.batch
        prompts = [self.task.prompt(step * batch.prompts + i) for i in range(batch.prompts)]
        rows = [(prompt, sample) for prompt in prompts for sample in range(batch.samples_per_prompt)]
        requests = [Request(prompt=p.token_ids, position=p.position, sample=s) for p, s in rows]
        answer = self.generator or UnitGenerator(self.job, self.task, self.fleet)
        return Rollouts(
            prompts=tuple(p for p, _ in rows), requests=tuple(requests), responses=tuple(answer(step, requests))
        )

    # -- inference -----------------------------------------------------------------------------------------------

    def _experience(self, rollouts: Rollouts) -> Experience:
        a = self.job.algorithm
        sequences = rollouts.sequences(self.task.pad_token_id)
        mask = sequences.response_mask()
        computed = self._infer(sequences, mask.shape[1])
        true_rewards = torch.tensor(
            [self.task.reward(p, r.tokens) for p, r in zip(rollouts.prompts, rollouts.responses, strict=True)]
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
                rewards.sum(1), group_size=self.job.batch.samples_per_prompt, normalize_std=a.normalize_std
            )
            advantages = grouped[:, None] * mask
        metrics = _rollout_metrics(self.job, sequences, true_rewards, scores, kl, mask)
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

    def _infer(self, sequences: Sequences, width: int) -> dict[str, torch.Tensor]:
        """Run the inference tasks of the job graph, side by side where their devices differ."""
        temperature = self.job.sampling.temperature
        how = {
            "reference_logprobs": ("logprobs", (temperature,)),
            "old_logprobs": ("logprobs", (temperature,)),
            "values": ("values", ()),
            "scores": ("scores", ()),
        }
        running: list[tuple[str, ModelStage, Call]] = []
        for task in job_graph(self.job.algorithm.name, reward_model=self.job.reward is not None):
            if task.stage == "inference":
                method, more = how[task.name]
                parts = deal(self.fleet, task.model_stage, len(sequences))
                arguments = [(task.model_stage, sequences.rows(torch.tensor(list(p))), *more) for p in parts]
                running.append((task.name, task.model_stage, start(self.fleet, method, task.model_stage, arguments)))
        found = {}
        for name, model_stage, call in running:
            wide = 1 if name == "scores" else width
            rows = answers(self.fleet, model_stage, call)
            found[name] = torch.cat([torch.nn.functional.pad(r, (0, wide - r.shape[1])) for r in rows])
        return found

    # -- training ------------------------------------------------------------------------------------------------

    def _train(self, step: int, experience: Experience) -> dict[str, float]:
        sums: dict[str, float] = {}
        norms: dict[str, list[float]] = {}
        tokens = discarded = 0
        for epoch in range(self.job.batch.epochs):
            order = _shuffled(len(experience.keys), self.job.seed, step, epoch)
            for mini_batch, rows in enumerate(np.split(order, self.job.batch.mini_batches)):
                index = torch.from_numpy(np.sort(rows))
                num_tokens = int(experience.sequences.response_lengths[index].sum())
                tokens += num_tokens
                entry = LedgerEntry(
                    step=step,
                    epoch=epoch,
                    mini_batch=mini_batch,
                    samples=tuple(experience.keys[i] for i in index.tolist()),
                )
                for name, targets in self._targets(experience, index, num_tokens):
                    statistics, norm = self._update(name, experience.sequences.rows(index), targets)
                    for key, value in statistics.items():
                        sums[key] = sums.get(key, 0.0) + value
                    norms.setdefault(f"{name.model}_grad_norm", []).append(norm)
                    if not math.isfinite(norm):
                        discarded += 1
                    elif name == ACTOR_TRAINING:
                        self.ledger.commit(entry)
        self._count(step)
        metrics = {key: value / max(tokens, 1) for key, value in sums.items()}
        metrics.update({key: sum(values) / len(values) for key, values in norms.items()})
        metrics["grad_norm"] = metrics.pop("actor_grad_norm")
        metrics["updates_discarded"] = float(discarded)
        return metrics

    def _targets(
        self, e: Experience, index: torch.Tensor, num_tokens: int
    ) -> Iterator[tuple[ModelStage, PolicyTargets | ValueTargets]]:
        yield (
            ACTOR_TRAINING,
            PolicyTargets(
                old_logprobs=e.old_logprobs[index],
                advantages=e.advantages[index],
                reference_logprobs=e.reference_logprobs[index],
                num_tokens=num_tokens,
                temperature=self.job.sampling.temperature,
                algorithm=self.job.algorithm,
            ),
        )
        if e.old_values is not None and e.returns is not None:
            yield (
                CRITIC_TRAINING,
                ValueTargets(
                    old_values=e.old_values[index],
                    returns=e.returns[index],
                    num_tokens=num_tokens,
                    clip=self.job.algorithm.value_clip,
                ),
            )

    def _update(self, name: ModelStage, sequences: Sequences, targets: Targets) -> tuple[dict[str, float], float]:
        """One optimizer update in two phases: all replicas have the same gradient before any steps.

        A gradient that is not finite is discarded by all. Returns (summed statistics, gradient norm).
        """
        rows = [torch.tensor(list(part)) for part in deal(self.fleet, name, len(sequences))]
        arguments = [(name, sequences.rows(r), targets.rows(r)) for r in rows]
        results = start(self.fleet, "gradients", name, arguments).results()
        norm = next(iter(results.values()))[1]
        if any(other != norm and not math.isnan(norm) for _, other in results.values()):
            raise StateError(
                f"{name}: replicas have different gradients, norms {sorted({n for _, n in results.values()})}"
            )
        placement = self.fleet.plan[name]
        settings = self._optimizer(name)
        step = "update" if math.isfinite(norm) else "discard"
        more = (settings,) if step == "update" else ()
        self.fleet.cluster.call(step, dict.fromkeys(placement.gpus, (name, *more))).results()
        names = POLICY_STATISTICS if name == ACTOR_TRAINING else VALUE_STATISTICS
        answers = [results[placement.output_gpu(u)][0] for u in range(placement.dp)]
        return {key: sum(row[i] for row in answers) for i, key in enumerate(names)}, norm

    def _optimizer(self, name: ModelStage) -> AdamW:
        o = self.job.optimizer
        critic_lr = o.lr if o.critic_lr is None else o.critic_lr
        return AdamW(
            lr=critic_lr if name == CRITIC_TRAINING else o.lr,
            betas=o.betas,
            eps=o.eps,
            weight_decay=o.weight_decay,
            max_grad_norm=o.max_grad_norm,
        )

    def _count(self, step: int) -> None:
        """Write the policy version and the next position into the trained units' state, so that they move with it."""
        values = {POLICY_VERSION: step + 1, NEXT_POSITION: (step + 1) * self.job.batch.prompts}
        for name in (ACTOR_TRAINING, CRITIC_TRAINING):
            if name in self.fleet.plan:
                arguments = dict.fromkeys(self.fleet.plan[name].gpus, (name, COUNTERS, values))
                self.fleet.cluster.call("set_counters", arguments).results()

    # -- the boundary --------------------------------------------------------------------------------------------

    def _change(self, step: int, change: PlannedChange) -> None:
        before, devices_before = self.fleet.plan, self.fleet.pool
        with self._stage(step, "transition"):
            started = self.clock()
            kept = [p.model_stage for p in before.placements if p.model_stage != ACTOR_GENERATION]
            digest_before = self.fleet.digest(kept)
            ready = self.clock()
            transition = self.fleet.change(change.plan, change.devices, on_span=self._tell(step))
            changed = self.clock()
            digest_after = self.fleet.digest(kept)
            ended = self.clock()
        self.emit(
            TransitionFinished(
                step=step,
                before=before,
                after=change.plan,
                devices_before=devices_before,
                devices_after=self.fleet.pool,
                moved={str(name): row for name, row in transition.moved.items()},
                lowerings={str(name): way for name, way in transition.program.dag.lowerings.items()},
                predicted_seconds=transition.program.dag.seconds,
                seconds=changed - ready,
                digest_seconds=(ready - started) + (ended - changed),
                digest_before=digest_before,
                digest_after=digest_after,
            )
        )
        if digest_before != digest_after:
            raise StateError(
                f"step {step}: the change of plan changed the state: {digest_before} before, {digest_after} after"
            )

    def _tell(self, step: int) -> OnSpan:
        """Report each primitive of the change before `step`."""

        def tell(span: Span, number: int, total: int) -> None:
            self.emit(
                PrimitiveFinished(
                    step=step,
                    model_stage=str(span.step.primitive.model_stage),
                    kind=span.step.primitive.kind,
                    devices=span.step.primitive.gpus,
                    seconds=span.end_s - span.start_s,
                    received_bytes={str(gpu): size for gpu, size in span.received.items()},
                    number=number,
                    total=total,
                )
            )

        return tell

    def _weight_sync(self, step: int) -> None:
        with self._stage(step, "weight_sync"):
            self.fleet.weight_sync()

    # -- inside --------------------------------------------------------------------------------------------------

    @contextmanager
    def _stage(self, step: int, stage: str) -> Iterator[None]:
        self.emit(StageStarted(step=step, stage=stage))
        started = self.clock()
        yield
        self._seconds[stage] = self._seconds.get(stage, 0.0) + self.clock() - started


def _shuffled(n: int, seed: int, step: int, epoch: int) -> np.ndarray:
    """A permutation of the batch that depends on (seed, step, epoch) alone; the first epoch goes through in order."""
    if epoch == 0:
        return np.arange(n)
    return np.argsort(hash_words(seed, step, epoch, np.arange(n)), kind="stable")


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
