"""What devices measure: every command, every call that ranks make together, and what a step's summary makes of it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from engine_rig import Batch, Rig, TinyModel, llama, plan_of, policy_targets

from nereus.core.measurements import (
    DeviceMeasurements,
    Operations,
    TaskMeasurements,
    Trace,
    Traffic,
    summarise,
)
from nereus.core.plan import ACTOR_GENERATION, ACTOR_TRAINING, Plan
from nereus.engine.generation import Request, Sampling

NAMES = (ACTOR_TRAINING, ACTOR_GENERATION)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel.make(llama(num_hidden_layers=2), "policy", tmp_path_factory.mktemp("metered"))


def measured(rig: Rig, plan: Plan) -> dict[int, DeviceMeasurements]:
    found: dict[int, DeviceMeasurements] = rig.cluster.call("measurements", dict.fromkeys(plan.gpus, ())).results()
    return found


def one_step(rig: Rig, model: TinyModel, plan: Plan) -> dict[int, DeviceMeasurements]:
    """Generation, a forward pass, the gradients of an update, weight_sync, as every device measured them."""
    rig.install(dict.fromkeys(NAMES, model), plan)
    measured(rig, plan)
    batch = Batch.draw(61, n=8)
    sampling = Sampling(max_new_tokens=6, temperature=1.0, top_p=1.0, eos_token_ids=(2,), pad_token_id=0, seed=3)
    rig.fleet.weight_sync()
    rig.generate([Request(prompt=tuple(p), position=i, sample=0) for i, p in enumerate(batch.prompts)], sampling)
    rig.forward("logprobs", ACTOR_TRAINING, batch, 1.0)
    rig.gradients(ACTOR_TRAINING, batch, policy_targets(model.reference, batch))
    return measured(rig, plan)


def test_each_device_measures_the_tasks_that_it_has_a_part_in(rig: Rig, model: TinyModel) -> None:
    plan = plan_of(NAMES, (2, 1, 2))
    found = one_step(rig, model, plan)
    for device, measurements in found.items():
        assert measurements.device == device
        assert set(measurements.tasks) == {"weight_sync", "generation", "old_logprobs", "actor_update"}
        for task in measurements.tasks.values():
            assert task.commands == 1
            assert 0 <= task.compute_seconds <= task.seconds
            assert sum(t.seconds for t in task.traffic.values()) <= task.seconds
        assert set(measurements.tasks["actor_update"].traffic) == {"all_reduce", "gradient_reduce"}
    assert all(not m.tasks for m in measured(rig, plan).values()), "a second question finds nothing new"
    assert pickle.loads(pickle.dumps(found)) == found
    step = summarise(found, plan)
    assert set(step.tasks) == {"weight_sync", "generation", "old_logprobs", "actor_update"}


def test_calls_inside_layers_are_counted_one_by_one(rig: Rig, model: TinyModel) -> None:
    """A forward pass of 2 layers over tp: a sum of embeddings, two sums a layer, two of the head's statistics."""
    plan = plan_of(NAMES, (2, 1, 1), micro_batch=8)
    rig.install(dict.fromkeys(NAMES, model), plan)
    measured(rig, plan)
    batch = Batch.draw(61, n=8)
    rig.forward("logprobs", ACTOR_TRAINING, batch, 1.0)
    tokens = batch.sequences.tokens.numel()
    answers = batch.num_tokens
    sizes = [4 * tokens * 48] * 5 + [4 * answers, 4 * 3 * answers]
    for measurements in measured(rig, plan).values():
        task = measurements.tasks["old_logprobs"]
        (trace,) = task.traces
        assert list(trace.sizes) == sizes, "a ring of two sends as much as there is"
        assert task.traffic["all_reduce"].count == len(sizes)
        assert task.traffic["all_reduce"].num_bytes == sum(sizes)


