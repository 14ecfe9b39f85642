"""What a device holds, kind by kind, against what it may hold.

    resident      the state of all units, new shards of a transition beside the old ones
    gradients     of the units that have any, whole from the first backward pass on
    activations   what autograd keeps for the backward pass: every storage once, without parameters;
                  where nothing is kept, what one layer computes at a time
    boundaries    hidden states received from the pp_stage before, and sent to the next, until their backward pass
    logits        what autograd keeps of the head, and the head's own temporaries
    kv_cache      keys and values of generation
    workspace     buckets of gradients, temporaries of the optimizer, copies of a layer's cache, staging memory
    checkpoint    copies of state that are being written to files

On a CPU this is the device: processes share one memory, so nothing else would stop one of them from taking more than its
part, and an emulated device has less than there is. What would exceed the capacity raises OutOfMemory in the operation that
needs it. On a GPU the driver's allocator is the judge, and the account says what the memory went to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nereus.core.errors import OutOfMemory
from nereus.core.measurements import MEMORY_KINDS

_NAMES = {"resident": "state", "kv_cache": "KV cache", "checkpoint": "copies for a checkpoint"}
LASTING = ("resident", "gradients", "checkpoint")
"""Kinds that outlast a command."""


class Budget:
    """The account of device `device`. capacity_bytes: None for as much as there is, or where an allocator knows.

    allocator: whether there is one that tells the peak; what autograd keeps is then not counted.
    until_written: called where only the copies for a checkpoint are in the way; returns when they are gone. Set by whoever
    begins commands with copies. most_bytes: the highest peak of a command, but for copies, since it was set to zero.
    """

    def __init__(self, device: int, capacity_bytes: float | None = None, *, allocator: bool = False) -> None:
        self.device, self.capacity_bytes, self.allocator = device, capacity_bytes, allocator
        self.held: dict[str, int] = dict.fromkeys(MEMORY_KINDS, 0)
        self.total = 0
        self._peaks: dict[str, dict[str, int]] = {}
        self._peak, self._peak_bytes = dict(self.held), 0
        self.most_bytes = 0
        self.until_written: Callable[[], object] | None = None

    # -- the account ---------------------------------------------------------------------------------------------

    def take(self, kind: str, num_bytes: int) -> None:
        """So many bytes more (or, below zero, fewer) of a kind. Raises OutOfMemory, and nothing is taken."""
        if num_bytes > 0 and self.capacity_bytes is not None and self.total + num_bytes > self.capacity_bytes:
            self._wait_for_copies()
            if self.total + num_bytes > self.capacity_bytes:
                raise OutOfMemory(self._refusal(kind, num_bytes))
        total = self.total = self.total + num_bytes
        self.held[kind] += num_bytes
        if total > self._peak_bytes:
            self._peak, self._peak_bytes = dict(self.held), total

    def hold(self, kind: str, num_bytes: int) -> None:
        """So many bytes of a kind in all."""
        self.take(kind, num_bytes - self.held[kind])

    def touch(self, kind: str, num_bytes: int) -> None:
        """So many bytes for a moment."""
        self.take(kind, num_bytes)
        self.take(kind, -num_bytes)

    @contextmanager
    def passing(self, kind: str, num_bytes: int) -> Iterator[None]:
        """So many bytes for as long as the context lasts."""
        self.take(kind, num_bytes)
        yield
        self.take(kind, -num_bytes)

    @contextmanager
    def saved(self, kind: str, known: set[int]) -> Iterator[None]:
        """Count what autograd keeps from now on, and add it to `kind`. known: storages that are counted, or need not be."""

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.keep(kind, tensor, known)
            return tensor.detach()  # not the tensor itself: a node that keeps its own output would never be freed

        if self.allocator:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(pack, _same):
            yield

    def keep(self, kind: str, tensor: torch.Tensor, known: set[int]) -> None:
        """Add a tensor's storage to a kind, unless it is known; it is then."""
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            known.add(storage._cdata)
            self.take(kind, storage.nbytes())

    # -- commands ------------------------------------------------------------------------------------------------

    def begin(self, resident: int, gradients: int, workspace: int = 0, checkpoint: int = 0) -> None:
        """A command begins: this much is here, and nothing else is."""
        self.held = dict.fromkeys(MEMORY_KINDS, 0)
        lasting = {"resident": resident, "gradients": gradients, "workspace": workspace, "checkpoint": checkpoint}
        self.held |= lasting
        self.total = sum(lasting.values())
        self._peak, self._peak_bytes = dict(self.held), self.total

    def end(self, task: str, measured_bytes: int | None = None, rest: str = "workspace") -> None:
        """A command of a task has ended, or failed. measured_bytes: by the allocator, where it tells; what is not accounted
        for is of the kind `rest`."""
        peak = dict(self._peak)
        if measured_bytes is not None:
            peak[rest] += max(0, measured_bytes - self._peak_bytes)
        self.most_bytes = max(self.most_bytes, sum(peak.values()) - peak["checkpoint"])
        if sum(peak.values()) > sum(self._peaks.get(task, {}).values()):
            self._peaks[task] = peak

    def take_peaks(self) -> dict[str, dict[str, int]]:
        """By task, bytes by kind when most was held, since the last time."""
        peaks, self._peaks = self._peaks, {}
        return peaks

    def _wait_for_copies(self) -> None:
        if self.held["checkpoint"] and self.until_written is not None:
            self.until_written()
            self.total -= self.held["checkpoint"]
            self.held["checkpoint"] = 0

    def _refusal(self, kind: str, num_bytes: int) -> str:
        would = {k: n for k, n in self.held.items() if n or k == kind}
        would[kind] += num_bytes
        parts = ", ".join(f"{_NAMES.get(k, k)} {_bytes(n)}" for k, n in would.items())
        assert self.capacity_bytes is not None
        whole, capacity = _bytes(self.total + num_bytes), _bytes(self.capacity_bytes)
        return f"device {self.device} would hold {whole} ({parts}), its capacity is {capacity}"


