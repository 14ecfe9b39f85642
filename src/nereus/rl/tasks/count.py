"""Counting on: the prompt gives a number, the response goes on from it, one token a number.

The longer the correct prefix of the response, the higher its reward, so a policy that can count but stops
early learns to answer longer: a small model of the length growth that reasoning models show in training.

There is no tokenizer. Numbers 0 .. modulus - 1 are tokens 0 .. modulus - 1 (after modulus - 1 comes 0); then
come the end, begin and padding tokens; then unused tokens up to a multiple of `VOCABULARY_MULTIPLE`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from nereus.rl.tasks.base import Prompt

VOCABULARY_MULTIPLE = 8
"""The vocabulary is rounded up to this, so that embeddings can be cut over 2, 4 or 8 TP ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountTask:
    """Count on from a number.

    Attributes:
        modulus: How many numbers there are.
        max_new_tokens: The longest response; that many correct numbers earn the full reward.
        seed: Chooses the prompts.

    Raises:
        ValueError: When `modulus` is under 2 or `max_new_tokens` under 1.
    """

    modulus: int = 100
    max_new_tokens: int = 48
    seed: int = 0

    def __post_init__(self) -> None:
        if self.modulus < 2:
            raise ValueError(f"modulus must be 2 or more, not {self.modulus}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be 1 or more, not {self.max_new_tokens}")

    @property
    def eos_token_id(self) -> int:
        """The token that ends a response."""
        return self.modulus

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """`eos_token_id`, as the one token of its kind."""
        return (self.eos_token_id,)

    @property
    def bos_token_id(self) -> int:
        """The token that begins a prompt."""
        return self.modulus + 1

    @property
    def pad_token_id(self) -> int:
        """The token that fills up a batch."""
        return self.modulus + 2

    @property
    def vocab_size(self) -> int:
        """Number of token ids, the unused ones at the end included."""
        num_used = self.pad_token_id + 1
        return -(-num_used // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    def prompt(self, position: int) -> Prompt:
        """The prompt at `position`: the begin token and a number, both fixed by `seed` and `position`."""
        digest = hashlib.blake2b(f"count/{self.seed}/{position}".encode(), digest_size=8).digest()
        start = int.from_bytes(digest, "big") % self.modulus
        return Prompt(position=position, token_ids=(self.bos_token_id, start))

    def num_correct(self, prompt: Prompt, response_ids: Sequence[int]) -> int:
        """How many numbers are right before the first mistake, the end token or `max_new_tokens`."""
        start = prompt.token_ids[-1]
        for index, token_id in enumerate(response_ids[: self.max_new_tokens]):
            if token_id != (start + 1 + index) % self.modulus:
                return index
        return min(len(response_ids), self.max_new_tokens)

    def reward(self, prompt: Prompt, response_ids: Sequence[int]) -> float:
        """The correct prefix as a share of the longest response, in [0, 1]."""
        return self.num_correct(prompt, response_ids) / self.max_new_tokens

    def describe(self, response_ids: Sequence[int]) -> str:
        """The response as numbers and `<eos>`, `<bos>`, `<pad>`, `<unused>`, with spaces between."""
        special = {self.eos_token_id: "<eos>", self.bos_token_id: "<bos>", self.pad_token_id: "<pad>"}
        return " ".join(
            str(token_id) if 0 <= token_id < self.modulus else special.get(token_id, "<unused>")
            for token_id in response_ids
        )
