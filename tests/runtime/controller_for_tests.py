"""A controller that is interrupted, and then killed, by test_cluster.py. It prints its workers' process ids, then what they
answer; then a worker says that it hangs. Before the answers, it waits for a line of input."""

from __future__ import annotations

import signal
import sys
from types import SimpleNamespace
from typing import Any

from nereus.runtime.cluster import LocalCluster
from nereus.runtime.worker import WorkerContext


class Program:
    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def ping(self) -> int:
        return self.context.device_id

    def hang(self) -> None:
        print("hanging", flush=True)
        while True:
            signal.pause()


def main() -> None:
    seen = SimpleNamespace(interrupts=0)

    def interrupted(number: int, frame: Any) -> None:
        seen.interrupts += 1

    signal.signal(signal.SIGINT, interrupted)
    cluster = LocalCluster("controller_for_tests:Program")
    cluster.start([0, 1])
    print(cluster.process_id(0), cluster.process_id(1), flush=True)
    sys.stdin.readline()
    answers = cluster.call("ping", {0: (), 1: ()}).results()
    print(seen.interrupts, sorted(answers.values()), flush=True)
    cluster.call("hang", {0: ()})
    sys.stdin.read()


if __name__ == "__main__":
    main()
