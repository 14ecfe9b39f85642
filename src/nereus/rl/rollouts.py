"""The responses of one step, and where they come from: the generation units, or a file of an earlier run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from nereus.core.errors import UserError
from nereus.core.job import Job
from nereus.core.plan import ACTOR_GENERATION
from nereus.engine.batch import Sequences
from nereus.engine.generation import Request, Response, Sampling
from nereus.rl.dispatch import answers, deal, start
from nereus.rl.tasks.base import Prompt, Task
from nereus.runtime.files import write_atomically
from nereus.runtime.fleet import Fleet


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


def check_recorded(folder: Path, steps: range, *, prompts: int, samples_per_prompt: int) -> None:
    """Raise UserError unless the rollouts under `folder` have every response that these steps will ask for."""
    if not folder.is_dir():
        raise UserError(
            f"run {folder.parent} has no rollouts to replay: record them with --set run.record_rollouts=true"
        )
    for step in steps:
        file = rollout_file(folder, step)
        if not file.is_file():
            raise UserError(
                f"run {folder.parent} has no rollouts of step {step}, and steps {steps[0]} to {steps[-1]} are needed"
            )
        try:
            with safe_open(file, framework="pt") as opened:
                keys = [opened.get_tensor(name).tolist() for name in ("positions", "samples")]
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is damaged: {error}") from error
        recorded = set(zip(*keys, strict=True))
        wanted = itertools.product(range(step * prompts, (step + 1) * prompts), range(samples_per_prompt))
        for position, sample in wanted:
            if (position, sample) not in recorded:
                raise UserError(
                    f"{file} lacks sample {sample} of prompt {position}: batch.prompts and batch.samples_per_prompt "
                    "must be those of the recorded run"
                )


def read_responses(folder: Path, step: int) -> dict[tuple[int, int], Response]:
    """By (position, sample), the recorded responses of a step."""
    tensors = load_file(rollout_file(folder, step))
    parts = [tensors[name].split(tensors["lengths"].tolist()) for name in ("tokens", "logprobs", "margins")]
    keys = zip(tensors["positions"].tolist(), tensors["samples"].tolist(), strict=True)
    return {
        key: Response(tokens.tolist(), logprobs.tolist(), margins.tolist())
        for key, tokens, logprobs, margins in zip(keys, *parts, strict=True)
    }


@dataclass(frozen=True, slots=True)
class UnitGenerator:
    """A `Generator`: the units of actor/generation answer, under whatever plan is in force."""

    job: Job
    task: Task
    fleet: Fleet

    def __call__(self, step: int, requests: Sequence[Request]) -> list[Response]:
        sampling = Sampling(
            max_new_tokens=self.job.sampling.max_new_tokens,
            temperature=self.job.sampling.temperature,
            top_p=self.job.sampling.top_p,
            eos_token_ids=self.task.eos_token_ids,
            pad_token_id=self.task.pad_token_id,
            seed=self.job.seed,
        )
        parts = deal(self.fleet, ACTOR_GENERATION, len(requests))
        arguments = [([requests[i] for i in part], sampling) for part in parts]
        call = start(self.fleet, "generate", ACTOR_GENERATION, arguments)
        return [response for part in answers(self.fleet, ACTOR_GENERATION, call) for response in part]


@dataclass(frozen=True, slots=True)
class Replay:
    """A `Generator` that answers from the rollouts of an earlier run, which `check_recorded` has found to suffice."""

    folder: Path

    def __call__(self, step: int, requests: Sequence[Request]) -> list[Response]:
        recorded = read_responses(self.folder, step)
        return [recorded[(r.position, r.sample)] for r in requests]
