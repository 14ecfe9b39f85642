"""Emulated devices: operations counted as torch counts them, and never faster than the declared device."""

from __future__ import annotations

import random

import pytest
import torch
from engine_rig import Batch, Rig, TinyModel, llama, plan_of, policy_targets
from lone_device import accumulate, answer, lone_worker, parameters, targets, update
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nereus.core.job import PaceSection
from nereus.core.measurements import SEND_RECV, DeviceMeasurements, Trace
from nereus.core.plan import ACTOR_GENERATION, ACTOR_TRAINING, Plan
from nereus.engine.batch import micro_batches
from nereus.engine.meter import Meter
from nereus.engine.pace import WORTH_A_SLEEP_S, Pace
from nereus.runtime.communicator import Transmission

NAMES = (ACTOR_TRAINING, ACTOR_GENERATION)
BATCH = Batch.draw(61, n=8)
LINKS = PaceSection(flops=1e12, memory_bytes_s=1e12, link_bytes_s=4e6, latency_s=1e-3)


# -- counting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_flops_are_those_that_torch_counts(recompute: bool) -> None:
    """It does not know the CPU's fused attention, so it is shown the products that this one fuses."""
    unit = lone_worker(recompute=recompute).units[ACTOR_TRAINING]
    (micro,) = micro_batches(BATCH.sequences, 100, torch.device("cpu"))
    rows, width = micro.sequences.tokens.shape
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        hidden = unit.module.run_layers(unit.module.embed(micro.sequences.tokens))
    with FlopCounterMode(display=False) as head:
        loss, _ = targets(BATCH).loss(unit)(micro, hidden)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as backward:
        loss.backward()
    counts = unit.counts
    assert counts.layers(rows, width)[0] == forward.get_total_flops()
    assert counts.head(micro.num_places)[0] == head.get_total_flops()
    expected = counts.backward(rows, width, micro.num_places)[0]
    # Nothing needs the last product of a layer that is computed again, and torch stops before it.
    last = 3 * 2.0 * rows * width * 48 * 50 if recompute else 0.0
    assert backward.get_total_flops() in (expected, expected - last)


def test_a_cached_token_attends_to_all_before_it() -> None:
    unit = lone_worker().units[ACTOR_GENERATION]
    cache = unit.module.new_cache()
    with torch.no_grad():
        unit.module.run_layers(unit.module.embed(torch.ones(2, 9, dtype=torch.int64)), cache=cache)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            unit.module.run_layers(unit.module.embed(torch.ones(2, 1, dtype=torch.int64)), cache=cache)
    assert unit.counts.layers(2, 1, keys=10)[0] == counter.get_total_flops()


def measured(rig: Rig, plan: Plan) -> dict[int, DeviceMeasurements]:
    found: dict[int, DeviceMeasurements] = rig.cluster.call("measurements", dict.fromkeys(plan.gpus, ())).results()
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel.make(llama(num_hidden_layers=2), "policy", tmp_path_factory.mktemp("paced"))


def test_the_ranks_of_a_unit_share_its_work(rig: Rig, model: TinyModel) -> None:
    """FLOPs of a forward pass add up to those of one device; over tp each has the same but for the vocabulary's rest."""
    flops: dict[tuple[int, int], list[float]] = {}
    for tp, pp in ((1, 1), (2, 1), (1, 2)):
        plan = plan_of((ACTOR_TRAINING,), (tp, pp, 1), micro_batch=8)
        rig.install({ACTOR_TRAINING: model}, plan)
        measured(rig, plan)
        rig.forward("logprobs", ACTOR_TRAINING, BATCH, 1.0)
        flops[tp, pp] = [m.tasks["old_logprobs"].operations["forward"].flops for m in measured(rig, plan).values()]
    (whole,) = flops[1, 1]
    assert flops[2, 1] == [whole / 2] * 2
    assert flops[1, 2] == [whole / 2] * 2


# -- pacing, by the clock --------------------------------------------------------------------------------------------


class FakeTime:
    """A clock that sleeps a little too long, as real ones do."""

    def __init__(self, seed: int = 0) -> None:
        self.now, self.sleeps = 0.0, 0
        self._random = random.Random(seed)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        self.now += seconds + 1e-4 * self._random.random()


def fake_meter(declared: PaceSection, seed: int = 0) -> tuple[Meter, FakeTime]:
    time = FakeTime(seed)
    return Meter(0, Pace(declared, clock=time.clock, sleep=time.sleep), clock=time.clock), time


@pytest.mark.parametrize("seed", range(20))
def test_many_small_operations_take_what_they_should_in_sum(seed: int) -> None:
    """Operations of 20-120 us, of which the process takes up to 150 us itself; a late one does not make others early."""
    draw = random.Random(seed)
    meter, time = fake_meter(PaceSection(flops=1e6, memory_bytes_s=1e6, link_bytes_s=1), seed)
    least = 0.0
    with meter.command("generation"):
        for _ in range(500):
            flops, num_bytes, own_s = 20 + 100 * draw.random(), 20 + 100 * draw.random(), 150e-6 * draw.random()
            least += max(flops / 1e6, num_bytes / 1e6, own_s)
            with meter.operation("decode", flops, num_bytes):
                time.now += own_s
    assert least <= time.now <= least + 2e-4, "no sleep is left out, and too long ones are made up for"
    assert time.sleeps <= least / WORTH_A_SLEEP_S + 1, "short ones are put together"
    assert meter.take()["generation"].compute_seconds == pytest.approx(time.now)


