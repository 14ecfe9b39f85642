"""Every change from one layout to another: the state is bitwise the same, the loss too, and no byte too many is sent.

What each device must receive is worked out here from first principles, element by element, and not with the code that
plans the moves.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_rig import (
    Batch,
    Rig,
    Shape,
    TinyModel,
    llama,
    plan_of,
    policy_targets,
    reference_policy_loss,
    shapes_of,
)

from nereus.core.plan import ACTOR_TRAINING, Placement, Plan
from nereus.engine.optimizer import AdamW
from nereus.rl.objectives import PolicyTargets

Held = dict[str, np.ndarray]
"""By logical tensor: which of its elements a device holds, as a boolean array of its shape."""

# Layers of each pp_stage, first stage first.
FIVE_LAYERS = {1: [5], 2: [2, 3], 3: [1, 2, 2], 4: [1, 1, 1, 2]}
NINE_LAYERS = {1: [9], 2: [4, 5], 3: [3, 3, 3], 4: [2, 2, 2, 3], 8: [1, 1, 1, 1, 1, 1, 1, 2]}


def dealt(total: int, ranks: int, rank: int) -> np.ndarray:
    """Numbers 0..total-1 that a rank gets; later ranks get the larger shares."""
    return np.arange(total * rank // ranks, total * (rank + 1) // ranks)


def rows_of_heads(heads: np.ndarray, head_dim: int) -> np.ndarray:
    return (heads[:, None] * head_dim + np.arange(head_dim)).ravel()


class FirstPrinciples:
    """What a device must hold of a Llama with tied embeddings, and how many bytes it must be sent."""

    def __init__(self, model: TinyModel, layers: Mapping[int, Sequence[int]]) -> None:
        self.config = model.reference.config
        self.layers = layers
        self.shapes = {name: tuple(p.shape) for name, p in model.reference.named_parameters()}

    def held(self, placement: Placement, device: int) -> Held:
        """All false where the device is not in the placement."""
        found: Held = {}
        for name, shape in self.shapes.items():
            element = np.zeros(shape, dtype=bool)
            if device in placement.gpus:
                self._mark(element, name, placement, placement.gpus.index(device))
            for prefix in ("", "exp_avg/", "exp_avg_sq/"):
                found[prefix + name] = element
        found["counters"] = np.full(3, device in placement.gpus)
        return found

    def _mark(self, element: np.ndarray, name: str, placement: Placement, index: int) -> None:
        tp, pp = placement.layout.tp, placement.layout.pp
        tp_rank, pp_stage = index % tp, index // tp % pp
        c, head_dim = self.config, self.config.hidden_size // self.config.num_attention_heads
        stage_of_layer = [stage for stage, count in enumerate(self.layers[pp]) for _ in range(count)]
        parts = name.split(".")
        if parts[1] == "layers" and stage_of_layer[int(parts[2])] != pp_stage:
            return
        heads = dealt(c.num_attention_heads, tp, tp_rank)
        kv_heads = np.unique(heads // (c.num_attention_heads // c.num_key_value_heads))
        kind = parts[-2]
        if kind == "embed_tokens":  # also the head of a tied model: on the first and on the last pp_stage
            if pp_stage in (0, pp - 1):
                element[dealt(c.vocab_size, tp, tp_rank)] = True
        elif kind == "q_proj":
            element[rows_of_heads(heads, head_dim)] = True
        elif kind in ("k_proj", "v_proj"):
            element[rows_of_heads(kv_heads, head_dim)] = True
        elif kind == "o_proj":
            element[:, rows_of_heads(heads, head_dim)] = True
        elif kind in ("gate_proj", "up_proj"):
            element[dealt(c.intermediate_size, tp, tp_rank)] = True
        elif kind == "down_proj":
            element[:, dealt(c.intermediate_size, tp, tp_rank)] = True
        elif kind == "norm":
            element[:] = pp_stage == pp - 1
        else:
            assert kind in ("input_layernorm", "post_attention_layernorm"), name
            element[:] = True

    def missing_bytes(self, old: Placement, new: Placement, device: int) -> int:
        """What it needs and does not hold: four bytes an element, eight for a counter."""
        before, after = self.held(old, device), self.held(new, device)
        elements = {name: int(np.count_nonzero(after[name] & ~before[name])) for name in after}
        return 4 * sum(elements.values()) + 4 * elements["counters"]


def eulerian_circuit(nodes: Sequence[Shape]) -> list[Shape]:
    """A closed walk that takes every ordered pair of different nodes exactly once (Hierholzer 1873)."""
    open_ends = {node: [other for other in nodes if other != node] for node in nodes}
    stack, circuit = [nodes[0]], []
    while stack:
        if open_ends[stack[-1]]:
            stack.append(open_ends[stack[-1]].pop())
        else:
            circuit.append(stack.pop())
    return circuit[::-1]


SHAPES = shapes_of(4)
CIRCUIT = eulerian_circuit(SHAPES)
PARTS = 4


def placed(shape: Shape, pool: int = 4) -> Placement:
    """Each shape has its own order of devices, so that layouts of one size do not all sit on the same ones."""
    turn, size = SHAPES.index(shape) if shape in SHAPES else 0, math.prod(shape)
    order = np.roll(np.arange(pool), -turn) if turn % 2 == 0 else np.roll(np.arange(pool), -turn)[::-1]
    return plan_of([ACTOR_TRAINING], shape, gpus=[int(g) for g in order[:size]])[ACTOR_TRAINING]


class Trained:
    """A model after a few optimizer steps, with all that must survive a move, and its loss by transformers."""

    def __init__(self, rig: Rig, model: TinyModel, start: Placement, folder: Path, pool: int) -> None:
        self.rig, self.folder = rig, folder
        self.batch = Batch.draw(model.reference.config.vocab_size, n=pool + 1)  # uneven under every dp but one
        self.targets: PolicyTargets = policy_targets(model.reference, self.batch)
        rig.install({ACTOR_TRAINING: model}, Plan((start,)))
        for _ in range(3):
            rig.gradients(ACTOR_TRAINING, self.batch, self.targets)
            rig.update(ACTOR_TRAINING, AdamW(lr=2e-3, weight_decay=0.01))
        counters = (ACTOR_TRAINING, "counters", {1: 7, 2: 1234567890123})
        rig.cluster.call("set_counters", dict.fromkeys(start.gpus, counters)).results()
        untrained = dict(model.reference.named_parameters())
        self.digest = rig.fleet.digest([ACTOR_TRAINING])
        self.state = rig.whole_state(ACTOR_TRAINING, folder / "first")
        for name, parameter in untrained.items():
            assert not torch.equal(self.state[name], parameter), name
            assert bool(self.state[f"exp_avg/{name}"].any() and self.state[f"exp_avg_sq/{name}"].any()), name
        assert self.state["counters"].tolist() == [3, 7, 1234567890123]
        model.reference.load_state_dict({name: self.state[name] for name in untrained}, strict=False)
        with torch.no_grad():
            _, self.loss = reference_policy_loss(model.reference, self.batch, self.targets)

    def check_whole(self, what: str) -> None:
        """Gathered, every tensor is bitwise what it was."""
        now = self.rig.whole_state(ACTOR_TRAINING, self.folder / "now")
        assert now.keys() == self.state.keys()
        for name, tensor in self.state.items():
            assert torch.equal(now[name], tensor), f"{name}, {what}"

    def loss_now(self) -> float:
        """The clipped surrogate summed over all tokens; forward and backward, then forgotten."""
        statistics, _ = self.rig.gradients(ACTOR_TRAINING, self.batch, self.targets)
        self.rig.discard(ACTOR_TRAINING)
        return statistics[0]


def walk(trained: Trained, rules: FirstPrinciples, path: Sequence[Placement], pool: int) -> None:
    """Go along; check each change."""
    rig = trained.rig
    for number, (old, new) in enumerate(itertools.pairwise(path)):
        what = f"{old.layout} dp{old.dp} {old.gpus} -> {new.layout} dp{new.dp} {new.gpus}"
        rig.go(Plan((new,)), range(pool))
        expected = {device: rules.missing_bytes(old, new, device) for device in range(pool)}
        assert rig.received(ACTOR_TRAINING) == expected, what
        assert rig.fleet.digest([ACTOR_TRAINING]) == trained.digest, what
        assert trained.loss_now() == pytest.approx(trained.loss, rel=1e-5), what
        if number % 13 == 12 or number == len(path) - 2:
            trained.check_whole(what)


def test_the_circuit_takes_every_pair_once() -> None:
    pairs = list(itertools.pairwise(CIRCUIT))
    assert len(SHAPES) == 13 and len(pairs) == len(set(pairs)) == 156
    assert all(old != new for old, new in pairs)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_pair_on_4_devices(rig: Rig, tmp_path: Path, part: int) -> None:
    num_changes = (len(CIRCUIT) - 1) // PARTS
    path = [placed(shape) for shape in CIRCUIT[part * num_changes : (part + 1) * num_changes + 1]]
    model = TinyModel.make(llama(), "policy", tmp_path / "model")
    walk(Trained(rig, model, path[0], tmp_path, 4), FirstPrinciples(model, FIVE_LAYERS), path, 4)


def test_pairs_on_8_devices(rig: Rig, tmp_path: Path) -> None:
    """Four devices join; layouts of 6 and 8 that do not nest in each other; four leave."""
    config = llama(num_attention_heads=24, num_hidden_layers=9)
    model = TinyModel.make(config, "policy", tmp_path / "model")
    shapes = [(2, 2, 1), (8, 1, 1), (1, 8, 1), (2, 2, 2), (2, 1, 3), (3, 1, 2), (4, 2, 1), (1, 1, 8), (2, 4, 1)]
    shapes += [(1, 3, 2), (6, 1, 1), (1, 2, 4), (2, 2, 1)]
    path = [placed(shape, 4 if shape == (2, 2, 1) else 8) for shape in shapes]
    trained, rules = Trained(rig, model, path[0], tmp_path, 8), FirstPrinciples(model, NINE_LAYERS)
    rig.go(Plan((path[0],)), range(8))
    walk(trained, rules, path, 8)
    rig.go(Plan((path[-1],)), range(4))
    assert rig.cluster.devices == (0, 1, 2, 3)
    trained.check_whole("after four devices have left")


def test_old_units_are_freed(rig: Rig, tmp_path: Path) -> None:
    """Memory, threads and open files of the workers stay what they were, however often the layout changes."""
    model = TinyModel.make(llama(vocab_size=30_011, num_hidden_layers=4), "policy", tmp_path / "model")
    state_bytes = model.architecture.training_state.num_bytes
    shapes = [(1, 1, 4), (4, 1, 1), (1, 4, 1), (2, 1, 2)]
    rig.install({ACTOR_TRAINING: model}, Plan((placed(shapes[-1]),)))
    seen = []
    for _ in range(6):
        for shape in shapes:
            rig.go(Plan((placed(shape),)))
        seen.append(rig.footprints())
    # From the second round to the last, 16 changes: each would have left a quarter of a copy or more on each device.
    for device, before in seen[1].items():
        after = seen[-1][device]
        assert after["resident_bytes"] - before["resident_bytes"] < state_bytes, (before, after)
    deadline = time.monotonic() + 20
    while True:  # sockets are closed in the background
        now = rig.footprints()
        left = [
            (device, what)
            for device, before in seen[0].items()
            for what in ("threads", "files")
            if now[device][what] > before[what]
        ]
        if not left:
            break
        assert time.monotonic() < deadline, (seen[0], now)
        time.sleep(0.1)
