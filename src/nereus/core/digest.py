"""One comparison for "the state is the same": a digest of the logical tensors, whatever the layout.

Each rank sums, modulo 2^64, (bits of an element) x (a weight that depends on the tensor and the element's logical
indices) over each region it holds. Sums of regions add up to the sum of the tensor, so the digest does not depend on
the cuts; swapped rows, a lost moment or a changed bit change it. Regions are cut at every end of any holder's
interval, so each copy of a region is compared with each other copy: replicas that differ are an error, not a digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from nereus.core.errors import StateError
from nereus.core.sharding import Holdings, Interval, StateSpec, elementary_intervals

Report = Mapping[str, list[int]]
"""By tensor, the sums of a rank's elementary intervals in order."""


def digest_regions(spec: StateSpec, holdings: Holdings) -> dict[int, dict[str, list[Interval]]]:
    """For every GPU and tensor the regions to sum."""
    cuts = {
        t.name: elementary_intervals(i for held in holdings.values() for i in held.get(t.name, ()))
        for t in spec.tensors
    }
    return {
        gpu: {
            name: [(a, b) for a, b in cuts[name] if any(s <= a and b <= e for s, e in pieces)]
            for name, pieces in held.items()
        }
        for gpu, held in holdings.items()
    }


def combine(spec: StateSpec, regions: Mapping[int, Mapping[str, list[Interval]]], reports: Mapping[int, Report]) -> str:
    """The digest (64 hex digits) of a model-stage from the sums of all of its GPUs.

    Raises StateError when two copies of a region differ or when a part of a tensor is held by nobody.
    """
    total = hashlib.sha256()
    for tensor in spec.tensors:
        seen: dict[Interval, tuple[int, int]] = {}
        for gpu in sorted(regions):
            for region, value in zip(regions[gpu].get(tensor.name, ()), reports[gpu].get(tensor.name, ()), strict=True):
                other_gpu, other = seen.setdefault(region, (gpu, value))
                if other != value:
                    raise StateError(
                        f"replicas differ: {tensor.name}[{region[0]}:{region[1]}] on devices {other_gpu} and {gpu}"
                    )
        covered = 0
        for start, stop in sorted(seen):
            if start != covered:
                break
            covered = stop
        if covered != tensor.length:
            raise StateError(f"{tensor.name}: no device holds index {covered} of {tensor.length}")
        value = sum(value for _, value in seen.values()) & (2**64 - 1)
        total.update(f"{tensor.name} {tensor.dtype} {tensor.shape} {value:016x}\n".encode())
    return total.hexdigest()
