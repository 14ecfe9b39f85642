"""The tensor-parallel sums of a decoder, as autograd functions over our communicator.

enter   identity forward, sum of the gradients backward: where a replicated activation goes into cut modules
leave   sum forward, identity backward: where the partial outputs of cut modules become a replicated activation
token_statistics   log-probability and entropy over a vocabulary that is cut over the ranks
"""

from __future__ import annotations

from typing import Any

import torch

from nereus.runtime.communicator import Communicator


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Communicator) -> torch.Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.tp.all_reduce(grads[0].clone(memory_format=torch.contiguous_format)), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Communicator) -> torch.Tensor:
        return tp.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _TokenStatistics(torch.autograd.Function):
    """Softmax statistics of logits [n, local vocabulary], the first local column being token `first`."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, first: int, tp: Communicator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.float()
        n, width = logits.shape
        floor = torch.finfo(logits.dtype).min
        peak = logits.amax(-1) if width else logits.new_full((n,), floor)
        peak = tp.all_reduce(peak.contiguous(), "max")
        shifted = logits - peak[:, None]
        column = tokens - first
        mine = (column >= 0) & (column < width)
        picked = logits.new_zeros(n)
        picked[mine] = shifted[mine, column[mine]]
        exp = shifted.exp()
        sums = tp.all_reduce(torch.stack([exp.sum(-1), (exp * shifted).sum(-1), picked]))
        log_norm = sums[0].log()
        logprobs = sums[2] - log_norm
        entropy = log_norm - sums[1] / sums[0]
        ctx.save_for_backward(shifted - log_norm[:, None], column, mine, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        grad_logprobs, grad_entropy = grads
        log_p, column, mine, entropy = ctx.saved_tensors
        p = log_p.exp()
        grad = -p * grad_logprobs[:, None] - p * (log_p + entropy[:, None]) * grad_entropy[:, None]
        grad[mine, column[mine]] += grad_logprobs[mine]
        return grad, None, None, None


def enter(x: torch.Tensor, tp: Communicator) -> torch.Tensor:
    return x if tp.size == 1 else _Enter.apply(x, tp)  # type: ignore[no-untyped-call]


def leave(x: torch.Tensor, tp: Communicator) -> torch.Tensor:
    return x if tp.size == 1 else _Leave.apply(x, tp)  # type: ignore[no-untyped-call]


def token_statistics(
    logits: torch.Tensor, tokens: torch.Tensor, *, first: int, tp: Communicator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of `tokens` [n] and entropy [n], in float32, from logits [n, local vocabulary].

    Softmax over the whole vocabulary, of which this rank has columns [first, first + local vocabulary).
    """
    logprobs, entropy = _TokenStatistics.apply(logits, tokens, first, tp)  # type: ignore[no-untyped-call]
    return logprobs, entropy
