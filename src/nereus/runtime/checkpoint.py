"""Logical state on disk: safetensors in the transformers layout, read and written region by region.

    FOLDER/actor/config.json, model-00001-of-00002.safetensors, model.safetensors.index.json   (from_pretrained reads it)
                 state-00001-of-00004.safetensors, ...          moments and counters, by logical tensor name
    FOLDER/manifest.json     what it is, and the SHA-256 of every file; written last: without it there is no checkpoint

Nothing in it depends on the layout or the number of devices that wrote it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from nereus.core.errors import UserError
from nereus.core.sharding import StateSpec
from nereus.runtime.files import write_atomically
from nereus.runtime.state import LocalState

INDEX = "model.safetensors.index.json"
MANIFEST = "manifest.json"
FRESH_PREFIX = "score."
"""A value head that a folder lacks is made fresh."""


@contextmanager
def _opened(file: str) -> Iterator[Any]:
    """A safetensors file. Raises UserError, with its name, when it is missing or damaged."""
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is not a readable safetensors file: {error}") from error


def find_tensors(folder: Path) -> dict[str, str]:
    """Tensor name -> file, for all safetensors files of a folder; headers are read, data is not.

    Raises UserError naming the folder or file that is missing or damaged.
    """
    if not folder.is_dir():
        raise UserError(f"model folder {folder} does not exist")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"model folder {folder} holds no .safetensors file")
    found: dict[str, str] = {}
    for file in files:
        with _opened(str(file)) as opened:
            found.update(dict.fromkeys(opened.keys(), str(file)))
    return found


def check_tensors(spec: StateSpec, files: Mapping[str, str], folder: Path) -> None:
    """Raise UserError unless every tensor of `spec` is in the files with its shape, a fresh head apart."""
    by_file: dict[str, list[str]] = {}
    for tensor in spec.tensors:
        if tensor.name in files:
            by_file.setdefault(files[tensor.name], []).append(tensor.name)
        elif not tensor.name.startswith(FRESH_PREFIX):
            raise UserError(f"{folder} lacks the tensor {tensor.name} of shape {list(tensor.shape)}")
    specs = spec.by_name()
    for file, names in by_file.items():
        with _opened(file) as opened:
            for name in names:
                shape = tuple(opened.get_slice(name).get_shape())
                if shape != specs[name].shape:
                    raise UserError(
                        f"{file}: {name} has shape {list(shape)}, the config says {list(specs[name].shape)}"
                    )


def read_regions(state: LocalState, files: Mapping[str, str], seed: int) -> None:
    """Fill the parts of `state` whose tensors are in `files`, reading only what this rank holds.

    Raises UserError naming a file that is missing or damaged.

    A value head that is in no file is drawn from a normal distribution of deviation 1 / sqrt(hidden + 1) (Stiennon et al.
    2020), its bias zero: the same for every layout. Moments and counters that are in no file stay zero.
    """
    by_file: dict[str, list[str]] = {}
    for name in state.tensors:
        if name in files:
            by_file.setdefault(files[name], []).append(name)
        elif name.startswith(FRESH_PREFIX) and name.endswith("weight"):
            shape = state.specs[name].shape
            drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / math.sqrt(shape[-1] + 1)
            state.tensors[name].copy_(drawn)
    for file, names in by_file.items():
        with _opened(file) as opened:
            for name in names:
                part, dim = opened.get_slice(name), state.specs[name].dim
                for start, stop in state.holding[name]:
                    index = (*[slice(None)] * dim, slice(start, stop))
                    state.region(name, start, stop).copy_(part[index])


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> int:
    """Write whole tensors to one file (its folder is published only when complete); returns its size in bytes."""
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path.stat().st_size


def shards(spec: StateSpec, max_bytes: int) -> list[list[str]]:
    """Tensor names of `spec` in order, in groups of at most `max_bytes` (one tensor at least)."""
    groups: list[list[str]] = [[]]
    free = max_bytes
    for tensor in spec.tensors:
        if groups[-1] and tensor.num_bytes > free:
            groups.append([])
            free = max_bytes
        groups[-1].append(tensor.name)
        free -= tensor.num_bytes
    return groups


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Publish a checkpoint: hash every file, then write the manifest, which carries a hash of its own content."""
    found = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
    found.pop(MANIFEST, None)
    manifest = {**facts, "files": {name: _sha256(path) for name, path in found.items()}}
    manifest = json.loads(json.dumps(manifest))  # as it will be read: keys are strings there
    write_atomically(folder / MANIFEST, json.dumps({**manifest, "sha256": _content_sha256(manifest)}, indent=1))


def read_manifest(folder: Path) -> dict[str, Any]:
    """A checkpoint's facts, after all of its files were found whole. Raises UserError naming the damaged one."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        digest = manifest.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"checkpoint {folder} has no readable {MANIFEST}: {error!r}") from error
    if digest != _content_sha256(manifest):
        raise UserError(f"checkpoint {folder}: {MANIFEST} is damaged")
    for name, expected in manifest["files"].items():
        try:
            whole = _sha256(folder / name) == expected
        except OSError:
            whole = False
        if not whole:
            raise UserError(f"checkpoint {folder}: {name} is missing or damaged")
    return manifest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _content_sha256(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
