"""The synchronous loop: generate, score, compute advantages, train, at step boundaries change the plan, sync weights.

    step:   [change of plan] -> weight_sync -> generation -> inference (reference, reward model, values, old log-probs)
            -> training, counters
    then:   [checkpoint], which so is always from before the next step's change

The loop holds no tensors of any model. It deals a batch out over the units of each model-stage, collects the answers, and
decides nothing about layouts: a `Director` does, and any plan gives the same numbers. What is done of a step is written
down in its `StepState`, so that after a failure (`rl.recovery`) it goes on with the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nereus.core.errors import StateError, UserError
from nereus.core.events import Event, PrimitiveFinished, StageStarted, StepFinished, TransitionFinished
from nereus.core.job import Job, PlannedChange
from nereus.core.plan import ACTOR_GENERATION, ModelStage
from nereus.engine.generation import Request
from nereus.rl.direction import Director, Unrecoverable
from nereus.rl.experience import compute_experience
from nereus.rl.ledger import Ledger
from nereus.rl.recovery import FAULTS, Recovery, Restart, start_missing
from nereus.rl.rollouts import Generator, Rollouts, UnitGenerator, record
from nereus.rl.step import StepState, updates_of
from nereus.rl.tasks.base import Task
from nereus.rl.updates import Updates
from nereus.runtime.executor import OnSpan, Span
from nereus.runtime.fleet import Fleet, Source, Transition


@dataclass
class Trainer:
    """See the module. emit: takes events. stop: asked at each step boundary. rollout_folder: None keeps no rollouts.

    at_boundary: told the next step, and whether the run ends before it; it may write a checkpoint. measure: by device,
    what workers measured since it was asked last. before_step: told once the devices of a step are there, again after a
    failure. before_stage: told when one begins. leaving: told of devices before a change stops them. models, restore:
    for `Recovery`.
    """

    job: Job
    task: Task
    fleet: Fleet
    ledger: Ledger
    emit: Callable[[Event], None]
    director: Director
    generator: Generator | None = None
    rollout_folder: Path | None = None
    stop: Callable[[], bool] = lambda: False
    at_boundary: Callable[[int, bool], None] = lambda step, last: None
    measure: Callable[[], Mapping[int, Any]] = dict
    before_step: Callable[[int], None] = lambda step: None
    before_stage: Callable[[], None] = lambda: None
    leaving: Callable[[Set[int]], None] = lambda devices: None
    models: Mapping[ModelStage, Source] = field(default_factory=dict)
    restore: Callable[[], Restart] | None = None
    clock: Callable[[], float] = time.monotonic

    def run(self, first_step: int) -> int:
        """Train from `first_step` to the job's last; returns the next step, earlier where `stop` said so.

        Raises what ends a run: StateError, Unrecoverable, or a failure that comes again.
        """
        self._updates = Updates(self.job, self.fleet, self.ledger)
        self._recovery = self._new_recovery()
        self._recovery.watch()
        at = self._begin(first_step)
        while True:
            try:
                if at.step >= self.job.steps or (not at.changed and self.stop()):
                    at.stage = "checkpoint"
                    self.at_boundary(at.step, True)
                    return at.step
                self._advance(at)
                at = self._begin(at.step + 1)
            except FAULTS as failure:
                at = self._recovery.recover(at, failure)

    def _new_recovery(self) -> Recovery:
        return Recovery(
            fleet=self.fleet,
            ledger=self.ledger,
            director=self.director,
            updates=self._updates,
            emit=self.emit,
            clock=self.clock,
            on_span=self._tell,
            models=self.models,
            restore=self.restore,
        )

    def _begin(self, step: int) -> StepState:
        self._recovery.begin(step)
        return StepState(step=step, began_s=self.clock())

    def _advance(self, at: StepState) -> None:
        """Do what is not done yet of a step."""
        if not at.changed:
            self._change(at)
        self.before_step(at.step)
        if at.rollouts is None:
            self._sync_weights(at)
            self._generate(at)
        if at.experience is None:
            self._infer(at)
        if not at.counted:
            self._train(at)
        if not at.reported:
            self._report(at)
        at.stage = "checkpoint"
        self.at_boundary(at.step + 1, False)

    # -- the stages of a step ------------------------------------------------------------------------------------

    def _sync_weights(self, at: StepState) -> None:
        with self._stage(at, "weight_sync"):
            self.fleet.weight_sync()
        if at.unproven:
            self.fleet.check_generation_weights()
            at.unproven = False

    def _generate(self, at: StepState) -> None:
        batch = self.job.batch
        with self._stage(at, "generation"):
            prompts = [self.task.prompt(at.step * batch.prompts + i) for i in range(batch.prompts)]
            rows = [(prompt, sample) for prompt in prompts for sample in range(batch.samples_per_prompt)]
            requests = [Request(prompt=p.token_ids, position=p.position, sample=s) for p, s in rows]
            answer = self.generator or UnitGenerator(self.job, self.task, self.fleet)
            at.rollouts = Rollouts(
                prompts=tuple(p for p, _ in rows),
                requests=tuple(requests),
                responses=tuple(answer(at.step, requests)),
            )
        self.director.generated(at.step, [len(response.tokens) for response in at.rollouts.responses])
        if self.rollout_folder is not None:
            record(self.rollout_folder, at.step, at.rollouts)

    def _infer(self, at: StepState) -> None:
        assert at.rollouts is not None
        with self._stage(at, "inference"):
            at.experience = compute_experience(self.job, self.task, self.fleet, at.rollouts)
        at.waiting = updates_of(self.job, at.step)

    def _train(self, at: StepState) -> None:
        with self._stage(at, "training"):
            while at.waiting:
                self._updates.run_next(at)
            self._updates.count(at)

    def _report(self, at: StepState) -> None:
        assert at.experience is not None and at.rollouts is not None
        at.stage = "report"
        started = self.clock()
        metrics = {**at.experience.metrics, **at.totals.metrics}
        measured = self.measure()
        so_far = {**at.seconds, "step": started - at.began_s}
        extra = self.director.measured(at.step, metrics, so_far, measured)
        ended = self.clock()
        self._took(at, "controller", ended - started)
        request, response = at.rollouts.requests[0], at.rollouts.responses[0]
        self.emit(
            StepFinished(
                step=at.step,
                metrics=metrics,
                seconds={**at.seconds, "step": ended - at.began_s},
                sample=self.task.describe([*request.prompt, *response.tokens]),
                predicted=extra.predicted,
                peak_bytes=extra.peak_bytes,
                signals=extra.signals,
            )
        )
        at.reported = True

    # -- the boundary --------------------------------------------------------------------------------------------

    def _change(self, at: StepState) -> None:
        started = self.clock()
        change = self.director.boundary(at.step)
        self._took(at, "controller", self.clock() - started)
        if change is not None and change.restart:
            with self._stage(at, "transition"):
                self.at_boundary(at.step, True)
                self._recovery.restart(at, change)
        elif change is not None:
            try:
                with self._stage(at, "transition"):
                    transition = self._carry_out(at.step, change)
            except FAULTS:
                self.director.changed(at.step, None)
                raise
            self.director.changed(at.step, transition)
        at.unproven |= change is not None
        at.changed = True

    def _carry_out(self, step: int, change: PlannedChange) -> Transition:
        """Raises StateError when the state is not the same before and after, Unrecoverable where there is no way."""
        before, devices_before = self.fleet.plan, self.fleet.pool
        if stopped := set(devices_before) - set(change.devices):
            self.leaving(stopped)
        started = self.clock()
        kept = [p.model_stage for p in before.placements if p.model_stage != ACTOR_GENERATION]
        digest_before = self.fleet.digest(kept)
        ready = self.clock()
        start_missing(self.fleet, change)
        self._recovery.watch()
        try:
            transition = self.fleet.change(change.plan, change.devices, on_span=self._tell(step))
        except UserError as error:
            raise Unrecoverable(f"the change of plan before step {step} cannot be made: {error}") from error
        self._recovery.watch()
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
                decision=change.decision,
            )
        )
        if digest_before != digest_after:
            raise StateError(
                f"step {step}: the change of plan changed the state: {digest_before} before, {digest_after} after"
            )
        return transition

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

    # -- inside --------------------------------------------------------------------------------------------------

    @contextmanager
    def _stage(self, at: StepState, stage: str) -> Iterator[None]:
        at.stage = stage
        self.emit(StageStarted(step=at.step, stage=stage))
        self.before_stage()
        started = self.clock()
        yield
        self._took(at, stage, self.clock() - started)

    def _took(self, at: StepState, stage: str, seconds: float) -> None:
        at.seconds[stage] = at.seconds.get(stage, 0.0) + seconds
