"""What a unit generates is what transformers generates, and no plan, batch or order changes a draw."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_rig import SMALL, Rig, TinyModel, llama, plan_of, shapes_of
from torch import nn

from nereus.core.plan import ACTOR_GENERATION, ACTOR_TRAINING, Plan
from nereus.core.randomness import uniforms
from nereus.engine.generation import Request, Response, Sampling, sample_tokens

VOCABULARY = 61
ENDINGS = tuple(range(3, VOCABULARY, 8))
"""About every eighth token ends a sequence."""

GREEDY = Sampling(max_new_tokens=12, temperature=0.0, top_p=1.0, eos_token_ids=ENDINGS, pad_token_id=0, seed=11)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.8)
NUCLEUS = dataclasses.replace(GREEDY, temperature=0.8, top_p=0.9)
ROUNDING = 1e-5
"""Two layouts may draw different tokens only where the draw is this close to a boundary."""


def draw_requests(n: int = 8) -> list[Request]:
    """Ragged prompts, two samples of each, at positions far apart."""
    random = np.random.default_rng(5)
    prompts = [tuple(map(int, random.integers(0, VOCABULARY, random.integers(1, 9)))) for _ in range(n // 2)]
    return [Request(prompt=p, position=1000 * i + 7, sample=s) for i, p in enumerate(prompts) for s in range(2)]


@torch.no_grad()
def expected_response(model: nn.Module, request: Request, sampling: Sampling) -> Response:
    """One token after the other with transformers, no cache: probabilities, nucleus, then the inverse distribution."""
    found, tokens = Response(), list(request.prompt)
    for number in range(sampling.max_new_tokens):
        logits = model(input_ids=torch.tensor([tokens])).logits[0, -1].double().numpy()
        logits = logits / (sampling.temperature or 1.0)
        p = np.exp(logits - logits.max())
        p /= p.sum()
        if sampling.temperature == 0:
            token = int(p.argmax())
        else:
            kept = p * nucleus(p, sampling.top_p)
            draw = float(uniforms(sampling.seed, request.position, request.sample, number))
            token = int(np.argmax(np.cumsum(kept) / kept.sum() > draw))
        tokens.append(token)
        found.tokens.append(token)
        found.logprobs.append(float(np.log(p[token])))
        if token in sampling.eos_token_ids:
            break
    return found


def nucleus(p: np.ndarray, top_p: float) -> np.ndarray:
    """The fewest most likely tokens that together have `top_p`, as a boolean array."""
    order = np.argsort(-p, kind="stable")
    count = 1 + int(np.searchsorted(np.cumsum(p[order]), top_p)) if top_p < 1 else len(p)
    return np.isin(np.arange(len(p)), order[:count])


def check_same(found: Response, expected: Response, what: str) -> None:
    """Equal tokens and log-probabilities, up to a first difference that is within rounding."""
    for i, (token, other) in enumerate(zip(found.tokens, expected.tokens, strict=False)):
        if token != other:
            assert found.margins[i] < ROUNDING, f"{what}, token {i}: {found} {expected}"
            return
        assert found.logprobs[i] == pytest.approx(expected.logprobs[i], abs=1e-4), f"{what}, token {i}"
    assert len(found.tokens) == len(expected.tokens) == len(found.logprobs) == len(found.margins), what


def make_models(config: Any, folder: Path) -> dict[Any, TinyModel]:
    model = TinyModel.make(config, "policy", folder)
    return {ACTOR_TRAINING: model, ACTOR_GENERATION: model}


def two_plans(training: Any, generation: Any, micro_batch: int = 3, recompute: bool = False) -> Plan:
    return Plan(
        (
            *plan_of([ACTOR_TRAINING], training).placements,
            *plan_of([ACTOR_GENERATION], generation, micro_batch=micro_batch, recompute=recompute).placements,
        )
    )


@pytest.fixture
def model(tmp_path: Path) -> TinyModel:
    return TinyModel.make(llama(), "policy", tmp_path / "model")


def test_every_layout_generates_what_transformers_does(rig: Rig, model: TinyModel) -> None:
    """Greedy against `model.generate`; sampled against a sampler of our own on transformers' logits."""
    requests, shapes = draw_requests(), shapes_of(4)
    expected = {s: [expected_response(model.reference, r, s) for r in requests] for s in (GREEDY, SAMPLED, NUCLEUS)}
    for request, response in zip(requests, expected[GREEDY], strict=True):
        assert response.tokens == transformers_greedy(model.reference, request, GREEDY)
    lengths = {len(response.tokens) for responses in expected.values() for response in responses}
    assert 1 in lengths and 12 in lengths and len(lengths) > 6, "the sequences should end at many places"
    assert expected[SAMPLED] != expected[NUCLEUS] and expected[SAMPLED][0] != expected[SAMPLED][1]

    names = {ACTOR_TRAINING: model, ACTOR_GENERATION: model}
    rig.install(names, two_plans(shapes[-1], shapes[0]))
    for training, shape in zip([shapes[-1], *shapes], shapes, strict=False):
        rig.go(two_plans(training, shape))
        rig.fleet.weight_sync()
        rig.fleet.check_generation_weights()
        for sampling, responses in expected.items():
            found = rig.generate(requests, sampling)
            assert len(found) == len(requests)
            for request, one, other in zip(requests, found, responses, strict=True):
                check_same(one, other, f"{shape}, {sampling}, {request}")


