"""Optimizer updates in two phases, so that after a death in either all that are left do the same.

    gradients   reduced over all ranks; every replica reports the same norm          a death here: nobody steps
    update      each rank steps by itself, once however often it is asked            a death here: all that are left step

From the moment that all have reported, the update is in flight: it will be applied by all, or discarded by all if its
norm is not finite. It enters the ledger when all have confirmed it. The actor's and the critic's updates with the same
samples need nothing of each other: where they are on different devices they run side by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nereus.core.errors import StateError
from nereus.core.job import Job
from nereus.core.plan import ACTOR_TRAINING, CRITIC_TRAINING, ModelStage
from nereus.engine.architecture import COUNTERS
from nereus.engine.optimizer import AdamW
from nereus.rl.dispatch import deal, start
from nereus.rl.ledger import Ledger, LedgerEntry
from nereus.rl.objectives import POLICY_STATISTICS, VALUE_STATISTICS, PolicyTargets, Targets, ValueTargets
from nereus.rl.step import TRAINED, Experience, InFlight, StepState, Update
from nereus.runtime.cluster import Call
from nereus.runtime.fleet import Fleet

POLICY_VERSION, NEXT_POSITION = 1, 2
"""Entries of the counters tensor, beside 0, the optimizer updates."""

Order = tuple[str, ModelStage, tuple[object, ...]]
"""(command, model-stage, arguments), the same for every rank of the model-stage; asked again, it changes nothing."""


class Updates:
    """The updates of a job's steps."""

    def __init__(self, job: Job, fleet: Fleet, ledger: Ledger) -> None:
        self._job, self._fleet, self._ledger = job, fleet, ledger

    def run_next(self, at: StepState) -> None:
        """Do the first update that waits, and beside it that of another model on other devices."""
        assert at.experience is not None
        at.computing = self._side_by_side(at.waiting)
        at.in_flight = self._gradients(at.experience, at.computing)
        orders = [(update, *self._order_everywhere(self.order(update))) for update in at.in_flight]
        for update, name, call in orders:
            found = call.results()
            if wrong := [d for d, updates in found.items() if not is_done(update, updates)]:
                raise StateError(f"{name}: devices {wrong} have not done update {update.number}: {found}")
            self.finish(at, update)
        at.computing = ()

    def _side_by_side(self, waiting: Sequence[Update]) -> tuple[Update, ...]:
        """The actor's and the critic's update with the same samples, where no device is in both."""
        first, *others = waiting
        plan, batch = self._fleet.plan, (first.epoch, first.mini_batch)
        return (
            first,
            *(
                other
                for other in others[:1]
                if (other.epoch, other.mini_batch) == batch
                and set(plan[first.model_stage].gpus).isdisjoint(plan[other.model_stage].gpus)
            ),
        )

    def order(self, update: InFlight) -> Order:
        """What every rank is to do about an update in flight."""
        if update.settings is None:
            return "discard", update.update.model_stage, ()
        return "update", update.update.model_stage, (update.number, update.settings)

    def finish(self, at: StepState, done: InFlight) -> None:
        """Take note, once, of an update that all have confirmed."""
        experience, update = at.experience, done.update
        assert experience is not None
        at.waiting = [other for other in at.waiting if other is not update]
        at.in_flight = tuple(other for other in at.in_flight if other is not done)
        if done.settings is not None and update.model_stage == ACTOR_TRAINING:
            self._ledger.commit(
                LedgerEntry(
                    step=at.step,
                    epoch=update.epoch,
                    mini_batch=update.mini_batch,
                    samples=tuple(experience.keys[i] for i in update.rows.tolist()),
                )
            )
        at.totals.add(done, _num_tokens(experience, update))

    def count(self, at: StepState) -> None:
        """Write the policy version and the next position into the trained units' state, so that they move with it."""
        at.counting = True
        for call in [self._order_everywhere(order)[1] for order in self.counts(at.step)]:
            call.results()
        at.counting, at.counted = False, True

    def counts(self, step: int) -> list[Order]:
        values = {POLICY_VERSION: step + 1, NEXT_POSITION: (step + 1) * self._job.batch.prompts}
        return [("set_counters", name, (COUNTERS, values)) for name in TRAINED if name in self._fleet.plan]

    # -- inside --------------------------------------------------------------------------------------------------

    def _order_everywhere(self, order: Order) -> tuple[ModelStage, Call]:
        method, name, arguments = order
        return name, self._fleet.cluster.call(method, dict.fromkeys(self._fleet.plan[name].gpus, (name, *arguments)))

    def _gradients(self, experience: Experience, updates: Sequence[Update]) -> tuple[InFlight, ...]:
        """All of them, side by side. Raises StateError where replicas do not agree."""
        calls = [(update, self._start_gradients(experience, update)) for update in updates]
        return tuple(self._in_flight(update, call.results()) for update, call in calls)

    def _start_gradients(self, experience: Experience, update: Update) -> Call:
        name = update.model_stage
        sequences, targets = experience.sequences.rows(update.rows), self._targets(experience, update)
        rows = [torch.tensor(list(part)) for part in deal(self._fleet, name, len(sequences))]
        return start(self._fleet, "gradients", name, [(name, sequences.rows(r), targets.rows(r)) for r in rows])

    def _in_flight(self, update: Update, results: Mapping[int, Any]) -> InFlight:
        name = update.model_stage
        number, norm = _agreed(name, [(row[2], row[1]) for row in results.values()])
        placement = self._fleet.plan[name]
        names = POLICY_STATISTICS if name == ACTOR_TRAINING else VALUE_STATISTICS
        answers = [results[placement.output_gpu(u)][0] for u in range(placement.dp)]
        return InFlight(
            update=update,
            number=number,
            statistics={key: sum(row[i] for row in answers) for i, key in enumerate(names)},
            norm=norm,
            settings=self._optimizer(name) if math.isfinite(norm) else None,
        )

    def _targets(self, e: Experience, update: Update) -> Targets:
        num_tokens = _num_tokens(e, update)
        if update.model_stage == ACTOR_TRAINING:
            return PolicyTargets(
                old_logprobs=e.old_logprobs[update.rows],
                advantages=e.advantages[update.rows],
                reference_logprobs=e.reference_logprobs[update.rows],
                num_tokens=num_tokens,
                temperature=self._job.sampling.temperature,
                algorithm=self._job.algorithm,
            )
        assert e.old_values is not None and e.returns is not None
        return ValueTargets(
            old_values=e.old_values[update.rows],
            returns=e.returns[update.rows],
            num_tokens=num_tokens,
            clip=self._job.algorithm.value_clip,
        )

    def _optimizer(self, name: ModelStage) -> AdamW:
        o = self._job.optimizer
        critic_lr = o.lr if o.critic_lr is None else o.critic_lr
        return AdamW(
            lr=critic_lr if name == CRITIC_TRAINING else o.lr,
            betas=o.betas,
            eps=o.eps,
            weight_decay=o.weight_decay,
            max_grad_norm=o.max_grad_norm,
        )


def is_done(update: InFlight, updates: object) -> bool:
    """Whether a rank that answers with this many updates has done what it was to do about an update in flight."""
    return update.settings is None or updates == update.number + 1


def _agreed(name: ModelStage, found: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """(updates so far, norm), as every rank has them."""
    number, norm = found[0]
    if any(n != number for n, _ in found):
        raise StateError(f"{name}: replicas have had different numbers of updates: {sorted({n for n, _ in found})}")
    if any(other != norm and not math.isnan(norm) for _, other in found):
        raise StateError(f"{name}: replicas have different gradients, norms {sorted({x for _, x in found})}")
    return number, norm


def _num_tokens(experience: Experience, update: Update) -> int:
    return int(experience.sequences.response_lengths[update.rows].sum())
