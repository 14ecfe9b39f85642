"""One test for every kind of resharding bug that was reported of a public system.

Each states what the bug would break, on real tensors that the executor moves between the stores of one process. What a
rank must have, or compute, is worked out here from whole tensors.
"""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from in_process_cluster import CPU, POISON, PoisonedMemory, World, as_bits, expected
from row_maps import PADDING, padded_rows
from safetensors.torch import save_file
from state_cases import Heads, Rows, State, make_tensor, rank_order, transformer
from transition_cases import Case, random_case

from nereus.core.errors import StateError
from nereus.core.plan import ACTOR_TRAINING, Layout, Placement, Plan, split_evenly
from nereus.core.sharding import Move, StateSpec
from nereus.engine.budget import Budget
from nereus.engine.generation import Request, Sampling, generate
from nereus.engine.meter import Meter
from nereus.engine.optimizer import AdamW, step
from nereus.transition.dag import InfeasibleTransition
from nereus.transition.groups import Lowering

LOWERINGS: list[tuple[Lowering, ...]] = [("direct",), ("lean",), ("streamed",), ("staged", "direct")]
MOMENTS = ("exp_avg", "exp_avg_sq")
COUNTERS = make_tensor("counters", "everywhere", -1, (), 0, 0, "int64")


def decoder(**changed: Any) -> State:
    """Five layers with their moments and master weights; two KV heads, tied embeddings, odd sizes."""
    sizes = {"layers": 5, "hidden": 6, "heads": 12, "kv": 2, "head_dim": 2, "mlp": 10, "vocab": 13}
    return transformer(**{**sizes, "fused": True, "tied": True, **changed})


def on(tp: int, pp: int = 1, dp: int = 1, *, turn: int = 0, pool: int = 12) -> Plan:
    """A training plan on devices of a pool, the first of which is `turn`."""
    gpus = tuple((turn + i) % pool for i in range(tp * pp * dp))
    return Plan((Placement(model_stage=ACTOR_TRAINING, layout=Layout(tp, pp), dp=dp, gpus=gpus),))


def started(state: State, plan: Plan, num_devices: int = 12) -> World:
    world = World(num_devices, {ACTOR_TRAINING: state})
    world.put(plan)
    return world


def local(world: World) -> dict[int, dict[str, torch.Tensor]]:
    """Every device's tensors."""
    return {gpu: world.local(ACTOR_TRAINING, gpu) for gpu in world.plan.gpus}


def randomise(world: World, *names: str) -> None:
    """Normal numbers in these logical tensors, to compute with."""
    generator = torch.Generator().manual_seed(0)
    for name in names:
        tensor = world.logical[ACTOR_TRAINING][name]
        tensor.copy_(torch.randn(tensor.shape, generator=generator))


PATH = [on(2, 2), on(4, 1, 2, turn=3), on(1, 5, turn=8), on(3, 4), on(1, 1, 12), on(12), on(2, 3, 2, turn=5)]
"""Changes in which layouts nest and do not, tp is more than the KV heads, and most devices change."""


# -- moments silently dropped ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lowerings", LOWERINGS, ids=lambda ways: ways[0])
def test_moments_go_where_their_parameter_goes(lowerings: tuple[Lowering, ...]) -> None:
    state = decoder()
    world = started(state, PATH[0])
    logical = world.logical[ACTOR_TRAINING]
    assert all(bool(logical[f"{kind}/0.qkv"].view(torch.int32).any()) for kind in MOMENTS)
    for plan in PATH[1:]:
        world.go(plan, lowerings)
        wanted = expected(state, plan[ACTOR_TRAINING], logical)
        for gpu, tensors in local(world).items():
            parameters = [name for name in tensors if "/" not in name and name != "counters"]
            assert parameters
            for kind, name in itertools.product(MOMENTS, parameters):
                assert tensors[f"{kind}/{name}"].shape == tensors[name].shape
                assert torch.equal(as_bits(tensors[f"{kind}/{name}"]), as_bits(wanted[gpu][f"{kind}/{name}"]))


# -- Adam's step not restored ----------------------------------------------------------------------------------------


def trainable(state: State) -> State:
    """As `engine.optimizer` wants it: float32 parameters, two moments and the counters, no master weights."""
    kept = [t for t in state.tensors if not t.spec.name.startswith("master/") and t.spec.name != "counters"]
    floats = [replace(t, spec=replace(t.spec, dtype="float32")) for t in kept]
    return State((*floats, COUNTERS), state.num_layers)


