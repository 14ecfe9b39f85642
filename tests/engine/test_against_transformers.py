"""Losses, gradients and updates under every layout are those of transformers' own model on one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_rig import (
    SMALL,
    TEMPERATURE,
    Batch,
    Rig,
    Shape,
    TinyModel,
    plan_of,
    policy_targets,
    reference_logprobs,
    reference_policy_loss,
    reference_score_loss,
    reference_scores,
    reference_value_loss,
    reference_values,
    score_targets,
    shapes_of,
    value_targets,
)

from nereus.core.plan import ACTOR_TRAINING, CRITIC_TRAINING, ModelStage
from nereus.engine.optimizer import AdamW

REWARD_TRAINING = ModelStage("reward", "training")
HEADS = {ACTOR_TRAINING: "policy", CRITIC_TRAINING: "value", REWARD_TRAINING: "reward"}


# Two KV heads are fewer than tp 3 and 4; under tp 3 four KV heads make ranks whose query heads share them 3 to 1, 2 to 2
# and 1 to 3. pp 2, 3 and 4 do not divide 5 layers, nor any tp the vocabulary.
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama, tied": (transformers.LlamaConfig, {}),
    "llama, untied, with biases": (
        transformers.LlamaConfig,
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    ),
    "qwen2, sliding from layer 2 on": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 6, "tie_word_embeddings": False, "num_key_value_heads": 4}),
    "mistral, sliding": (transformers.MistralConfig, {"sliding_window": 4, "tie_word_embeddings": False}),
}
RARER: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma3, scaled embeddings, soft-capped logits": (
        transformers.Gemma3TextConfig,
        {"head_dim": 4, "sliding_window": 4, "final_logit_softcapping": 1.5},
    ),
    "llama, dimensions smaller than tp": (transformers.LlamaConfig, {"vocab_size": 3, "intermediate_size": 3}),
    "llama, padded with the last token": (transformers.LlamaConfig, {"pad_token_id": -1}),
}


def config_of(family: str, **changes: Any) -> Any:
    factory, settings = {**FAMILIES, **RARER}[family]
    return factory(**{**SMALL, "num_key_value_heads": 2, **settings, **changes})


@dataclass(frozen=True, slots=True)
class Expected:
    """What transformers finds for a model, a batch and targets. outputs: by sequence, of the forward pass alone."""

    model: TinyModel
    targets: Any
    outputs: list[torch.Tensor]
    loss_sum: float
    gradients: Mapping[str, torch.Tensor]
    norm: float

    @classmethod
    def of(cls, model: TinyModel, batch: Batch) -> Expected:
        reference = model.reference
        reference.zero_grad()
        with torch.no_grad():
            outputs, targets, loss = {
                "policy": lambda: (
                    [logprobs for logprobs, _ in reference_logprobs(reference, batch, TEMPERATURE)],
                    policy_targets(reference, batch),
                    reference_policy_loss,
                ),
                "value": lambda: (reference_values(reference, batch), value_targets(batch), reference_value_loss),
                "reward": lambda: (reference_scores(reference, batch), score_targets(batch), reference_score_loss),
            }[model.architecture.head]()
        scalar, loss_sum = loss(reference, batch, targets)
        scalar.backward()
        gradients = {name: g.clone() for name, g in model.gradients().items()}
        norm = float(torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt())
        return cls(model, targets, outputs, loss_sum, gradients, norm)

    def check_outputs(self, found: torch.Tensor, what: str) -> None:
        assert len(found) == len(self.outputs), what
        for row, expected in zip(found, self.outputs, strict=True):
            torch.testing.assert_close(row[: len(expected)], expected, atol=1e-5, rtol=1e-5, msg=what)
            assert not row[len(expected) :].any(), what

    def check(self, statistics: list[float], norm: float, gradients: Mapping[str, torch.Tensor], what: str) -> None:
        """Relative to each tensor's own size; some gradients, of key biases, are exactly zero but for rounding."""
        assert statistics[0] == pytest.approx(self.loss_sum, rel=1e-5, abs=1e-5), what
        assert norm == pytest.approx(self.norm, rel=1e-5), what
        assert gradients.keys() == self.gradients.keys(), what
        for name, expected in self.gradients.items():
            error = float((gradients[name] - expected).norm())
            assert error <= 1e-5 * float(expected.norm()) + 1e-7 * self.norm, f"{name}, {what}: {error}"


def check_all(rig: Rig, expected: Mapping[ModelStage, Expected], batch: Batch, what: str) -> None:
    names = list(expected)
    for name in names:
        head = expected[name].model.architecture.head
        method, *more = {"policy": ("logprobs", TEMPERATURE), "value": ("values",), "reward": ("scores",)}[head]
        expected[name].check_outputs(rig.forward(method, name, batch, *more), f"{name}, {what}")
    found = {name: rig.gradients(name, batch, expected[name].targets) for name in names}
    gradients = rig.whole_gradients(names)
    for name in names:
        expected[name].check(*found[name], gradients[name], f"{name}, {what}")
        rig.discard(name)


def make_all(config: Any, names: list[ModelStage], folder: Path) -> dict[ModelStage, TinyModel]:
    return {name: TinyModel.make(config, HEADS[name], folder / HEADS[name]) for name in names}  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_of_every_layout(rig: Rig, tmp_path: Path, family: str) -> None:
    names = list(HEADS)
    models = make_all(config_of(family), names, tmp_path)
    batch = Batch.draw(61)
    expected = {name: Expected.of(model, batch) for name, model in models.items()}
    rig.install(models, plan_of(names, (1, 1, 1)))
    for shape in shapes_of(4):
        rig.go(plan_of(names, shape))
        check_all(rig, expected, batch, f"{family}, {shape}")


