"""Checkpoints of a job: both trained models, whole and in the transformers format, and where the run stood.

step-000012/actor/     config.json, tokenizer, model-*.safetensors (from_pretrained reads it), state-*.safetensors
step-000012/critic/    the same
step-000012/manifest.json
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereus.core.errors import UserError
from nereus.core.plan import ModelStage, Plan
from nereus.core.sharding import StateSpec
from nereus.rl.recovery import Restart
from nereus.rl.setup import TOKENIZER_FILES, Prepared
from nereus.rl.step import TRAINED
from nereus.runtime.checkpoint import MANIFEST, find_tensors, read_manifest, write_manifest
from nereus.runtime.files import sync_folder, write_atomically
from nereus.runtime.fleet import Fleet, Source

FORMAT = 1


def save_checkpoint(
    fleet: Fleet, prepared: Prepared, root: Path, *, step: int, ledger_bytes: int, keep: int
) -> tuple[Path, int]:
    """Write the checkpoint of the start of `step` under `root`; returns its folder and size in bytes.

    It appears whole or not at all; afterwards the newest `keep` remain.
    """
    final = root / f"step-{step:06d}"
    folder = root / f".{final.name}.tmp"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    num_bytes = 0
    names = [name for name in TRAINED if name in fleet.plan]
    for name in names:
        num_bytes += _save_model(fleet, prepared, name, folder / name.model)
    write_manifest(
        folder,
        {
            "format": FORMAT,
            "step": step,
            "plan": fleet.plan.to_json(),
            "devices": list(fleet.pool),
            "ledger_bytes": ledger_bytes,
            "digest": fleet.digest(names),
        },
    )
    shutil.rmtree(final, ignore_errors=True)
    folder.rename(final)
    sync_folder(root)
    for old in checkpoints(root)[:-keep]:
        shutil.rmtree(old)
    return final, num_bytes


def _save_model(fleet: Fleet, prepared: Prepared, name: ModelStage, folder: Path) -> int:
    folder.mkdir()
    architecture, spec = prepared.architectures[name], prepared.specs[name]
    parameters = architecture.parameters
    known = parameters.by_name()
    rest = StateSpec(tuple(t for t in spec.tensors if t.name not in known), spec.num_layers)
    model: Any = architecture.meta
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    write_atomically(folder / "config.json", json.dumps(config, indent=1, default=str))
    for file in TOKENIZER_FILES:
        if (prepared.folders[name] / file).is_file():
            shutil.copy2(prepared.folders[name] / file, folder / file)
    written = fleet.write(name, parameters, folder, "model", index=True)
    written += fleet.write(name, rest, folder, "state")
    sync_folder(folder)
    return written


def checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints under a folder, oldest first."""
    return sorted(p for p in root.glob("step-*") if (p / MANIFEST).is_file())


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A checkpoint, verified: where the run stood, and the sources of the trained model-stages."""

    step: int
    plan: Plan
    devices: tuple[int, ...]
    ledger_bytes: int
    digest: str
    sources: Mapping[ModelStage, Source]


def newest_checkpoint(root: Path) -> Restored:
    """The newest whole checkpoint. Raises UserError when there is none, or the newest is damaged."""
    found = checkpoints(root)
    if not found:
        raise UserError(f"run {root.parent} has no checkpoint to go on from: it ended before its first one")
    folder = found[-1]
    try:
        return _restored(folder, read_manifest(folder))
    except (UserError, KeyError, TypeError, AttributeError) as error:
        what = error if isinstance(error, UserError) else f"checkpoint {folder} has a damaged {MANIFEST}: {error!r}"
        rest = f"delete that folder to go on from {found[-2].name}" if found[1:] else "there is no other one"
        raise UserError(f"{what}; {rest}") from error


def _restored(folder: Path, facts: Mapping[str, Any]) -> Restored:
    if facts["format"] != FORMAT:
        raise UserError(f"checkpoint {folder} has format {facts['format']}, this version reads {FORMAT}")
    plan = Plan.from_json(facts["plan"])
    return Restored(
        step=facts["step"],
        plan=plan,
        devices=tuple(facts["devices"]),
        ledger_bytes=facts["ledger_bytes"],
        digest=facts["digest"],
        # TRAINED is also the order of the digest.
        sources={name: Source(files=find_tensors(folder / name.model)) for name in TRAINED if name in plan},
    )


def restart_point(root: Path, prepared: Prepared) -> Restart:
    """The newest checkpoint; before there is one, the job's own models and step 0. Raises UserError for a damaged one."""
    if not checkpoints(root):
        models = {name: source for name, source in prepared.sources.items() if name in TRAINED}
        return Restart(step=0, ledger_bytes=0, sources=models)
    found = newest_checkpoint(root)
    return Restart(step=found.step, ledger_bytes=found.ledger_bytes, sources=found.sources, digest=found.digest)
