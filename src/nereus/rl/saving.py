"""Checkpoints of a job: both trained models, whole and in the transformers format, and where the run stood.

step-000012/actor/     config.json, tokenizer, model-*.safetensors (from_pretrained reads it), state-*.safetensors
step-000012/critic/    the same
step-000012/manifest.json

A checkpoint is taken at a step boundary and written while the run goes on (`Checkpoints`):

    begin     devices gather copies of all that goes into the files, and write them             the loop waits for the copies
    look      between later stages; the loop waits only at the end, where the next one is due, and before writers leave
    publish   config and manifest; the folder, hidden so far (.step-*.tmp), gets its name       all of it appears at once

One that fails, or whose writer dies, leaves nothing, and those before it are still there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereus.core.digest import combine
from nereus.core.errors import StateError, UserError
from nereus.core.events import CheckpointFailed, CheckpointWritten, Event
from nereus.core.plan import ModelStage, Plan
from nereus.core.sharding import StateSpec
from nereus.rl.recovery import FAULTS, Restart
from nereus.rl.setup import TOKENIZER_FILES, Prepared
from nereus.rl.step import TRAINED
from nereus.runtime.checkpoint import INDEX, MANIFEST, find_tensors, read_manifest, write_manifest
from nereus.runtime.file_batch import FileBatch, WriterLost
from nereus.runtime.files import sync_folder, write_atomically
from nereus.runtime.fleet import Fleet, Source
from nereus.runtime.tensor_files import Part, index_of

FORMAT = 1

LEAVE_S = 5.0
"""How long a run that ends before its time waits for the checkpoint that is being written."""


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A checkpoint that is being written to `folder`: of the start of a step, when the plan and the devices were these."""

    step: int
    ledger_bytes: int
    plan: Plan
    devices: tuple[int, ...]
    folder: Path
    files: FileBatch
    began_s: float
    blocked_s: float = 0.0


