"""The responses of one step, and where they come from: the generation units, or a file of an earlier run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save

from nereus.core.errors import UserError
from nereus.engine.batch import Sequences
from nereus.engine.generation import Request, Response
from nereus.rl.tasks.base import Prompt
from nereus.runtime.files import write_atomically


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """One row per sequence; samples of one prompt are consecutive."""

    prompts: tuple[Prompt, ...]
    requests: tuple[Request, ...]
    responses: tuple[Response, ...]

    def sequences(self, pad: int) -> Sequences:
        return Sequences.build([r.prompt for r in self.requests], [r.tokens for r in self.responses], pad)


class Generator(Protocol):
    """Answers the requests of a step, in their order."""

    def __call__(self, step: int, requests: Sequence[Request]) -> list[Response]: ...


def rollout_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.safetensors"


def record(folder: Path, step: int, rollouts: Rollouts) -> None:
    """Keep a step's responses under `folder`."""
    folder.mkdir(exist_ok=True)
    responses = rollouts.responses
    tensors = {
        "positions": torch.tensor([r.position for r in rollouts.requests]),
        "samples": torch.tensor([r.sample for r in rollouts.requests]),
        "lengths": torch.tensor([len(r.tokens) for r in responses]),
        "tokens": torch.tensor([t for r in responses for t in r.tokens]),
        "logprobs": torch.tensor([x for r in responses for x in r.logprobs], dtype=torch.float64),
        "margins": torch.tensor([x for r in responses for x in r.margins], dtype=torch.float64),
    }
    write_atomically(rollout_file(folder, step), save(tensors))


def read_responses(folder: Path, step: int) -> dict[tuple[int, int], Response]:
    """By (position, sample), the recorded responses of a step. Raises UserError when there are none."""
    file = rollout_file(folder, step)
    if not file.exists():
        raise UserError(
            f"{file} is missing: replay needs a run with run.record_rollouts: true and at least as many steps"
        )
    tensors = load_file(file)
    parts = [tensors[name].split(tensors["lengths"].tolist()) for name in ("tokens", "logprobs", "margins")]
    keys = zip(tensors["positions"].tolist(), tensors["samples"].tolist(), strict=True)
    return {
        key: Response(tokens.tolist(), logprobs.tolist(), margins.tolist())
        for key, tokens, logprobs, margins in zip(keys, *parts, strict=True)
    }


@dataclass(frozen=True, slots=True)
class Replay:
    """A `Generator` that answers from the rollouts of an earlier run."""

    folder: Path

    def __call__(self, step: int, requests: Sequence[Request]) -> list[Response]:
        recorded = read_responses(self.folder, step)
        missing = [(r.position, r.sample) for r in requests if (r.position, r.sample) not in recorded]
        if missing:
            raise UserError(
                f"{rollout_file(self.folder, step)} lacks (position, sample) {missing[0]}: another batch size?"
            )
        return [recorded[(r.position, r.sample)] for r in requests]