def update(world: World, seed: int) -> None:
    """One AdamW update on every device, all of them with the same logical gradient."""
    state = world.states[ACTOR_TRAINING]
    generator = torch.Generator().manual_seed(seed)
    gradient = {
        t.spec.name: torch.randn(t.spec.shape, generator=generator)
        for t in state.tensors
        if "/" not in t.spec.name and t.spec.name != "counters"
    }
    whole = {**world.logical[ACTOR_TRAINING], **gradient}
    for gpu, cut in expected(state, world.plan[ACTOR_TRAINING], whole).items():
        tensors = world.local(ACTOR_TRAINING, gpu)
        parameters = {name: torch.nn.Parameter(tensors[name]) for name in gradient if name in tensors}
        for name, parameter in parameters.items():
            parameter.grad = cut[name]
        unit: Any = SimpleNamespace(
            module=SimpleNamespace(parameters=parameters),
            state=SimpleNamespace(tensors=tensors),
            budget=Budget(0),
            meter=Meter(0),
            counts=SimpleNamespace(optimizer_working_bytes=0, optimizer=lambda: (0.0, 0.0)),
            has_gradients=False,
        )
        step(unit, AdamW(lr=0.1, max_grad_norm=0.0, weight_decay=0.01), torch.zeros(()))


def zeroed(world: World) -> World:
    """Parameters of small numbers, as before the first update."""
    for name, tensor in world.logical[ACTOR_TRAINING].items():
        tensor.zero_()
        if "/" not in name and name != "counters":
            tensor.copy_(torch.linspace(-1, 1, tensor.numel()).view(tensor.shape))
    return world


@pytest.mark.parametrize("lowerings", LOWERINGS, ids=lambda ways: ways[0])
def test_the_update_after_a_change_is_the_one_without_it(lowerings: tuple[Lowering, ...]) -> None:
    """Bias correction depends on the number of updates: were it lost, the next one would be many times too large."""
    state = trainable(decoder())
    stays, changes = (zeroed(World(12, {ACTOR_TRAINING: state})) for _ in range(2))
    for world in (stays, changes):
        world.put(on(1))
        for seed in range(3):
            update(world, seed)
    for seed, plan in enumerate(PATH, start=3):
        changes.go(plan, lowerings)
        for world in (stays, changes):
            update(world, seed)
        changes.logical = {ACTOR_TRAINING: stays.local(ACTOR_TRAINING, 0)}
        changes.check(ACTOR_TRAINING)
        assert {int(t["counters"][0]) for t in local(changes).values()} == {seed + 1}


# -- gate and up halves swapped ---------------------------------------------------------------------------------------


