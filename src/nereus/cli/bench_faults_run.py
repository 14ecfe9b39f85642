"""One run of `nereus bench faults`, in a process of its own: `python -m nereus.cli.bench_faults_run FOLDER`.

FOLDER/order.json says what to run (`Order`). Left there: where the run is, with its summary (run.json), what plans it was
told to go to (plans.jsonl), and which faults happened (marks.jsonl).
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from nereus.cli.bench_faults_worker import PROGRAM, Campaign, Clock, Fault
from nereus.cli.failure import RunFailed
from nereus.cli.run import ROLLOUTS, Parts, RunRequest, run_job
from nereus.core.events import DeviceFailed, Event
from nereus.core.job import Job, PlannedChange
from nereus.core.plan import Layout, ModelStage, Placement, Plan
from nereus.engine.generation import Request, Response
from nereus.rl.direction import Director, Extra, Unrecoverable, leaner, out_of_memory
from nereus.rl.rollouts import Generator, Replay, UnitGenerator
from nereus.rl.supply import SCALE, scale_request
from nereus.rl.tasks.base import Task
from nereus.runtime.calls import WorkerFailed
from nereus.runtime.fleet import Fleet, Transition
from nereus.telemetry.folder import EVENTS

ORDER, CLOCK, MARKS, PLANS, RESULT = "order.json", "clock", "marks.jsonl", "plans.jsonl", "run.json"

LAYOUTS = {Layout(1, 1): 8, Layout(2, 1): 6, Layout(1, 2): 6, Layout(2, 2): 1}
"""(tp, pp) and how often it is drawn, where there are devices for it."""

SPARE = 0.25
"""How often a spare device takes the place of a lost one at once; else it comes at the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to run. replay: the run whose rollouts are trained on; None: a run of its own, without faults.

    director: mixed, for another plan at every step, or the policy of the job. faults: `Fault`s.
    """

    job: str
    settings: tuple[str, ...]
    replay: str | None
    director: str
    devices: int
    seed: int
    faults: tuple[Fault, ...]

    def write(self, folder: Path) -> None:
        (folder / ORDER).write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @classmethod
    def read(cls, folder: Path) -> Self:
        facts = json.loads((folder / ORDER).read_text())
        faults = tuple(Fault(**row) for row in facts.pop("faults"))
        return cls(**{**facts, "settings": tuple(facts["settings"]), "faults": faults})


def main(folder: Path) -> int:
    """Run an order; the exit code of `nereus run`."""
    order = Order.read(folder)
    request = RunRequest(job=Path(order.job), overrides=order.settings)
    parts = Parts()
    if order.replay is not None:
        replay = Path(order.replay)
        request = replace(request, replay=replay)
        clock = Clock(folder / CLOCK, write=True)

        def heard(event: Event) -> None:
            clock.handle(event)
            if isinstance(event, DeviceFailed) and event.kind != "out of memory":
                _supply(folder, order.devices)

        parts = Parts(
            program=PROGRAM,
            arguments=(Campaign(order.faults, folder / CLOCK, folder / MARKS),),
            listener=heard,
            direct=lambda director, fleet: _direct(order, director, fleet, folder / PLANS),
            generator=lambda job, task, fleet: _generator(job, task, fleet, replay),
        )
    with open(os.devnull, "w") as nowhere:
        try:
            summary = run_job(request, Console(file=nowhere), parts)
        except RunFailed as error:
            print(error, file=sys.stderr)
            traceback.print_exception(error.__cause__ or error)
            return error.exit_code
    (folder / RESULT).write_text(json.dumps({name: summary[name] for name in ("run", "steps", "seconds", "samples")}))
    return 0


def _supply(folder: Path, devices: int) -> None:
    """From the next step on there are so many devices again, if the director wants them: as `nereus scale` does it."""
    (run,) = (path.parent for path in folder.glob(f"*/{EVENTS}"))
    with (run / SCALE).open("ab") as file:
        file.write(scale_request(devices, (), None))


def _generator(job: Job, task: Task, fleet: Fleet, replay: Path) -> Generator:
    """The units answer, so that they can fail; trained is on what is recorded."""
    units, recorded = UnitGenerator(job, task, fleet), Replay(replay / ROLLOUTS)

    def generate(step: int, requests: Sequence[Request]) -> list[Response]:
        units(step, requests)
        return recorded(step, requests)

    return generate


# -- directors -----------------------------------------------------------------------------------------------------


def _direct(order: Order, own: Director, fleet: Fleet, log: Path) -> Director:
    chosen = MixedPlans(fleet, order.devices, order.seed) if order.director == "mixed" else own
    return Noted(chosen, lambda change: _append(log, change))


def _append(log: Path, change: PlannedChange) -> None:
    """One line: when a plan was taken, and which."""
    with log.open("a") as file:
        file.write(json.dumps({"time_s": time.time(), "plan": change.plan.to_json()}) + "\n")


class MixedPlans:
    """A director that has another plan for every step, drawn from (seed, step), and a full pool again by the next one."""

    def __init__(self, fleet: Fleet, devices: int, seed: int) -> None:
        self._fleet, self._devices, self._seed = fleet, tuple(range(devices)), seed
        self._names = [p.model_stage for p in fleet.plan.placements]

    def boundary(self, step: int) -> PlannedChange | None:
        return self._change(step, self._devices)

    def failed(self, step: int, stage: str, failure: BaseException) -> PlannedChange:
        pool, plan = self._fleet.pool, self._fleet.plan
        if not pool:
            raise Unrecoverable("no device is left")
        if set(plan.gpus) <= set(pool):
            if isinstance(failure, WorkerFailed) and out_of_memory(failure) and stage != "transition":
                plan = leaner(plan, failure.device)
            return PlannedChange(step, pool, plan)
        spare = random.Random(f"{self._seed} {step} spare").random() < SPARE
        return self._change(step, self._devices if spare else pool)

    def changed(self, step: int, transition: Transition | None) -> None:
        pass

    def generated(self, step: int, lengths: Sequence[int]) -> None:
        pass

    def measured(
        self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float], measurements: Mapping[int, Any]
    ) -> Extra:
        return Extra()

    def _change(self, step: int, devices: tuple[int, ...]) -> PlannedChange:
        return PlannedChange(step, devices, draw_plan(f"{self._seed} {step} {devices}", self._names, devices))


def draw_plan(seed: str, names: Sequence[ModelStage], devices: Sequence[int]) -> Plan:
    """Every model-stage with a layout of its own, in as many replicas as there are devices for, on devices in any order."""
    draw = random.Random(seed)
    placements = []
    for name in names:
        layouts = [layout for layout in LAYOUTS if layout.size <= len(devices)]
        (layout,) = draw.choices(layouts, [LAYOUTS[layout] for layout in layouts])
        dp = len(devices) // layout.size
        placements.append(
            Placement(
                model_stage=name,
                layout=layout,
                dp=dp,
                gpus=tuple(draw.sample(list(devices), dp * layout.size)),
                micro_batch=draw.choice([4, 8]),
                recompute=name.stage == "training" and draw.random() < 0.5,
            )
        )
    return Plan(tuple(placements))


class Noted:
    """A director whose plans are noted."""

    def __init__(self, director: Director, note: Callable[[PlannedChange], None]) -> None:
        self._director, self._note = director, note
        self.changed, self.generated, self.measured = director.changed, director.generated, director.measured

    def boundary(self, step: int) -> PlannedChange | None:
        change = self._director.boundary(step)
        if change is not None:
            self._note(change)
        return change

    def failed(self, step: int, stage: str, failure: BaseException) -> PlannedChange:
        change = self._director.failed(step, stage, failure)
        self._note(change)
        return change


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