class LayerSavings:
    """What layers keep that are computed again in the backward pass: forward, each its input; then, one at a time, all.

    torch's checkpointing takes what autograd would keep into hooks of its own, inside those of `Budget.saved`. These here
    are inside of both, around each module of a layer: they count, and pass on. What they have counted lives until the next
    layer: a storage that has gone could not be told from another one at its place.
    """

    def __init__(self, layers: Iterable[torch.nn.Module]) -> None:
        self.most_bytes = 0
        self._counted: tuple[Budget, set[int]] | None = None
        self._seen: set[int] = set()
        self._kept: list[torch.UntypedStorage] = []
        self._open: list[Any] = []
        for layer in layers:
            layer.register_forward_pre_hook(self._next_layer)
            for module in layer.children():
                module.register_forward_pre_hook(self._enter)
                module.register_forward_hook(self._leave, always_call=True)

    @contextmanager
    def counted(self, budget: Budget, known: set[int], new: bool) -> Iterator[None]:
        """A forward pass, of something `new`: the layers' inputs count as activations; the most that one of them would keep
        is then `most_bytes`."""
        self.most_bytes, self._counted = 0, (budget, known) if new and not budget.allocator else None
        try:
            yield
        finally:
            self._counted = None
            self._end_layer()

    def _end_layer(self) -> None:
        self.most_bytes = max(self.most_bytes, sum(storage.nbytes() for storage in self._kept))
        self._kept = []

    def _next_layer(self, layer: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if self._counted is not None:
            budget, known = self._counted
            budget.keep("activations", args[0], known)
            self._end_layer()
            self._seen = set(known)

    def _enter(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if self._counted is None:
            return
        outer_pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)

        def pack(tensor: torch.Tensor) -> Any:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen:
                self._seen.add(storage._cdata)
                self._kept.append(storage)
            return outer_pack(tensor)

        context = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        context.__enter__()
        self._open.append(context)

    def _leave(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._open:
            self._open.pop().__exit__()


def storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Of `Budget.saved`'s known storages."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _bytes(num_bytes: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"
