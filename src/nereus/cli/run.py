"""`nereus run`: put a job together, run it, show and store what happens, leave a checkpoint.

run_job(new job, or resume)   opens the run folder, starts devices, hands everything to rl.loop, sums up
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from nereus.cli.config import dump_job, load_job
from nereus.core.errors import UserError
from nereus.core.events import CheckpointWritten, Event, RunFinished, RunStarted, StepFinished, TransitionFinished
from nereus.core.job import Job, PlannedChange, initial_plan, planned_changes
from nereus.core.plan import Plan
from nereus.telemetry.folder import RunFolder, check_is_run, read_events
from nereus.telemetry.progress import first_and_last

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
class _Start:
    """Where a run begins."""

    job: Job
    plan: Plan
    devices: tuple[int, ...]
    first_step: int
    ledger_bytes: int
    sources: Mapping[Any, Any]
    digest: str = ""

    @property
    def changes(self) -> list[PlannedChange]:
        return planned_changes(self.job, self.plan, self.devices, self.first_step)


def run_job(request: RunRequest, console: Console) -> dict[str, Any]:
    """Run to the end (or to Ctrl-C); returns the summary that `--json` prints. Raises UserError before any start."""
    from nereus.rl.setup import check_layouts, prepare

    start = _resumed(request) if request.resume is not None else _fresh(request)
    job = start.job
    changes = start.changes
    console.print(f"[dim]checking {job.name}: models, task, plans[/dim]")
    prepared = prepare(job, cache_folder())
    for plan in (start.plan, *(change.plan for change in changes)):
        check_layouts(prepared, plan, job.cluster.memory_gib * 2**30)
    if request.replay is not None:
        check_is_run(request.replay)
    folder = _run_folder(request, job)
    with folder:
        return _run(request, start, changes, prepared, folder, console)


def _run(
    request: RunRequest,
    start: _Start,
    changes: Sequence[PlannedChange],
    prepared: Any,
    folder: RunFolder,
    console: Console,
) -> dict[str, Any]:
    from nereus.rl.ledger import Ledger
    from nereus.rl.loop import Trainer
    from nereus.rl.rollouts import Replay
    from nereus.rl.saving import save_checkpoint
    from nereus.rl.worker import PRELOAD, PROGRAM
    from nereus.runtime.cluster import LocalCluster
    from nereus.runtime.fleet import Fleet

    job, began = start.job, time.monotonic()
    with ExitStack() as stack:
        history = [record.event for record in read_events(folder.path)]
        emit = _listeners(stack, job, folder, history, console)
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
            )
        )
        cluster = LocalCluster(
            PROGRAM,
            (prepared.architectures,),
            preload=PRELOAD,
            device_type=_device_type(job),
            timeout_s=job.cluster.timeout_s,
        )
        stack.callback(cluster.close)
        cluster.start(start.devices)
        fleet = Fleet(cluster, prepared.specs)
        fleet.create(start.plan, {**prepared.sources, **start.sources})
        if start.digest and fleet.digest(list(start.sources)) != start.digest:
            raise UserError(f"checkpoint of {folder.path}: the state that was read is not the state that was written")

        def save(step: int) -> None:
            saved_from = time.monotonic()
            path, num_bytes = save_checkpoint(
                fleet,
                prepared,
                folder.checkpoints_path,
                step=step,
                ledger_bytes=ledger.size,
                keep=job.run.keep_checkpoints,
            )
            seconds = time.monotonic() - saved_from
            emit(CheckpointWritten(step=step, path=str(path), num_bytes=num_bytes, seconds=seconds))

        def at_boundary(step: int) -> None:
            if job.run.checkpoint_every and step % job.run.checkpoint_every == 0 and step < job.steps:
                save(step)

        stop = stack.enter_context(_interruptible(console))
        trainer = Trainer(
            job=job,
            task=prepared.task,
            fleet=fleet,
            ledger=ledger,
            emit=emit,
            changes=changes,
            generator=Replay(request.replay / ROLLOUTS) if request.replay is not None else None,
            rollout_folder=folder.path / ROLLOUTS if job.run.record_rollouts else None,
            stop=stop,
            at_boundary=at_boundary,
        )
        last = trainer.run(start.first_step)
        if last > start.first_step:
            save(last)
        summary = summarise(folder, job, time.monotonic() - began)
        emit(RunFinished(summary=summary, interrupted=last < job.steps))
        return summary


def summarise(folder: RunFolder, job: Job, seconds: float) -> dict[str, Any]:
    """The facts of a run, from what it wrote down. Rewards and lengths are means over three steps."""
    from nereus.rl.ledger import account, read_ledger

    events = [record.event for record in read_events(folder.path)]
    steps = list({e.step: e for e in events if isinstance(e, StepFinished)}.values())
    counted = account(
        read_ledger(folder.path / LEDGER),
        positions=len(steps) * job.batch.prompts,
        samples_per_prompt=job.batch.samples_per_prompt,
        epochs=job.batch.epochs,
    )
    reward_first, reward_last, _ = first_and_last([e.metrics["reward"] for e in steps])
    length_first, length_last, _ = first_and_last([e.metrics["length_mean"] for e in steps])
    samples = dataclasses.asdict(counted)
    return {
        "run": str(folder.path),
        "steps": len(steps),
        "seconds": seconds,
        "reward_first": reward_first,
        "reward_last": reward_last,
        "length_first": length_first,
        "length_last": length_last,
        "transitions": [_transition_row(e) for e in events if isinstance(e, TransitionFinished)],
        "samples": samples,
        **{f"samples_{key}": value for key, value in samples.items()},
        "history": [{"step": e.step, **e.metrics} for e in steps],
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


def _fresh(request: RunRequest) -> _Start:
    if request.job is None:
        raise UserError("a job file is needed: nereus run JOB.yaml, or --resume RUN")
    job = load_job(request.job, request.overrides)
    if request.static:
        job = dataclasses.replace(job, changes=())
    devices = tuple(range(job.cluster.devices))
    return _Start(job=job, plan=initial_plan(job), devices=devices, first_step=0, ledger_bytes=0, sources={})


def _resumed(request: RunRequest) -> _Start:
    """From the newest checkpoint of a run; under its plan and devices then, or those that `--set` asks for."""
    assert request.resume is not None
    from nereus.rl.saving import newest_checkpoint

    check_is_run(request.resume)
    job = load_job(request.resume / "job.yaml", request.overrides)
    if request.static:
        job = dataclasses.replace(job, changes=())
    restored = newest_checkpoint(request.resume / "checkpoints")
    if restored.step >= job.steps:
        raise UserError(
            f"run {request.resume} has done its {job.steps} steps; to go on, ask for more: --set steps={job.steps + 10}"
        )
    asked = {override.partition("=")[0].split(".")[0] for override in request.overrides}
    replaced = "plan" in asked or any(o.startswith("cluster.devices") for o in request.overrides)
    plan = initial_plan(job) if replaced else restored.plan
    devices = tuple(range(job.cluster.devices)) if replaced else restored.devices
    return _Start(
        job=job,
        plan=plan,
        devices=devices,
        first_step=restored.step,
        ledger_bytes=restored.ledger_bytes,
        sources=restored.sources,
        digest=restored.digest,
    )


def _run_folder(request: RunRequest, job: Job) -> RunFolder:
    if request.resume is not None:
        return RunFolder.open(request.resume, clock=time.time)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return RunFolder.create(
        Path(job.run.folder) / f"{job.name}-{stamp}-{os.getpid()}", job=dump_job(job), clock=time.time
    )


def cache_folder() -> Path:
    """Where converted models are kept: $NEREUS_CACHE, or nereus under the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nereus"
    folder = Path(os.environ.get("NEREUS_CACHE") or default)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _device_type(job: Job) -> str:
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    most = max([job.cluster.devices, *(c.devices or 0 for c in job.changes)])
    if job.cluster.device == "cuda" and found < most:
        raise UserError(f"cluster.device: cuda needs {most} GPUs, this machine has {found}")
    return "cuda" if job.cluster.device != "cpu" and found >= most else "cpu"


def _listeners(
    stack: ExitStack, job: Job, folder: RunFolder, history: Sequence[Event], console: Console
) -> Callable[[Event], None]:
    from nereus.telemetry.console import view_for

    listeners: list[Callable[[Event], None]] = [folder.handle]
    if job.run.tensorboard:
        from nereus.telemetry.tracker import TensorBoardTracker

        listeners.append(stack.enter_context(TensorBoardTracker(folder.tensorboard_path)).handle)
    view = view_for(console, clock=time.monotonic, folder=folder.path, history=history)
    listeners.append(stack.enter_context(view).handle)

    def emit(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return emit


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