def test_both_ends_of_a_pipeline_tell_of_the_same_messages(rig: Rig, model: TinyModel) -> None:
    plan = plan_of(NAMES, (1, 2, 1), micro_batch=4)
    found = one_step(rig, model, plan)
    traces = [
        {t.ranks: (t.count, list(t.sizes)) for t in m.tasks["actor_update"].traces if t.kind == "send_recv"}
        for m in found.values()
    ]
    assert traces[0] == traces[1]
    assert {ranks: count for ranks, (count, _) in traces[0].items()} == {(0, 1): 2, (1, 0): 2}, "one a micro-batch"


def test_what_was_asked_for_and_failed_is_not_left_open(rig: Rig, model: TinyModel) -> None:
    plan = plan_of(NAMES, (1, 1, 1))
    rig.install(dict.fromkeys(NAMES, model), plan)
    measured(rig, plan)
    batch = Batch.draw(61, n=8)
    with pytest.raises(Exception, match="KeyError"):
        rig.cluster.call("logprobs", {0: (plan, batch.sequences, 1.0)}).results()
    rig.fleet.create(plan, {})
    rig.forward("logprobs", ACTOR_TRAINING, batch, 1.0)
    assert measured(rig, plan)[0].tasks["old_logprobs"].commands == 1


# -- the summary -----------------------------------------------------------------------------------------------------


def task_of(seconds: float, *traces: Trace, held: dict[str, Traffic] | None = None, **more: Any) -> TaskMeasurements:
    return TaskMeasurements(
        commands=1, seconds=seconds, operations=more.pop("operations", {}), traffic=held or {}, traces=traces, memory={}
    )


def all_reduce(*seconds: float, sizes: tuple[int, ...] | None = None) -> Trace:
    sizes = (100,) * len(seconds) if sizes is None else sizes
    return Trace(kind="all_reduce", ranks=(0, 1), count=len(sizes), sizes=sizes, seconds=seconds)


def summary(first: TaskMeasurements, second: TaskMeasurements) -> Any:
    devices = {
        i: DeviceMeasurements(device=i, tasks={"generation": t}, memory={}) for i, t in enumerate((first, second))
    }
    return summarise(devices, plan_of((ACTOR_GENERATION,), (2, 1, 1)))


def test_waiting_for_a_late_peer_is_not_taken_for_a_slow_link() -> None:
    """Device 1 comes 5 s late to the first call, device 0 to the second; each call takes 1 s of its own."""
    held = {"all_reduce": Traffic(count=2, num_bytes=200, seconds=7.0)}
    step = summary(task_of(10, all_reduce(6.0, 1.0), held=held), task_of(10, all_reduce(1.0, 6.0), held=held))
    assert step.tasks["generation"].communication["all_reduce"].seconds == 2.0
    assert step.bandwidth_bytes_s == {"all_reduce": 100.0}


def test_ranks_that_tell_of_different_calls_are_taken_as_they_are() -> None:
    held = {"all_reduce": Traffic(count=2, num_bytes=200, seconds=7.0)}
    step = summary(task_of(10, all_reduce(6.0, 1.0), held=held), task_of(10, all_reduce(1.0), held={}))
    assert step.tasks["generation"].communication["all_reduce"].seconds == 7.0


def test_small_calls_say_nothing_of_bandwidth() -> None:
    trace = all_reduce(1.0, 1.0, sizes=(1000, 10))
    assert summary(task_of(3, trace), task_of(3, trace)).bandwidth_bytes_s == {"all_reduce": 1000.0}


def test_seconds_are_those_of_the_slowest_and_flops_of_all() -> None:
    operations = {"forward": Operations(count=1, seconds=2.0, flops=100.0)}
    step = summary(task_of(3, operations=operations), task_of(4, operations=operations))
    assert (step.tasks["generation"].seconds, step.tasks["generation"].flops) == (4, 200.0)
    assert step.flops_s == 50.0
    assert not step.bandwidth_bytes_s


def test_devices_outside_of_the_plan_have_no_part_in_the_step() -> None:
    left = DeviceMeasurements(device=7, tasks={"generation": task_of(99)}, memory={"resident": 5})
    assert not summarise({7: left}, plan_of((ACTOR_GENERATION,), (1, 1, 1))).tasks
