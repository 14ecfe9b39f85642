"""What devices and links really achieve: one efficiency per operation class, learned from measured times.

A prediction is linear in what is learned:

    seconds = sum over classes of (seconds at peak rates) / efficiency

so one measured operation (one class), or a whole task (many classes at once), is a row of the same robust regression on
log seconds, held near conservative priors until data speak. What a model's classes learned serves every other model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nereus.core.errors import UserError
from nereus.cost.work import CLASSES, OVERLAP_POWER, PART, PARTS, Array, joined, overlapped

PRIORS: Mapping[str, tuple[float, float]] = {
    # class: (efficiency, standard deviation of its logarithm). Conservative: below what tuned kernels reach.
    "gemm": (0.60, 0.3),  # 0.6-0.75 of peak on A100 and H100 at large sizes (SimuMax kernel tables)
    "weights": (0.60, 0.7),
    "gemm_operands": (0.90, 0.15),  # beside gemm at 0.78, of the A100's measured products (`work.product_width`)
    "attention_prefill": (0.40, 0.5),  # FlashAttention-2: 0.5-0.7 on A100, 0.35-0.5 on H100 (Dao 2023)
    "attention_scores": (0.60, 0.5),
    "attention_decode": (0.70, 0.5),
    "elementwise": (0.55, 0.5),
    "logits": (0.50, 0.5),
    "optimizer": (0.50, 0.7),
    "launch": (0.25, 0.5),
    "decode_launch": (1.50, 1.0),
    "launch/nodes": (3.0, 1.0),
    "launch/tp": (10.0, 2.0),
    "all_reduce/intra": (0.50, 0.5),
    "all_reduce/inter": (0.50, 0.7),
    "gradient_reduce/intra": (0.50, 0.7),
    "gradient_reduce/inter": (0.40, 0.7),
    "shard_gradients/intra": (0.50, 0.7),
    "shard_gradients/inter": (0.40, 0.7),
    "gradient_message": (1.0, 1.0),
    "gradient_message/slow": (10.0, 2.0),
    "send_recv/intra": (0.40, 0.7),
    "send_recv/inter": (0.50, 0.7),
    "message/intra": (0.70, 0.4),
    "message/inter": (0.50, 0.4),
    "decode_message": (3.2, 0.7),
    "decode_rows": (1.0, 1.0),
}
"""Decoding is that of inference engines, which replay CUDA graphs (`EAGER_DECODING` is for others).

