"""Advantages against references written from the papers, in plain Python over lists of floats."""

import math
import statistics
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nereus.rl.advantages import KlKind, gae, group_advantages, kl_estimate, token_rewards, whiten

WIDTH = 6
LENGTHS = st.lists(st.integers(0, WIDTH), min_size=1, max_size=5)
SEEDS = st.integers(0, 2**31 - 1)
UNIT = st.floats(0.0, 1.0)
few_examples = settings(max_examples=25, derandomize=True, deadline=None)


def ragged_mask(lengths: list[int], width: int = WIDTH) -> Tensor:
    """[n, width] bool: row i has lengths[i] response tokens."""
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def response_tokens(x: Tensor, lengths: list[int]) -> list[list[float]]:
    return [row[:length] for row, length in zip(x.tolist(), lengths, strict=True)]


def assert_tokens(actual: Tensor, expected: list[list[float]], tolerance: float = 1e-6) -> None:
    """`actual` [n, t] holds the ragged `expected`, and zero in the padding."""
    padded = [row + [0.0] * (actual.shape[1] - len(row)) for row in expected]
    torch.testing.assert_close(actual, torch.tensor(padded, dtype=actual.dtype), rtol=0, atol=tolerance)


def reference_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """GAE eq. 16 as the sum it is defined as: sum over l of (gamma lam)^l delta_{t+l}."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=False)]
    return [
        sum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, len(deltas))) for t in range(len(deltas))
    ]


@few_examples
@given(lengths=LENGTHS, seed=SEEDS, gamma=UNIT, lam=UNIT)
def test_gae_is_the_discounted_sum_of_td_errors(lengths: list[int], seed: int, gamma: float, lam: float) -> None:
    rewards, values = normal(seed, 2, len(lengths), WIDTH)
    advantages, returns = gae(rewards, values, ragged_mask(lengths), gamma=gamma, lam=lam)

    value_rows = response_tokens(values, lengths)
    expected = [
        reference_gae(r, v, gamma, lam) for r, v in zip(response_tokens(rewards, lengths), value_rows, strict=True)
    ]
    assert_tokens(advantages, expected)
    sums = [[a + v for a, v in zip(*rows, strict=True)] for rows in zip(expected, value_rows, strict=True)]
    assert_tokens(returns, sums)


def test_returns_with_lam_1_are_the_rewards_to_go_whatever_the_critic_says() -> None:
    lengths = [6, 3, 1, 0]
    rewards, values = normal(0, 2, 4, WIDTH)
    mask = ragged_mask(lengths)
    to_go = [
        [sum(0.9**k * r for k, r in enumerate(row[t:])) for t in range(len(row))]
        for row in response_tokens(rewards, lengths)
    ]
    for critic in (values, torch.zeros_like(values), 100 * values):
        assert_tokens(gae(rewards, critic, mask, gamma=0.9, lam=1.0)[1], to_go)


def test_gae_of_a_perfect_critic_is_zero() -> None:
    mask = ragged_mask([5, 2])
    rewards = normal(1, 2, WIDTH).masked_fill(~mask, 0)
    value_is_reward_to_go = rewards.flip(1).cumsum(1).flip(1)
    advantages, _ = gae(rewards, value_is_reward_to_go, mask, gamma=1.0, lam=0.7)
    torch.testing.assert_close(advantages, torch.zeros_like(advantages))


def test_gae_of_a_single_token_is_its_reward_minus_its_value() -> None:
    advantages, returns = gae(torch.tensor([[2.0]]), torch.tensor([[0.5]]), torch.tensor([[True]]), gamma=0.9, lam=0.8)
    assert (advantages.item(), returns.item()) == (1.5, 2.0)


def test_padding_is_never_read() -> None:
    mask = ragged_mask([4, 0, 6])
    x, y = normal(2, 2, 3, WIDTH)
    scores = normal(3, 3)
    for poison in (math.nan, math.inf, 1e30):
        x_poisoned, y_poisoned = x.masked_fill(~mask, poison), y.masked_fill(~mask, poison)
        for clean, poisoned in zip(
            gae(x, y, mask, gamma=0.9, lam=0.9),
            gae(x_poisoned, y_poisoned, mask, gamma=0.9, lam=0.9),
            strict=True,
        ):
            assert torch.equal(clean, poisoned)
        assert torch.equal(whiten(x, mask), whiten(x_poisoned, mask))
        assert torch.equal(
            token_rewards(scores, x, mask, kl_coef=0.1), token_rewards(scores, x_poisoned, mask, kl_coef=0.1)
        )


def test_float_mask_and_float32_are_taken_as_they_are() -> None:
    mask = ragged_mask([4, 0, 6])
    rewards, values = normal(4, 2, 3, WIDTH).float()
    for bool_result, float_result in zip(
        gae(rewards, values, mask, gamma=1.0, lam=0.95),
        gae(rewards, values, mask.float(), gamma=1.0, lam=0.95),
        strict=True,
    ):
        assert torch.equal(bool_result, float_result)
        assert float_result.dtype == torch.float32
    assert whiten(rewards, mask.float()).dtype == torch.float32


def test_targets_carry_no_gradient() -> None:
    mask = ragged_mask([4, 2])
    leaf = normal(5, 2, WIDTH).requires_grad_()
    advantages, returns = gae(leaf, leaf, mask, gamma=1.0, lam=1.0)
    rewards = token_rewards(leaf[:, 0], leaf, mask, kl_coef=0.1)
    group = group_advantages(leaf[:, 0], group_size=2)
    assert not any(tensor.requires_grad for tensor in (advantages, returns, rewards, group))


@few_examples
@given(lengths=LENGTHS.filter(lambda lengths: sum(lengths) > 1), seed=SEEDS, shift_mean=st.booleans())
def test_whiten_over_all_response_tokens(lengths: list[int], seed: int, shift_mean: bool) -> None:
    x = 3.0 + 2.0 * normal(seed, len(lengths), WIDTH)
    rows = response_tokens(x, lengths)
    tokens = [token for row in rows for token in row]
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    shift = 0.0 if shift_mean else mean
    expected = [[(token - mean) / math.sqrt(variance + 1e-8) + shift for token in row] for row in rows]
    assert_tokens(whiten(x, ragged_mask(lengths), shift_mean=shift_mean), expected)


def test_whiten_of_a_single_token_and_of_none() -> None:
    x = torch.tensor([[5.0, 7.0]])
    assert whiten(x, torch.tensor([[1, 0]])).tolist() == [[0.0, 0.0]]
    assert whiten(x, torch.tensor([[1, 0]]), shift_mean=False).tolist() == [[5.0, 0.0]]
    assert whiten(x, torch.tensor([[0, 0]])).tolist() == [[0.0, 0.0]]


@few_examples
@given(seed=SEEDS, num_groups=st.integers(1, 4), group_size=st.integers(2, 5), normalize_std=st.booleans())
def test_group_advantages_compare_within_the_group(
    seed: int, num_groups: int, group_size: int, normalize_std: bool
) -> None:
    scores = normal(seed, num_groups * group_size)
    expected = []
    for start in range(0, len(scores), group_size):
        group = scores[start : start + group_size].tolist()
        scale = statistics.stdev(group) + 1e-6 if normalize_std else 1.0
        expected += [(score - statistics.fmean(group)) / scale for score in group]
    actual = group_advantages(scores, group_size=group_size, normalize_std=normalize_std)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("normalize_std", [True, False])
def test_a_group_of_identical_scores_gets_exactly_zero(normalize_std: bool) -> None:
    identical = torch.full((7,), 0.1)
    assert (identical - identical.mean()).any(), "pick a score whose mean is rounded"
    scores = torch.cat([identical, torch.arange(7.0)])
    advantages = group_advantages(scores, group_size=7, normalize_std=normalize_std)
    assert advantages[:7].tolist() == [0.0] * 7
    assert advantages[7:].abs().sum() > 0


@few_examples
@given(lengths=LENGTHS, seed=SEEDS, kl_coef=UNIT)
def test_token_rewards_add_up_to_score_minus_kl(lengths: list[int], seed: int, kl_coef: float) -> None:
    kl = normal(seed, len(lengths), WIDTH)
    scores = normal(seed + 1, len(lengths))
    expected = [[-kl_coef * token for token in row] for row in response_tokens(kl, lengths)]
    for row, score in zip(expected, scores.tolist(), strict=True):
        if row:
            row[-1] += score
    assert_tokens(token_rewards(scores, kl, ragged_mask(lengths), kl_coef=kl_coef), expected)


@few_examples
@given(seed=SEEDS)
def test_kl_estimates_follow_their_formulas(seed: int) -> None:
    logprobs, reference = normal(seed, 2, 3, WIDTH) - 2.0
    rows = zip(logprobs.tolist(), reference.tolist(), strict=True)
    pairs = [list(zip(*row, strict=True)) for row in rows]
    k1 = [[p - q for p, q in row] for row in pairs]
    k2 = [[(q - p) ** 2 / 2 for p, q in row] for row in pairs]
    k3 = [[math.exp(q) / math.exp(p) - 1 - (q - p) for p, q in row] for row in pairs]
    assert_tokens(kl_estimate(logprobs, reference, kind="k1"), k1)
    assert_tokens(kl_estimate(logprobs, reference, kind="k2"), k2)
    assert_tokens(kl_estimate(logprobs, reference, kind="k3"), k3)


def test_expected_k1_and_k3_are_the_kl_and_the_expected_gradient_of_k2_is_its_gradient() -> None:
    logits, reference_logits = normal(6, 2, 1, 8)
    logits.requires_grad_()
    logprobs, reference = logits.log_softmax(-1), reference_logits.log_softmax(-1)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    # Every outcome weighted by its probability: the expectation itself, no sampling.
    expectation = {
        kind: (logprobs.exp().detach() * kl_estimate(logprobs, reference, kind=kind)).sum()
        for kind in cast(list[KlKind], ["k1", "k2", "k3"])
    }
    assert expectation["k1"].item() == pytest.approx(exact.item(), abs=1e-12)
    assert expectation["k3"].item() == pytest.approx(exact.item(), abs=1e-12)
    (gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (k2_gradient,) = torch.autograd.grad(expectation["k2"], logits)
    torch.testing.assert_close(k2_gradient, gradient)


def test_k3_of_nearly_equal_policies_is_not_lost_to_rounding() -> None:
    logprobs = torch.linspace(-1e-3, 1e-3, 1001)[None]
    k3 = kl_estimate(logprobs, torch.zeros_like(logprobs), kind="k3")
    # exp(x) - 1 in float32 is off by up to 6e-8, a tenth of the largest k3 here.
    torch.testing.assert_close(k3, logprobs.square() / 2 - logprobs**3 / 6, rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_no_responses_and_no_tokens_give_empty_results(shape: tuple[int, int]) -> None:
    empty = torch.zeros(shape)
    advantages, returns = gae(empty, empty, empty, gamma=1.0, lam=1.0)
    rewards = token_rewards(empty.new_ones(shape[0]), empty, empty, kl_coef=0.1)
    assert {tuple(x.shape) for x in (advantages, returns, rewards, whiten(empty, empty))} == {shape}


def test_errors_name_the_offending_value() -> None:
    x, mask = torch.zeros(2, 3), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"'values': \(2, 4\)"):
        gae(x, torch.zeros(2, 4), mask, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"'mask': \(3,\)"):
        whiten(torch.zeros(3), torch.ones(3))
    with pytest.raises(ValueError, match=r"gamma .* 1\.5"):
        gae(x, x, mask, gamma=1.5, lam=1.0)
    with pytest.raises(ValueError, match=r"lam .* nan"):
        gae(x, x, mask, gamma=1.0, lam=math.nan)
    with pytest.raises(ValueError, match=r"row 1 .* \[0, 1, 1\]"):
        gae(x, x, torch.tensor([[1, 1, 0], [0, 1, 1]]), gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        group_advantages(x, group_size=2)
    with pytest.raises(ValueError, match=r"5 scores .* group_size=2"):
        group_advantages(torch.zeros(5), group_size=2)
    with pytest.raises(ValueError, match="got 1"):
        group_advantages(torch.zeros(5), group_size=1)
    with pytest.raises(ValueError, match=r"\[2\], got \(3,\)"):
        token_rewards(torch.zeros(3), x, mask, kl_coef=0.1)
    with pytest.raises(ValueError, match=r"-0\.1"):
        token_rewards(torch.zeros(2), x, mask, kl_coef=-0.1)
    with pytest.raises(ValueError, match="'k4'"):
        kl_estimate(x, x, kind=cast(KlKind, "k4"))