def transformers_greedy(model: Any, request: Request, sampling: Sampling) -> list[int]:
    prompt = torch.tensor([request.prompt])
    whole = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=sampling.max_new_tokens,
        do_sample=False,
        eos_token_id=list(sampling.eos_token_ids),
        pad_token_id=0,
    )
    return [int(token) for token in whole[0, prompt.shape[1] :]]


@pytest.mark.parametrize(
    ("factory", "settings"),
    [
        (transformers.Qwen2Config, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
        (transformers.MistralConfig, {"sliding_window": 4}),
        (transformers.Gemma3TextConfig, {"sliding_window": 4, "head_dim": 4}),
        (transformers.Qwen3Config, {"head_dim": 6, "num_key_value_heads": 2, "tie_word_embeddings": False}),
    ],
    ids=["qwen2, pp_stages of sliding layers only", "mistral, sliding", "gemma3", "qwen3"],
)
def test_other_caches(rig: Rig, tmp_path: Path, factory: Any, settings: dict[str, Any]) -> None:
    models = make_models(factory(**{**SMALL, **settings}), tmp_path)
    reference, requests = models[ACTOR_GENERATION].reference, draw_requests()
    expected = [expected_response(reference, request, SAMPLED) for request in requests]
    rig.install(models, two_plans((1, 1, 1), (1, 1, 1)))
    for shape in ((1, 1, 1), (3, 1, 1), (1, 4, 1), (2, 2, 1)):
        rig.go(two_plans((1, 1, 1), shape, micro_batch=4))
        rig.fleet.weight_sync()
        for request, one, other in zip(requests, rig.generate(requests, SAMPLED), expected, strict=True):
            check_same(one, other, f"{shape}, {request}")


def test_a_draw_does_not_depend_on_who_is_drawn_beside_it(rig: Rig, model: TinyModel) -> None:
    """Subsets, other orders, other micro-batches and more units than requests: each sequence stays what it is."""
    requests = draw_requests()
    names = {ACTOR_TRAINING: model, ACTOR_GENERATION: model}
    rig.install(names, two_plans((1, 1, 1), (2, 2, 1)))
    whole = dict(zip(requests, rig.generate(requests, NUCLEUS), strict=True))

    def check(some: Sequence[Request], what: str) -> None:
        found = rig.generate(some, NUCLEUS)
        assert len(found) == len(some)
        for request, response in zip(some, found, strict=True):
            check_same(response, whole[request], f"{what}, {request}")

    check(requests[::-1], "reversed")
    check(requests[3:7], "a subset")
    check(requests[4:5], "alone")
    check([], "none")
    for micro_batch in (1, 2, 16):
        rig.go(two_plans((1, 1, 1), (1, 2, 2), micro_batch=micro_batch, recompute=True))
        rig.fleet.weight_sync()
        check(requests, f"micro-batches of {micro_batch}")
    check(requests[:1], "a unit without requests")
    other_seed = rig.generate(requests, dataclasses.replace(NUCLEUS, seed=12))
    assert [r.tokens for r in other_seed] != [whole[r].tokens for r in requests]


def test_the_number_of_new_tokens_is_a_limit(rig: Rig, model: TinyModel) -> None:
    requests = draw_requests()
    rig.install({ACTOR_TRAINING: model, ACTOR_GENERATION: model}, two_plans((1, 1, 1), (1, 3, 1)))
    for limit in (1, 2):
        sampling = dataclasses.replace(SAMPLED, max_new_tokens=limit, eos_token_ids=())
        assert {len(r.tokens) for r in rig.generate(requests, sampling)} == {limit}


# -- the sampler alone -----------------------------------------------------------------------------------------------


def logits_of_a_skewed_distribution(size: int = 40) -> torch.Tensor:
    return 2.0 * torch.randn(size, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5])
