"""The boundary: YAML text and `--set` overrides in, a checked `Job` out; one line for each mistake."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError
from typing_extensions import Doc

from nereus.core.errors import UserError
from nereus.core.job import Job

_ADAPTER: TypeAdapter[Job] = TypeAdapter(Job)


def load_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """Read a job file (or the job.yaml of a folder), apply `a.b=value` overrides, make model paths absolute.

    Raises UserError in one line that names the file, the field, the bad value and what would be right.
    """
    file = path / "job.yaml" if path.is_dir() else path
    try:
        text = file.read_text()
    except OSError as error:
        raise UserError(f"job file {file} cannot be read: {error.strerror}") from error
    return parse_job(text, where=str(file), base=file.resolve().parent, overrides=overrides)


def parse_job(text: str, *, where: str, base: Path, overrides: Sequence[str] = ()) -> Job:
    """See `load_job`. base: the folder that relative model paths start from."""
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{where} is not a job: it must be a mapping with name, steps, model, task, ...")
    for override in overrides:
        _override(tree, override)
    try:
        job = _ADAPTER.validate_python(tree)
    except ValidationError as error:
        raise UserError(f"{where}: {_first_mistake(error)}") from error
    return _absolute(job, base)


def dump_job(job: Job) -> str:
    """The YAML text of a job; `parse_job` reads the same job from it."""
    return yaml.safe_dump(_ADAPTER.dump_python(job, mode="json"), sort_keys=False)


def describe_fields() -> Iterator[tuple[str, str, str, str]]:
    """(field, type, default, documentation) of every field of a job file."""
    yield from _describe(Job, "")


def _override(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise UserError(f"--set {override!r} is not of the form field=value, as in batch.prompts=64")
    *parents, last = path.split(".")
    node: Any = tree
    for name in parents:
        node = node.setdefault(name, {}) if isinstance(node, dict) else node
        if node is None or isinstance(node, str | int | float | list):
            raise UserError(f"--set {override!r}: {name} has no fields")
    try:
        node[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"--set {override!r}: the value is not valid YAML") from error


def _first_mistake(error: ValidationError) -> str:
    """One line for the first of a validation's errors."""
    mistakes = error.errors(include_url=False)
    # A union reports every member it tried; what matters is the member that came nearest: the longest path.
    mistake = max(mistakes, key=lambda m: (m["type"] == "extra_forbidden", len(m["loc"])))
    if mistake["type"] == "value_error":
        return str(mistake["msg"]).removeprefix("Value error, ")
    names = [str(part) for part in mistake["loc"] if not _is_union_tag(part)]
    field = ".".join(names)
    if mistake["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{field}: unknown field{_did_you_mean(names)}"
    if mistake["type"] in ("missing", "missing_argument"):
        return f"{field}: is required and not given"
    return f"{field}: {mistake['input']!r} is wrong: {mistake['msg'][:1].lower()}{mistake['msg'][1:]}"


def _is_union_tag(part: object) -> bool:
    return isinstance(part, str) and (part.startswith(("literal[", "mapping[", "Mapping[", "function-")) or "[" in part)


def _did_you_mean(names: Sequence[str]) -> str:
    section, prefix = ".".join(names[:-1]), ""
    siblings = []
    for field, *_ in describe_fields():
        parent, _, leaf = field.rpartition(".")
        if parent.replace("MODEL/STAGE", "*") == section or _same_section(parent, section):
            siblings.append(leaf)
    close = difflib.get_close_matches(names[-1], siblings, 1)
    return (
        f"; did you mean {prefix}{close[0]}?" if close else (f"; known are {', '.join(siblings)}" if siblings else "")
    )


def _same_section(pattern: str, section: str) -> bool:
    a, b = pattern.split(".") if pattern else [], section.split(".") if section else []
    return len(a) == len(b) and all(x == y or x in ("MODEL/STAGE", "N") for x, y in zip(a, b, strict=True))


def _describe(owner: type, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    hints = typing.get_type_hints(owner, include_extras=True)
    for field in dataclasses.fields(owner):
        if field.name.startswith("__"):
            continue
        annotation = hints[field.name]
        doc = next((m.documentation for m in getattr(annotation, "__metadata__", ()) if isinstance(m, Doc)), "")
        name = f"{prefix}{field.name}"
        nested = list(_sections(annotation))
        yield name, _type_name(annotation), _default(field), doc
        for suffix, section in nested:
            yield from _describe(section, f"{name}{suffix}.")


def _sections(annotation: Any) -> Iterator[tuple[str, type]]:
    """The sections inside a field's type, with what stands between the field's name and theirs."""
    annotation = _bare(annotation)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        yield "", annotation
        return
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        for argument in arguments:
            yield from _sections(argument)
    elif origin is not None and isinstance(origin, type) and arguments:
        step = ".MODEL/STAGE" if issubclass(origin, Mapping) else ".N"
        for suffix, section in _sections(arguments[-1]):
            yield step + suffix, section


def _bare(annotation: Any) -> Any:
    return typing.get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation


def _type_name(annotation: Any) -> str:
    annotation = _bare(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " | ".join(str(a) for a in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type_name(a) for a in arguments)
    if origin is not None:
        if issubclass(origin, Mapping):
            return "mapping"
        return "list of " + _type_name(arguments[0])
    if dataclasses.is_dataclass(annotation):
        return "section"
    return "null" if annotation is type(None) else str(getattr(annotation, "__name__", annotation))


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return "null" if field.default is None else str(field.default)
    return "required" if field.default_factory is dataclasses.MISSING else ""


def _absolute(job: Job, base: Path) -> Job:
    """Relative model paths start at the job file, the run folder at the working directory."""
    changed = {}
    for name in ("model", "critic", "reward"):
        section = getattr(job, name)
        if section is not None and not section.path.startswith("package:"):
            changed[name] = dataclasses.replace(section, path=str(base / section.path))
    return dataclasses.replace(job, **changed)
