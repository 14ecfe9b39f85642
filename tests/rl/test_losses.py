"""Losses and their gradients, against references written from the papers and against TRL where installed."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nereus.rl.advantages import gae, group_advantages, kl_estimate, token_rewards, whiten
from nereus.rl.losses import masked_sum, policy_loss, policy_metric_sums, value_loss

WIDTH = 6
LENGTHS = st.lists(st.integers(0, WIDTH), min_size=1, max_size=5)
SEEDS = st.integers(0, 2**31 - 1)
CLIPS = st.floats(0.0, 0.5)
few_examples = settings(max_examples=25, derandomize=True, deadline=None)


def ragged_mask(lengths: list[int], width: int = WIDTH) -> Tensor:
    """[n, width] bool: row i has lengths[i] response tokens."""
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaf_normal(seed: int, *shape: int) -> Tensor:
    return normal(seed, *shape).requires_grad_()


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss, leaf, retain_graph=True)[0]


def tokens_of(*tensors: Tensor) -> list[list[float]]:
    """One entry per token: the numbers that the tensors [n, t] have there."""
    return torch.stack([tensor.detach().flatten() for tensor in tensors], dim=1).tolist()


def assert_tokens(actual: Tensor, expected: list[float]) -> None:
    assert actual.flatten().tolist() == pytest.approx(expected, rel=0, abs=1e-6)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=0, atol=tolerance)


def reference_policy_loss(
    logprob: float, old_logprob: float, advantage: float, low: float, high: float
) -> tuple[float, float]:
    """PPO eq. 7 for one token, negated, and its derivative with respect to logprob."""
    ratio = math.exp(logprob - old_logprob)
    clipped = min(max(ratio, 1 - low), 1 + high)
    if clipped * advantage < ratio * advantage:
        return -clipped * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


@few_examples
@given(seed=SEEDS, clip_low=CLIPS, clip_high=CLIPS)
def test_policy_loss_and_its_gradient(seed: int, clip_low: float, clip_high: float) -> None:
    logprobs = leaf_normal(seed, 4, WIDTH)
    old_logprobs = logprobs.detach() + 0.3 * normal(seed + 1, 4, WIDTH)
    advantages = normal(seed + 2, 4, WIDTH)
    loss = policy_loss(logprobs, old_logprobs, advantages, clip_low=clip_low, clip_high=clip_high)

    expected = [
        reference_policy_loss(new, old, advantage, clip_low, clip_high)
        for new, old, advantage in tokens_of(logprobs, old_logprobs, advantages)
    ]
    assert_tokens(loss, [token_loss for token_loss, _ in expected])
    assert_tokens(gradient(loss.sum(), logprobs), [slope for _, slope in expected])


def test_on_policy_the_gradient_is_the_plain_policy_gradient() -> None:
    logprobs, advantages = leaf_normal(0, 2, WIDTH), normal(1, 2, WIDTH)
    loss = policy_loss(logprobs, logprobs, advantages, clip_low=0.2, clip_high=0.2)
    assert_near(loss, -advantages)
    assert_near(gradient(loss.sum(), logprobs), -advantages)


def test_policy_metrics_count_the_tokens_without_gradient() -> None:
    mask = ragged_mask([6, 3, 0, 1])
    logprobs = leaf_normal(2, 4, WIDTH)
    old_logprobs, advantages = logprobs.detach() + 0.3 * normal(3, 4, WIDTH), normal(4, 4, WIDTH)
    clip = {"clip_low": 0.1, "clip_high": 0.2}
    num_clipped, kl = policy_metric_sums(logprobs, old_logprobs, advantages, mask, **clip)

    loss = policy_loss(logprobs, old_logprobs, advantages, **clip)
    without_gradient = gradient(loss.sum(), logprobs) == 0
    assert 0 < num_clipped.item() == (without_gradient & mask).sum().item()
    expected_kl = sum(
        math.exp(new - old) - 1 - (new - old)
        for new, old in zip(logprobs[mask].tolist(), old_logprobs[mask].tolist(), strict=True)
    )
    assert kl.item() == pytest.approx(expected_kl, abs=1e-6)
    on_policy = policy_metric_sums(logprobs, logprobs, advantages, mask, **clip)
    assert [x.item() for x in on_policy] == [0.0, 0.0]


def reference_value_loss(value: float, old: float, target: float, clip: float | None) -> tuple[float, float]:
    """Half the larger squared error of the value and the clipped value, and its derivative."""
    plain, slope = (value - target) ** 2 / 2, value - target
    if clip is None or abs(value - old) <= clip:
        return plain, slope
    clipped = (old + math.copysign(clip, value - old) - target) ** 2 / 2
    return (clipped, 0.0) if clipped > plain else (plain, slope)


@few_examples
@given(seed=SEEDS, clip=st.none() | st.floats(0.0, 1.0))
def test_value_loss_and_its_gradient(seed: int, clip: float | None) -> None:
    values = leaf_normal(seed, 4, WIDTH)
    old_values, returns = normal(seed + 1, 2, 4, WIDTH)
    loss = value_loss(values, old_values, returns, clip=clip)

    expected = [
        reference_value_loss(value, old, target, clip) for value, old, target in tokens_of(values, old_values, returns)
    ]
    assert_tokens(loss, [token_loss for token_loss, _ in expected])
    assert_tokens(gradient(loss.sum(), values), [slope for _, slope in expected])


def test_only_the_trained_policy_and_critic_get_a_gradient() -> None:
    trained, *constants = (leaf_normal(seed, 2, WIDTH) for seed in range(5))
    old_logprobs, advantages, old_values, returns = constants
    loss = policy_loss(trained, old_logprobs, advantages, clip_low=0.2, clip_high=0.2)
    loss = loss + value_loss(trained, old_values, returns, clip=0.2)
    gradients = torch.autograd.grad(loss.sum(), [trained, *constants], allow_unused=True)
    assert [x is not None for x in gradients] == [True, False, False, False, False]


def test_masked_sum_does_not_read_the_padding() -> None:
    mask = ragged_mask([2, 0])
    x = normal(5, 2, WIDTH).masked_fill(~mask, math.nan).requires_grad_()
    total = masked_sum(x, mask)
    assert total.item() == pytest.approx(sum(x[0, :2].tolist()))
    assert torch.equal(gradient(total, x), mask.double())
    assert torch.equal(masked_sum(x, mask.float()), total)


def grpo_token_loss(
    logprobs: Tensor, old_logprobs: Tensor, reference: Tensor, advantages: Tensor, kl_coef: float
) -> Tensor:
    """GRPO as the trainer puts it together; advantages [n, t]."""
    surrogate = policy_loss(logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.28)
    return surrogate + kl_coef * kl_estimate(logprobs, reference, kind="k3")


def reference_grpo(
    scores: list[float], lengths: list[int], group_size: int, kl_coef: float, *rows: list[list[float]]
) -> tuple[float, list[list[float]]]:
    """DeepSeekMath eqs. 3 and 4, averaged over all tokens as in DAPO: the loss and its gradient, from floats.

    `rows` are the log-probabilities of the policy, the old policy and the reference.
    """
    num_tokens = sum(lengths)
    loss, slopes = 0.0, [[0.0] * WIDTH for _ in lengths]
    for i, length in enumerate(lengths):
        group = scores[i - i % group_size : i - i % group_size + group_size]
        mean = sum(group) / group_size
        std = math.sqrt(sum((score - mean) ** 2 for score in group) / (group_size - 1))
        for t in range(length):
            new, old, ref = (x[i][t] for x in rows)
            surrogate, slope = reference_policy_loss(new, old, (scores[i] - mean) / (std + 1e-6), 0.2, 0.28)
            ratio = math.exp(ref) / math.exp(new)
            loss += (surrogate + kl_coef * (ratio - math.log(ratio) - 1)) / num_tokens
            slopes[i][t] = (slope + kl_coef * (1 - ratio)) / num_tokens
    return loss, slopes


@few_examples
@given(
    lengths=st.lists(st.integers(0, WIDTH), min_size=6, max_size=6).filter(any),
    seed=SEEDS,
    group_size=st.sampled_from([2, 3, 6]),
    kl_coef=st.floats(0.0, 0.5),
)
def test_grpo_end_to_end(lengths: list[int], seed: int, group_size: int, kl_coef: float) -> None:
    logprobs = leaf_normal(seed, 6, WIDTH)
    old_logprobs, reference = logprobs.detach() + 0.3 * normal(seed + 1, 2, 6, WIDTH)
    scores = normal(seed + 2, 6)
    advantages = group_advantages(scores, group_size=group_size)[:, None].expand(6, WIDTH)
    token_loss = grpo_token_loss(logprobs, old_logprobs, reference, advantages, kl_coef)
    loss = masked_sum(token_loss, ragged_mask(lengths)) / sum(lengths)

    expected, slopes = reference_grpo(
        scores.tolist(),
        lengths,
        group_size,
        kl_coef,
        logprobs.tolist(),
        old_logprobs.tolist(),
        reference.tolist(),
    )
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert_tokens(gradient(loss, logprobs), [slope for row in slopes for slope in row])


def bounded(x: Tensor, low: float, high: float) -> Tensor:
    """Scalar `x` where it is inside, else a constant."""
    return x if low <= x.item() <= high else x.new_tensor(low if x.item() < low else high)


def lesser(first: Tensor, second: Tensor) -> Tensor:
    return first if first.item() <= second.item() else second


def reference_ppo(
    leaves: tuple[Tensor, Tensor], constants: tuple[Tensor, ...], scores: list[float], lengths: list[int]
) -> Tensor:
    """RLHF with PPO, response by response and token by token, every term as the papers write it."""
    logprobs, values = leaves
    old_logprobs, reference, old_values = (x.tolist() for x in constants)
    gamma, lam, kl_coef = 0.99, 0.9, 0.1
    tokens, advantages, returns = [], [], []
    for i, length in enumerate(lengths):
        rewards = [-kl_coef * (old_logprobs[i][t] - reference[i][t]) for t in range(length)]
        if length:
            rewards[-1] += scores[i]
        baseline = [*old_values[i][:length], 0.0]
        for t in range(length):
            advantage = sum(
                (gamma * lam) ** (k - t) * (rewards[k] + gamma * baseline[k + 1] - baseline[k])
                for k in range(t, length)
            )
            tokens.append((i, t))
            advantages.append(advantage)
            returns.append(advantage + baseline[t])
    mean = sum(advantages) / len(advantages)
    std = math.sqrt(sum((a - mean) ** 2 for a in advantages) / (len(advantages) - 1) + 1e-8)
    total = torch.zeros((), dtype=torch.float64)
    for (i, t), advantage, target in zip(tokens, advantages, returns, strict=True):
        scaled = (advantage - mean) / std
        ratio = logprobs[i, t].exp() / math.exp(old_logprobs[i][t])
        total = total - lesser(ratio * scaled, bounded(ratio, 0.8, 1.2) * scaled)
        value, old = values[i, t], old_values[i][t]
        errors = (value - target, bounded(value, old - 0.2, old + 0.2) - target)
        total = total - lesser(*(-0.5 * error**2 for error in errors))
    return total / len(tokens)


@few_examples
@given(lengths=LENGTHS.filter(lambda lengths: sum(lengths) > 1), seed=SEEDS)
def test_ppo_end_to_end(lengths: list[int], seed: int) -> None:
    n, mask = len(lengths), ragged_mask(lengths)
    logprobs, values = leaf_normal(seed, n, WIDTH), leaf_normal(seed + 1, n, WIDTH)
    old_logprobs, reference = logprobs.detach() + 0.3 * normal(seed + 2, 2, n, WIDTH)
    old_values = values.detach() + 0.3 * normal(seed + 3, n, WIDTH)
    scores = normal(seed + 4, n)

    kl = kl_estimate(old_logprobs, reference, kind="k1")
    rewards = token_rewards(scores, kl, mask, kl_coef=0.1)
    advantages, returns = gae(rewards, old_values, mask, gamma=0.99, lam=0.9)
    token_loss = policy_loss(
        logprobs, old_logprobs, whiten(advantages, mask), clip_low=0.2, clip_high=0.2
    ) + value_loss(values, old_values, returns, clip=0.2)
    loss = masked_sum(token_loss, mask) / sum(lengths)

    expected = reference_ppo((logprobs, values), (old_logprobs, reference, old_values), scores.tolist(), lengths)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    for leaf in (logprobs, values):
        assert_near(gradient(loss, leaf), gradient(expected, leaf))


@few_examples
@given(lengths=LENGTHS.filter(any), seed=SEEDS, data=st.data())
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(
    lengths: list[int], seed: int, data: st.DataObject
) -> None:
    n = len(lengths)
    logprobs = leaf_normal(seed, n, WIDTH)
    old_logprobs, reference, advantages = logprobs.detach() + 0.3 * normal(seed + 1, 3, n, WIDTH)
    token_loss = grpo_token_loss(logprobs, old_logprobs, reference, advantages, kl_coef=0.1)
    whole = masked_sum(token_loss, ragged_mask(lengths)) / sum(lengths)

    micro_batch_of = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    parts = []
    for micro_batch in set(micro_batch_of):
        rows = [i for i in range(n) if micro_batch_of[i] == micro_batch]
        # Each is padded only as far as its own longest response.
        width = max(lengths[i] for i in rows)
        part_loss = grpo_token_loss(
            logprobs[rows, :width],
            old_logprobs[rows, :width],
            reference[rows, :width],
            advantages[rows, :width],
            kl_coef=0.1,
        )
        parts.append(masked_sum(part_loss, ragged_mask([lengths[i] for i in rows], width)) / sum(lengths))
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), abs=1e-6)
    accumulated = torch.stack([gradient(part, logprobs) for part in parts]).sum(0)
    assert_near(accumulated, gradient(whole, logprobs), 1e-7)


def test_empty_responses_contribute_nothing() -> None:
    logprobs = leaf_normal(6, 2, WIDTH)
    old_logprobs, reference, advantages = normal(7, 3, 2, WIDTH)
    token_loss = grpo_token_loss(logprobs, old_logprobs, reference, advantages, kl_coef=0.1)
    loss = masked_sum(token_loss, ragged_mask([0, 0]))
    assert loss.item() == 0.0
    assert not gradient(loss, logprobs).any()


def test_identical_scores_leave_only_the_kl_term() -> None:
    logprobs = leaf_normal(8, 4, WIDTH)
    reference = normal(9, 4, WIDTH)
    advantages = group_advantages(torch.full((4,), 0.1), group_size=4)[:, None].expand(4, WIDTH).double()
    loss = grpo_token_loss(logprobs, logprobs, reference, advantages, kl_coef=0.1)
    assert torch.equal(loss, 0.1 * kl_estimate(logprobs, reference, kind="k3"))


def test_errors_name_the_offending_value() -> None:
    x, other = torch.zeros(2, 3), torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"'advantages': \(2, 4\)"):
        policy_loss(x, x, other, clip_low=0.2, clip_high=0.2)
    with pytest.raises(ValueError, match=r"'advantages': \(2,\)"):
        policy_loss(x, x, torch.zeros(2), clip_low=0.2, clip_high=0.2)
    with pytest.raises(ValueError, match=r"clip_low .* 1\.5"):
        policy_loss(x, x, x, clip_low=1.5, clip_high=0.2)
    with pytest.raises(ValueError, match=r"clip_high .* -0\.2"):
        policy_loss(x, x, x, clip_low=0.2, clip_high=-0.2)
    with pytest.raises(ValueError, match=r"'old_values': \(2, 4\)"):
        value_loss(x, other, x, clip=None)
    with pytest.raises(ValueError, match=r"clip .* -1\.0"):
        value_loss(x, x, x, clip=-1.0)
    with pytest.raises(ValueError, match=r"'mask': \(2, 4\)"):
        masked_sum(x, other)


def trl_trainer(folder: Path, scores: list[float], lengths: list[int], group_size: int, **config: Any) -> Any:
    """TRL's GRPO trainer, evaluating a one-layer model, with scores and lengths given instead of sampled."""
    trl = pytest.importorskip("trl", minversion="1.16", reason="trl >= 1.16 is not installed")
    datasets, tokenizers, transformers = map(pytest.importorskip, ("datasets", "tokenizers", "transformers"))

    def rollout(prompts: list[str], _: object) -> dict[str, list[list[int]] | list[list[float]]]:
        return {
            "prompt_ids": [[1] for _ in prompts],
            "completion_ids": [[1] * length for length in lengths],
            "logprobs": [[0.0] * length for length in lengths],
        }

    model_config = transformers.LlamaConfig(
        vocab_size=3, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    # TRL reads the model, and the reference once more, from a folder.
    transformers.LlamaForCausalLM(model_config).save_pretrained(folder)
    word_level = tokenizers.models.WordLevel({"<pad>": 0, "a": 1, "<eos>": 2}, unk_token="a")
    trainer = trl.GRPOTrainer(
        str(folder),
        reward_funcs=lambda **_: scores,
        args=trl.GRPOConfig(
            output_dir=str(folder / "output"),
            per_device_train_batch_size=len(scores),
            num_generations=group_size,
            use_cpu=True,
            bf16=False,
            report_to="none",
            **config,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a"]}),
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer(word_level), pad_token="<pad>", eos_token="<eos>"
        ),
        rollout_func=rollout,
    )
    trainer.model.eval()
    return trainer


@pytest.mark.parametrize("weigh_kl_by_ratio", [False, True])
def test_grpo_agrees_with_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weigh_kl_by_ratio: bool) -> None:
    lengths, scores = [6, 2, 1, 4, 5, 3], [1.0, 0.0, 0.5, 0.1, 0.1, 0.2]
    config = {"loss_type": "dapo", "beta": 0.1, "epsilon": 0.2, "epsilon_high": 0.28}
    # TRL's default is True, the variant of DeepSeek-V3.2 (arXiv:2512.02556); False is GRPO as published.
    config["use_bias_correction_kl"] = weigh_kl_by_ratio
    trainer = trl_trainer(tmp_path, scores, lengths, group_size=3, **config)
    batch = trainer._generate_and_score_completions([{"prompt": "a"}] * len(scores))
    advantages = group_advantages(torch.tensor(scores), group_size=3, eps=1e-4)
    assert_near(advantages, batch["advantages"])

    logprobs = leaf_normal(10, 6, WIDTH)
    old_logprobs, reference = logprobs.detach() + 0.3 * normal(11, 2, 6, WIDTH)
    token_advantages = advantages.double()[:, None].expand(6, WIDTH)
    kl = kl_estimate(logprobs, reference, kind="k3")
    if weigh_kl_by_ratio:
        kl = kl * torch.exp(logprobs - old_logprobs)
    surrogate = policy_loss(logprobs, old_logprobs, token_advantages, clip_low=0.2, clip_high=0.28)
    loss = masked_sum(surrogate + 0.1 * kl, ragged_mask(lengths)) / sum(lengths)

    forward = (logprobs, torch.zeros_like(logprobs), None)
    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: forward)
    batch |= {"old_per_token_logps": old_logprobs, "ref_per_token_logps": reference}
    trl_loss = trainer._compute_loss(trainer.model, batch)
    assert loss.item() == pytest.approx(trl_loss.item(), abs=1e-6)
    assert_near(gradient(loss, logprobs), gradient(trl_loss, logprobs))
