"""Which cluster a job runs on: the one place that knows all backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nereus.core.job import ClusterSection
from nereus.runtime.cluster import Cluster, LocalCluster
from nereus.runtime.ray_cluster import RayCluster, check_installed


def check_backend(section: ClusterSection) -> None:
    """Raise UserError where the backend that a job asks for is not installed."""
    if section.backend == "ray":
        check_installed()


def make_cluster(
    section: ClusterSection,
    program: str,
    arguments: tuple[Any, ...] = (),
    *,
    preload: Sequence[str] = (),
    device_type: str,
    most_devices: int = 0,
) -> Cluster:
    """The cluster of a job's `cluster` section, without devices yet.

    program, arguments: what a device runs. preload: modules that it needs, if they can be loaded once for all.
    most_devices: how many the job may come to ask for; a Ray that is started here has room for so many.
    Raises UserError where the backend is not there.
    """
    timeout_s, heartbeat_s = section.timeout_s, section.heartbeat_s
    if section.backend == "ray":
        return RayCluster(
            program,
            arguments,
            address=section.address,
            new_slots=max(section.devices, most_devices),
            device_type=device_type,
            timeout_s=timeout_s,
            heartbeat_s=heartbeat_s,
        )
    return LocalCluster(
        program, arguments, preload=preload, device_type=device_type, timeout_s=timeout_s, heartbeat_s=heartbeat_s
    )
