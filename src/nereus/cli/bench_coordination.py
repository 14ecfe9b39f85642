"""`nereus bench coordination`: the paper's Table 5 with real processes.

Model-stages change places on the same GPUs, whose memory is so tight that one can only get in when another has got out.
Every trial draws placements and a GPU's memory, and is run twice from the same state:

    coordinated   the global DAG with its resource edges, one executor
    independent   every model-stage by its own DAG and its own executor and processes, launched in random order a moment
                  apart; each takes GPU memory as it comes, and waits where there is none

Both have the same lowerings, and memory enforced by the same counters (`bench_coordination_worker`). Independent DAGs fail
when some of them wait for memory that only they themselves could free, or after ten times the coordinated median.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np
import torch.distributed as dist

from nereus.cli.bench import machine
from nereus.cli.bench_coordination_worker import PROGRAM
from nereus.cli.bench_reshard_cases import decoder
from nereus.core.plan import (
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    REFERENCE_INFERENCE,
    REWARD_INFERENCE,
    Layout,
    ModelStage,
    Placement,
    Plan,
)
from nereus.core.shapes import state_spec
from nereus.core.sharding import StateSpec
from nereus.runtime.cluster import LocalCluster
from nereus.runtime.executor import Span
from nereus.runtime.fleet import LOCAL_RATES, Fleet
from nereus.transition.dag import InfeasibleTransition, TransitionDag
from nereus.transition.groups import Lowering
from nereus.transition.plan import plan_transition
from nereus.transition.profile import StateProfile
from nereus.transition.program import program

Say = Callable[[str], None]
Profiles = Mapping[ModelStage, StateProfile]

ACTOR_INFERENCE = ModelStage("actor", "inference")
OVERLAPS: Mapping[str, tuple[ModelStage, ...]] = {
    "same model, other stage": (ACTOR_TRAINING, ACTOR_INFERENCE),
    "other model, same stage": (REFERENCE_INFERENCE, REWARD_INFERENCE),
    "other model, other stage": (ACTOR_TRAINING, REFERENCE_INFERENCE, CRITIC_TRAINING),
}
GPUS = 8
LAYOUTS = tuple(Layout(tp, pp) for tp in (1, 2) for pp in (1, 2))
REPLICAS = (1, 2, 4)
WAYS: tuple[Lowering, ...] = ("direct",)
PATIENCE = 10.0
"""How many times the coordinated median independent DAGs get."""
LAUNCH_S = 0.25
"""Of the coordinated median: within what launches of independent DAGs fall."""
LOOK_S = 0.01
AIM_OVERLAP = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Two plans and the GPUs' memory; the global DAG as it is planned for them."""

    number: int
    current: Plan
    target: Plan
    usable_bytes: float
    planned: TransitionDag

    @property
    def allows_overlap(self) -> bool:
        """Whether primitives of two model-stages are under way at once in the schedule that was planned."""
        moving = [p for p in self.planned.primitives() if p.received_bytes]
        return overlap_s([(p.model_stage, p.start_s, p.start_s + p.seconds) for p in moving]) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a trial went. why: of a failure. waits: acquisitions that found too little memory free."""

    ok: bool
    seconds: float
    overlap_s: float
    waits: int
    why: str = ""


def bench_coordination(
    trials: int = 100,
    *,
    overlaps: Sequence[str] = tuple(OVERLAPS),
    parameters: float = 1e6,
    seed: int = 0,
    say: Say = print,
) -> dict[str, Any]:
    """The bench: {bench, machine, rows, summary}. trials: of each kind of overlap."""
    rows = []
    for overlap in overlaps:
        ground = Ground(OVERLAPS[overlap], parameters)
        try:
            rows.append(_row(overlap, ground, trials, seed))
        finally:
            ground.close()
        say(
            f"{overlap}: coordinated {rows[-1]['coordinated_success']:.0%}, independent "
            f"{rows[-1]['independent_success']:.0%}"
        )
    return {"bench": "coordination", "machine": machine(), "rows": rows, "summary": _summary(rows)}


def _row(overlap: str, ground: Ground, trials: int, seed: int) -> dict[str, Any]:
    rng = random.Random(f"{seed} {overlap}")
    done = [ground.run(trial, rng) for trial in ground.draw(rng, trials)]
    coordinated, independent = [one for _, one, _ in done], [one for _, _, one in done]
    allowed = [together for trial, together, _ in done if trial.allows_overlap]
    whys = [alone.why for alone in independent if alone.why]
    return {
        "overlap": overlap,
        "trials": trials,
        "edges": statistics.mean(len(trial.planned.edges) for trial, *_ in done),
        "overlap_s": statistics.median(one.overlap_s for one in allowed) if allowed else None,
        "allow_overlap": len(allowed),
        "overlapped": sum(one.overlap_s > 0 for one in allowed),
        "coordinated_success": sum(one.ok for one in coordinated) / trials,
        "coordinated_s": _median(coordinated),
        "coordinated_waits": sum(one.waits for one in coordinated),
        "independent_success": sum(one.ok for one in independent) / trials,
        "independent_s": _median(independent),
        "failures": {why: whys.count(why) for why in sorted(set(whys))},
    }


def _median(outcomes: Sequence[Outcome]) -> float | None:
    """Seconds of the trials that succeeded."""
    listed = [one.seconds for one in outcomes if one.ok]
    return statistics.median(listed) if listed else None


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    allow, overlapped = (sum(row[key] for row in rows) for key in ("allow_overlap", "overlapped"))
    trials = sum(row["trials"] for row in rows)
    succeeded = round(sum(row["coordinated_success"] * row["trials"] for row in rows))
    return {
        "ok": succeeded == trials and overlapped >= AIM_OVERLAP * allow,
        "coordinated": f"{succeeded} of {trials}",
        "overlapped": f"{overlapped} of {allow} that allow it",
        "independent_success": {row["overlap"]: row["independent_success"] for row in rows},
    }


def overlap_s(spans: Sequence[tuple[ModelStage, float, float]]) -> float:
    """Seconds in which at least two model-stages were under way. spans: start and end of each primitive."""
    both = []
    for (m, start, end), (n, other_start, other_end) in combinations(spans, 2):
        first, last = max(start, other_start), min(end, other_end)
        if m != n and first < last:
            both.append((first, last))
    total, reached = 0.0, float("-inf")
    for first, last in sorted(both):
        total += max(0.0, last - max(first, reached))
        reached = max(reached, last)
    return total


# -- drawing trials --------------------------------------------------------------------------------------------------


def draw_plan(rng: random.Random, stages: Sequence[ModelStage]) -> Plan:
    """Every model-stage in a random layout, with random replicas, each on a random block of neighbouring GPUs."""
    placements = []
    for m in stages:
        layout = rng.choice(LAYOUTS)
        dp = rng.choice([d for d in REPLICAS if d * layout.size <= GPUS])
        blocks = rng.sample(range(GPUS // layout.size), dp)
        gpus = tuple(block * layout.size + i for block in blocks for i in range(layout.size))
        placements.append(Placement(model_stage=m, layout=layout, dp=dp, gpus=gpus))
    return Plan(tuple(placements))


def plan_dag(profiles: Profiles, current: Plan, target: Plan, usable_bytes: float) -> TransitionDag | None:
    """None where there is no order."""
    try:
        return plan_transition(
            profiles,
            current,
            target,
            node_of=np.zeros(GPUS, dtype=np.int64),
            rates=LOCAL_RATES,
            usable_bytes=usable_bytes,
            lowerings=WAYS,
        )
    except InfeasibleTransition:
        return None


def draw_trial(rng: random.Random, specs: Mapping[ModelStage, StateSpec], number: int) -> Trial:
    """Plans between which the model-stages must wait for each other: anything from the least memory in which there is an
    order at all to where nobody would have to wait. Of every two trials one is drawn until it allows overlap.

    All are changed directly, with old and new shards side by side, so that memory is the only thing that is tight.
    """
    profiles = {m: StateProfile.of(spec) for m, spec in specs.items()}
    while True:
        trial = _draw(rng, profiles, number)
        if trial is None or not (trial.allows_overlap or number % 2):
            continue
        exact = exact_dag(specs, trial)
        if exact is not None and exact.edges:
            trial = replace(trial, planned=exact)
            if trial.allows_overlap or number % 2:
                return trial


def exact_dag(specs: Mapping[ModelStage, StateSpec], trial: Trial) -> TransitionDag | None:
    """As the fleet will plan it, tensor by tensor; the senders that it levels may be others, and so what can go first."""
    holdings = {p.model_stage: specs[p.model_stage].holdings(p) for p in trial.current.placements}
    try:
        return program(
            specs,
            holdings,
            trial.current,
            trial.target,
            node_of=np.zeros(GPUS, dtype=np.int64),
            rates=LOCAL_RATES,
            usable_bytes=trial.usable_bytes,
            lowerings=WAYS,
        ).dag
    except InfeasibleTransition:
        return None


def _draw(rng: random.Random, profiles: Profiles, number: int) -> Trial | None:
    current, target = draw_plan(rng, tuple(profiles)), draw_plan(rng, tuple(profiles))

    def planned(usable_bytes: float) -> TransitionDag | None:
        return plan_dag(profiles, current, target, usable_bytes)

    easy = planned(float("inf"))
    assert easy is not None
    low, most = float(easy.held_bytes.max()), float(easy.peak_bytes.max()) * len(profiles)
    least = _least(lambda usable: planned(usable) is not None, low, most)
    free = _least(lambda usable: (found := planned(usable)) is not None and not found.edges, least, most)
    usable = float(round(rng.uniform(least, free)))
    found = planned(usable)
    if found is None or not found.edges:
        return None
    return Trial(number=number, current=current, target=target, usable_bytes=usable, planned=found)


def _least(enough: Callable[[float], bool], low: float, high: float) -> float:
    """About the least value that is enough, between one that may be too low and one that is enough."""
    if enough(low):
        return low
    while high - low > 0.03 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


# -- running them ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Ground:
    """Two sets of processes on the same GPUs: one that has all model-stages, and one for each model-stage alone."""

    stages: tuple[ModelStage, ...]
    parameters: float
    specs: dict[ModelStage, StateSpec] = field(init=False)
    store: dist.TCPStore = field(init=False)
    together: Fleet = field(init=False)
    alone: dict[ModelStage, Fleet] = field(init=False)
    times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = decoder(self.parameters)
        self.specs = {m: state_spec(shape, dtype="float32", trained=m.stage == "training") for m in self.stages}
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.together = self._fleet(self.specs, "all")
        self.alone = {m: self._fleet({m: spec}, str(m)) for m, spec in self.specs.items()}

    def _fleet(self, specs: Mapping[ModelStage, StateSpec], holder: str) -> Fleet:
        cluster = LocalCluster(PROGRAM, (self.store.port, holder))
        cluster.start(range(GPUS))
        return Fleet(cluster, specs)

    def close(self) -> None:
        for fleet in (self.together, *self.alone.values()):
            fleet.cluster.close()

    def draw(self, rng: random.Random, trials: int) -> Iterator[Trial]:
        return (draw_trial(rng, self.specs, number) for number in range(trials))

    def run(self, trial: Trial, rng: random.Random) -> tuple[Trial, Outcome, Outcome]:
        """Both ways, one after the other; whoever does not run holds nothing."""
        together = self._coordinated(trial)
        self.times += [together.seconds] if together.ok else []
        return trial, together, self._independent(trial, rng)

    def _coordinated(self, trial: Trial) -> Outcome:
        run = Run(self.store, f"{trial.number} together", trial, {"all": self.together}, self.specs)
        return run.execute(dict.fromkeys(("all",), 0.0), limit_s=60.0)

    def _independent(self, trial: Trial, rng: random.Random) -> Outcome:
        median = statistics.median(self.times or [1.0])
        run = Run(
            self.store,
            f"{trial.number} alone",
            trial,
            {str(m): fleet for m, fleet in self.alone.items()},
            self.specs,
        )
        delays = {holder: rng.uniform(0, LAUNCH_S * median) for holder in run.fleets}
        return run.execute(delays, limit_s=PATIENCE * median)


@dataclass(slots=True)
class Run:
    """One trial by one or several executors, each in a thread. trial_key: prefix of its keys in the store."""

    store: dist.TCPStore
    trial_key: str
    trial: Trial
    fleets: Mapping[str, Fleet]
    specs: Mapping[ModelStage, StateSpec]
    spans: dict[str, tuple[Span, ...]] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    def execute(self, delays: Mapping[str, float], limit_s: float) -> Outcome:
        """Set up, launch, watch, compare, clean up."""
        for gpu in range(GPUS):
            self.store.add(f"{self.trial_key} free {gpu}", int(self.trial.usable_bytes))
        digests = [self._prepare(holder) for holder in self.fleets]
        threads = [threading.Thread(target=self._launch, args=(h, delays[h])) for h in self.fleets]
        for thread in threads:
            thread.start()
        why = self._watch(limit_s)
        for thread in threads:
            thread.join()
        if self.errors and not why:
            raise next(iter(self.errors.values()))
        after = [] if why else [fleet.digest(list(fleet.specs)) for fleet in self.fleets.values()]
        self._clean_up()
        spans = [span for listed in self.spans.values() for span in listed]
        return Outcome(
            ok=not why and after == digests,
            seconds=max(s.end_s for s in spans) - min(s.start_s for s in spans) if not why and spans else 0.0,
            overlap_s=overlap_s(
                [(s.step.primitive.model_stage, s.start_s, s.end_s) for s in spans if s.received_bytes]
            ),
            waits=self.store.add(f"{self.trial_key} waits", 0),
            why=why,
        )

    def _plans(self, holder: str) -> tuple[Plan, Plan]:
        """Of the model-stages of one executor."""
        current, target = (
            tuple(p for p in plan.placements if p.model_stage in self.fleets[holder].specs)
            for plan in (self.trial.current, self.trial.target)
        )
        return Plan(current), Plan(target)

    def _prepare(self, holder: str) -> str:
        fleet = self.fleets[holder]
        fleet.usable_bytes, fleet.lowerings = self.trial.usable_bytes, WAYS
        self._everywhere(fleet, "reset", fleet.specs)
        fleet.create(self._plans(holder)[0], {})
        self._everywhere(fleet, "fill")
        digest = fleet.digest(list(fleet.specs))
        self._everywhere(fleet, "begin", self.trial_key)
        return digest

    def _clean_up(self) -> None:
        for fleet in self.fleets.values():
            self._everywhere(fleet, "end")
            self._everywhere(fleet, "reset", fleet.specs)

    def _everywhere(self, fleet: Fleet, method: str, *arguments: Any) -> None:
        fleet.cluster.call(method, dict.fromkeys(fleet.pool, arguments)).results()

    def _launch(self, holder: str, delay_s: float) -> None:
        try:
            time.sleep(delay_s)
            fleet = self.fleets[holder]
            self.spans[holder] = fleet.change(self._plans(holder)[1], fleet.pool).spans
        except Exception as error:  # told to whoever started the thread
            self.errors[holder] = error
        finally:
            self.ended.add(holder)

    # -- waits without an end ----------------------------------------------------------------------------------------

    def _watch(self, limit_s: float) -> str:
        """Return when all have ended; if they never will, stop them and say why."""
        deadline, why = time.monotonic() + limit_s, ""
        while len(self.ended) < len(self.fleets):
            stuck = self._stuck()
            time.sleep(LOOK_S)
            if stuck and stuck == self._stuck():  # nothing has moved in between
                why = "circular wait" if len(stuck) > 1 else "wait for memory that nobody will free"
            elif time.monotonic() > deadline:
                why = "too long"
            if why:
                self.store.add(f"{self.trial_key} stop", 1)
                break
        return why

    def _stuck(self) -> tuple[tuple[str, int, int, int], ...]:
        """The smallest set of executors each of which waits on a GPU for memory that only this set holds; what they want.

        (holder, GPU, wanted, held) of each wait; empty if there is no such set.
        """
        free = {g: self._read("free", g) for g in range(GPUS)}
        holders = [h for h in self.fleets if h not in self.ended]
        wanted = {h: {g: n for g in range(GPUS) if (n := self._read("wanted", h, g))} for h in holders}
        waiting = [h for h in holders if wanted[h]]
        if not waiting:
            return ()
        held = {h: {g: self._read("held", h, g) for g in range(GPUS)} for h in holders}
        for count in range(1, len(waiting) + 1):
            for among in combinations(waiting, count):
                others = [h for h in holders if h not in among]
                blocked = {
                    h: [g for g, n in wanted[h].items() if free[g] + sum(held[o][g] for o in others) < n] for h in among
                }
                if all(blocked.values()):
                    return tuple((h, g, wanted[h][g], held[h][g]) for h in among for g in blocked[h])
        return ()

    def _read(self, *words: object) -> int:
        return self.store.add(" ".join(map(str, (self.trial_key, *words))), 0)
