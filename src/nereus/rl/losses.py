"""Losses of PPO and GRPO, per token and not reduced: shape in [n, t], shape out [n, t].

The trainer reduces them, and always in the same way: it adds up `masked_sum` over the micro-batches and the
data-parallel ranks, and divides by the number of response tokens of the *global* mini-batch,

    loss = sum over ranks and micro-batches of masked_sum(token_loss, mask) / global response tokens

so loss and gradient do not depend on the data-parallel degree, the micro-batch size or how long the padding
is. A mean over each micro-batch would weigh tokens by the company they happen to be in. (So gradients are
summed over the ranks, not averaged.) This is the token-level loss of DAPO; GRPO as first published averages
within each response before it averages over responses, which weighs the tokens of short responses more.

    PPO    policy_loss + value_loss (each for its own model)
    GRPO   policy_loss + kl_coef * kl_estimate(..., kind="k3"); a response's advantage at each of its tokens

The KL term is the published one. DeepSeek-V3.2 (arXiv:2512.02556) multiplies it by the importance ratio, and
so does TRL unless told otherwise (`use_bias_correction_kl`).

Log-probabilities are in nats, of the sampled tokens. The padding must hold finite numbers (0 will do)
wherever a gradient is wanted: autograd multiplies the zero that `masked_sum` sends back with the local
derivative.

Sources:
    PPO    Schulman et al. 2017, arXiv:1707.06347
    GRPO   Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300
    DAPO   Yu et al. 2025, arXiv:2503.14476
"""

import torch
from torch import Tensor

from nereus.rl.advantages import check_token_shapes, kl_estimate


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """The clipped surrogate objective of PPO, negated, [n, t].

    PPO eq. 7 with r = exp(logprobs - old_logprobs): -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). PPO
    and GRPO have clip_low = clip_high; DAPO section 3.1 ("clip-higher") sets them apart.

    Args:
        logprobs: [n, t], under the policy that is trained; the only argument that gets a gradient.
        old_logprobs: [n, t], under the policy that sampled; `logprobs` itself if on-policy (r = 1).
        advantages: [n, t].
        clip_low: in [0, 1].
        clip_high: not negative.

    Raises:
        ValueError: shapes differ or a clip is out of range.
    """
    unclipped, clipped = _surrogate_losses(logprobs, old_logprobs, advantages, clip_low, clip_high)
    return torch.maximum(unclipped, clipped)


@torch.no_grad()
def policy_metric_sums(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Two scalars, summed over the response tokens: how many were clipped, and KL(old || new) in nats.

    Divided by the global response tokens, as the losses are, they give the clip fraction and the approximate
    KL that trackers show. Clipped is a token whose gradient the clip took away. The KL is the k3 estimate,
    for tokens that were sampled from the old policy.

    Args and raises: as `policy_loss`, and `mask` [n, t].
    """
    unclipped, clipped = _surrogate_losses(logprobs, old_logprobs, advantages, clip_low, clip_high)
    is_clipped = (clipped > unclipped).to(logprobs.dtype)
    approx_kl = kl_estimate(old_logprobs, logprobs, kind="k3")
    return masked_sum(is_clipped, mask), masked_sum(approx_kl, mask)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> Tensor:
    """Half the squared error of the critic, [n, t], with no gain from moving further than `clip`.

    0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2). Not in the PPO paper but in its authors'
    code (OpenAI baselines, `ppo2/model.py`), and in TRL and verl since.

    Args:
        values: [n, t], of the critic that is trained; the only argument that gets a gradient.
        old_values: [n, t], as they were when the response was sampled.
        returns: [n, t], see `nereus.rl.advantages.gae`.
        clip: in the unit of the values, not negative; None for the plain squared error.

    Raises:
        ValueError: shapes differ or clip is negative.
    """
    check_token_shapes(values=values, old_values=old_values, returns=returns)
    old_values, returns = old_values.detach(), returns.detach()
    error = (values - returns).square()
    if clip is None:
        return 0.5 * error
    if not clip >= 0.0:
        raise ValueError(f"clip must not be negative, got {clip}")
    clipped_values = torch.clamp(values, old_values - clip, old_values + clip)
    return 0.5 * torch.maximum(error, (clipped_values - returns).square())


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Scalar sum of `x` [n, t] over the response tokens; values in the padding are not read.

    Raises:
        ValueError: shapes differ.
    """
    check_token_shapes(x=x, mask=mask)
    return x.masked_fill(~mask.bool(), 0).sum()


def _surrogate_losses(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """The two terms of PPO eq. 7, negated: (unclipped, clipped), each [n, t]."""
    check_token_shapes(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    if not 0.0 <= clip_low <= 1.0:
        raise ValueError(f"clip_low must be in [0, 1], got {clip_low}")
    if not clip_high >= 0.0:
        raise ValueError(f"clip_high must not be negative, got {clip_high}")
    advantages = advantages.detach()
    ratio = torch.exp(logprobs - old_logprobs.detach())
    return -ratio * advantages, -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
