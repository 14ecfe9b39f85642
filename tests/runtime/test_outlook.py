"""Looks at real processes, over a pipe in place of a network."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest
from devices_for_tests import wait_until

from nereus.runtime.outlook import Outlook, keep_looking


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as started:
        yield started
        started.kill()


def hang_up(connection: Connection) -> None:
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)


def state(outlook: Outlook, pid: int) -> str:
    look = outlook.look(pid)
    return "unseen" if look is None else look.state


def test_what_is_watched_is_seen_and_can_be_killed(process: subprocess.Popen[bytes]) -> None:
    outlook, pid = Outlook(fresh_s=60.0), process.pid
    outlook.watch(pid)  # before there is a connection
    assert state(outlook, pid) == "unseen"
    here, there = Pipe()
    looking = threading.Thread(target=keep_looking, args=(there, 0.01), daemon=True)
    looking.start()
    outlook.connected(here)
    wait_until(lambda: state(outlook, pid) == "S")
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: state(outlook, pid) == "T")
    outlook.forget(pid)
    wait_until(lambda: state(outlook, pid) == "unseen")
    outlook.kill(pid)  # not one of ours
    outlook.watch(pid)
    wait_until(lambda: state(outlook, pid) == "T")
    outlook.kill(pid)
    assert process.wait() == -signal.SIGKILL
    wait_until(lambda: state(outlook, pid) == "unseen")
    hang_up(here)
    looking.join()


def test_an_old_look_says_nothing(process: subprocess.Popen[bytes]) -> None:
    outlook, (here, there) = Outlook(fresh_s=0.2), Pipe()

    def asleep_when_asked() -> bool:
        outlook.watch(process.pid)  # it looks when it is told something; the process may not be asleep yet
        return state(outlook, process.pid) == "S"

    outlook.watch(process.pid)
    outlook.connected(here)
    looking = threading.Thread(target=keep_looking, args=(there, 3600.0), daemon=True)
    looking.start()
    wait_until(asleep_when_asked)
    wait_until(lambda: state(outlook, process.pid) == "unseen")
    wait_until(asleep_when_asked)
    hang_up(here)
    looking.join()