@pytest.mark.parametrize("family", RARER)
def test_rarer_models(rig: Rig, tmp_path: Path, family: str) -> None:
    """Also ranks with no row of the vocabulary or of the MLP, and a padding that counts from the end."""
    config = config_of(family)
    models = make_all(config, [ACTOR_TRAINING], tmp_path)
    batch = Batch.draw(config.vocab_size)
    expected = {name: Expected.of(model, batch) for name, model in models.items()}
    rig.install(models, plan_of([ACTOR_TRAINING], (1, 1, 1)))
    for shape in ((1, 1, 1), (4, 1, 1), (2, 2, 1), (1, 4, 1), (3, 1, 1)):
        rig.go(plan_of([ACTOR_TRAINING], shape))
        check_all(rig, expected, batch, f"{family}, {shape}")


@pytest.mark.parametrize("shape", [(2, 2, 1), (1, 3, 1), (1, 2, 2)])
def test_neither_micro_batches_nor_recomputation_change_a_gradient(rig: Rig, tmp_path: Path, shape: Shape) -> None:
    names = [ACTOR_TRAINING, CRITIC_TRAINING]
    models = make_all(config_of("llama, tied"), names, tmp_path)
    batch = Batch.draw(61)
    expected = {name: Expected.of(model, batch) for name, model in models.items()}
    rig.install(models, plan_of(names, shape, micro_batch=1))
    for micro_batch in range(1, len(batch.prompts) + 1):
        rig.go(plan_of(names, shape, micro_batch=micro_batch, recompute=micro_batch % 2 == 0))
        check_all(rig, expected, batch, f"{shape}, micro-batches of {micro_batch}")


def test_recomputation_is_bitwise_the_same(rig: Rig, tmp_path: Path) -> None:
    """Also with a dropout in the config, which must be off: seed_oss has one by default."""
    config = transformers.SeedOssConfig(**{**SMALL, "head_dim": 4, "residual_dropout": 0.5})
    models = make_all(config, [ACTOR_TRAINING], tmp_path)
    batch, found = Batch.draw(61), []
    targets = policy_targets(models[ACTOR_TRAINING].reference, batch)
    for recompute in (False, True):
        rig.install(models, plan_of([ACTOR_TRAINING], (2, 2, 1), recompute=recompute))
        statistics = rig.gradients(ACTOR_TRAINING, batch, targets)
        found.append((statistics, rig.whole_gradients([ACTOR_TRAINING])[ACTOR_TRAINING]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


@pytest.mark.parametrize(
    "shapes",
    [
        [(1, 1, 1), (1, 1, 1), (1, 1, 1)],
        [(2, 2, 1), (1, 3, 1), (4, 1, 1)],
        [(1, 1, 4), (3, 1, 1), (1, 2, 2)],
        [(1, 4, 1), (2, 1, 2), (1, 1, 3)],
    ],
    ids=str,
)
def test_three_updates_under_three_layouts(rig: Rig, tmp_path: Path, shapes: list[Shape]) -> None:
    """AdamW with its moments and step count carried over; the norm is clipped in some steps and not in others."""
    names = [ACTOR_TRAINING, CRITIC_TRAINING]
    models = make_all(config_of("llama, tied"), names, tmp_path)
    batches = [Batch.draw(61, seed=seed) for seed in range(3)]
    losses: dict[ModelStage, Callable[..., Any]] = {
        ACTOR_TRAINING: reference_policy_loss,
        CRITIC_TRAINING: reference_value_loss,
    }
    settings = AdamW(lr=3e-3, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1, max_grad_norm=3.0)
    optimizers = {
        name: torch.optim.AdamW(
            model.reference.parameters(),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        for name, model in models.items()
    }
    clipped = set()
    rig.install(models, plan_of(names, shapes[0]))
    for shape, batch in zip(shapes, batches, strict=True):
        rig.go(plan_of(names, shape))
        for name, model in models.items():
            targets = policy_targets(model.reference, batch) if name == ACTOR_TRAINING else value_targets(batch)
            _, norm = rig.gradients(name, batch, targets)
            rig.update(name, settings)
            optimizers[name].zero_grad()
            losses[name](model.reference, batch, targets)[0].backward()
            expected = torch.nn.utils.clip_grad_norm_(model.reference.parameters(), settings.max_grad_norm)
            optimizers[name].step()
            assert norm == pytest.approx(float(expected.detach()), rel=1e-4), f"{name} {shape}"
            clipped.add(norm > settings.max_grad_norm)
    assert clipped == {True, False}
    for name, model in models.items():
        state = rig.whole_state(name, tmp_path / f"state-{name.model}")
        for parameter_name, parameter in model.reference.named_parameters():
            difference = float((state[parameter_name] - parameter.detach()).abs().max())
            assert difference <= 1e-5, f"{name} {parameter_name}: {difference}"
            kept = optimizers[name].state[parameter]
            for moment in ("exp_avg", "exp_avg_sq"):
                theirs = kept[moment]
                error = float((state[f"{moment}/{parameter_name}"] - theirs).norm())
                assert error <= 1e-4 * float(theirs.norm()) + 1e-9, f"{name} {moment}/{parameter_name}: {error}"
        assert state["counters"][0] == 3
