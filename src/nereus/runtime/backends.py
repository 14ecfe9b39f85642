"""Which cluster a job runs on: the one place that knows all backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nereus.core.job import ClusterSection
from nereus.runtime.cluster import LocalCluster


def make_cluster(
    section: ClusterSection,
    program: str,
    arguments: tuple[Any, ...] = (),
    *,
    preload: Sequence[str] = (),
    device_type: str,
) -> LocalCluster:
    """The cluster of a job's `cluster` section, without devices yet. The rest is as `LocalCluster` takes it."""
    return LocalCluster(
        program,
        arguments,
        preload=preload,
        device_type=device_type,
        timeout_s=section.timeout_s,
        heartbeat_s=section.heartbeat_s,
    )
