"""What Ray runs on its nodes for us, and how that reaches the controller: by connections of our own.

controller   Listener   on one address ── the actor dials it, shows the key that Ray has brought it, says who it is
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Literal

from nereus.runtime.memory import ProcessAddress
from nereus.runtime.outlook import keep_looking
from nereus.runtime.worker import WorkerSettings, pack, serve, unpack

HANDSHAKE_S = 10
"""How long whoever has connected may take to say who it is."""

EXIT_S = 1.0
"""How long an actor may take to end in Ray's own way."""

Channel = Literal["commands", "control", "outlook"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """What a worker says first on each of its connections. boot: of which start of which machine its process is one."""

    serial: int
    channel: Channel
    process: ProcessAddress
    boot: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where a worker finds its controller. path: of the controller's imports."""

    host: str
    port: int
    key: bytes
    serial: int
    path: tuple[str, ...]


class DeviceActor:
    """What Ray runs for a device."""

    def serve(self, device: int, settings: WorkerSettings, home: Home, address: str) -> None:
        """Be the device's worker; never returns. address: of this node, for messages between devices."""
        import ray

        sys.path += [place for place in home.path if place not in sys.path]
        if interface := _interface_of(address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        serve(device, settings, _dial(home, "commands"), _dial(home, "control"))
        # Ray gets to know that this is meant; a helper thread that still sits in a Gloo call may keep it from ending.
        end = threading.Timer(EXIT_S, os._exit, (0,))
        end.daemon = True
        end.start()
        ray.actor.exit_actor()


class OutlookActor:
    """What Ray runs for a machine that has devices and is not the controller's."""

    def serve(self, home: Home, look_s: float) -> None:
        """Look at devices' processes until the controller has gone."""
        keep_looking(_dial(home, "outlook"), look_s)


def _dial(home: Home, channel: Channel) -> Connection:
    connection = Client((home.host, home.port), family="AF_INET", authkey=home.key)
    _at_once(connection)
    greeting = Greeting(serial=home.serial, channel=channel, process=ProcessAddress.own(), boot=boot_id())
    connection.send_bytes(pack(greeting))
    return connection


class Listener:
    """Takes the connections of workers that the controller waits for; others are shown the door.

    expected: by serial number, who takes a worker's connections.
    """

    def __init__(self, host: str) -> None:
        self.key = secrets.token_bytes(32)
        self.expected: dict[int, Callable[[Greeting, Connection], None]] = {}
        self._socket = socket.create_server((host, 0), backlog=128)
        self.host, self.port = self._socket.getsockname()
        threading.Thread(target=self._accept, name="workers' connections", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                incoming, _ = self._socket.accept()
            except OSError:
                return
            # In a thread of its own: a stranger that says nothing must not keep workers waiting.
            threading.Thread(target=self._greet, args=(incoming,), name="a connection", daemon=True).start()

    def _greet(self, incoming: socket.socket) -> None:
        incoming.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", HANDSHAKE_S, 0))
        connection = Connection(incoming.detach())
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            greeting = unpack(connection.recv_bytes())
            _at_once(connection)
            self.expected[greeting.serial](greeting, connection)
        except Exception:  # no worker of ours, or one that is no longer wanted
            connection.close()


def boot_id() -> str:
    """Of this start of this machine."""
    place = Path("/proc/sys/kernel/random/boot_id")
    return place.read_text() if place.exists() else ""


def shut(connection: Connection) -> None:
    """End a connection; a thread that waits on it gets to know."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)


def _at_once(connection: Connection) -> None:
    """A connection's small messages leave as they are written; waits on it have no end."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))


def _interface_of(address: str) -> str:
    """The network interface that has this IPv4 address; empty where none is found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                request = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24]) == address:  # SIOCGIFADDR
                    return name
    return ""
