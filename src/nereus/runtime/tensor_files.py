"""The files that a state is written to: which tensors lie in which, and who gathers and writes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereus.core.plan import ModelStage
from nereus.core.sharding import StateSpec
from nereus.runtime.checkpoint import shards

MOST_FILE_BYTES, LEAST_FILE_BYTES = 512 * 2**20, 16 * 2**20
"""Of a file: at most so much (or one tensor), and not less only so that every device has one to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile:
    """spec: the tensors of a model-stage that lie in it, whole. writer: the device that gathers and writes them."""

    model_stage: ModelStage
    spec: StateSpec
    path: Path
    writer: int

    @property
    def num_bytes(self) -> int:
        """Of its tensors."""
        return self.spec.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tensors of a model-stage, for files FOLDER/STEM-0000i-of-0000n.safetensors. writers: any of these devices."""

    model_stage: ModelStage
    spec: StateSpec
    folder: Path
    stem: str
    writers: tuple[int, ...]


def deal_out(parts: Iterable[Part], most_bytes: int = MOST_FILE_BYTES) -> list[TensorFile]:
    """The files of all parts, each for the device that has least to write so far."""
    files: list[TensorFile] = []
    to_write: dict[int, int] = {}
    for part in parts:
        specs = part.spec.by_name()
        share = -(-part.spec.num_bytes // len(part.writers))
        groups = shards(part.spec, min(most_bytes, max(LEAST_FILE_BYTES, share))) if specs else []
        for i, names in enumerate(groups):
            spec = StateSpec(tuple(specs[name] for name in names), part.spec.num_layers)
            writer = min(part.writers, key=lambda g: to_write.get(g, 0))
            to_write[writer] = to_write.get(writer, 0) + spec.num_bytes
            path = part.folder / f"{part.stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors"
            files.append(TensorFile(model_stage=part.model_stage, spec=spec, path=path, writer=writer))
    return files


def index_of(files: Iterable[TensorFile]) -> Mapping[str, Any]:
    """What transformers looks for beside several files of one model: which tensor lies where."""
    files = list(files)
    where = {tensor.name: file.path.name for file in files for tensor in file.spec.tensors}
    return {"metadata": {"total_size": sum(file.num_bytes for file in files)}, "weight_map": where}