def swiglu(gate_up: torch.Tensor, down: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What a rank adds to the output, its fused tensor being [its gate rows; its up rows]."""
    gate, up = (gate_up @ x).chunk(2)
    return down @ (F.silu(gate) * up)


def test_the_mlp_of_a_fused_gate_and_up_computes_the_same_under_every_plan() -> None:
    size, hidden = 11, 4
    fused = make_tensor("0.gate_up", "layer", 0, (Rows(size), Rows(size)), 0, hidden, "float32")
    down = make_tensor("0.down", "layer", 0, (Rows(size),), 1, hidden, "float32")
    world = World(12, {ACTOR_TRAINING: State((fused, down, COUNTERS), 1)})
    randomise(world, "0.gate_up", "0.down")
    x = torch.randn(hidden)
    whole = world.logical[ACTOR_TRAINING]
    wanted = swiglu(whole["0.gate_up"], whole["0.down"], x)
    swapped = swiglu(whole["0.gate_up"].roll(size, 0), whole["0.down"], x)
    assert not torch.allclose(wanted, swapped, rtol=1e-2)
    world.put(on(2))
    for tp in (3, 1, 4, 12, 5, 2):
        world.go(on(tp, turn=tp))
        parts = [swiglu(t["0.gate_up"], t["0.down"], x) for t in local(world).values()]
        torch.testing.assert_close(sum(parts), wanted)


# -- every rank loading shard 0 with matching shapes -------------------------------------------------------------------


def test_ranks_whose_shards_have_one_shape_load_each_its_own(tmp_path: Path) -> None:
    """From files, then by changes of plan. All sizes divide, so that a wrong shard would fit."""
    state = transformer(layers=4, hidden=8, heads=12, kv=12, head_dim=2, mlp=24, vocab=24)
    world = started(state, on(1))
    logical = world.logical[ACTOR_TRAINING]
    save_file(logical, tmp_path / "all.safetensors")
    files = dict.fromkeys(logical, str(tmp_path / "all.safetensors"))
    for plan in (on(4, 2), on(2, 4, turn=1), on(12), on(3, 4, turn=7)):
        for gpu, holding in world.specs[ACTOR_TRAINING].holdings(plan[ACTOR_TRAINING]).items():
            store = world.cluster.stores[gpu]
            store.forget()
            store.create(ACTOR_TRAINING, holding)
            store.load(ACTOR_TRAINING, files, 0)
        wanted = expected(state, plan[ACTOR_TRAINING], logical)
        for gpu, tensors in wanted.items():
            for name, tensor in world.local(ACTOR_TRAINING, gpu).items():
                assert torch.equal(as_bits(tensor), as_bits(tensors[name])), (name, gpu)
    world = started(state, on(4, 2))
    for plan in (on(2, 4, turn=1), on(12), on(3, 4, turn=7), on(4, 2)):
        world.go(plan)
        world.check(ACTOR_TRAINING)
        shards = [t["0.q"] for gpu, t in local(world).items() if plan[ACTOR_TRAINING].position(gpu).pp_stage == 0]
        assert len({shard.shape for shard in shards}) == 1
        assert not any(torch.equal(as_bits(a), as_bits(b)) for a, b in itertools.combinations(shards, 2))


# -- another rank's random numbers -------------------------------------------------------------------------------------


class _Length:
    """All that there is of a key-value cache."""

    length = 0

    @property
    def layers(self) -> list[Any]:
        return [SimpleNamespace(keys=torch.zeros(self.length), values=torch.zeros(self.length))]

    def get_seq_length(self) -> int:
        return self.length

    def batch_select_indices(self, keep: torch.Tensor) -> None:
        pass


class _NothingCounted:
    """Of an operation: no FLOPs, no bytes."""

    groups = 1

    def sampling_bytes(self, rows: int, *, top_p: float) -> int:
        return 0

    def working_bytes(self, tokens: int) -> int:
        return 0

    def sampling(self, rows: int) -> tuple[float, float]:
        return 0.0, 0.0

    def layers(self, rows: int, width: int, keys: int) -> tuple[float, float]:
        return 0.0, 0.0


class _Uniform:
    """A model whose next token is any of `size`, all as likely: what comes out are the draws."""

    is_first = is_last = True

    def __init__(self, size: int) -> None:
        self.size = size

    def new_cache(self) -> Any:
        return _Length()

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens[..., None].double()

    def run_layers(self, hidden: torch.Tensor, *, cache: _Length, **_: Any) -> torch.Tensor:
        cache.length += hidden.shape[1]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), self.size)


def drawn(placement: Placement, requests: list[Request], seed: int) -> dict[tuple[int, int], list[int]]:
    """What the units of a placement draw between them, by (position, sample). Process-wide randomness differs by unit."""
    found = {}
    for unit, rows in enumerate(split_evenly(len(requests), placement.dp)):
        torch.manual_seed(unit)
        mine = [requests[i] for i in rows]
        module = _Uniform(1000)
        alone: Any = SimpleNamespace(
            placement=placement,
            module=module,
            embed=module.embed,
            meter=Meter(0),
            budget=Budget(0),
            counts=_NothingCounted(),
            device=CPU,
            answers=True,
            groups=SimpleNamespace(tp=SimpleNamespace(size=1), up=SimpleNamespace(ranks=(0,), rank=0)),
        )
        sampling = Sampling(
            max_new_tokens=6, temperature=1.0, top_p=1.0, eos_token_ids=tuple(range(100)), pad_token_id=0, seed=seed
        )
        responses = generate(alone, mine, sampling) or []
        found |= {(r.position, r.sample): response.tokens for r, response in zip(mine, responses, strict=True)}
    return found


def test_draws_belong_to_the_sample_whatever_plan_draws_them() -> None:
    requests = [Request(prompt=(1,) * (1 + i % 3), position=40 + i // 4, sample=i % 4) for i in range(24)]
    placements = [
        Placement(model_stage=ACTOR_TRAINING, layout=Layout(1, pp), dp=dp, gpus=tuple(range(pp * dp)), micro_batch=size)
        for pp, dp, size in ((1, 1, 100), (1, 3, 1), (2, 2, 4), (3, 5, 100), (2, 1, 3))
    ]
    first = drawn(placements[0], requests, seed=7)
    assert len(first) == 24 and len({tuple(tokens) for tokens in first.values()}) == 24
    for placement in placements[1:]:
        assert drawn(placement, requests, seed=7) == first
    assert drawn(placements[0], requests, seed=8) != first
    later = requests[13:]  # a restart in the middle of the order of samples
    assert drawn(placements[3], later, seed=7) == {key: first[key] for key in list(first)[13:]}


# -- a padded size multiplied by TP twice ------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 61, 64, 128, 131, 1000])
def test_the_vocabulary_has_its_rows_once_whatever_tp(vocab: int) -> None:
    tensor = make_tensor("embed", "first", -1, (Rows(vocab),), 0, 2, "float32")
    world = started(State((tensor, COUNTERS), 1), on(3))
    for tp in (2, 8, 1, 12, 4, 8, 2):
        world.go(on(tp, turn=tp))
        assert (
            sum(len(t["embed"]) for t in local(world).values())
            == vocab
            == world.specs[ACTOR_TRAINING].tensors[0].length
        )
        world.check(ACTOR_TRAINING)
        for multiple in (128 * tp, 64):
            if multiple % tp == 0:
                ranks = [padded_rows(vocab, multiple, tp, rank) for rank in range(tp)]
                rows = [int(row) for part in ranks for row in part]
                assert vocab <= len(rows) < vocab + multiple and len(rows) % multiple == 0
                assert rows[:vocab] == list(range(vocab)) and set(rows[vocab:]) <= {PADDING}
                assert len({len(part) for part in ranks}) == 1


# -- an empty shard when a dimension is smaller than the ranks -----------------------------------------------------------


@pytest.mark.parametrize("lowerings", LOWERINGS, ids=lambda ways: ways[0])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_that_gets_or_loses_nothing_but_empty_tensors(lowerings: tuple[Lowering, ...], dim: int) -> None:
    """No byte of its shard changes, or it has none at all: its unit has all tensors nevertheless."""
    small = make_tensor("small", "everywhere", -1, (Rows(3),), dim, 2, "float32")
    fused = make_tensor("fused", "layer", 0, (Rows(2), Rows(5)), dim, 3, "bfloat16")
    world = started(State((small, fused), 2), on(5))
    for plan in (on(2, turn=4), on(12), on(7, turn=9), on(3, 2, 2), on(11), on(1, 2), on(6, 2)):
        world.go(plan, lowerings)
        world.check_units(ACTOR_TRAINING)


@pytest.mark.parametrize("lowerings", LOWERINGS, ids=lambda ways: ways[0])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_without_any_row_of_a_tensor_has_an_empty_tensor(lowerings: tuple[Lowering, ...], dim: int) -> None:
    small = make_tensor("small", "everywhere", -1, (Rows(3),), dim, 2, "float32")
    fused = make_tensor("fused", "layer", 0, (Rows(2), Rows(5)), dim, 3, "bfloat16")
    norms = [make_tensor(f"norm {i}", "layer", i, (), 0, 0, "float32") for i in range(2)]
    world = started(State((small, fused, *norms, COUNTERS), 2), on(5))
    for plan in (on(2, turn=4), on(12), on(7, turn=9), on(3, 2, 2), on(11), on(1, 2), on(6, 2)):
        world.go(plan, lowerings)
        world.check(ACTOR_TRAINING)
        tp = plan[ACTOR_TRAINING].layout.tp
        sizes = [t["small"].shape[dim] for t in local(world).values()]
        assert min(sizes) == (0 if tp > 3 else 3 // tp)
        assert {t["small"].shape[1 - dim] for t in local(world).values()} == {2}


# -- layers left as they were made -------------------------------------------------------------------------------------


def with_counters(case: Case) -> Case:
    """As every real state, so that no device of a plan has nothing at all."""
    found = {}
    for m, state in case.states.items():
        others = tuple(t for t in state.tensors if t.spec.name != "counters")
        found[m] = State((*others, COUNTERS), state.num_layers)
    return replace(case, states=found)


@pytest.mark.parametrize("chunk", range(3))
def test_no_byte_of_a_new_shard_is_left_as_it_was_made(chunk: int) -> None:
    """Random plans of up to five model-stages; new shards start as poison."""
    executed = 0
    for seed in range(25 * chunk, 25 * chunk + 25):
        rng = random.Random(seed)
        case = with_counters(random_case(rng))
        world = World(case.num_gpus, case.states)
        world.put(case.current)
        usable = case.resting_bytes * rng.choice([1.1, 1.5, 3.0])
        try:
            world.go(case.target, rng.choice([*LOWERINGS, sum(LOWERINGS, ())]), usable)
        except InfeasibleTransition:
            continue
        executed += 1
        for placement in case.target.placements:
            m = placement.model_stage
            if m in case.current and str(m) != "actor/generation":  # this one is only made, and is zeros
                world.check(m)
    assert executed >= 12


def test_new_shards_start_as_poison() -> None:
    made = PoisonedMemory(CPU).allocate({"w": ((3, 2), torch.float32), "none": ((0, 2), torch.int64)})
    assert made["w"].tensor.view(torch.uint8).tolist() == [[POISON] * 8] * 3


@pytest.mark.parametrize("seed", range(8))
def test_a_region_that_no_move_writes_is_an_error_and_the_old_shards_stay(seed: int) -> None:
    """One move of a program is left out: of a whole tensor, of the middle of one, from the rank itself or from another."""
    rng = random.Random(seed)
    world = started(decoder(), on(2, 2))
    target = on(*rng.choice([(4, 1), (3, 2), (1, 1)]))
    found = world.program(target, [rng.choice(("direct", "streamed"))])
    before = {gpu: {n: t.clone() for n, t in tensors.items()} for gpu, tensors in local(world).items()}
    steps = list(found.steps)
    number = rng.choice([i for i, s in enumerate(steps) if any(m.tensor != "counters" for m in s.moves)])
    fresh = [m for m in steps[number].moves if _changes(world, target, m)]
    gone = rng.choice(fresh)
    steps[number] = replace(steps[number], moves=tuple(m for m in steps[number].moves if m != gone))
    with pytest.raises(StateError, match=re.escape(gone.tensor)):
        world.run(replace(found, steps=tuple(steps)), target)
    if found.dag.lowerings[ACTOR_TRAINING] == "direct":  # streamed: part of it has gone on by then
        for gpu, tensors in before.items():
            assert all(
                torch.equal(as_bits(world.local(ACTOR_TRAINING, gpu)[n]), as_bits(t)) for n, t in tensors.items()
            )


def test_a_region_that_is_written_instead_of_another_is_an_error() -> None:
    """As many indices as there should be, but one region twice."""
    world = started(decoder(), on(2))
    target = on(1, turn=5)
    found = world.program(target, ["direct"])
    steps = [replace(step, moves=tuple(_first_half(move) for move in step.moves)) for step in found.steps]
    with pytest.raises(StateError, match="is to be written"):
        world.run(replace(found, steps=tuple(steps)), target)


def _first_half(move: Move) -> Move:
    """Where it brings the second half of the embeddings: the first half again, of 13 rows the first seven too."""
    return replace(move, start=0, stop=7) if (move.tensor, move.start) == ("embed", 6) else move


def _changes(world: World, target: Plan, move: Move) -> bool:
    """Whether a move writes to a new tensor: one that stays as it is, is taken over without a copy."""
    wanted = world.specs[ACTOR_TRAINING].holdings(target[ACTOR_TRAINING])[move.target]
    return world.owners.of(ACTOR_TRAINING).get(move.target, {}).get(move.tensor) != wanted[move.tensor]


def test_a_tensor_that_nobody_holds_is_an_error_before_anything_moves() -> None:
    state = decoder()
    world = started(state, on(2, 2))
    before = {gpu: dict(tensors) for gpu, tensors in local(world).items()}
    world.owners.set(ACTOR_TRAINING, 2, None, None)  # half of the second pp_stage
    with pytest.raises(StateError, match=r"\d\.\w+\[\d+:\d+\] is held by no device"):
        world.go(on(4))
    assert {gpu: dict(tensors) for gpu, tensors in local(world).items()} == before


# -- a tied model with a pp_stage in the middle ------------------------------------------------------------------------


@pytest.mark.parametrize("lowerings", LOWERINGS, ids=lambda ways: ways[0])
def test_tied_embeddings_are_on_both_ends_and_on_no_stage_between(lowerings: tuple[Lowering, ...]) -> None:
    world = started(decoder(), on(1, 3))
    for plan in (on(2, 4, turn=1), on(1, 5), on(3, 3, turn=4), on(2, 1), on(1, 2, 3), on(2, 5, turn=2), on(1, 4)):
        world.go(plan, lowerings)
        world.check(ACTOR_TRAINING)
        placement = plan[ACTOR_TRAINING]
        for gpu, tensors in local(world).items():
            at = placement.position(gpu)
            is_end = at.pp_stage in (0, placement.layout.pp - 1)
            assert [("embed" in n) for n in tensors].count(True) == (4 if is_end else 0), "it, its master and moments"
            if is_end:
                other = placement.gpu(at.unit, placement.layout.pp - 1 - at.pp_stage, at.tp_rank)
                assert torch.equal(as_bits(tensors["embed"]), as_bits(world.local(ACTOR_TRAINING, other)["embed"]))


@pytest.mark.parametrize("lost", [0, 3])
def test_either_end_of_a_tied_model_restores_the_other(lost: int) -> None:
    state = decoder()
    kept = tuple(t for t in state.tensors if "embed" in t.spec.name)
    world = started(State((*kept, COUNTERS), state.num_layers), on(1, 4))
    world.owners.set(ACTOR_TRAINING, lost, None, None)
    world.cluster.stores[lost].forget()
    world.go(on(2, 3, turn=4))
    for gpu in (0, 1, 2, 3):
        world.cluster.stores[gpu].forget()
    world.check(ACTOR_TRAINING)


# -- a wrong KV head when there are more ranks than KV heads -----------------------------------------------------------


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Grouped-query attention of [t, h] inputs with the heads that q, k and v [heads, dim, h] and o [h, heads, dim] have."""
    queries, keys, values = (torch.einsum("ndh,th->ntd", w, x) for w in (q, k, v))
    group = len(q) // len(k)
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    weights = (queries @ keys.transpose(1, 2)).softmax(-1)
    return torch.einsum("ntd,hnd->th", weights @ values, o)


@pytest.mark.parametrize(("heads", "kv"), [(12, 2), (12, 3), (12, 1), (12, 4), (12, 12)])
def test_attention_is_the_same_with_more_ranks_than_kv_heads(heads: int, kv: int) -> None:
    dim, hidden = 2, 5
    q, k = Heads(heads, heads, dim), Heads(heads, kv, dim)
    qkv = make_tensor("0.qkv", "layer", 0, (q, k, k), 0, hidden, "float32")
    out = make_tensor("0.o", "layer", 0, (q,), 1, hidden, "float32")
    world = World(12, {ACTOR_TRAINING: State((qkv, out, COUNTERS), 1)})
    randomise(world, "0.qkv", "0.o")
    x = torch.randn(3, hidden)

    def of_rank(tensors: dict[str, torch.Tensor], num_heads: int, num_kv: int) -> torch.Tensor:
        sizes = [num_heads * dim, num_kv * dim, num_kv * dim]
        parts = [w.view(-1, dim, hidden) for w in tensors["0.qkv"].split(sizes)]
        return attention(*parts, tensors["0.o"].view(hidden, -1, dim), x)

    wanted = of_rank(world.logical[ACTOR_TRAINING], heads, kv)
    world.put(on(1))
    degrees = [tp for tp in (12, 2, 6, 4, 1, 12, 3, 6) if tp % kv == 0 or kv % tp == 0]
    for tp in degrees:
        world.go(on(tp, turn=tp))
        num_kv = max(kv // tp, 1)
        parts = [of_rank(tensors, heads // tp, num_kv) for tensors in local(world).values()]
        torch.testing.assert_close(sum(parts), wanted, rtol=1e-4, atol=1e-5)


def test_the_kv_head_of_a_rank_is_that_of_vllm() -> None:
    """K/V shard = rank // (tp / kv_heads), as vLLM's QKVParallelLinear has it."""
    for kv, repeats, group in itertools.product((1, 2, 3, 4), (1, 2, 4), (1, 2, 3)):
        tp = kv * repeats
        tensor = make_tensor("k", "layer", 0, (Heads(tp * group, kv, 1),), 0, 2, "float32")
        holdings = StateSpec((tensor.spec,), 1).holdings(rank_order(tp, 1, 1))
        assert [holdings[rank]["k"] for rank in range(tp)] == [((r // repeats, r // repeats + 1),) for r in range(tp)]
