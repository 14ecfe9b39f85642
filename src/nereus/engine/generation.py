"""Generation by one unit: a batch with a key-value cache, under any layout.

Over pp_stages the batch is cut into as many sub-batches, which follow each other through the pipeline: while the last
pp_stage samples for one, the first works on the next.

    pp_stage 0   s0 t0 | s1 t0 | s0 t1 | s1 t1 | ...
    pp_stage 1         | s0 t0 | s1 t0 | s0 t1 | ...     samples, and tells the tokens to all pp_stages

Sequences that have ended leave the batch once half of its rows are idle. A draw is a number of its own for every
(seed, position, sample, token), turned into a token by the inverse of the cumulative distribution in order of token id, so
another layout draws another token only where the number lies within rounding of a boundary. That distance is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from nereus.core.randomness import uniforms
from nereus.engine.unit import Sends, Unit
from nereus.runtime.communicator import Pending


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """temperature 0 is greedy. top_p 1 keeps the whole distribution. Sequences end at any of eos_token_ids."""

    max_new_tokens: int
    temperature: float
    top_p: float
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate: its prompt, and the (position, sample) that names its draws."""

    prompt: tuple[int, ...]
    position: int
    sample: int


@dataclass(slots=True)
class Response:
    """What was generated: tokens (the ending one included), their log-probabilities at the sampling temperature before
    top-p, and how far each draw was from the nearest boundary of its distribution."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)


def sample_tokens(
    logits: torch.Tensor, draws: torch.Tensor, *, temperature: float, top_p: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, log-probabilities, margins), each [b], from logits [b, vocabulary] and draws [b] in [0, 1)."""
    if temperature == 0:
        tokens = logits.argmax(-1)
        best = logits.topk(2, -1).values
        logprobs = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        return tokens, logprobs, best[:, 0] - best[:, 1]
    all_logprobs = (logits / temperature).log_softmax(-1)
    p = all_logprobs.double().exp()
    if top_p < 1:
        ordered, order = p.sort(dim=-1, descending=True, stable=True)
        dropped = ordered.cumsum(-1) - ordered >= top_p
        p = p.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), 0.0)
    cdf = p.cumsum(-1)
    cdf = cdf / cdf[:, -1:]
    tokens = torch.searchsorted(cdf, draws[:, None], right=True).clamp(max=logits.shape[-1] - 1)
    last_possible = p.shape[-1] - 1 - (p > 0).flip(-1).int().argmax(-1, keepdim=True)
    tokens = torch.minimum(tokens, last_possible)
    upper = cdf.gather(-1, tokens)[:, 0]
    lower = (cdf.gather(-1, (tokens - 1).clamp(min=0)) * (tokens > 0))[:, 0]
    margins = torch.minimum((draws - lower).abs(), (upper - draws).abs())
    return tokens[:, 0], all_logprobs.gather(-1, tokens)[:, 0], margins


class _SubBatch:
    """Sequences that go through the pipeline together; every rank of the unit keeps the same books."""

    def __init__(self, unit: Unit, requests: Sequence[tuple[int, Request]], sampling: Sampling) -> None:
        self._unit, self._sampling = unit, sampling
        self.numbers = [number for number, _ in requests]
        self.requests = [request for _, request in requests]
        width = max(len(r.prompt) for r in self.requests)
        padded = [[sampling.pad_token_id] * (width - len(r.prompt)) + list(r.prompt) for r in self.requests]
        self.tokens = torch.tensor(padded, device=unit.device)
        lengths = torch.tensor([len(r.prompt) for r in self.requests], device=unit.device)
        self.mask = (torch.arange(width, device=unit.device) >= width - lengths[:, None]).long()
        self.ended = torch.zeros(len(self.requests), dtype=torch.bool, device=unit.device)
        self.cache = unit.module.new_cache()
        self._cache_bytes = 0
        self.num_tokens = 0
        self.responses = [Response() for _ in requests]
        self._draws: tuple[torch.Tensor, ...] = ()
        self._finished: list[tuple[int, Response]] = []

    @property
    def done(self) -> bool:
        return self.num_tokens == self._sampling.max_new_tokens or bool(self.ended.all())

    def place_ids(self) -> torch.Tensor:
        """Positions of the tokens that go in next, [b, t]."""
        return (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -self.tokens.shape[1] :]

    def count_cache(self) -> None:
        """Tell the budget what the cache has grown or shrunk by; a layer's old one, and where the batch is padded its copy
        for all query heads, were there beside its new one for a moment."""
        layers = [layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers]
        budget, grown, self._cache_bytes = self._unit.budget, sum(layers) - self._cache_bytes, sum(layers)
        budget.take("kv_cache", grown)
        budget.touch("workspace", (1 + self._unit.counts.groups) * max(layers))

    def sample(self, hidden: torch.Tensor) -> torch.Tensor:
        """On the last pp_stage: the next token of every row, int64 [b]."""
        unit, rows = self._unit, len(self.requests)
        with (
            unit.budget.passing("logits", unit.counts.sampling_bytes(rows, top_p=self._sampling.top_p)),
            unit.meter.operation("sample", *unit.counts.sampling(rows)),
        ):
            return self._sample(hidden)

    def _sample(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._unit.module.logits(hidden[:, -1])
        positions = [r.position for r in self.requests]
        samples = [r.sample for r in self.requests]
        draws = torch.from_numpy(uniforms(self._sampling.seed, positions, samples, self.num_tokens)).to(logits.device)
        drawn = sample_tokens(logits, draws, temperature=self._sampling.temperature, top_p=self._sampling.top_p)
        self._draws = drawn
        tokens = drawn[0]
        tp = self._unit.groups.tp
        if tp.size > 1 and tokens.is_cuda:  # sums on a GPU need not be bitwise equal between ranks
            tokens = tp.broadcast(tokens.contiguous(), tp.ranks[0])
        return tokens

    def append(self, tokens: torch.Tensor) -> None:
        """Take the next tokens: the same on every pp_stage."""
        going = ~self.ended
        if self._unit.answers:
            rows = zip(going.tolist(), tokens.tolist(), *(d.tolist() for d in self._draws[1:]), strict=True)
            for response, (alive, token, logprob, margin) in zip(self.responses, rows, strict=True):
                if alive:
                    response.tokens.append(token)
                    response.logprobs.append(logprob)
                    response.margins.append(margin)
        self.num_tokens += 1
        eos = torch.tensor(self._sampling.eos_token_ids, device=tokens.device)
        self.ended = self.ended | torch.isin(tokens, eos)
        self.tokens = tokens[:, None]
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], 1)
        if not self.done and int(self.ended.sum()) * 2 >= len(self.requests):
            self._drop_ended()

    def _drop_ended(self) -> None:
        keep = (~self.ended).nonzero()[:, 0]
        self.cache.batch_select_indices(keep)
        self.tokens, self.mask, self.ended = self.tokens[keep], self.mask[keep], self.ended[keep]
        rows = keep.tolist()
        self._finished += [pair for i, pair in enumerate(self._numbered()) if i not in set(rows)]
        self.numbers = [self.numbers[i] for i in rows]
        self.requests = [self.requests[i] for i in rows]
        self.responses = [self.responses[i] for i in rows]

    def results(self) -> list[tuple[int, Response]]:
        return self._finished + self._numbered()

    def _numbered(self) -> list[tuple[int, Response]]:
        return list(zip(self.numbers, self.responses, strict=True))