def test_samples_follow_the_distribution(top_p: float) -> None:
    """Pearson's chi-square of 100,000 draws; 5 standard deviations above its mean would be one in a million."""
    n, temperature = 100_000, 0.8
    logits = logits_of_a_skewed_distribution()
    draws = torch.from_numpy(uniforms(1, np.arange(n), 0, 0))
    tokens, logprobs, _ = sample_tokens(logits.expand(n, -1), draws, temperature=temperature, top_p=top_p)
    p = (logits.double() / temperature).softmax(-1).numpy()
    kept = p * nucleus(p, top_p)
    kept /= kept.sum()
    counts = np.bincount(tokens.numpy(), minlength=len(p))
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(kept))
    likely = kept * n >= 5
    chi_square = float((((counts - kept * n) ** 2)[likely] / (kept * n)[likely]).sum())
    freedom = int(likely.sum()) - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)
    torch.testing.assert_close(logprobs.double(), torch.from_numpy(np.log(p))[tokens], atol=1e-5, rtol=0)


@pytest.mark.parametrize("top_p", [0.999, 0.9, 0.5, 0.1, 1e-6])
def test_the_nucleus_is_exact(top_p: float) -> None:
    """Every token of it can be drawn, at both of its ends, and no other token at any draw."""
    logits = torch.stack([logits_of_a_skewed_distribution(), torch.zeros(40), -logits_of_a_skewed_distribution()])
    for row in logits:
        p = row.double().softmax(-1).numpy()
        kept = p * nucleus(row.log_softmax(-1).double().exp().numpy(), top_p)
        ends = np.cumsum(kept) / kept.sum()
        inside = np.concatenate([[0.0], ends - 1e-7, ends + 1e-7, np.linspace(0, 1, 5000)])
        draws = torch.from_numpy(np.append(inside[(inside >= 0) & (inside < 1)], 1 - 2.0**-53))
        tokens, _, _ = sample_tokens(row.expand(len(draws), -1), draws, temperature=1.0, top_p=top_p)
        assert set(tokens.tolist()) == set(np.flatnonzero(kept).tolist())


def test_a_margin_is_the_distance_to_another_token() -> None:
    """Moving the draw by less than its margin gives the same token, by more another one."""
    logits = logits_of_a_skewed_distribution()
    draws = torch.from_numpy(uniforms(2, np.arange(2000), 0, 0))
    settings = {"temperature": 0.8, "top_p": 0.9}
    rows = logits.expand(len(draws), -1)
    tokens, _, margins = sample_tokens(rows, draws, **settings)
    for direction in (-1, 1):
        near, _, _ = sample_tokens(rows, (draws + 0.999 * direction * margins).clamp(0, 1 - 2**-53), **settings)
        assert torch.equal(near, tokens)
    beyond = [
        sample_tokens(rows, (draws + d * (margins + 1e-9)).clamp(0, 1 - 2**-53), **settings)[0] != tokens
        for d in (-1, 1)
    ]
    at_an_end = (draws < margins + 2e-9) | (draws > 1 - margins - 2e-9)
    assert bool((beyond[0] | beyond[1] | at_an_end).all())


def test_greedy_margin_is_the_lead_of_the_best_token() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.5], [0.0, -1.0, 4.0]])
    tokens, logprobs, margins = sample_tokens(logits, torch.zeros(2), temperature=0.0, top_p=1.0)
    assert tokens.tolist() == [1, 2]
    torch.testing.assert_close(margins, torch.tensor([0.5, 4.0]))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1))
