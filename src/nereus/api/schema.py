"""The job file's schema in words: every field with its type, default and documentation, read off the annotations.

list_fields()            what `nereus run --fields` prints
inside(annotation, key)  the annotation of one of a section's fields, of a mapping's or a list's members
expected(annotation)     "a whole number of at least 1", for a message that says what would be right
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from annotated_types import Ge, Gt, Le
from typing_extensions import Doc

from nereus.core.job import Job

NAME, NUMBER = "MODEL/STAGE", "N"
"""What stands for any name of a mapping and any index of a list in a field's path."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of a job file. default: as it would be written there; None where the field is required."""

    path: str
    type: str
    default: str | None
    doc: str


def list_fields(owner: type = Job, prefix: str = "") -> Iterator[Field]:
    """Every field of a section in order, each section's own fields after it; what a section repeats is left out."""
    for field in dataclasses.fields(owner):
        annotation = members(owner)[field.name]
        path, doc = prefix + field.name, _documentation(annotation)
        sections = list(_sections(annotation))
        if doc or not sections:
            yield Field(path=path, type=_short(annotation), default=_default(field), doc=doc)
        for between, section in sections:
            if not (prefix and between.endswith(NAME)):  # a change's placements have the fields of the first plan's
                yield from list_fields(section, f"{path}{between}.")


def members(owner: type) -> dict[str, Any]:
    """The annotations of a section's fields, by name."""
    hints = typing.get_type_hints(owner, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(owner)}


def is_section(annotation: Any) -> bool:
    return dataclasses.is_dataclass(annotation)


def bare(annotation: Any) -> Any:
    """Without its bounds and documentation."""
    return typing.get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; of anything else, itself."""
    kind = bare(annotation)
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (annotation,)


def inside(annotation: Any, key: str | int) -> Any:
    """The annotation of what stands under `key`; None where nothing may stand."""
    for alternative in map(bare, alternatives(annotation)):
        origin, arguments = typing.get_origin(alternative), typing.get_args(alternative)
        if is_section(alternative):
            found = members(alternative).get(str(key))
        elif isinstance(origin, type) and issubclass(origin, Mapping):
            found = arguments[1]
        else:
            found = arguments[0] if isinstance(origin, type) and isinstance(key, int) else None
        if found is not None:
            return found
    return None


def expected(annotation: Any) -> str:
    """What a value must be, to be read after "it must be"."""
    options = alternatives(annotation)
    if len(options) > 1:
        bounds = getattr(annotation, "__metadata__", ())
        return ", or ".join(_expected(option, bounds) for option in options)
    return _expected(bare(annotation), getattr(annotation, "__metadata__", ()))


def _expected(kind: Any, bounds: tuple[Any, ...]) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return _listed([str(a) for a in arguments], "or")
    if is_section(kind):
        return f"a section with {_listed(list(members(kind)), 'and')}"
    if origin is tuple:
        return f"a list of {len(arguments)} numbers"
    if origin is not None and issubclass(origin, Mapping):
        whole = is_section(arguments[1])
        return (
            f"a section that gives each {NAME} {expected(arguments[1])}" if whole else "a section of names and values"
        )
    if origin is not None:
        return f"a list, each item {expected(arguments[0])}"
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    return words[kind] + (_bounds(bounds) if kind in (int, float) else "")


def _bounds(metadata: tuple[Any, ...]) -> str:
    words = []
    for bound in metadata:
        match bound:
            case Ge(ge=least):
                words.append(f"of at least {least}")
            case Gt(gt=below):
                words.append(f"above {below}")
            case Le(le=most):
                words.append(f"of at most {most}")
    return f" {' and '.join(words)}" if words else ""


def _listed(words: list[str], link: str) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {link} {words[-1]}"


def _sections(annotation: Any) -> Iterator[tuple[str, type]]:
    """The sections inside a field's type, with what stands between the field's path and theirs."""
    for alternative in map(bare, alternatives(annotation)):
        origin, arguments = typing.get_origin(alternative), typing.get_args(alternative)
        if is_section(alternative):
            yield "", alternative
        elif isinstance(origin, type) and arguments:
            step = f".{NAME}" if issubclass(origin, Mapping) else f".{NUMBER}"
            for between, section in _sections(arguments[-1]):
                yield step + between, section


def _documentation(annotation: Any) -> str:
    metadata = getattr(annotation, "__metadata__", ())
    return next((m.documentation for m in metadata if isinstance(m, Doc)), "")


def _short(annotation: Any) -> str:
    """A type in a word or two."""
    return " | ".join(_short_name(bare(option)) for option in alternatives(annotation))


def _short_name(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return " | ".join(str(a) for a in arguments)
    if origin is not None:
        return "section" if issubclass(origin, Mapping) else f"list of {_short(arguments[0])}"
    return "section" if is_section(kind) else "null" if kind is type(None) else str(kind.__name__)


def _default(field: dataclasses.Field[Any]) -> str | None:
    """As YAML would have it."""
    if field.default is dataclasses.MISSING:
        return None if field.default_factory is dataclasses.MISSING else "{}"
    match field.default:
        case None:
            return "null"
        case bool():
            return str(field.default).lower()
        case tuple():
            return str(list(field.default))
        case default:
            return str(default)
