"""What the two trained models minimise, as a loss over one micro-batch's hidden states.

Sums over response tokens, divided by the number of response tokens of the *global* mini-batch: the result does not
depend on dp or on micro-batches. Statistics are sums as well; the loop divides them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nereus.core.job import AlgorithmSection
from nereus.engine.batch import MicroBatch
from nereus.engine.unit import Loss, Unit
from nereus.rl.advantages import kl_estimate
from nereus.rl.losses import masked_sum, policy_loss, policy_metric_sums, value_loss

POLICY_STATISTICS = ("policy_loss", "clip_fraction", "approx_kl", "entropy", "kl_loss")
VALUE_STATISTICS = ("value_loss",)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTargets:
    """Response-aligned float32 [n, r]; num_tokens: response tokens of the global mini-batch."""

    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    reference_logprobs: torch.Tensor
    num_tokens: int
    temperature: float
    algorithm: AlgorithmSection

    def rows(self, index: torch.Tensor) -> PolicyTargets:
        return PolicyTargets(
            old_logprobs=self.old_logprobs[index],
            advantages=self.advantages[index],
            reference_logprobs=self.reference_logprobs[index],
            num_tokens=self.num_tokens,
            temperature=self.temperature,
            algorithm=self.algorithm,
        )

    def loss(self, unit: Unit) -> Loss:
        """Clipped surrogate, entropy bonus, and the KL to the reference where it belongs to the loss."""
        a = self.algorithm

        def compute(micro: MicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            mask = micro.sequences.response_mask()
            old, advantages, reference = (
                _fit(t, micro.index, mask) for t in (self.old_logprobs, self.advantages, self.reference_logprobs)
            )
            logprobs, entropy = unit.response_statistics(micro, hidden, self.temperature)
            surrogate = masked_sum(
                policy_loss(logprobs, old, advantages, clip_low=a.clip_low, clip_high=a.clip_high), mask
            )
            kl = masked_sum(kl_estimate(logprobs, reference, kind=a.kl_estimator), mask)
            bonus = masked_sum(entropy, mask)
            total = surrogate - a.entropy_coef * bonus
            if a.kl_place == "loss":
                total = total + a.kl_coef * kl
            clipped, approx_kl = policy_metric_sums(
                logprobs.detach(), old, advantages, mask, clip_low=a.clip_low, clip_high=a.clip_high
            )
            row = torch.stack([x.detach().double() for x in (surrogate, clipped, approx_kl, bonus, kl)])
            return total / self.num_tokens, row

        return compute


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTargets:
    """Response-aligned float32 [n, r]; num_tokens: response tokens of the global mini-batch."""

    old_values: torch.Tensor
    returns: torch.Tensor
    num_tokens: int
    clip: float | None

    def rows(self, index: torch.Tensor) -> ValueTargets:
        return ValueTargets(
            old_values=self.old_values[index],
            returns=self.returns[index],
            num_tokens=self.num_tokens,
            clip=self.clip,
        )

    def loss(self, unit: Unit) -> Loss:
        """Clipped squared error of the values."""

        def compute(micro: MicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            mask = micro.sequences.response_mask()
            old, returns = (_fit(t, micro.index, mask) for t in (self.old_values, self.returns))
            values = unit.response_values(micro, hidden)
            total = masked_sum(value_loss(values, old, returns, clip=self.clip), mask)
            return total / self.num_tokens, total.detach().double()[None]

        return compute


Targets = PolicyTargets | ValueTargets


def _fit(whole: torch.Tensor, index: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A micro-batch's rows, as wide as its mask, on its device."""
    return whole[index, : mask.shape[1]].to(mask.device)
