"""What a step has to do: how many sequences, how long, how often they are trained on, and in what precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nereus.core.errors import UserError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step of a job.

    prompt_length: mean, tokens. response_length: mean, with its 95th percentile and longest (None: as a lognormal that
    is cut at the longest; longest None: three times the mean).
    epochs, mini_batches: optimizer updates a step are their product.
    parameter_bytes, gradient_bytes, optimizer_bytes: per parameter of a training unit. The defaults are bf16 weights and
    gradients with fp32 master weights and two fp32 moments (Micikevicius et al. 2018).
    zero: 0, every unit holds the whole of its optimizer state; 1, it is cut over dp (Rajbhandari et al. 2020).
    sequence_parallel: between its matrices a layer is cut over the sequence (Korthikanti et al. 2022).
    """

    prompts: int
    samples_per_prompt: int = 1
    prompt_length: float
    response_length: float
    response_p95: float | None = None
    response_max: float | None = None
    epochs: int = 1
    mini_batches: int = 1
    dtype: str = "bfloat16"
    parameter_bytes: float = 2
    gradient_bytes: float = 2
    optimizer_bytes: float = 12
    zero: Literal[0, 1] = 0
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("prompts", "samples_per_prompt", "prompt_length", "response_length", "epochs", "mini_batches"):
            if getattr(self, name) <= 0:
                raise UserError(f"workload: {name}={getattr(self, name)} must be above 0")
        if self.sequences % self.mini_batches:
            raise UserError(f"workload: mini_batches={self.mini_batches} does not divide {self.sequences} sequences")
        if self.dtype not in DTYPE_BYTES:
            raise UserError(f"workload: dtype {self.dtype!r} is not known; known are {', '.join(DTYPE_BYTES)}")
        longest = self.longest_response
        p95 = self.response_p95 if self.response_p95 is not None else longest
        if longest < self.response_length or p95 > longest:
            raise UserError(
                f"workload: response_max={longest:g} must be at least the mean {self.response_length:g} and the 95th "
                f"percentile {p95:g}"
            )

    @property
    def sequences(self) -> int:
        """Responses a step."""
        return self.prompts * self.samples_per_prompt

    @property
    def mini_batch(self) -> int:
        """Responses an update."""
        return self.sequences // self.mini_batches

    @property
    def longest_response(self) -> float:
        return self.response_max if self.response_max is not None else 3 * self.response_length

    @property
    def mean_length(self) -> float:
        """Tokens of a sequence, prompt and response."""
        return self.prompt_length + self.response_length

    @property
    def longest(self) -> float:
        """Tokens of the longest sequence."""
        return self.prompt_length + self.longest_response