class Checkpoints:
    """The checkpoints of a run under `root`: see the module. The newest `keep` remain.

    saved: the step of the newest, where one is there already. What a killed run left half done is removed.
    """

    def __init__(
        self,
        fleet: Fleet,
        prepared: Prepared,
        root: Path,
        *,
        keep: int,
        saved: int | None,
        emit: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        self._fleet, self._prepared, self._root, self._keep = fleet, prepared, root, keep
        self._emit, self._clock = emit, clock
        self._saved, self._owed = saved, False
        self._pending: _Pending | None = None
        self._num_begun, self._failure = 0, ""
        _remove_leftovers(root)

    def at_boundary(self, step: int, ledger_bytes: int, *, due: bool, last: bool) -> None:
        """Before `step`: see what has become of the last one; begin one where it is due, or the last one was given up.

        last: return when the state at this boundary is saved, or raise OSError. Raises WorkerDied and WorkerFailed: begin
        again after a recovery.
        """
        if self._pending is not None:
            self._look(wait=last or (due and self._pending.step != step))
        while (due or last or self._owed) and self._saved != step and self._pending is None:
            self._begin(step, ledger_bytes, wait=last)
            if not self._owed:
                break
        if last and self._saved != step:
            raise OSError(f"the checkpoint of step {step} cannot be written: {self._failure}")

    def look(self) -> None:
        """Publish what has been written meanwhile. Raises WorkerDied, WorkerFailed."""
        if self._pending is not None:
            self._look(wait=False)

    def settle(self, leaving: Set[int] | None = None) -> None:
        """Wait for what is being written (leaving: where one of these devices writes it), or give it up.

        Raises WorkerDied, WorkerFailed.
        """
        if self._pending is not None and (leaving is None or leaving & self._pending.files.writers):
            self._look(wait=True)

    def close(self) -> None:
        """At the end of a run, whatever ended it: what can be saved soon is saved, the rest removed."""
        with suppress(*FAULTS, ValueError):
            if self._pending is not None:
                self._look(wait=True, within_s=LEAVE_S)
        _remove_leftovers(self._root)

    # -- one checkpoint ------------------------------------------------------------------------------------------

    def _begin(self, step: int, ledger_bytes: int, *, wait: bool) -> None:
        began, self._owed = self._clock(), False
        _remove_leftovers(self._root)
        self._num_begun += 1
        folder = self._root / f".step-{step:06d}.{os.getpid()}-{self._num_begun}.tmp"
        try:
            for name in self._names():
                (folder / name.model).mkdir(parents=True)
            files = FileBatch(self._fleet, [part for name in self._names() for part in self._parts(name, folder)])
            files.start()
        except (OSError, WriterLost) as error:
            self._owed = isinstance(error, WriterLost)
            self._failed(step, str(error), folder)
            return
        pending = self._pending = _Pending(
            step=step,
            ledger_bytes=ledger_bytes,
            plan=self._fleet.plan,
            devices=self._fleet.pool,
            folder=folder,
            files=files,
            began_s=began,
        )
        pending.blocked_s = self._clock() - began
        if wait or files.waited:
            self._look(wait=True)

    def _look(self, *, wait: bool, within_s: float | None = None) -> None:
        """Publish what is being written once it is complete, or give it up."""
        pending = self._pending
        assert pending is not None
        began = self._clock()
        try:
            complete = pending.files.look(wait=wait, within_s=within_s)
            num_bytes = self._publish(pending) if complete else 0
        except (OSError, StateError, WriterLost) as error:
            self._pending, self._owed = None, isinstance(error, WriterLost)
            self._failed(pending.step, str(error), pending.folder)
            pending.files.give_up()
            return
        now = self._clock()
        pending.blocked_s += now - began
        if complete:
            self._pending, self._saved = None, pending.step
            self._emit(
                CheckpointWritten(
                    step=pending.step,
                    path=str(self._final(pending)),
                    num_bytes=num_bytes,
                    seconds=now - pending.began_s,
                    blocked_seconds=pending.blocked_s,
                    waited=pending.files.waited,
                )
            )

    def _failed(self, step: int, why: str, folder: Path) -> None:
        self._failure = " ".join(why.split())
        shutil.rmtree(folder, ignore_errors=True)
        self._emit(CheckpointFailed(step=step, why=self._failure))

    def _publish(self, pending: _Pending) -> int:
        """Complete the folder and give it its name; returns the bytes of tensor files. Raises OSError, StateError."""
        folder, written = pending.folder, pending.files.written()
        names = [name for name in TRAINED if name in pending.plan]
        for name in names:
            _write_config(self._prepared, name, folder / name.model)
            files = [file for file in pending.files.files if file.path.match(f"{name.model}/model-*")]
            write_atomically(folder / name.model / INDEX, json.dumps(index_of(files), indent=1))
        facts = {
            "format": FORMAT,
            "step": pending.step,
            "plan": pending.plan.to_json(),
            "devices": list(pending.devices),
            "ledger_bytes": pending.ledger_bytes,
            "digest": " ".join(f"{name}={self._digest(name, pending.files)[:32]}" for name in names),
        }
        write_manifest(folder, facts, {str(path.relative_to(folder)): file.sha256 for path, file in written.items()})
        final = self._final(pending)
        if final.exists():
            _remove(final)
        folder.rename(final)
        sync_folder(self._root)
        for old in checkpoints(self._root)[: -self._keep]:
            _remove(old)
        return sum(file.num_bytes for file in written.values())

    def _digest(self, name: ModelStage, files: FileBatch) -> str:
        """As `Fleet.digest_of`, of what lies in the files. Raises StateError where a tensor is in none."""
        spec, sums = self._prepared.specs[name], files.sums(name)
        whole = {tensor.name: [(0, tensor.length)] for tensor in spec.tensors if tensor.name in sums}
        return combine(spec, {0: whole}, {0: {tensor: [sums[tensor]] for tensor in whole}})

    def _final(self, pending: _Pending) -> Path:
        return self._root / f"step-{pending.step:06d}"

    def _names(self) -> list[ModelStage]:
        return [name for name in TRAINED if name in self._fleet.plan]

    def _parts(self, name: ModelStage, folder: Path) -> list[Part]:
        """Parameters, and the rest."""
        parameters, spec = self._prepared.architectures[name].parameters, self._prepared.specs[name]
        known = parameters.by_name()
        rest = StateSpec(tuple(t for t in spec.tensors if t.name not in known), spec.num_layers)
        return [
            Part(
                model_stage=name,
                spec=part,
                folder=folder / name.model,
                stem=stem,
                writers=self._fleet.plan[name].gpus,
            )
            for stem, part in (("model", parameters), ("state", rest))
        ]


def _write_config(prepared: Prepared, name: ModelStage, folder: Path) -> None:
    model: Any = prepared.architectures[name].meta
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    write_atomically(folder / "config.json", json.dumps(config, indent=1, default=str))
    for file in TOKENIZER_FILES:
        if (prepared.folders[name] / file).is_file():
            shutil.copy2(prepared.folders[name] / file, folder / file)
    sync_folder(folder)


def _remove(folder: Path) -> None:
    """Whoever dies whenever, the folder is whole under its name or not there."""
    hidden = folder.with_name(f".{folder.name}.old.tmp")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _remove_leftovers(root: Path) -> None:
    for folder in root.glob(".step-*.tmp"):
        shutil.rmtree(folder, ignore_errors=True)


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
