"""What a device holds: counted right, given back, and refused beyond its capacity without harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_rig import Batch, Rig, TinyModel, llama, plan_of, policy_targets
from lone_device import NAMES, accumulate, answer, fill, lone_worker, parameters, targets, update

from nereus.core.errors import OutOfMemory
from nereus.core.plan import ACTOR_GENERATION, ACTOR_TRAINING, Layout
from nereus.engine.batch import micro_batches
from nereus.engine.budget import Budget
from nereus.rl.worker import RlWorker
from nereus.runtime.cluster import WorkerFailed

BATCH = Batch.draw(61, n=8)
SMALLER = Batch(BATCH.prompts[:2], BATCH.responses[:2])

COMMANDS: dict[str, Callable[[RlWorker, Batch], Any]] = {
    "gradients": accumulate,
    "logprobs": lambda worker, batch: worker.logprobs(ACTOR_TRAINING, batch.sequences, 1.0),
    "generate": answer,
}


def resident(worker: RlWorker) -> int:
    return sum(worker.specs[n].holding_bytes(worker._states[n].holding) for n in NAMES)


def peak(worker: RlWorker) -> dict[str, int]:
    return dict(worker.measurements().memory)


# -- counting --------------------------------------------------------------------------------------------------------


def kept_by_autograd(worker: RlWorker, batch: Batch) -> int:
    """Bytes of distinct storages that one micro-batch's graph holds, without parameters; all are kept to be told apart."""
    unit = worker.units[ACTOR_TRAINING]
    (micro,) = micro_batches(batch.sequences, 100, torch.device("cpu"))
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = unit.module.run_layers(unit.module.embed(micro.sequences.tokens))
        loss, _ = targets(batch).loss(unit)(micro, hidden)
    loss.backward()
    for parameter in unit.module.parameters.values():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
        parameter.grad = None
    unit.budget.hold("logits", 0)
    return sum(storage.nbytes() for storage in kept.values())


def test_activations_are_what_autograd_keeps() -> None:
    worker = lone_worker(micro_batch=8)
    expected = kept_by_autograd(worker, BATCH)
    accumulate(worker, BATCH)
    found = peak(worker)
    temporaries = worker.units[ACTOR_TRAINING].counts.softmax_bytes(BATCH.num_tokens, kept=True)
    assert found["activations"] + found["logits"] == expected + temporaries
    assert found["gradients"] == sum(p.nbytes for p in parameters(worker).values())
    assert found["resident"] == resident(worker)


def test_recomputed_layers_keep_their_inputs_and_one_layer_at_a_time() -> None:
    plain, again = lone_worker(micro_batch=8), lone_worker(micro_batch=8, recompute=True)
    accumulate(plain, BATCH)
    accumulate(again, BATCH)
    held, recomputed = peak(plain), peak(again)
    inputs = 3 * BATCH.sequences.tokens.numel() * 48 * 4
    assert held["activations"] / 3 < recomputed["activations"] < held["activations"] / 3 + 2 * inputs
    assert recomputed["logits"] == held["logits"]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_shape_that_comes_again_counts_the_same(recompute: bool) -> None:
    worker = lone_worker(micro_batch=3, recompute=recompute)
    peaks = []
    for _ in range(2):
        accumulate(worker, BATCH)
        peaks.append(peak(worker))
    assert peaks[0] == peaks[1]


def test_a_smaller_micro_batch_takes_less() -> None:
    peaks = []
    for size in (8, 4, 2):
        worker = lone_worker(micro_batch=size)
        accumulate(worker, BATCH)
        peaks.append(peak(worker)["activations"])
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > 1.5 * peaks[1]