decode_launch: 100 us a layer. With next to no weights to read on a device, a token of Llama-3-8B takes 3.35 ms (tp 8,
batch 1: sgl-project/sglang#1008) and one of Qwen3-0.6B 2.72 ms (xLLM-AI/xllm#713): 105 and 97 us a layer.
decode_message: one kernel in which every rank reads from all others takes 9-12 us up to 32 KB, among 2, 4 and 8 H100
(vLLM's, as measured in sgl-project/sglang#2904); at 1 MB it saves 44 us of NCCL's (A100, tp 4: vllm-project/vllm#2192).
attention_decode: 0.5 would leave the published tp 1 runs of a 7B on 8 H100 37 % slower than measured (rl_plans/dapo7b.csv).
"""
EAGER_DECODING: Mapping[str, float] = {"decode_launch": 0.50, "decode_message": 0.70}
"""Efficiencies without CUDA graphs: the host issues every kernel of every token, sums are those of training."""
NOISE = 0.03
"""Usual relative deviation of a measured time from a good prediction."""
LOOSEST = 0.25
"""However much was measured, the logarithm of an efficiency may move by this much at little cost: links drift."""
MEMORY_PRIORS: Mapping[str, tuple[float, float]] = {
    # kind: (measured / counted, standard deviation of its logarithm). What is resident is known exactly.
    "resident": (1.0, 0.01),
    "gradients": (1.0, 0.3),
    "activations": (1.1, 0.3),
    "boundaries": (2.0, 1.0),
    "logits": (1.0, 0.5),
    "kv_cache": (1.0, 0.2),
    "workspace": (1.0, 0.7),
}
MEMORY_KINDS = tuple(MEMORY_PRIORS)
MEMORY_NOISE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One measured time. work: class -> seconds at peak rates."""

    work: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryObservation:
    """One measured peak. kinds: "resident" and working kinds (`MEMORY_KINDS`) -> counted bytes."""

    kinds: Mapping[str, float]
    peak_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """How far predictions are from what they were fitted on, as shares of the measured value."""

    mean: float
    median: float
    observations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What has been learned so far; a class that is not named has its prior.

    log_cost: class -> log(1 / efficiency). precision: class -> 1 / variance of it.
    log_memory: memory kind -> log(measured / counted bytes).
    usable_memory: share of a device's memory at which runs begin to fail.
    error, memory_error: over what was fitted last; None before any fit.
    """

    log_cost: Mapping[str, float] = field(default_factory=dict)
    precision: Mapping[str, float] = field(default_factory=dict)
    log_memory: Mapping[str, float] = field(default_factory=dict)
    usable_memory: float = 1.0
    error: FitError | None = None
    memory_error: FitError | None = None

    # -- what it says ------------------------------------------------------------------------------------------------

    def efficiency(self, name: str) -> float:
        """Achieved share of the peak; of the `launch` classes, of a nominal time. May exceed 1."""
        return math.exp(-self._log_cost(name))

    def memory_scale(self, kind: str) -> float:
        """Measured over counted bytes of a working kind; 1 for what is resident."""
        if kind not in MEMORY_PRIORS or kind == "resident":
            return 1.0
        return math.exp(self.log_memory.get(kind, math.log(MEMORY_PRIORS[kind][0])))

    @property
    def cost(self) -> Array:
        """1 / efficiency, [C]."""
        return np.exp([self._log_cost(name) for name in CLASSES])

    def seconds(self, work: Array, overlap: Array | None = None) -> Array:
        """[C, ...] -> [...]. overlap: see `work.joined`."""
        found: Array = joined(np.tensordot(PARTS * self.cost, work, axes=1), overlap)
        return found

    def split(self, work: Array) -> tuple[float, Array]:
        """(seconds, seconds of each class [C]) of one task; of the host only what sticks out from under the device."""
        classes = self.cost * work
        parts = PARTS @ classes
        device, host, _, _ = parts
        if host > 0:
            classes[PART == 1] *= (overlapped(device, host) - device) / host
        return float(joined(parts)), classes

    def _log_cost(self, name: str) -> float:
        return self.log_cost.get(name, -math.log(PRIORS[name][0]))

    # -- learning ----------------------------------------------------------------------------------------------------

    def updated(self, measurements: Sequence[Observation]) -> Calibration:
        """With measured operations taken in; what was known counts as much as its precision, up to `LOOSEST`.

        A measurement that agrees with neither the others nor what is known (a straggler) has next to no weight.
        """
        if not measurements:
            return self
        return self._fitted(measurements)

    def fit_whole_tasks(self, rows: Sequence[Observation]) -> Calibration:
        """From times of whole tasks or steps, many classes in each: the same regression, started from the priors.

        Classes that the rows do not contain keep what they have.
        """
        seen = {name for row in rows for name, seconds in row.work.items() if seconds > 0}
        fresh = replace(
            self,
            log_cost={name: v for name, v in self.log_cost.items() if name not in seen},
            precision={name: v for name, v in self.precision.items() if name not in seen},
        )
        return fresh._fitted(rows) if rows else self

    def _fitted(self, rows: Sequence[Observation]) -> Calibration:
        work = np.array([[row.work.get(name, 0.0) for name in CLASSES] for row in rows])
        return self.fit_arrays(work, np.array([row.seconds for row in rows]))

    def fit_arrays(self, work: Array, seconds: Array, overlap: Array | None = None) -> Calibration:
        """`updated` for work [N, C] and measured seconds [N]. overlap: of each row, see `work.joined`; none by default."""
        overlap = np.zeros(len(seconds)) if overlap is None else overlap
        used = np.flatnonzero((work > 0).any(0))
        prior = np.array([self._log_cost(CLASSES[i]) for i in used])
        loosest = 1 / LOOSEST**2
        precision = np.array(
            [min(self.precision.get(CLASSES[i], 1 / PRIORS[CLASSES[i]][1] ** 2), max(loosest, _given(i))) for i in used]
        )
        found, gained = robust_fit(
            work[:, used], seconds, prior=prior, precision=precision, noise=NOISE, part=PART[used], overlap=overlap
        )
        fitted = replace(
            self,
            log_cost={**self.log_cost, **{CLASSES[i]: float(v) for i, v in zip(used, found, strict=True)}},
            precision={
                **self.precision,
                **{CLASSES[i]: float(p + g) for i, p, g in zip(used, precision, gained, strict=True)},
            },
        )
        return replace(fitted, error=fit_error(fitted.seconds(work.T, overlap), seconds))

    def fit_memory(self, rows: Sequence[MemoryObservation]) -> Calibration:
        """Scales of the working kinds from measured peaks."""
        if not rows:
            return self
        kinds = np.array([[row.kinds.get(name, 0.0) for name in MEMORY_KINDS] for row in rows])
        return self.fit_memory_arrays(kinds[:, None, :], np.array([row.peak_bytes for row in rows]))

    def fit_memory_arrays(self, kinds: Array, peaks: Array) -> Calibration:
        """`fit_memory` for counted bytes [N, P, K] of P places and the peak of the fullest of them, [N].

        Which place is the fullest depends on the scales: taken with what is known, fitted, and taken once more.
        """
        names = np.flatnonzero((kinds > 0).any((0, 1)))
        prior = np.array([math.log(MEMORY_PRIORS[MEMORY_KINDS[i]][0]) for i in names])
        precision = np.array([1 / MEMORY_PRIORS[MEMORY_KINDS[i]][1] ** 2 for i in names])
        fitted = self
        for _ in range(3):
            fullest = np.take_along_axis(kinds, fitted.peak_bytes(kinds).argmax(1)[:, None, None], axis=1)[:, 0, names]
            found, _gained = robust_fit(fullest, peaks, prior=prior, precision=precision, noise=MEMORY_NOISE)
            fitted = replace(self, log_memory={MEMORY_KINDS[i]: float(v) for i, v in zip(names, found, strict=True)})
        return replace(fitted, memory_error=fit_error(fitted.peak_bytes(kinds).max(1), peaks))

    def peak_bytes(self, kinds: Array) -> Array:
        """Counted bytes [..., K] -> corrected bytes [...]."""
        found: Array = kinds @ np.array([self.memory_scale(kind) for kind in MEMORY_KINDS])
        return found

    def fit_usable_memory(self, share: Array, failed: Array) -> Calibration:
        """From predicted peaks as a share of the device's memory [N] and whether the run failed [N]: the limit that tells
        them apart best, the middle of the gap where several do."""
        if not failed.any() or failed.all():
            return self
        edges = np.unique(share)
        limits = np.concatenate([[edges[0] * 0.99], (edges[1:] + edges[:-1]) / 2, [edges[-1] * 1.01]])
        right = ((share[None, :] > limits[:, None]) == failed[None, :]).sum(1)
        best = limits[right == right.max()]
        return replace(self, usable_memory=float(best[len(best) // 2]))

    # -- storage -----------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """The inverse of `to_json`. Raises UserError for classes or fields that are not known."""
        found = json.loads(text)
        unknown = set(found.get("log_cost", {})) - set(PRIORS)
        if unknown:
            raise UserError(f"calibration: class {sorted(unknown)[0]!r} is not known; known are {', '.join(CLASSES)}")
        for name in ("error", "memory_error"):
            found[name] = FitError(**found[name]) if found.get(name) else None
        try:
            return cls(**found)
        except TypeError as error:
            raise UserError(f"calibration: {error}") from error


def _given(index: np.integer[Any]) -> float:
    """The prior's own precision: a class may be known better than `LOOSEST` from the start."""
    return float(1 / PRIORS[CLASSES[index]][1] ** 2)


def fit_error(predicted: Array, measured: Array) -> FitError:
    errors = np.abs(predicted / measured - 1)
    return FitError(mean=float(errors.mean()), median=float(np.median(errors)), observations=len(errors))


def robust_fit(
    work: Array,
    measured: Array,
    *,
    prior: Array,
    precision: Array,
    noise: float,
    part: npt.NDArray[np.int64] | None = None,
    overlap: Array | None = None,
) -> tuple[Array, Array]:
    """Minimise, over log costs x [C],

        sum over rows of log(1 + r^2) + sum over classes of precision (x - prior)^2,   r = log(predicted / measured) / noise

    Returns (x, precision gained [C]). The first term is Cauchy's: a row ten times off hardly pulls (Huber and Ronchetti
    2009). It has several minima, so the fit runs from what is known and from a gentle fit to all rows; the better one wins.
    part: of a task that each class is in (`work.PART`); by default all simply add up. overlap [N]: see `work.joined`.
    """
    part = np.zeros(len(prior), dtype=np.int64) if part is None else part
    overlap = np.zeros(len(measured)) if overlap is None else overlap
    parts = np.stack([part == i for i in range(len(PARTS))]).astype(float)
    problem = _Problem(work, np.log(measured), prior, precision, noise, parts, overlap)
    gentle = problem.minimise(prior, scale=50.0)
    found = min((problem.minimise(start, scale=1.0) for start in (prior, gentle)), key=lambda x: problem.loss(x, 1.0))
    return found, problem.gained(found)


def _slopes(parts: Array, overlap: Array) -> Array:
    """Derivatives of `work.joined` with respect to each part, [4, N]."""
    device, host, gradients, _ = parts
    least = np.finfo(float).tiny
    passes = np.maximum(overlapped(device, host), least)
    beside = passes * overlap
    summed = np.maximum(overlapped(beside, gradients), least)
    power = OVERLAP_POWER - 1
    of_passes = 1 - overlap + overlap * (beside / summed) ** power
    return np.stack(
        [
            of_passes * (device / passes) ** power,
            of_passes * (host / passes) ** power,
            (gradients / summed) ** power,
            np.ones_like(device),
        ]
    )


@dataclass(frozen=True, slots=True)
class _Problem:
    """Gauss-Newton with Levenberg's damping on iteratively reweighted rows. parts [4, C]: `PARTS` of the classes fitted."""

    work: Array
    log_measured: Array
    prior: Array
    precision: Array
    noise: float
    parts: Array
    overlap: Array

    def residuals(self, x: Array) -> Array:
        predicted = joined(self.parts @ (self.work * np.exp(x)).T, self.overlap)
        found: Array = (np.log(predicted) - self.log_measured) / self.noise
        return found

    def loss(self, x: Array, scale: float) -> float:
        rows = scale**2 * np.log1p((self.residuals(x) / scale) ** 2)
        return float(rows.sum() + (self.precision * (x - self.prior) ** 2).sum())

    def jacobian(self, x: Array) -> Array:
        seconds = self.work * np.exp(x)
        parts = self.parts @ seconds.T
        slopes = self.parts.T @ _slopes(parts, self.overlap)
        found: Array = seconds * slopes.T / joined(parts, self.overlap)[:, None] / self.noise
        return found

    def minimise(self, x: Array, scale: float) -> Array:
        damping, loss = 1e-3, self.loss(x, scale)
        for _ in range(100):
            r, jacobian = self.residuals(x), self.jacobian(x)
            weights = 1 / (1 + (r / scale) ** 2)
            gradient = jacobian.T @ (weights * r) + self.precision * (x - self.prior)
            curvature = jacobian.T @ (jacobian * weights[:, None]) + np.diag(self.precision)
            gain = 0.0
            while damping < 1e8:
                step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient)
                candidate = x + np.clip(step, -1, 1)
                new = self.loss(candidate, scale)
                if new < loss:
                    gain, x, loss, damping = loss - new, candidate, new, max(damping / 5, 1e-9)
                    break
                damping *= 5
            if gain <= 1e-7 * loss:
                break
        return x

    def gained(self, x: Array) -> Array:
        weights = 1 / (1 + self.residuals(x) ** 2)
        found: Array = (self.jacobian(x) ** 2 * weights[:, None]).sum(0)
        return found
