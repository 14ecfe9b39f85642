"""From a job to what a run needs: architectures, files, task. Everything a user can get wrong here is a UserError."""

from __future__ import annotations

import hashlib
import importlib.resources
import importlib.util
import inspect
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereus.core.errors import PlanError, UserError
from nereus.core.job import Job, TaskSection
from nereus.core.plan import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    REFERENCE_INFERENCE,
    REWARD_INFERENCE,
    ModelStage,
    Plan,
)
from nereus.core.sharding import StateSpec
from nereus.engine.architecture import Architecture, Head
from nereus.rl.tasks.base import Task
from nereus.rl.worker import state_spec
from nereus.runtime.checkpoint import check_tensors, find_tensors
from nereus.runtime.fleet import Source

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What is known of a job before anything starts. folders: by model-stage, where its first weights lie."""

    architectures: Mapping[ModelStage, Architecture]
    specs: Mapping[ModelStage, StateSpec]
    sources: Mapping[ModelStage, Source]
    folders: Mapping[ModelStage, Path]
    task: Task


def prepare(job: Job, cache: Path) -> Prepared:
    """Find and check all models and the task. cache: where converted GGUF files are kept.

    Raises UserError for a missing or damaged model, or a task that cannot be made.
    """
    actor = resolve_model(job.model.path, cache)
    critic = resolve_model(job.critic.path, cache) if job.critic else actor
    by_stage: dict[ModelStage, tuple[Path, Head]] = {
        ACTOR_GENERATION: (actor, "policy"),
        REFERENCE_INFERENCE: (actor, "policy"),
        ACTOR_TRAINING: (actor, "policy"),
        CRITIC_TRAINING: (critic, "value"),
    }
    if job.reward is not None:
        by_stage[REWARD_INFERENCE] = (resolve_model(job.reward.path, cache), "reward")
    known: dict[tuple[Path, Head], Architecture] = {}
    architectures, sources, folders = {}, {}, {}
    for name in job.model_stages:
        folder, head = by_stage[name]
        if (folder, head) not in known:
            known[folder, head] = Architecture(_load_config(folder), head)
        architectures[name], folders[name] = known[folder, head], folder
        if name != ACTOR_GENERATION:  # weight_sync fills it
            files = find_tensors(folder)
            check_tensors(architectures[name].parameters, files, folder)
            sources[name] = Source(files=files, seed=job.seed)
    return Prepared(
        architectures=architectures,
        specs={name: state_spec(name, a) for name, a in architectures.items()},
        sources=sources,
        folders=folders,
        task=build_task(job.task, job, actor),
    )


def check_layouts(prepared: Prepared, plan: Plan, memory_bytes: float) -> None:
    """Raise PlanError for a layout that its model cannot have, or a device that cannot hold its resident state."""
    resident: dict[int, int] = {}
    for placement in plan.placements:
        name = placement.model_stage
        try:
            prepared.architectures[name].check(placement.layout)
        except PlanError as error:
            raise PlanError(f"{name}: {error}") from error
        spec = prepared.specs[name]
        gradients = prepared.architectures[name].parameters if name.stage == "training" else None
        for gpu, holding in spec.holdings(placement).items():
            resident[gpu] = resident.get(gpu, 0) + spec.holding_bytes(holding)
        for gpu, holding in gradients.holdings(placement).items() if gradients else ():
            resident[gpu] += gradients.holding_bytes(holding) if gradients else 0
    for gpu, num_bytes in sorted(resident.items()):
        if num_bytes > memory_bytes:
            raise PlanError(
                f"cluster.memory_gib: device {gpu} would hold {num_bytes / 2**30:.2f} GiB of parameters, gradients and "
                f"optimizer state, which is more than the {memory_bytes / 2**30:.2f} GiB it has"
            )


def resolve_model(path: str, cache: Path) -> Path:
    """A folder in the transformers format for a job file's model path (`ModelSection.path`)."""
    if path.startswith("package:"):
        return _convert_gguf(_package_file(path), cache)
    if path.endswith(".gguf"):
        return _convert_gguf(Path(path), cache)
    folder = Path(path)
    if not folder.is_dir():
        script = folder.parent.parent / "prepare.py"
        hint = f": run `python {script}`, which makes it" if script.is_file() else ""
        raise UserError(f"model folder {folder} does not exist{hint}")
    return folder


def _package_file(path: str) -> Path:
    package, _, name = path.removeprefix("package:").partition("/")
    if importlib.util.find_spec(package) is None:
        raise UserError(f"model {path}: the package {package} is not installed: pip install 'nereus-rl[examples]'")
    file = Path(str(importlib.resources.files(package))) / name
    if not file.is_file():
        raise UserError(f"model {path}: the package {package} holds no file {name}")
    return file


def _convert_gguf(file: Path, cache: Path) -> Path:
    """Let transformers read a GGUF file once, and keep the result as a folder."""
    if not file.is_file():
        raise UserError(f"model file {file} does not exist")
    stat = file.stat()
    key = hashlib.sha256(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = cache / f"{file.stem}-{key}"
    if folder.is_dir():
        return folder
    import transformers

    made = cache / f".{folder.name}.{os.getpid()}.tmp"
    made.mkdir(parents=True)
    try:
        where, name = str(file.parent), file.name
        model = transformers.AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype="float32")
        model.save_pretrained(made)
        transformers.AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(made)
        os.replace(made, folder)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{file} is not a GGUF file that transformers can read: {error}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _load_config(folder: Path) -> Any:
    import transformers

    if not (folder / "config.json").is_file():
        raise UserError(f"model folder {folder} holds no config.json")
    try:
        return transformers.AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder / 'config.json'} cannot be read: {error}") from error


def build_task(section: TaskSection, job: Job, model_folder: Path) -> Task:
    """The task of a job. Raises UserError when it is unknown or its arguments are wrong."""
    if section.name == "count":
        from nereus.rl.tasks.count import CountTask

        arguments = {"max_new_tokens": job.sampling.max_new_tokens, **section.args}
        return _built(section, CountTask, arguments)
    family, _, dataset = section.name.partition("/")
    if family == "reasoning_gym" and dataset:
        import transformers

        from nereus.rl.tasks.reasoning import ReasoningTask

        tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
        return _built(section, ReasoningTask.build, {"dataset": dataset, "tokenizer": tokenizer, **section.args})
    raise UserError(
        f"task.name: {section.name!r} is not known: count, or reasoning_gym/NAME as in reasoning_gym/chain_sum"
    )


def _built(section: TaskSection, make: Any, arguments: Mapping[str, Any]) -> Task:
    known = inspect.signature(make).parameters
    unknown = [name for name in arguments if name not in known]
    if unknown:
        raise UserError(f"task.args: {unknown[0]!r} is not known to task {section.name}; it takes {', '.join(known)}")
    try:
        task: Task = make(**arguments)
    except (ValueError, TypeError) as error:
        raise UserError(f"task.args: {error}") from error
    return task
