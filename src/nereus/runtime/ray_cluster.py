"""Devices as actors of a Ray cluster: of one machine or of many, whose nodes come and go.

Ray decides nothing here that the controller knows better, and does what only it can do: it starts a process on a node, keeps
the cores or the GPU of that node for it, tells when the process or the node has gone, and which nodes there are.

    slot      one core (cpu) or one GPU (cuda) of a node: where a device can be; device ids are numbers of slots
    group     a placement group of one bundle for each device, on the node of its slot, given back with the device
    actor     one for each device; it calls the controller back and becomes a worker (runtime.worker.serve); and one for each
              machine but the controller's, that looks at its devices' processes (runtime.outlook)

Commands and aborts then go over two connections of the worker's own, as between local processes: so calls, aborts that
overtake, epochs and signs of life are the same code for both backends, and nothing of it waits for Ray.

    controller   listens on one address ── the actor dials it twice, and shows the key that Ray has brought it
                 future of the actor's only call ── ends with the actor, however that comes about
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import logging
import math
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from nereus.core.errors import UserError
from nereus.runtime.calls import WorkerDied
from nereus.runtime.cluster import LOCALHOST, PoolNews, WorkerCluster
from nereus.runtime.heartbeat import Look, look_at
from nereus.runtime.memory import has_shared_memory
from nereus.runtime.outlook import Outlook
from nereus.runtime.ray_actor import DeviceActor, Greeting, Home, Listener, OutlookActor, boot_id, shut
from nereus.runtime.worker import START

START_S = 120.0
"""How long Ray may take to start the actors of some devices: a cold process imports torch for seconds."""

REPORT_S = 1.0
"""How long Ray may take to tell how a worker has ended whose connection has ended."""

OBJECT_STORE_BYTES = 80 * 2**20
"""Of a Ray that we start: nothing of ours goes through it. About the least that it accepts."""

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # What Ray prints of each worker and node that ends, to standard output; the controller says it in its own words.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed|has been marked dead|Raylet is terminated",
}
"""The environment of Ray, where it is not set: no reports of usage, nothing of ours said twice."""

RESOURCES = {"cpu": "CPU", "cuda": "GPU"}
NEW = "local"
"""The address, in Ray's words, of a cluster that is started here."""

NODE_LABEL = "ray.io/node-id"


class _ActorProcess:
    """See `calls.WorkerProcess`. Killed means given up: what a process beyond reach goes on to do reaches nobody."""

    exit_code = None

    def __init__(self, ray: Any, actor: Any, group: Any, running: Any) -> None:
        self.how = ""
        self.pid = 0
        self.outlook: Outlook | None = None
        self._connections: list[Connection] = []
        self._is_here = False
        self._ray, self._actor, self._group = ray, actor, group
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._sentinel, self._bell = socket.socketpair()
        self._future = running.future()
        self._future.add_done_callback(self._told)

    @property
    def sentinel(self) -> int:
        return self._sentinel.fileno()

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this machine that can be seen from here. Known once it has connected."""
        return self._is_here

    def greeted(self, greeting: Greeting, connection: Connection) -> None:
        """The worker has connected."""
        self._connections.append(connection)
        self.pid = greeting.process.pid
        self._is_here = greeting.boot == boot_id() and greeting.process.alive

    def look(self) -> Look | None:
        if self._is_here:
            return look_at(self.pid)
        return None if self.outlook is None else self.outlook.look(self.pid)

    def kill(self) -> None:
        # Not by Ray alone, which first asks a process to end by itself.
        if self._is_here and not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        elif self.outlook is not None:
            self.outlook.kill(self.pid)
        with contextlib.suppress(Exception):  # it may be dead, or Ray gone
            self._ray.kill(self._actor)
        for connection in self._connections:
            shut(connection)
        self._end()

    def join(self, timeout_s: float | None) -> bool:
        return self._ended.wait(timeout_s)

    def release(self) -> None:
        if self.outlook is not None:
            self.outlook.forget(self.pid)
        with contextlib.suppress(Exception):  # Ray may be gone
            self._ray.util.remove_placement_group(self._group)

    def _told(self, future: Any) -> None:
        """In a thread of Ray's: its call has ended, which it does only with the process."""
        error = future.exception()
        if not self._ended.is_set():
            self.how = _how(error)
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._ended.set()
            self._bell.close()