def test_the_cache_is_counted_as_it_grows() -> None:
    worker = lone_worker(micro_batch=8)
    answer(worker, Batch([[1]] * 8, [[]] * 8), most=20)
    width = 20  # the last token is not fed in
    assert peak(worker)["kv_cache"] == 8 * width * 3 * 2 * (4 * 48 // 12) * 4


@pytest.mark.parametrize("recompute", [False, True])
def test_every_command_gives_back_what_it_took(recompute: bool) -> None:
    worker = lone_worker(recompute=recompute)
    for command in COMMANDS.values():
        command(worker, BATCH)
        lasting = {kind: held for kind, held in worker.budget.held.items() if held}
        gradients = worker.units[ACTOR_TRAINING].counts.gradient_bytes
        assert lasting == {"resident": resident(worker)} | ({"gradients": gradients} if command is accumulate else {})
        worker.discard(ACTOR_TRAINING)
        assert {kind: held for kind, held in worker.budget.held.items() if held} == {"resident": resident(worker)}


# -- refusing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("recompute", [False, True])
def test_the_capacity_is_what_counts_to_the_byte(command: str, recompute: bool) -> None:
    """After a refusal the worker does what is smaller, with the very results of a worker that never was in need."""
    run = COMMANDS[command]
    free = lone_worker(recompute=recompute)
    expected = run(free, BATCH)
    needed = free.measurements().peak_bytes
    just_enough = lone_worker(recompute=recompute, capacity_bytes=needed)
    assert_equal(run(just_enough, BATCH), expected)
    short = lone_worker(recompute=recompute, capacity_bytes=needed - 1)
    with pytest.raises(OutOfMemory, match=r"device 0 would hold .* \(state .*\), its capacity is .*B$") as refusal:
        run(short, BATCH)
    assert "\n" not in str(refusal.value)
    assert not short.units[ACTOR_TRAINING].has_gradients
    assert_equal(run(short, SMALLER), run(lone_worker(recompute=recompute), SMALLER))


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(found, torch.Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


def test_counting_changes_no_result() -> None:
    plain, counted = lone_worker(), lone_worker(capacity_bytes=2**30)
    plain.units[ACTOR_TRAINING].budget = Budget(0, allocator=True)  # counts nothing of what autograd keeps
    for number in range(3):
        for worker in (plain, counted):
            accumulate(worker, BATCH)
            update(worker, number)
    after = parameters(counted)
    assert all(torch.equal(value, after[name]) for name, value in parameters(plain).items())


def test_what_the_optimizer_needs_is_refused_before_anything_is_updated() -> None:
    """The step's temporaries are the most that so small a batch takes, and all ranks must be able to discard."""
    tiny = Batch([[1]], [[2]])
    free = lone_worker()
    accumulate(free, tiny)
    assert peak(free)["workspace"] > 0
    needed = lone_worker(capacity_bytes=None)
    accumulate(needed, tiny)
    short = lone_worker(capacity_bytes=needed.measurements().peak_bytes - 1)
    with pytest.raises(OutOfMemory):
        accumulate(short, tiny)


def test_what_an_allocator_refuses_is_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = lone_worker()
    expected = accumulate(lone_worker(), BATCH)
    backward = torch.autograd.backward

    def fail(*args: Any) -> None:
        backward(*args)
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")

    with monkeypatch.context() as patch, pytest.raises(OutOfMemory, match=r"device 0: CUDA out of memory\. Tried"):
        patch.setattr(torch.autograd, "backward", fail)
        accumulate(worker, BATCH)
    assert not worker.units[ACTOR_TRAINING].has_gradients
    assert accumulate(worker, BATCH) == expected


def test_state_beyond_the_capacity_is_not_made() -> None:
    worker = lone_worker(capacity_bytes=None)
    worker.budget.capacity_bytes = resident(worker) + 100
    spec = worker.specs[ACTOR_GENERATION]
    before = resident(worker)
    with pytest.raises(OutOfMemory):
        worker.create(ACTOR_GENERATION, spec.position_holding(Layout(1, 1), 0, 0))
    assert resident(worker) == before
    fill(worker, ACTOR_GENERATION)
    with pytest.raises(OutOfMemory):
        accumulate(worker, BATCH)


def test_a_unit_goes_on_after_one_of_its_ranks_was_refused(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = TinyModel.make(llama(num_hidden_layers=2), "policy", tmp_path_factory.mktemp("short"))
    plan = plan_of((ACTOR_TRAINING,), (2, 2, 1))
    rig.install({ACTOR_TRAINING: model}, plan)
    batch, wanted = BATCH, policy_targets(model.reference, BATCH)
    expected = rig.gradients(ACTOR_TRAINING, batch, wanted)
    held = rig.cluster.call("held", dict.fromkeys(plan.gpus, ())).results()
    assert all({k for k, n in kinds.items() if n} == {"resident", "gradients"} for kinds in held.values())
    # What is under way between pp_stages at the peak depends on who is first: the limit leaves out all that comes on top.
    limit = sum(held[3].values())
    rig.cluster.call("restrict", {3: (limit,)}).results()
    try:
        with pytest.raises(WorkerFailed) as refusal:
            rig.gradients(ACTOR_TRAINING, batch, wanted)
        assert (refusal.value.device, refusal.value.failure.kind) == (3, "OutOfMemory")
    finally:
        rig.cluster.call("restrict", {3: (None,)}).results()
    rig.fleet.salvage()
    rig.go(plan)
    assert rig.gradients(ACTOR_TRAINING, batch, wanted) == expected
