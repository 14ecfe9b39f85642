"""The boundary: YAML text and `--set` overrides in, a checked `Job` out; one line for each mistake.

text -> tree (dicts, lists, scalars) -> overrides -> names are known -> types, bounds -> Job's own checks
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from nereus.api.schema import alternatives, bare, expected, inside, is_section, members
from nereus.core.errors import UserError
from nereus.core.job import Job

_ADAPTER: TypeAdapter[Job] = TypeAdapter(Job)

TreePath = tuple[str | int, ...]


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """Read a job file (or the job.yaml of a folder), apply `a.b=value` overrides, make model paths absolute.

    Raises UserError in one line that names the file, the field, the bad value and what would be right.
    """
    path = Path(path)
    file = path / "job.yaml" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"job file {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"job file {file} is not text: byte {error.start} is not UTF-8") from error
    return parse_job(text, where=str(file), base=file.resolve().parent, overrides=overrides)


def parse_job(text: str, *, where: str, base: Path, overrides: Sequence[str] = ()) -> Job:
    """See `load_job`. base: the folder that relative model paths start from."""
    try:
        tree = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{where} is not valid YAML: {_yaml_mistake(error)}") from error
    if not isinstance(tree, dict):
        found = "empty" if tree is None else _shown(tree)
        raise UserError(f"{where} is not a job but {found}: it must have name, steps, model, task and so on")
    for override in overrides:
        _override(tree, override)
    for mistake in _unknown_names(Job, tree):
        raise UserError(f"{where}: {mistake}")
    try:
        job = _ADAPTER.validate_python(tree)
    except ValidationError as error:
        raise UserError(f"{where}: {_mistake(error, tree)}") from error
    if job.name in (".", "..") or "/" in job.name:
        raise UserError(f"{where}: name: {job.name!r} is wrong: it must do as the name of a folder")
    return _absolute(job, base)


def dump_job(job: Job) -> str:
    """The YAML text of a job; `parse_job` reads the same job from it."""
    return yaml.safe_dump(_ADAPTER.dump_python(job, mode="json"), sort_keys=False)


def override_paths(overrides: Sequence[str]) -> list[tuple[str, ...]]:
    """The fields that overrides set: `("batch", "prompts")`."""
    return [tuple(override.partition("=")[0].split(".")) for override in overrides]


class _Loader(yaml.SafeLoader):
    """Refuses a name that stands twice in a section: YAML forbids it, and PyYAML would take the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.composer.ComposerError(None, None, f"{key.value} stands there twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else "")
        return node


def _yaml_mistake(error: yaml.YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _override(tree: dict[str, Any], override: str) -> None:
    """Set one field of the tree. Sections on the way are made, in the place of a scalar where need be."""
    path, equals, text = override.partition("=")
    *parents, last = path.split(".")
    if not equals or not all((*parents, last)):
        raise UserError(f"--set {override!r} is not of the form FIELD=VALUE, as in --set batch.prompts=64")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise UserError(f"--set {override!r}: the value is not valid YAML: {_yaml_mistake(error)}") from error
    node: Any = tree
    for name in parents:
        key = _key(node, name, override)
        if not isinstance(_item(node, key), dict | list):
            node[key] = {}
        node = node[key]
    node[_key(node, last, override)] = value


def _key(node: Any, name: str, override: str) -> str | int:
    if not isinstance(node, list):
        return name
    if not name.isdecimal() or int(name) >= len(node):
        raise UserError(f"--set {override!r}: {name} is no item of that list, which has {len(node)}, counted from 0")
    return int(name)


def _unknown_names(annotation: Any, tree: Any, path: TreePath = ()) -> Iterator[str]:
    """One line for each name in the tree that the schema does not have."""
    if bare(annotation) is Any:
        return
    sections = [a for a in map(bare, alternatives(annotation)) if is_section(a)]
    items: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(tree, dict):
        items = iter(tree.items())
    elif isinstance(tree, list):
        items = iter(enumerate(tree))
    for key, value in items:
        if isinstance(tree, dict) and not isinstance(key, str):
            yield f"{_dotted(path) or 'the job'}: {_shown(key)} is not a name"
            continue
        below = inside(annotation, key)
        if below is not None:
            yield from _unknown_names(below, value, (*path, key))
        elif sections and isinstance(tree, dict):
            yield f"{_dotted((*path, key))}: there is no such field{_suggestion(str(key), list(members(sections[0])))}"


def _suggestion(wrong: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(wrong, known, n=2)
    return f"; did you mean {' or '.join(close)}?" if close else f"; there are {', '.join(known)}"


def _mistake(error: ValidationError, tree: Any) -> str:
    """One line for the first of a validation's errors."""
    errors = error.errors(include_url=False)
    if errors[0]["type"] == "value_error" and not errors[0]["loc"]:  # from Job itself, in our own words
        return str(errors[0]["msg"]).removeprefix("Value error, ")
    # A union reports every alternative that it tried. What was meant is the one that came furthest into the tree.
    paths = [_tree_path(mistake["loc"], tree) for mistake in errors]
    first = paths[0]
    path = max((p for p in paths if p[: len(first)] == first), key=len)
    annotation: Any = Job
    value: Any = tree
    for key in path:
        annotation = inside(annotation, key)
        value = _item(value, key, _MISSING)
    what = "is missing" if value is _MISSING else f"{_shown(value)} is wrong"
    return f"{_dotted(path)}: {what}: it must be {expected(annotation)}"


_MISSING = object()


def _tree_path(loc: Sequence[str | int], tree: Any) -> TreePath:
    """An error's location without the names of union members that pydantic puts in between."""
    path: list[str | int] = []
    annotation: Any = Job
    for part in loc:
        below = inside(annotation, part) if isinstance(tree, dict | list) else None
        if below is None or (isinstance(part, str) and part not in tree and not _is_field(annotation, part)):
            continue
        if isinstance(tree, list) and (not isinstance(part, int) or part >= len(tree)):
            break  # an item that is not there: it is the list that is wrong
        path.append(part)
        annotation = below
        tree = _item(tree, part)
    return tuple(path)


def _is_field(annotation: Any, name: str) -> bool:
    return any(is_section(a) and name in members(a) for a in map(bare, alternatives(annotation)))


def _item(tree: Any, key: Any, default: Any = None) -> Any:
    return tree[key] if isinstance(tree, list) else tree.get(key, default)


def _dotted(path: Sequence[Any]) -> str:
    return ".".join(map(str, path))


def _shown(value: Any) -> str:
    """A value as it stands in the file, cut to fit into a line."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _absolute(job: Job, base: Path) -> Job:
    """Relative paths of models and of a supply trace start at the job file, the run folder at the working directory."""
    changed: dict[str, Any] = {}
    if job.cluster.supply_trace is not None:
        trace = str(base / Path(job.cluster.supply_trace).expanduser())
        changed["cluster"] = dataclasses.replace(job.cluster, supply_trace=trace)
    for name in ("model", "critic", "reward"):
        section = getattr(job, name)
        if section is not None and not section.path.startswith("package:"):
            changed[name] = dataclasses.replace(section, path=str(base / Path(section.path).expanduser()))
    return dataclasses.replace(job, **changed)
