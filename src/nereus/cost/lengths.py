"""How long responses are: a lognormal, cut at the longest, from the mean and the 95th percentile.

Chat and reasoning lengths are close to lognormal with a long tail; what would be longer than the limit ends there, so the
longest carries a mass of its own (the "clip ratio" that RL frameworks log).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nereus.core.workload import Workload
from nereus.cost.work import Array

Z95 = 1.6448536269514722
USUAL_SIGMA = 0.6
"""Spread of log lengths where no percentile says it: 0.9 over all chats of AzurePublicDataset, RL batches 0.3-0.7."""


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """min(X, longest) with log X normal(mu, sigma)."""

    mu: float
    sigma: float
    longest: float

    @classmethod
    def of(cls, workload: Workload) -> LengthDistribution:
        mean, longest, p95 = workload.response_length, workload.longest_response, workload.response_p95
        if mean >= longest * (1 - 1e-9):
            return cls(math.log(longest) + 1.0, 1e-3, longest)
        if p95 is None or p95 >= longest * (1 - 1e-9) or p95 <= mean:
            return cls(_mu_for_mean(mean, USUAL_SIGMA, longest), USUAL_SIGMA, longest)
        low, high = 1e-3, Z95  # the mean falls with sigma at a fixed percentile, until sigma = 1.645
        for _ in range(30):
            sigma = (low + high) / 2
            if _mean(math.log(p95) - Z95 * sigma, sigma, longest) > mean:
                low = sigma
            else:
                high = sigma
        sigma = (low + high) / 2
        return cls(math.log(p95) - Z95 * sigma, sigma, longest)

    @property
    def mean(self) -> float:
        return _mean(self.mu, self.sigma, self.longest)

    @property
    def second_moment(self) -> float:
        """E[L^2]."""
        tail = 1 - _phi((math.log(self.longest) - self.mu) / self.sigma)
        body = math.exp(2 * self.mu + 2 * self.sigma**2) * _phi(
            (math.log(self.longest) - self.mu - 2 * self.sigma**2) / self.sigma
        )
        return body + self.longest**2 * tail

    def quantile(self, share: Array) -> Array:
        """Length that `share` of the responses do not exceed, [..]."""
        found: Array = np.minimum(self.longest, np.exp(self.mu + self.sigma * _probit(share)))
        return found

    def survival(self, lengths: Array) -> Array:
        """Share of the responses that are still going after `lengths` tokens, for lengths < longest."""
        z = (np.log(np.maximum(lengths, 1e-9)) - self.mu) / self.sigma
        share: Array = 1 - _phi_array(z)
        return share

    def expected_longest(self, count: Array) -> Array:
        """About how long the longest of `count` responses is: the median of the maximum."""
        return self.quantile(np.asarray(0.5 ** (1 / np.maximum(count, 1.0))))


def _mean(mu: float, sigma: float, longest: float) -> float:
    edge = (math.log(longest) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * _phi(edge - sigma) + longest * (1 - _phi(edge))


def _mu_for_mean(mean: float, sigma: float, longest: float) -> float:
    low, high = math.log(mean) - sigma**2, math.log(longest) + 4 * sigma
    for _ in range(40):
        mu = (low + high) / 2
        if _mean(mu, sigma, longest) < mean:
            low = mu
        else:
            high = mu
    return (low + high) / 2


def _phi(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


def _phi_array(z: Array) -> Array:
    """Normal distribution function by Abramowitz and Stegun 7.1.26, error below 1.5e-7."""
    x = np.abs(z) / math.sqrt(2)
    t = 1 / (1 + 0.3275911 * x)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    half = 0.5 * poly * np.exp(-(x**2))
    return np.where(z < 0, half, 1 - half)


def _probit(share: Array) -> Array:
    """Inverse of the normal distribution function by Abramowitz and Stegun 26.2.23, error below 4.5e-4."""
    share = np.clip(share, 1e-12, 1 - 1e-12)
    t = np.sqrt(-2 * np.log(np.minimum(share, 1 - share)))
    top = 2.515517 + t * (0.802853 + t * 0.010328)
    z = t - top / (1 + t * (1.432788 + t * (0.189269 + t * 0.001308)))
    found: Array = np.where(share < 0.5, -z, z)
    return found