def test_nothing_that_a_peer_sees_is_early() -> None:
    meter, time = fake_meter(PaceSection(flops=1e3, memory_bytes_s=1e9, link_bytes_s=1e3, latency_s=0.25))
    with meter.operation("forward", 0.5, 0.0):  # half a millisecond: not worth a sleep by itself
        pass
    assert time.now == 0.0
    meter.starts(Transmission("tp", "all_reduce", (0, 1), 500))
    assert time.now >= 0.5e-3
    began = time.now
    meter.ended(Transmission("tp", "all_reduce", (0, 1), 500), 0.1, 0.1)
    assert time.now - began >= 0.25 + 0.5 - 0.1


def test_a_message_leaves_when_its_link_has_had_the_time() -> None:
    meter, time = fake_meter(PaceSection(flops=1, memory_bytes_s=1, link_bytes_s=1e3, latency_s=0.25))
    pace = meter.pace
    assert pace is not None
    with meter.command("actor_update"):
        meter.starts(Transmission("down", "send", (0, 1), 500))
        assert time.now >= 0.75
        meter.starts(Transmission("down", "recv", (1, 0), 500))
        assert time.now < 0.8, "the sender pays"
        meter.ended(Transmission("down", "send", (0, 1), 500), 0.01, 0.0)
        pace.link_factor = 0.5
        meter.starts(Transmission("down", "send", (0, 1), 500))
        assert time.now >= 0.75 + 1.25
    task = meter.take()["actor_update"]
    (trace,) = task.traces
    assert trace == Trace(kind=SEND_RECV, ranks=(0, 1), count=1, sizes=trace.sizes, seconds=trace.seconds)
    assert trace.seconds[0] >= 0.75
    assert task.traffic[SEND_RECV].seconds == pytest.approx(time.now)


def test_what_a_failed_command_owed_is_forgotten() -> None:
    meter, time = fake_meter(PaceSection(flops=1e4, memory_bytes_s=1e9, link_bytes_s=1))
    with pytest.raises(RuntimeError), meter.command("actor_update"):
        with meter.operation("forward", 9.0, 0.0):
            pass
        raise RuntimeError
    with meter.command("actor_update"):
        pass
    assert time.now == 0.0


# -- pacing, for real ------------------------------------------------------------------------------------------------


def test_paced_commands_give_the_same_and_take_at_least_the_declared_time() -> None:
    free = lone_worker()
    accumulate(free, BATCH)
    update(free)
    responses = answer(free, BATCH)
    tasks = free.measurements().tasks
    flops = min(tasks[name].flops for name in ("actor_update", "generation")) / 0.1
    paced = lone_worker(pace=PaceSection(flops=flops, memory_bytes_s=1e15, link_bytes_s=1e15))
    accumulate(paced, BATCH)
    update(paced)
    assert answer(paced, BATCH) == responses
    after = parameters(paced)
    assert all(torch.equal(value, after[name]) for name, value in parameters(free).items())
    for name, task in paced.measurements().tasks.items():
        assert task.flops == tasks[name].flops
        assert task.seconds >= task.compute_seconds >= task.flops / flops


def test_memory_paces_what_has_few_flops() -> None:
    worker = lone_worker(pace=PaceSection(flops=1e15, memory_bytes_s=2e7, link_bytes_s=1e15))
    accumulate(worker, BATCH)
    update(worker)
    operations = worker.measurements().tasks["actor_update"].operations
    assert set(operations) == {"embedding", "forward", "head", "backward", "optimizer"}
    for operation in operations.values():
        assert operation.seconds >= operation.num_bytes / 2e7


def test_links_are_as_slow_as_declared(rig: Rig, model: TinyModel) -> None:
    """Sums over tp, gradients over dp, weights to the generation units; then all with a quarter of the bandwidth."""
    plan = plan_of(NAMES, (2, 1, 2), micro_batch=8)
    rig.install(dict.fromkeys(NAMES, model), plan)
    rig.cluster.call("keep_pace", dict.fromkeys(plan.gpus, (LINKS,))).results()
    measured(rig, plan)
    for factor in (1.0, 0.25):
        rig.cluster.call("set_link_factor", dict.fromkeys(plan.gpus, (factor,))).results()
        rig.gradients(ACTOR_TRAINING, BATCH, policy_targets(model.reference, BATCH))
        rig.fleet.weight_sync()
        for measurements in measured(rig, plan).values():
            for trace in (t for task in measurements.tasks.values() for t in task.traces):
                for size, seconds in zip(trace.sizes, trace.seconds, strict=True):
                    assert seconds >= LINKS.latency_s + size / (LINKS.link_bytes_s * factor)
    rig.cluster.call("keep_pace", dict.fromkeys(plan.gpus, (None,))).results()
