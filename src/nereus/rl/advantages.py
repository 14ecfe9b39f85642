"""From scores to advantages: the part of PPO and GRPO that comes before the loss.

    PPO    scores, kl ── token_rewards ──> rewards ── gae(values) ──> returns, advantages ── whiten
    GRPO   scores ── group_advantages ──> one advantage per response, the same for each of its tokens

Token tensors have shape [n, t]: n responses, padded on the right to t tokens. `mask` has the same shape, bool
or 0/1, and marks the response tokens, contiguous from column 0; a response may be empty. Log-probabilities
and KL are in nats. What stands in the padding is never read (it may be NaN), and the results there are zero.
Results have the dtype of their input, float32 or float64.

`whiten` and `group_advantages` depend on the whole batch or group: call them before the batch is cut into
micro-batches or data-parallel shards.

Sources:
    PPO       Schulman et al. 2017, arXiv:1707.06347
    GAE       Schulman et al. 2015, arXiv:1506.02438
    KL        Schulman 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html
    GRPO      Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300
    Dr. GRPO  Liu et al. 2025, arXiv:2503.20783
"""

from typing import Literal, assert_never, get_args

import torch
from torch import Tensor

KlKind = Literal["k1", "k2", "k3"]


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and the returns that the critic is fitted to, both [n, t].

    GAE eq. 16 as a recursion, with the value after the last response token 0 (the episode has ended):

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}        R_t = A_t + V_t

    Args:
        rewards: [n, t], reward of each token; see `token_rewards`.
        values: [n, t], the critic's value before each token, as it was when the response was sampled.
        mask: [n, t], response tokens.
        gamma: discount per token, in [0, 1].
        lam: bias-variance trade-off, in [0, 1].

    Raises:
        ValueError: shapes differ, the mask has holes, or gamma or lam is outside [0, 1].
    """
    check_token_shapes(rewards=rewards, values=values, mask=mask)
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= number <= 1.0:
            raise ValueError(f"{name} must be in [0, 1], got {number}")
    padding = ~_right_padded(mask)
    rewards, values = rewards.masked_fill(padding, 0), values.masked_fill(padding, 0)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(values.shape[0])
    # With rewards and values zero in the padding, every delta there is zero: the last token sees none of it.
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = delta + gamma * lam * next_advantage
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values


def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """`x` [n, t] scaled to unit variance over all response tokens, and to mean zero if `shift_mean`.

    The variance is the unbiased one (n - 1), and 1e-8 is added to it under the root, as in `masked_whiten` of
    TRL and verl. Those raise on a single token; here its variance counts as 0.

    Raises:
        ValueError: shapes differ.
    """
    check_token_shapes(x=x, mask=mask)
    padding = ~mask.bool()
    num_tokens = mask.bool().sum()
    mean = x.masked_fill(padding, 0).sum() / num_tokens.clamp(min=1)
    centred = (x - mean).masked_fill(padding, 0)
    variance = centred.square().sum() / (num_tokens - 1).clamp(min=1)
    whitened = centred * torch.rsqrt(variance + 1e-8)
    return whitened if shift_mean else (whitened + mean).masked_fill(padding, 0)


@torch.no_grad()
def group_advantages(scores: Tensor, *, group_size: int, normalize_std: bool = True, eps: float = 1e-6) -> Tensor:
    """GRPO's advantage of each response over the other samples of its prompt, [n].

    DeepSeekMath section 4.1.2 (outcome supervision): (score - mean) / (std + eps) within the group;
    `normalize_std=False` leaves the division out, as Dr. GRPO does. The standard deviation is the unbiased
    one, as in TRL and verl; eps is verl's (TRL has 1e-4). A group of identical scores gets exactly zero:
    rounding of the mean, divided by eps, would be a signal made of noise.

    Args:
        scores: [n], one per response; the `group_size` samples of a prompt are consecutive.
        group_size: samples per prompt, at least 2: a lone sample has nothing to be compared with.
        normalize_std: divide by the standard deviation of the group.
        eps: added to the standard deviation, in the unit of the scores.

    Raises:
        ValueError: scores are not one-dimensional, n is no multiple of group_size, or group_size is below 2.
    """
    if scores.ndim != 1:
        raise ValueError(f"scores must have shape [n], got {tuple(scores.shape)}")
    if group_size < 2:
        raise ValueError(f"group_size must be at least 2, got {group_size}")
    if len(scores) % group_size:
        raise ValueError(f"{len(scores)} scores do not divide into groups of group_size={group_size}")
    groups = scores.view(-1, group_size)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    if normalize_std:
        advantages = advantages / (groups.std(dim=1, keepdim=True) + eps)
    identical = (groups == groups[:, :1]).all(dim=1, keepdim=True)
    return advantages.masked_fill(identical, 0).view(-1)


@torch.no_grad()
def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
    """Rewards [n, t]: -kl_coef * kl at every response token, plus the response's score at its last one.

    The KL-shaped reward of RLHF with PPO (Ouyang et al. 2022, arXiv:2203.02155, eq. 2; DeepSeekMath eq. 2).
    An empty response gets nothing, not even its score: there is no token to reward.

    Args:
        scores: [n], score of each response.
        kl: [n, t], per-token KL to the reference policy; see `kl_estimate`.
        mask: [n, t], response tokens.
        kl_coef: reward per nat, not negative.

    Raises:
        ValueError: shapes differ, the mask has holes, or kl_coef is negative.
    """
    check_token_shapes(kl=kl, mask=mask)
    if scores.shape != kl.shape[:1]:
        raise ValueError(f"scores must have shape [{kl.shape[0]}], got {tuple(scores.shape)}")
    if not kl_coef >= 0.0:
        raise ValueError(f"kl_coef must not be negative, got {kl_coef}")
    response = _right_padded(mask)
    followed = torch.zeros_like(response)
    followed[:, :-1] = response[:, 1:]
    last = response & ~followed
    return (-kl_coef * kl).masked_fill(~response, 0) + scores[:, None].masked_fill(~last, 0)


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, *, kind: KlKind) -> Tensor:
    """Per-token Monte Carlo estimate of KL(policy || reference) in nats, [n, t].

    Schulman 2020, with r = p_reference / p_policy of a token sampled from the policy:

        k1 = -log r                 unbiased, high variance, may be negative
        k2 = (log r)^2 / 2          biased, low variance; its expected gradient is that of the KL
        k3 = (r - 1) - log r        unbiased, low variance, never negative; GRPO's (DeepSeekMath eq. 4)

    Differentiable. Unlike the rest of this module it has no mask: padding comes out as whatever stood there.

    Raises:
        ValueError: shapes differ or `kind` is unknown.
    """
    check_token_shapes(logprobs=logprobs, reference_logprobs=reference_logprobs)
    if kind not in get_args(KlKind):
        raise ValueError(f"unknown KL estimator {kind!r}, expected one of {get_args(KlKind)}")
    log_ratio = reference_logprobs - logprobs
    match kind:
        case "k1":
            return -log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            # expm1, because r - 1 would lose to rounding the small values that k3 is made for.
            return torch.expm1(log_ratio) - log_ratio
    assert_never(kind)


def check_token_shapes(**tensors: Tensor) -> None:
    """Raises ValueError, with every name and shape, unless all tensors have one and the same shape [n, t]."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 2 for shape in shapes.values()):
        raise ValueError(f"expected one shape [n, t], got {shapes}")


def _right_padded(mask: Tensor) -> Tensor:
    """`mask` as bool; raises ValueError with the first row that is not contiguous from column 0."""
    response = mask.bool()
    broken = (response[:, 1:] & ~response[:, :-1]).any(dim=1)
    if broken.any():
        row = int(broken.int().argmax())
        raise ValueError(f"mask row {row} is not contiguous from column 0: {response[row].int().tolist()}")
    return response