@torch.no_grad()
def generate(unit: Unit, requests: Sequence[Request], sampling: Sampling) -> list[Response] | None:
    """Generate all requests, at most micro_batch x pp at a time; in their order on the answering rank, else None."""
    pp, size = unit.placement.layout.pp, unit.placement.micro_batch
    found: list[tuple[int, Response]] = []
    numbered = list(enumerate(requests))
    for start in range(0, len(numbered), size * pp):
        wave = numbered[start : start + size * pp]
        per_batch = -(-len(wave) // pp)
        batches = [_SubBatch(unit, wave[i : i + per_batch], sampling) for i in range(0, len(wave), per_batch)]
        _run(unit, batches)
        unit.budget.hold("kv_cache", 0)
        found += [pair for batch in batches for pair in batch.results()]
    return [response for _, response in sorted(found, key=lambda pair: pair[0])] if unit.answers else None


def _run(unit: Unit, batches: list[_SubBatch]) -> None:
    sends = Sends()
    own: dict[int, torch.Tensor] = {}
    going = list(batches)
    while going:
        for batch in list(going):
            if batch.cache.get_seq_length() > 0:
                batch.append(own.pop(id(batch)) if unit.module.is_last else _receive_tokens(unit, batch))
            if batch.done:
                going.remove(batch)
                continue
            hidden = _forward(unit, batch)
            if unit.module.is_last:
                own[id(batch)] = tokens = batch.sample(hidden)
                for send in _tell(unit, tokens):
                    sends.add(send)
            else:
                sends.add(unit.send(unit.groups.down, hidden, +1))
    sends.wait()


def _forward(unit: Unit, batch: _SubBatch) -> torch.Tensor:
    if unit.module.is_first:
        hidden = unit.embed(batch.tokens)
    else:
        hidden = unit.receive(unit.groups.down, (*batch.tokens.shape, unit.hidden_size), +1)
    (rows, width), keys = batch.tokens.shape, batch.mask.shape[1]
    with (
        unit.budget.passing("activations", unit.counts.working_bytes(rows * width)),
        unit.meter.operation("prefill" if width > 1 else "decode", *unit.counts.layers(rows, width, keys)),
    ):
        hidden = unit.module.run_layers(
            hidden, attention_mask=batch.mask, position_ids=batch.place_ids(), cache=batch.cache
        )
        batch.count_cache()
    return hidden


def _tell(unit: Unit, tokens: torch.Tensor) -> list[tuple[torch.Tensor, Pending]]:
    up = unit.groups.up
    return [(tokens, up.isend(tokens.contiguous(), rank)) for rank in up.ranks if rank != up.rank]


def _receive_tokens(unit: Unit, batch: _SubBatch) -> torch.Tensor:
    up = unit.groups.up
    tokens = torch.empty(len(batch.requests), dtype=torch.int64, device=unit.device)
    up.irecv(tokens, up.ranks[-1]).wait()
    return tokens