class RayCluster(WorkerCluster):
    """Devices of a Ray cluster. See `Cluster`, `PoolEvents`, and `WorkerCluster` for what is not said here.

    address: of the cluster; "auto": the one that this machine belongs to; "local": a new one on this machine, which ends
    with `close`; None: auto, or else local. In a process that uses Ray already, its cluster.
    new_slots: devices that a new one has. shared_memory: whether devices read each other's state in memory; None: they do
    if they are CPU devices of a cluster that was started here, so has one node.
    """

    BURY_S = REPORT_S

    def __init__(
        self,
        program: str,
        arguments: tuple[Any, ...] = (),
        *,
        address: str | None = None,
        new_slots: int | None = None,
        device_type: str = "cpu",
        timeout_s: float = 600.0,
        shared_memory: bool | None = None,
        heartbeat_s: float = 1.5,
    ) -> None:
        self._ray = _import_ray()
        self._connected, is_new = _connect(self._ray, address, new_slots or os.cpu_count() or 1)
        host = LOCALHOST if is_new else self._ray.util.get_node_ip_address()
        if shared_memory is None:
            shared_memory = is_new and device_type == "cpu" and has_shared_memory()
        super().__init__(
            program,
            arguments,
            host=host,
            device_type=device_type,
            timeout_s=timeout_s,
            shared_memory=is_new and device_type == "cpu" and has_shared_memory()
            if shared_memory is None
            else shared_memory,
            heartbeat_s=heartbeat_s,
        )
        self._settings = replace(self._settings, own_gpu=device_type == "cuda")
        self._is_new = is_new
        self._bundle = {RESOURCES[device_type]: 1.0}
        self._actor_class = self._ray.remote(DeviceActor)
        self._listener = Listener(host)
        self._serials = itertools.count()
        self._slots = _Slots(RESOURCES[device_type], first=self._ray.get_runtime_context().get_node_id())
        self._slots.update(self._ray.nodes(), ())
        self._news: list[PoolNews] = []
        self._places: dict[int, int] = {}
        self._outlooks: dict[str, tuple[Outlook, Any]] = {}

    def node_of(self, device: int) -> int:
        return self._places[device]

    def available(self) -> tuple[int, ...]:
        return tuple(sorted(self._slots.node_by_device))

    def poll(self) -> tuple[PoolNews, ...]:
        self._look_around()
        found, self._news = tuple(self._news), []
        return found

    def close(self) -> None:
        super().close()
        for _, actor in self._outlooks.values():
            with contextlib.suppress(Exception):  # its node may be gone
                self._ray.kill(actor)
        self._outlooks = {}
        self._listener.close()
        if self._connected:
            self._connected = False
            self._ray.shutdown()

    # -- inside --------------------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        if (news := self._slots.update(self._ray.nodes(), self._workers)) != PoolNews():
            self._news.append(news)

    def _spawn(self, devices: Sequence[int]) -> None:
        self._look_around()
        slots = self._slots.node_by_device
        if unknown := [device for device in devices if device not in slots]:
            raise UserError(f"devices {unknown} are not there: the Ray cluster has {sorted(slots)}")
        arrivals: queue.SimpleQueue[Any] = queue.SimpleQueue()
        starting: dict[int, tuple[int, _ActorProcess]] = {}
        try:
            for device in devices:
                serial = next(self._serials)
                self._listener.expected[serial] = lambda greeting, connection: arrivals.put((greeting, connection))
                starting[serial] = device, self._launch(device, serial)
            self._welcome(starting, arrivals)
        except BaseException:
            for device, process in starting.values():
                if device not in self._workers:
                    process.kill()
                    process.release()
            raise
        finally:
            for serial in starting:
                self._listener.expected.pop(serial, None)

    def _launch(self, device: int, serial: int) -> _ActorProcess:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        node = self._slots.nodes[self._slots.node_by_device[device]]
        group = placement_group([self._bundle], bundle_label_selector=[{NODE_LABEL: node.id}])
        actor = self._actor_class.options(
            num_cpus=self._bundle.get("CPU", 0),
            num_gpus=self._bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
        ).remote()
        address = LOCALHOST if self._is_new else node.address
        return _ActorProcess(
            self._ray, actor, group, actor.serve.remote(device, self._settings, self._home(serial), address)
        )

    def _home(self, serial: int) -> Home:
        return Home(
            host=self._listener.host,
            port=self._listener.port,
            key=self._listener.key,
            serial=serial,
            path=tuple(place or os.getcwd() for place in sys.path),
        )

    def _outlook(self, node: _Node) -> Outlook:
        """On the machine of a node; begun if there is none."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node.id not in self._outlooks:
            outlook, serial = Outlook(self._limits.heartbeat_s), next(self._serials)
            self._listener.expected[serial] = lambda _, connection: outlook.connected(connection)
            actor = self._ray.remote(OutlookActor).options(
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=-1,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            )
            self._outlooks[node.id] = outlook, (running := actor.remote())
            running.serve.remote(self._home(serial), self._limits.look_s)
        return self._outlooks[node.id][0]

    def _welcome(self, starting: dict[int, tuple[int, _ActorProcess]], arrivals: queue.SimpleQueue[Any]) -> None:
        """Wait until all have connected; add them."""
        deadline = time.monotonic() + START_S
        channels: dict[int, dict[str, Connection]] = {serial: {} for serial in starting}
        while any(len(found) < 2 for found in channels.values()):
            try:
                greeting, connection = arrivals.get(timeout=0.05)
            except queue.Empty:
                self._check(starting, channels, deadline)
                continue
            starting[greeting.serial][1].greeted(greeting, connection)
            channels[greeting.serial][greeting.channel] = connection
        for serial, (device, process) in starting.items():
            node = self._slots.nodes[self._slots.node_by_device[device]]
            self._places[device] = node.number
            if not process.is_here and math.isfinite(self._limits.heartbeat_s):
                process.outlook = self._outlook(node)
                process.outlook.watch(process.pid)
            self._add(device, process, channels[serial]["commands"], channels[serial]["control"])

    def _check(
        self,
        starting: dict[int, tuple[int, _ActorProcess]],
        channels: dict[int, dict[str, Connection]],
        deadline: float,
    ) -> None:
        for device, process in starting.values():
            if process.join(0.0):
                raise WorkerDied(device, START, None, how=process.how)
        if time.monotonic() > deadline:
            late = [starting[serial][0] for serial, found in channels.items() if len(found) < 2]
            raise UserError(
                f"devices {late}: Ray has not started them in {START_S:.0f} s; is their {next(iter(self._bundle))} in use?"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    id: str
    number: int
    address: str


@dataclass
class _Slots:
    """Which devices there can be, and on which node each. first: the node whose slots have the first ids.

    resource: "CPU" or "GPU". nodes: by id, all that were ever seen.
    """

    resource: str
    first: str
    node_by_device: dict[int, str] = field(default_factory=dict)
    nodes: dict[str, _Node] = field(default_factory=dict)

    def update(self, listed: Sequence[dict[str, Any]], in_use: Any) -> PoolNews:
        """Bring it in line with `ray.nodes()`: a new node's slots get the lowest ids that are free, and not `in_use`."""
        alive = {node["NodeID"]: node for node in listed if node["Alive"]}
        vanished = [device for device, node in self.node_by_device.items() if node not in alive]
        for device in vanished:
            del self.node_by_device[device]
        appeared = []
        for node_id in sorted(alive.keys() - set(self.node_by_device.values()), key=lambda i: (i != self.first, i)):
            node = alive[node_id]
            number = self.nodes[node_id].number if node_id in self.nodes else len(self.nodes)
            self.nodes[node_id] = _Node(id=node_id, number=number, address=node["NodeManagerAddress"])
            free = (d for d in itertools.count() if d not in self.node_by_device and d not in in_use)
            for device in list(itertools.islice(free, int(node["Resources"].get(self.resource, 0)))):
                self.node_by_device[device] = node_id
                appeared.append(device)
        return PoolNews(appeared=tuple(sorted(appeared)), vanished=tuple(sorted(vanished)))


def check_installed() -> None:
    """Raise UserError where Ray is not installed, without importing it."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("cluster.backend: ray is not installed: pip install 'nereus-rl[ray]'")


def _import_ray() -> Any:
    check_installed()
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    import ray
    import ray.util

    return ray


def _connect(ray: Any, address: str | None, new_slots: int) -> tuple[bool, bool]:
    """(Whether we have connected to Ray, and so must disconnect; whether the cluster is a new one)."""
    if ray.is_initialized():
        return False, False
    if address != NEW:
        try:
            ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
            return True, False
        except ConnectionError as error:
            if address is not None:
                raise UserError(f"cluster.address: {address}: no Ray cluster answers there: {error}") from error
    ray.init(
        address=NEW,
        num_cpus=new_slots,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=OBJECT_STORE_BYTES,
        _node_ip_address=LOCALHOST,
    )
    return True, True


def _how(error: BaseException | None) -> str:
    """How an actor has ended, in a few words; Ray's own are a paragraph."""
    text = str(error)
    if "node" in text and ("died" in text or "dead" in text) and "its node has died" in text:
        return "its node is gone"
    return "its process has ended"
