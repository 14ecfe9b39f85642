"""What every task offers: prompts by position in the run, and the true reward of a response.

A task is pure: a prompt depends on the task's own fields and the position alone, a reward on the prompt and
the response alone. So a run that was stopped, or that changed its plan, asks again and gets the same answers,
and no data-loader state has to be saved or moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of a run.

    Attributes:
        position: Which prompt of the run this is, counted from 0.
        token_ids: The tokens that the model is given, without padding.
        answer: The expected answer, for tasks that check against one.
    """

    position: int
    token_ids: tuple[int, ...]
    answer: str = ""

    def __post_init__(self) -> None:
        if self.position < 0:
            raise ValueError(f"a prompt's position must be 0 or more, not {self.position}")
        if not self.token_ids:
            raise ValueError(f"prompt {self.position} has no tokens")


class Task(Protocol):
    """A source of prompts with a verifiable reward."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response; the one that ended it is part of the response."""

    @property
    def pad_token_id(self) -> int:
        """The token that fills up a batch; never part of a prompt or response."""

    def prompt(self, position: int) -> Prompt:
        """The prompt at `position`; the same one every time it is asked for."""

    def reward(self, prompt: Prompt, response_ids: Sequence[int]) -> float:
        """The true reward of a response without padding, in [0, 1]."""

    def describe(self, response_ids: Sequence[int]) -> str:
        """The response as readable text."""
