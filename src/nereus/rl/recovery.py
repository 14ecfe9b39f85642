"""After a failure in a step: settle what was in flight, find out what is left, take a plan for it, go on in the same step.

    blame      which devices are gone; a device with an error of its own is stopped           DeviceFailed
    settle     the update in flight is applied by all that are left, or discarded by all
    salvage    what survivors hold becomes the record
    go on      the director's pool and plan; what no device has any more comes from files     Recovered

More may fail in the middle of that: then it begins again, with fewer devices. A last copy of a frozen model is read from
the job's model files. One of a trained model means a restore: the whole job goes back to its newest checkpoint, both
trained models and the ledger together. `docs/loop.md` says which failures end a run all the same.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from nereus.core.errors import StateError, UserError
from nereus.core.events import DeviceFailed, Event, Recovered
from nereus.core.job import PlannedChange
from nereus.core.plan import ACTOR_GENERATION, ModelStage
from nereus.rl.direction import Director, Unrecoverable, out_of_memory
from nereus.rl.ledger import Ledger
from nereus.rl.step import TRAINED, InFlight, StepState
from nereus.rl.updates import Order, Updates, is_done
from nereus.runtime.cluster import WorkerDied, WorkerFailed
from nereus.runtime.executor import OnSpan
from nereus.runtime.fleet import Fleet, Source

FAULTS = (WorkerDied, WorkerFailed)
"""What a step survives."""

REDO = "discarded by all, and done again"

LEANER_PLANS = 16
"""How many plans are tried in one stage of a step that is out of memory; micro-batches are halved from one to the next."""

WAITS = ("Aborted", "PeerTimeout")
"""Errors of a worker that has nothing wrong with itself: it waited for somebody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Where a job can be taken up again from files. sources: of both trained model-stages; digest: of these, if known."""

    step: int
    ledger_bytes: int
    sources: Mapping[ModelStage, Source]
    digest: str = ""


@dataclass
class Recovery:
    """See the module. models: the job's own files of every model-stage. restore: the newest point to restart from.

    on_span: what is told of the primitives of a change before a step.
    """

    fleet: Fleet
    ledger: Ledger
    director: Director
    updates: Updates
    emit: Callable[[Event], None]
    clock: Callable[[], float]
    on_span: Callable[[int], OnSpan]
    models: Mapping[ModelStage, Source]
    restore: Callable[[], Restart] | None
    _present: set[int] = field(default_factory=set)
    _errors: Counter[tuple[int, str, str]] = field(default_factory=Counter)

    def watch(self) -> None:
        """The devices that are there now: any that is not there later has failed."""
        self._present = set(self.fleet.pool)

    def begin(self, step: int) -> None:
        """Before a step: report devices that have died while nobody used them."""
        self._bury(step, "transition")
        self.watch()

    def recover(self, at: StepState, failure: WorkerDied | WorkerFailed) -> StepState:
        """Returns the step to go on with: `at`, or the start of an earlier one after a restore.

        Raises Unrecoverable; the failure itself where going on would only repeat it.
        """
        began, stage, rolled = self.clock(), at.stage, ""
        self._blame(at.step, stage, failure)
        while True:
            try:
                rolled = self._settle(at, failure) or rolled
                after, restored_from = self._go_on(at, stage, failure)
                break
            except FAULTS as another:
                failure, stage = another, "transition"
                self._blame(at.step, stage, failure)
            except StateError:
                if not self._bury(at.step, "transition"):
                    raise  # it is not that a device died between being asked and being used
        self._tell_recovered(at, after, self.clock() - began, rolled, restored_from)
        return after

    def restart(self, at: StepState, change: PlannedChange) -> None:
        """Reach a plan by way of the checkpoint that was just written, where there is no other way."""
        began = self.clock()
        self.fleet.salvage()
        after, step = self._go_back(at, change, list(self.fleet.specs))
        if step != at.step:
            raise Unrecoverable(f"before step {at.step} only the checkpoint of step {step} is there to restart from")
        self._tell_recovered(at, after, self.clock() - began, "", step)

    def _tell_recovered(
        self,
        at: StepState,
        after: StepState,
        seconds: float,
        rolled: str,
        restored_from: int | None,
    ) -> None:
        self.emit(
            Recovered(
                step=at.step,
                stage=at.stage,
                devices=self.fleet.pool,
                plan=self.fleet.plan,
                seconds=seconds,
                rolled={"": "none", REDO: "discarded by all"}.get(rolled, rolled),
                redone=_redone(at.stage, rolled) if restored_from is None else (),
                restored_from=restored_from,
            )
        )
        after.seconds["recovery"] = after.seconds.get("recovery", 0.0) + seconds

    # -- who it was ----------------------------------------------------------------------------------------------

    def _blame(self, step: int, stage: str, failure: WorkerDied | WorkerFailed) -> None:
        """Say which devices are gone, and stop one whose process is suspect. Raises the failure if it is a bug."""
        gone = self._bury(step, stage, failure)
        if isinstance(failure, WorkerFailed) and failure.failure.kind in WAITS and not gone:
            gone = self._call_roll(step, stage)
        if gone or isinstance(failure, WorkerDied):
            return
        kind, what = failure.failure.kind, f"{failure.running}: {_one_line(failure)}"
        self._errors[(step, stage, kind)] += 1
        again = self._errors[(step, stage, kind)]
        if out_of_memory(failure):
            if again > LEANER_PLANS:
                raise failure
            self._tell(step, stage, failure.device, "out of memory", what)
            return
        if again > 1 or set(self.fleet.pool) == {failure.device}:
            raise failure  # the same again, though not on the same device: it is not the device
        if kind in WAITS:
            self._tell(step, stage, failure.device, "silent" if kind == "PeerTimeout" else "error", what)
        else:
            self._stop(step, stage, failure.device, what)

    def _call_roll(self, step: int, stage: str) -> set[int]:
        """Wait for an answer of every device; returns those that have none. Who waits for a dead one knows it before us."""
        gone: set[int] = set()
        while True:
            try:
                self.fleet.cluster.call("ping", dict.fromkeys(self.fleet.pool, ())).results()
                return gone
            except WorkerDied as death:
                gone |= self._bury(step, stage, death)

    def _bury(self, step: int, stage: str, failure: WorkerDied | WorkerFailed | None = None) -> set[int]:
        """Report every device that has gone since it was last looked at."""
        gone = self._present - set(self.fleet.pool)
        if isinstance(failure, WorkerDied):
            gone.add(failure.device)  # it may have died while it was started
        for device in sorted(gone):
            silent_s, why = None, "its process has ended"
            if isinstance(failure, WorkerDied) and failure.device == device:
                silent_s, why = failure.silent_s, _how(failure)
            self._tell(step, stage, device, "died" if silent_s is None else "silent", why, silent_s)
        self._present -= gone
        return gone

    def _stop(self, step: int, stage: str, device: int, why: str) -> None:
        """Leave a device out whose process cannot be trusted any more, with what it holds."""
        self.fleet.cluster.stop([device])
        self._present.discard(device)
        self._tell(step, stage, device, "error", why)

    def _tell(
        self, step: int, stage: str, device: int, kind: str, why: str, detect_seconds: float | None = None
    ) -> None:
        self.emit(
            DeviceFailed(step=step, stage=stage, device=device, kind=kind, why=why, detect_seconds=detect_seconds)
        )

    # -- what was in flight --------------------------------------------------------------------------------------

    def _settle(self, at: StepState, failure: BaseException) -> str:
        """All that are left do the same about what was in flight; returns what that was, if anything."""
        if at.counting:
            for order in self.updates.counts(at.step):
                self._everywhere_left(at, order)
            at.counting, at.counted = False, True
        rolled = ""
        for update in at.in_flight:
            name = update.update.model_stage
            if out_of_memory(failure) and not self._begun(at, update):
                self._everywhere_left(at, ("discard", name, ()))
                continue
            found = self._everywhere_left(at, self.updates.order(update))
            for device, updates in found.items():
                if not is_done(update, updates):
                    self._stop(
                        at.step, at.stage, device, f"it stopped in the middle of update {update.number} of {name}"
                    )
            rolled = (
                "applied by all" if rolled == "applied by all" or update.settings is not None else "discarded by all"
            )
            self.updates.finish(at, update)
        if rolled:
            at.computing = at.in_flight = ()
            return rolled
        if at.computing:
            at.computing = at.in_flight = ()  # the gradients go with the units
            return REDO
        return ""

    def _begun(self, at: StepState, update: InFlight) -> bool:
        """Whether any rank has applied an update, or a part of it."""
        found = self._everywhere_left(at, ("updates", update.update.model_stage, ()))
        return any(updates != update.number for updates in found.values())

    def _everywhere_left(self, at: StepState, order: Order) -> dict[int, object]:
        """Every device of a model-stage that is left is given an order, until all have carried it out.

        One that cannot is stopped: its copy would differ from the others.
        """
        method, name, arguments = order
        while True:
            left = [d for d in self.fleet.plan[name].gpus if d in self.fleet.pool]
            try:
                return self.fleet.cluster.call(method, dict.fromkeys(left, (name, *arguments))).results()
            except WorkerDied as death:
                self._bury(at.step, at.stage, death)
            except WorkerFailed as failure:
                if failure.failure.kind not in WAITS:
                    self._stop(at.step, at.stage, failure.device, f"{method}: {_one_line(failure)}")
                elif not self._bury(at.step, at.stage):
                    raise

    # -- where to go on ------------------------------------------------------------------------------------------

    def _go_on(self, at: StepState, stage: str, failure: BaseException) -> tuple[StepState, int | None]:
        """Change to the director's plan. Returns the step to go on with, and which it was restored from, if it was."""
        lost = self.fleet.salvage()
        self._bury(at.step, stage)
        change = self.director.failed(at.step, stage, failure)
        if change.restart:
            return self._go_back(at, change, list(self.fleet.specs))
        if not lost.keys().isdisjoint(TRAINED):
            return self._go_back(at, change, [*lost, *TRAINED])
        self._change(at.step, change, {name: self.models[name] for name in lost if name in self.models})
        at.changed = at.unproven = True
        return at, None

    def _go_back(self, at: StepState, change: PlannedChange, names: Sequence[ModelStage]) -> tuple[StepState, int]:
        """Take the job back to where it can be restarted from: the ledger, and these model-stages from files."""
        if self.restore is None:
            raise Unrecoverable(
                f"the last copy of {', '.join(map(str, names))} is gone, and there is nothing to restore"
            )
        try:
            restart = self.restore()
        except UserError as error:
            raise Unrecoverable(f"the last copy of a trained model is gone, and {error}") from error
        self.ledger.cut(restart.ledger_bytes)
        self.fleet.drop([name for name in dict.fromkeys(names) if name in self.fleet.specs])
        sources = {**self.models, **restart.sources}
        self._change(at.step, change, {name: source for name, source in sources.items() if name in names})
        if restart.digest and self.fleet.digest(list(restart.sources)) != restart.digest:
            raise Unrecoverable(f"the checkpoint of step {restart.step} is damaged: it does not restore what was saved")
        return StepState(step=restart.step, began_s=at.began_s, unproven=True), restart.step

    def _change(self, step: int, change: PlannedChange, sources: Mapping[ModelStage, Source]) -> None:
        """What devices hold is the same before and after. Raises StateError, also when replicas differ."""
        kept = [name for name in self.fleet.specs if name not in sources and name != ACTOR_GENERATION]
        digest = self.fleet.digest(kept)
        try:
            start_missing(self.fleet, change)
            self._present |= set(self.fleet.pool)
            transition = self.fleet.change(change.plan, change.devices, sources, self.on_span(step))
        except UserError as error:
            raise Unrecoverable(f"the plan for devices {list(change.devices)} cannot be reached: {error}") from error
        except FAULTS:
            self.director.changed(step, None)
            raise
        if self.fleet.digest(kept) != digest:
            raise StateError(f"step {step}: going on after a failure changed the state")
        self.watch()
        self.director.changed(step, transition)


def start_missing(fleet: Fleet, change: PlannedChange) -> None:
    """Start the devices of a change that do not run. Raises WorkerDied, also for one that did when the change was taken."""
    if added := sorted(set(change.devices) - set(fleet.pool)):
        fleet.cluster.start(added)
        fleet.cluster.call("ping", dict.fromkeys(change.devices, ())).results()


def _redone(stage: str, rolled: str) -> tuple[str, ...]:
    """What of the step is done again: not what is complete, nor what was in flight."""
    if stage == "generation":
        return ("weight_sync", "generation")
    if rolled == REDO:
        return ("gradients",)
    return (stage,) if stage in ("weight_sync", "inference", "checkpoint") else ()


def _how(death: WorkerDied) -> str:
    """How a device ended, without saying which."""
    if death.exit_code is None or -death.exit_code not in list(signal.Signals):
        return str(death).removeprefix(f"device {death.device} ")
    return f"killed by {signal.Signals(-death.exit_code).name} while running {death.running or 'nothing'}"


def _one_line(failure: WorkerFailed) -> str:
    return f"{failure.failure.kind}: {' '.join(failure.failure.message.split())}"
