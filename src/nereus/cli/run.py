"""`nereus run`: put a job together, run it, show and store what happens, leave a checkpoint.

run_job(new job, or resume)   checks everything, makes the run folder, starts devices, hands all to rl.loop, sums up

Until everything has been checked nothing is written and nothing is started.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from nereus.api.job_file import dump_job, load_job
from nereus.api.machine import cache_folder, device_memory_bytes, device_type_of
from nereus.cli.failure import RunFailed
from nereus.cli.start import Start, fresh, resumed
from nereus.core.errors import PlanError, StateError, UserError
from nereus.core.events import Event, RunFinished, RunStarted, TransitionFinished
from nereus.core.job import Job
from nereus.runtime.files import write_atomically
from nereus.telemetry.folder import RunFolder, check_is_run, read_events
from nereus.telemetry.progress import Progress, first_and_last

if TYPE_CHECKING:
    from nereus.rl.direction import Director
    from nereus.rl.rollouts import Generator
    from nereus.rl.tasks.base import Task
    from nereus.runtime.fleet import Fleet

LEDGER, ROLLOUTS = "ledger.jsonl", "rollouts"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What to run: a job file, or a run to go on with; and how.

    static: leave out the job's changes. replay: a run whose recorded rollouts are used in place of generation.
    """

    job: Path | None = None
    resume: Path | None = None
    overrides: tuple[str, ...] = ()
    static: bool = False
    replay: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a bench puts in the place of a run's own parts.

    program: what devices run in place of `rl.worker.RlWorker`; it takes `arguments` after those of that one.
    listener: is told of each event before anybody else. direct: of the run's director makes the one that is asked.
    generator: made in place of the one that replays.
    """

    program: str | None = None
    arguments: tuple[Any, ...] = ()
    listener: Callable[[Event], None] = lambda event: None
    direct: Callable[[Director, Fleet], Director] = lambda director, fleet: director
    generator: Callable[[Job, Task, Fleet], Generator] | None = None


def run_job(request: RunRequest, console: Console, parts: Parts | None = None) -> dict[str, Any]:
    """Run to the end (or to Ctrl-C); returns the summary that `--json` prints, the metrics of each step as "history".

    Raises UserError before anything is started, RunFailed when the run ends before its time.
    """
    with ExitStack() as stack:
        folder = None
        if request.resume is not None:
            if request.job is not None:
                raise UserError(f"--resume takes the job from the run folder: leave out {request.job}")
            # The lock first: whoever holds it may still be writing checkpoints.
            folder = stack.enter_context(RunFolder.open(request.resume, clock=time.time))
            start = resumed(request.resume, request.overrides, static=request.static)
        elif request.job is not None:
            start = fresh(request.job, request.overrides, static=request.static)
        else:
            raise UserError("a job file is needed: nereus run JOB.yaml, or nereus run --resume RUN")
        # torch and transformers take seconds to import: not before the job itself is known to be right.
        from nereus.rl.changes import lay_out
        from nereus.rl.direction import Unrecoverable
        from nereus.rl.setup import prepare
        from nereus.runtime.cluster import WorkerDied, WorkerFailed

        device_type = device_type_of(start.job)
        with console.status(f"checking {start.job.name}: models, task, plans"):  # on a terminal only
            prepared = prepare(start.job, cache_folder())
            changes = lay_out(start.job, start.plan, start.changes, prepared.specs)
            start = dataclasses.replace(start, changes=changes)
            _check(request, start, prepared, device_type)
        if folder is None:
            folder = stack.enter_context(_new_folder(start.job))
        else:
            # --static is for this session: the run's own changes stay in its job file.
            job = load_job(folder.job_path, request.overrides) if request.static else start.job
            write_atomically(folder.job_path, dump_job(job))
        try:
            return _run(request, start, prepared, folder, device_type, console, parts or Parts())
        except (KeyboardInterrupt, OSError, StateError, Unrecoverable, WorkerDied, WorkerFailed) as error:
            raise _failed(error, folder) from error


def _check(request: RunRequest, start: Start, prepared: Any, device_type: str) -> None:
    """What can be known to be wrong before anything starts, beyond the models and the task."""
    from nereus.cli.directing import supply_points
    from nereus.rl.changes import check_changes
    from nereus.rl.rollouts import check_recorded
    from nereus.rl.setup import check_layouts, check_restored
    from nereus.runtime.backends import check_backend

    job = start.job
    supply_points(job)  # reads its trace
    check_backend(job.cluster)
    plans = {"plan": (start.plan, start.devices)}
    plans |= {f"changes: step {change.step}": (change.plan, change.devices) for change in start.changes}
    for where, (plan, devices) in plans.items():
        try:
            check_layouts(prepared, plan, device_memory_bytes(job, device_type, len(devices)))
        except PlanError as error:
            raise PlanError(f"{where}: {error}") from error
    check_changes(start.plan, start.changes, prepared.specs, _usable_bytes(start, device_type))
    check_restored(prepared, start.sources)
    if request.replay is not None:
        check_is_run(request.replay)
        check_recorded(
            request.replay / ROLLOUTS,
            range(start.first_step, job.steps),
            prompts=job.batch.prompts,
            samples_per_prompt=job.batch.samples_per_prompt,
        )
    if job.run.tensorboard:
        from nereus.telemetry.tracker import TensorBoardTracker

        TensorBoardTracker(Path())  # writes nothing yet; raises where tensorboard is not installed
    if job.adapt.metrics_port is not None:
        from nereus.telemetry.metrics import check_port

        check_port(job.adapt.metrics_port)


def _usable_bytes(start: Start, device_type: str) -> float:
    """What state may fill of a device while the plan changes, whatever the pool is then."""
    most = max(len(devices) for devices in (start.devices, *(change.devices for change in start.changes)))
    return device_memory_bytes(start.job, device_type, most)


def _most_devices(start: Start) -> int:
    """How many devices the job says it may have at a time."""
    from nereus.cli.directing import supply_points

    changed = [len(change.devices) for change in start.changes]
    return max(len(start.devices), *changed, *(point.devices or 0 for point in supply_points(start.job)), 0)


def _run(
    request: RunRequest,
    start: Start,
    prepared: Any,
    folder: RunFolder,
    device_type: str,
    console: Console,
    parts: Parts,
) -> dict[str, Any]:
    from nereus.cli.directing import link_factors, make_director, transition_rates
    from nereus.rl.ledger import Ledger
    from nereus.rl.loop import Trainer
    from nereus.rl.recovery import Restart
    from nereus.rl.rollouts import Replay
    from nereus.rl.saving import Checkpoints, restart_point
    from nereus.rl.worker import PRELOAD, PROGRAM
    from nereus.runtime.backends import make_cluster
    from nereus.runtime.fleet import Fleet

    job, began = start.job, time.monotonic()
    capacity_bytes = _usable_bytes(start, device_type)
    with ExitStack() as stack:
        records = read_events(folder.path)
        history = [record.event for record in records]
        listeners = [parts.listener, *_listeners(stack, job, folder, history, console)]

        def emit(event: Event) -> None:
            for listener in listeners:
                listener(event)

        ledger = Ledger(folder.path / LEDGER, size=start.ledger_bytes)
        stack.callback(ledger.close)
        emit(
            RunStarted(
                run=folder.path.name,
                job=job.name,
                algorithm=job.algorithm.name,
                first_step=start.first_step,
                num_steps=job.steps,
                devices=start.devices,
                plan=start.plan,
                policy=job.policy,
                emulated=job.cluster.pace is not None,
                capacity_bytes=int(capacity_bytes),
            )
        )
        for choice in start.chosen:
            emit(choice)
        cluster = make_cluster(
            job.cluster,
            parts.program or PROGRAM,
            (prepared.architectures, capacity_bytes, job.cluster.pace, *parts.arguments),
            preload=(*PRELOAD, "nereus.cli.main"),
            device_type=device_type,
            most_devices=_most_devices(start),
        )
        stack.callback(cluster.close)
        cluster.start(start.devices)
        fleet = Fleet(cluster, prepared.specs, usable_bytes=capacity_bytes, rates=transition_rates(job))
        fleet.create(start.plan, {**prepared.sources, **start.sources})
        if start.digest and fleet.digest(list(start.sources)) != start.digest:
            raise UserError(
                f"the checkpoint of step {start.first_step} of {folder.path} is damaged: the state that was read from it "
                "is not the state that was written; delete its folder to go on from the one before"
            )

        checkpoints = Checkpoints(
            fleet,
            prepared,
            folder.checkpoints_path,
            keep=job.run.keep_checkpoints,
            saved=start.first_step or None,
            emit=emit,
            clock=time.monotonic,
        )
        stack.callback(checkpoints.close)

        def at_boundary(step: int, last: bool) -> None:
            due = bool(job.run.checkpoint_every and step % job.run.checkpoint_every == 0)
            checkpoints.at_boundary(step, ledger.size, due=due, last=last)

        def restore() -> Restart:
            checkpoints.settle()
            return restart_point(folder.checkpoints_path, prepared)

        director, heard = make_director(stack, start, fleet, folder.path, emit, records)
        listeners.append(heard)
        replay = Replay(request.replay / ROLLOUTS) if request.replay is not None else None
        stop = stack.enter_context(_interruptible(console))
        trainer = Trainer(
            job=job,
            task=prepared.task,
            fleet=fleet,
            ledger=ledger,
            emit=emit,
            director=parts.direct(director, fleet),
            generator=replay if parts.generator is None else parts.generator(job, prepared.task, fleet),
            rollout_folder=folder.path / ROLLOUTS if job.run.record_rollouts else None,
            stop=stop,
            at_boundary=at_boundary,
            measure=lambda: cluster.call("measurements", dict.fromkeys(cluster.devices, ())).results(),
            before_step=link_factors(job, cluster),
            models=prepared.sources,
            before_stage=checkpoints.look,
            leaving=checkpoints.settle,
            restore=restore,
        )
        last = trainer.run(start.first_step)
        summary = summarise(folder, job, time.monotonic() - began)
        facts = {name: value for name, value in summary.items() if name != "history"}
        counts = {f"samples_{name}": value for name, value in summary["samples"].items()}
        emit(RunFinished(summary={**facts, **counts}, interrupted=last < job.steps))
        return summary


def summarise(folder: RunFolder, job: Job, seconds: float) -> dict[str, Any]:
    """The facts of a run, from what it wrote down. Rewards and lengths are means over three steps."""
    from nereus.rl.ledger import account, read_ledger

    progress = Progress()
    for record in read_events(folder.path):
        progress = progress.after(record.event, record.time_s)
    counted = account(
        read_ledger(folder.path / LEDGER),
        positions=len(progress.steps) * job.batch.prompts,
        samples_per_prompt=job.batch.samples_per_prompt,
        epochs=job.batch.epochs,
    )
    reward_first, reward_last, _ = first_and_last(progress.values("reward"))
    length_first, length_last, _ = first_and_last(progress.values("length_mean"))
    return {
        "run": str(folder.path),
        "steps": len(progress.steps),
        "seconds": seconds,
        "reward_first": reward_first,
        "reward_last": reward_last,
        "length_first": length_first,
        "length_last": length_last,
        "transitions": [_transition_row(event) for event in progress.transitions],
        "samples": dataclasses.asdict(counted),
        "history": [{"step": event.step, **event.metrics} for event in progress.steps],
    }


def _transition_row(event: TransitionFinished) -> dict[str, Any]:
    return {
        "step": event.step,
        "before": event.before.to_json(),
        "after": event.after.to_json(),
        "bytes": event.received_bytes,
        "seconds": event.seconds,
        "state_equal": event.state_equal,
    }


def _failed(error: BaseException, folder: RunFolder) -> RunFailed:
    """What happened, what of the run is lost, and what to do next."""
    from nereus.rl.saving import checkpoints

    progress = Progress()
    for record in read_events(folder.path):
        progress = progress.after(record.event, record.time_s)
    what, details = _cause(error)
    if kept := checkpoints(folder.checkpoints_path):
        step, last = int(kept[-1].name.removeprefix("step-")), progress.num_done - 1
        lost = (
            "no step is lost"
            if last < step
            else f"step {step} is lost"
            if last == step
            else f"steps {step} to {last} are lost"
        )
        saved = f"{lost}, go on from the checkpoint of step {step}: nereus run --resume {folder.path}"
    else:
        saved = "there is no checkpoint yet (run.checkpoint_every makes some on the way): start the job again"
    return RunFailed(
        f"{what}, in step {progress.num_done}; {saved}",
        details=details,
        exit_code=130 if isinstance(error, KeyboardInterrupt) else 1,
    )


def _cause(error: BaseException) -> tuple[str, str]:
    """(What happened in a few words, a worker's traceback if there is one)."""
    from nereus.runtime.cluster import WorkerDied, WorkerFailed

    if isinstance(error, WorkerDied):
        code = error.exit_code or 0
        name = signal.Signals(-code).name if -code in list(signal.Signals) else ""
        return str(error).replace(f"exit code {code}", f"killed by {name}" if name else f"exit code {code}"), ""
    if isinstance(error, WorkerFailed):
        failure = error.failure
        what = f"{failure.kind}: {' '.join(failure.message.split())}"
        return f"device {error.device} failed while running {error.running}: {what}", failure.traceback
    if isinstance(error, KeyboardInterrupt):
        return "left at once", ""
    return " ".join(str(error).split()), ""


def _new_folder(job: Job) -> RunFolder:
    stem = f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    names = itertools.chain([stem], (f"{stem}-{i}" for i in itertools.count(2)))
    path = next(path for name in names if not (path := Path(job.run.folder) / name).exists())
    return RunFolder.create(path, job=dump_job(job), clock=time.time)


def _listeners(
    stack: ExitStack, job: Job, folder: RunFolder, history: Sequence[Event], console: Console
) -> list[Callable[[Event], None]]:
    from nereus.telemetry.console import view_for
    from nereus.telemetry.trace import TraceFile

    listeners: list[Callable[[Event], None]] = [folder.handle]
    listeners.append(stack.enter_context(TraceFile(folder.trace_path, time.time)).handle)
    if job.run.tensorboard:
        from nereus.telemetry.tracker import TensorBoardTracker

        listeners.append(stack.enter_context(TensorBoardTracker(folder.tensorboard_path)).handle)
    if job.adapt.metrics_port is not None:
        from nereus.telemetry.metrics import MetricsServer

        metrics = stack.enter_context(MetricsServer(job.adapt.metrics_port))
        console.print(f"metrics on {metrics.address}", highlight=False)
        listeners.append(metrics.handle)
    view = view_for(console, clock=time.monotonic, folder=folder.path, history=history)
    listeners.append(stack.enter_context(view).handle)

    return listeners


@contextmanager
def _interruptible(console: Console) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C (or SIGTERM) lets the step end; a second one ends the run at once."""
    asked: list[int] = []

    def handler(number: int, _: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        console.print("stopping: this step ends, a checkpoint is written; once more to leave at once")

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, old in before.items():
            signal.signal(number, old)
