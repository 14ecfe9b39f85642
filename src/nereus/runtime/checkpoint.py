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
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nereus.core.errors import UserError
from nereus.core.sharding import StateSpec
from nereus.runtime.files import write_atomically
from nereus.runtime.state import LocalState

INDEX = "model.safetensors.index.json"
MANIFEST = "manifest.json"
FRESH_PREFIX = "score."
"""A value head that a folder lacks is made fresh."""

PIECE_BYTES = 8 * 2**20
"""What is written and hashed at a time."""

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls them."""


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


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file on disk."""

    num_bytes: int
    sha256: str


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], go_on: Callable[[], None] = lambda: None
) -> WrittenFile:
    """Write whole tensors to one safetensors file, force it to disk, and hash what is written on the way.

    go_on: called every PIECE_BYTES; may raise. Raises OSError. The folder is published only when it is complete.
    The interpreter is free for other threads nearly all of the time, which `safetensors.save_file` does not promise.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so all are aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].numel() * tensors[name].element_size()
        kind, shape = _DTYPES[tensors[name].dtype], list(tensors[name].shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    sha256, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in _pieces(struct.pack("<Q", len(text)) + text, [tensors[name] for name in order]):
            go_on()
            file.write(piece)
            sha256.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(size, sha256.hexdigest())


def _pieces(header: bytes, tensors: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    """The bytes of a header and of tensors."""
    yield memoryview(header)
    for tensor in tensors:
        whole = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        yield from (whole[at : at + PIECE_BYTES] for at in range(0, len(whole), PIECE_BYTES))


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


def write_manifest(folder: Path, facts: Mapping[str, Any], known: Mapping[str, str] | None = None) -> None:
    """Complete a checkpoint: write the manifest, with the hash of every file and one of its own content.

    known: SHA-256 by path in the folder, of files that were hashed when they were written; others are read.
    """
    found = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
    found.pop(MANIFEST, None)
    known = known or {}
    manifest = {**facts, "files": {name: known.get(name) or _sha256(path) for name, path in found.items()}}
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
