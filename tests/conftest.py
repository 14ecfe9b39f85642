"""What tests of whole runs share: three tiny models, a job over them, and runs of it in this process."""

from __future__ import annotations

import io
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

JOB: dict[str, Any] = {
    "name": "tiny",
    "steps": 3,
    "model": {"path": "actor"},
    "critic": {"path": "critic"},
    "reward": {"path": "reward"},
    "task": {"name": "count", "args": {"modulus": 5}},
    "algorithm": {"name": "ppo", "kl_coef": 0.05},
    "batch": {"prompts": 8, "mini_batches": 2, "epochs": 2},
    "sampling": {"max_new_tokens": 8},
    "optimizer": {"lr": 3.0e-3},
    "cluster": {"devices": 2, "device": "cpu", "memory_gib": 1},
    "plan": {"all": {"dp": 2}},
}
"""A PPO job of a few tenths of a second a step. Its model paths start at the folder of `tiny_models`."""


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with actor, critic and reward: 2 layers of 32, 4 heads over 2, random weights.

    The vocabulary is that of counting modulo 5, so small that random responses differ in length and in reward.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaForTokenClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=6,
        eos_token_id=5,
        pad_token_id=7,
        num_labels=1,
        initializer_range=0.2,
        dtype="float32",
    )
    folder = tmp_path_factory.mktemp("models")
    kinds = {
        "actor": LlamaForCausalLM,
        "critic": LlamaForTokenClassification,
        "reward": LlamaForSequenceClassification,
    }
    for seed, (name, kind) in enumerate(kinds.items()):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            kind(config).save_pretrained(folder / name)
    return folder


@pytest.fixture
def write_job(tmp_path: Path, tiny_models: Path) -> Callable[..., Path]:
    """Writes `JOB` with other sections or fields to tmp_path/job.yaml: `write_job(steps=5, batch={"prompts": 4})`."""

    def write(**changed: Any) -> Path:
        job = _merged({**JOB, "run": {"folder": str(tmp_path / "runs")}}, changed)
        for name in ("model", "critic", "reward"):
            if isinstance(job.get(name), dict):
                job[name] = {"path": str(tiny_models / job[name]["path"])}
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(job, sort_keys=False))
        return path

    return write


@pytest.fixture
def run() -> Iterator[Callable[..., dict[str, Any]]]:
    """Runs a job in this process, as `nereus run` does, its console output thrown away; returns the summary."""
    from rich.console import Console

    from nereus.cli.run import RunRequest, run_job

    def run_once(job: Path | None = None, *overrides: str, **how: Any) -> dict[str, Any]:
        return run_job(RunRequest(job=job, overrides=overrides, **how), Console(file=io.StringIO()))

    before = {child.pid for child in multiprocessing.active_children()}  # clusters that other tests share
    yield run_once
    left = [child for child in multiprocessing.active_children() if child.pid not in before]
    assert not left, "a run has left processes behind"


def _merged(base: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """`changed` over `base`; sections are merged but for plans, None takes a field away."""
    merged = dict(base)
    for name, value in changed.items():
        whole = name in ("plan", "changes") or not isinstance(value, dict) or not isinstance(merged.get(name), dict)
        merged[name] = value if whole else _merged(merged[name], value)
    return {name: value for name, value in merged.items() if value is not None}
