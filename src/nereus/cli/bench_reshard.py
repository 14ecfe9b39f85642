"""`nereus bench reshard`: what it takes to change the plan of real processes, beside the least possible and beside others.

Every transition is run with shared memory and with Gloo messages; by the direct and by the staged lowering, and once more
with as little memory as it can be done in. The first change of a process writes to pages that the system has yet to find
and to clear, which takes most of the time; later ones to pages that were kept (`runtime.memory`). So there are two rows of
each, `pages`: fresh, after all that was kept has been given back, and kept, after the same change has been made before, as
in a job whose plan goes back and forth. Each is measured several times, in turn with

    raw_s             the received bytes, as one contiguous buffer for each pair of devices, into memory of the same kind
    raw_with_copies_s the same, and the bytes that a device copies on the spot because its shard has another shape
    ..._cpu_s         of the processor, over all devices: what a machine that others use, too, does not blur
    peers             what other systems take from the same state to the same state (bench_reshard_*.py), in a row of kept
                      pages into memory that has been written to before, where they can be given such. One that moves
                      nothing but parameters is compared in rows of its own, `state_fraction` of the state

`seconds` is of all that a change of plan does: connecting, planning, its primitives (`primitives_s`), commit. `predicted_s`
is of the last turn, with rates that were measured at the start and then learned from every change, as in a job.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nereus.cli.bench import machine, summary_lines
from nereus.cli.bench_reshard_cases import NAMES, PARAMETERS_ONLY, TRANSITIONS, Case, case_of
from nereus.cli.bench_reshard_figure12 import figure_12
from nereus.cli.bench_reshard_peers import Peer, peers_named
from nereus.cli.bench_reshard_refit import RefitPeer
from nereus.cli.bench_reshard_worker import PROGRAM
from nereus.core.errors import PlanError
from nereus.core.plan import ACTOR_GENERATION, Plan
from nereus.core.sharding import plan_moves
from nereus.runtime.cluster import LocalCluster
from nereus.runtime.fleet import Fleet, Transition
from nereus.transition.dag import InfeasibleTransition
from nereus.transition.groups import Lowering
from nereus.transition.plan import changes_of
from nereus.transition.program import flows_of
from nereus.transition.rates import Rates

Say = Callable[[str], None]

TRANSPORTS: Mapping[str, bool] = {"shared memory": True, "gloo": False}
WAYS: Mapping[str, tuple[Lowering, ...]] = {
    "direct": ("direct",),
    "staged": ("staged",),
    "tight": ("direct", "lean", "streamed"),
}
"""tight: as little memory as the transition can be planned in."""
PAGES = ("fresh", "kept")
KEPT = "_kept"
"""In the name of what a peer takes with memory that has been written to before."""
MEMORY_SHARE = 0.7
"""Of the machine's free memory, that old and new shards may take together."""
PROBE_BYTES = 128 * 2**20
AIMS = {"raw": 1.3, "dcp": {"shared memory": 6.0, "gloo": 2.5}, "universal_checkpoint": 30.0}


def bench_reshard(
    parameters: float = 336e6,
    *,
    devices: Sequence[int] = (4, 8),
    transitions: Sequence[str] = NAMES,
    peers: Sequence[str] = ("dcp", "dtensor"),
    repeats: int = 3,
    figure: bool = True,
    say: Say = print,
) -> dict[str, Any]:
    """The bench: {bench, machine, rows, summary, figure_12}. devices: the largest numbers of devices to run transitions of.

    parameters: of the model; fewer where old and new shards would not fit in this machine's memory.
    """
    known = peers_named(peers)
    memory = MEMORY_SHARE * free_memory_bytes()
    cases = [case_of(name, round(parameters), memory) for name in _cases_for(transitions, known)]
    cases = [case for case in cases if any(case.devices <= n for n in devices)]
    found: dict[str, list[dict[str, Any]]] = {case.name: [] for case in cases}
    for transport in TRANSPORTS if cases else ():
        with_cluster = Bench(transport, max(case.devices for case in cases), repeats, say)
        try:
            for case in cases:
                found[case.name] += with_cluster.rows(case)
        finally:
            with_cluster.close()
    others, notes = _peers(known, cases, repeats, say)
    rows = [
        row | {"peers": peers_with(row["pages"], others.get(name, {}))}
        for name, listed in found.items()
        for row in listed
    ]
    result = {"bench": "reshard", "machine": machine(), "rows": rows, "summary": summary(rows) | {"notes": notes}}
    return result | ({"figure_12": figure_12()} if figure else {})


def _cases_for(transitions: Sequence[str], peers: Sequence[Peer]) -> list[str]:
    """Each transition of a single model once more without moments, where a peer moves nothing else."""
    twice = any(isinstance(peer, RefitPeer) and not peer.missing() for peer in peers)
    return [*transitions, *(name + PARAMETERS_ONLY for name in transitions if twice and name in TRANSITIONS)]


def peers_with(pages: str, seconds: Mapping[str, Any]) -> dict[str, Any]:
    """What peers take under the conditions of a row; those that know no difference always take the same."""
    found = {name: value for name, value in seconds.items() if KEPT not in name}
    if pages == "kept":
        found |= {name.replace(KEPT, ""): value for name, value in seconds.items() if KEPT in name}
    return found


def free_memory_bytes() -> int:
    """Of this machine, at this moment."""
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["MemAvailable"].split()[0]) * 1024


def _peers(
    peers: Sequence[Peer], cases: Sequence[Case], repeats: int, say: Say
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """By transition, the seconds of every peer that is installed and can do it; and what is missing."""
    found: dict[str, dict[str, Any]] = {}
    notes = []
    for peer in peers:
        if missing := peer.missing():
            notes.append(missing)
            say(missing)
            continue
        for case, seconds in peer.measure(cases, repeats):
            found.setdefault(case.name, {}).update(seconds)
            say(f"{case.name}: " + ", ".join(f"{name} {value:.3f}" for name, value in seconds.items()))
    return found, notes


# -- one transport ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One change of plan. cpu_s: of all devices. staging_bytes: what one may stage. kept_bytes: the most
    pages in no use that a device had when it began. digests: before and after, or none."""

    transition: Transition
    kept_bytes: int
    cpu_s: float
    staging_bytes: int
    digests: tuple[str, str] | None


class Bench:
    """A cluster with one transport, on which transitions are measured."""

    def __init__(self, transport: str, num_devices: int, repeats: int, say: Say) -> None:
        self.transport, self.repeats, self.say = transport, repeats, say
        self.cluster = LocalCluster(PROGRAM, (), shared_memory=TRANSPORTS[transport])
        self.cluster.start(range(num_devices))
        self.fleet = Fleet(self.cluster, {})
        self.fleet.rates = self.rates = self._rates()
        say(f"{transport}: {self.rates}")

    def close(self) -> None:
        self.cluster.close()

    def rows(self, case: Case) -> list[dict[str, Any]]:
        """One row for every way that leads there, and for fresh and for kept pages; staged with fresh ones only."""
        ways = {way: usable for way in WAYS if (usable := self._usable_bytes(case, way)) is not None}
        kinds = [(way, pages) for way in ways for pages in PAGES if (way, pages) != ("staged", "kept")]
        measured: dict[tuple[str, str], list[Measured]] = {kind: [] for kind in kinds}
        raw: dict[str, list[dict[str, float]]] = {pages: [] for pages in PAGES}
        for turn in range(self.repeats):
            for way, pages in kinds:
                one = self._change(case, way, ways[way], pages, digests=turn == 0)
                measured[way, pages].append(one)
            for pages in PAGES:
                raw[pages].append(self._raw(case, pages))
        rows = [self._row(case, way, pages, listed, raw[pages]) for (way, pages), listed in measured.items()]
        self._reset(case)
        for row in rows:
            self.say(
                f"{case.name}, {self.transport}, {row['lowering']}, {row['pages']}: {row['primitives_s']:.3f} s of "
                f"{row['seconds']:.3f}, raw {row['raw_s']:.3f} and {row['raw_with_copies_s']:.3f} with copies"
            )
        return rows

    # -- a transition ------------------------------------------------------------------------------------------------

    def _reset(self, case: Case) -> None:
        self.fleet.specs = case.specs
        self._everywhere("reset", case.specs)

    def _everywhere(self, method: str, *arguments: Any) -> None:
        self.cluster.call(method, dict.fromkeys(self.cluster.devices, arguments)).results()

    def _cpu_s(self) -> float:
        """Of all devices, so far."""
        return float(sum(self.cluster.call("cpu_s", dict.fromkeys(self.cluster.devices, ())).results().values()))

    def _kept_bytes(self) -> int:
        """The most of any device."""
        return int(max(self.cluster.call("kept_bytes", dict.fromkeys(self.cluster.devices, ())).results().values()))

    def _change(self, case: Case, way: str, usable_bytes: float, pages: str, *, digests: bool) -> Measured:
        fleet = self.fleet
        self._reset(case)
        fleet.create(case.current, {})
        self._everywhere("fill")
        fleet.lowerings, fleet.usable_bytes = WAYS[way], usable_bytes
        before = fleet.digest(case.moved) if digests else ""
        if pages == "fresh":
            self._everywhere("trim")
        kept_bytes = self._kept_bytes()
        gc.collect()
        used_s = self._cpu_s()
        transition = fleet.change(case.target, fleet.pool)
        used_s = self._cpu_s() - used_s
        after = fleet.digest(case.moved) if digests else ""
        return Measured(
            transition=transition,
            kept_bytes=kept_bytes,
            cpu_s=used_s,
            staging_bytes=fleet.staging_bytes,
            digests=(before, after) if digests else None,
        )

    def _usable_bytes(self, case: Case, way: str) -> float | None:
        """What the devices' memory is said to be; None where a way does not lead there, or is no other than `direct`."""
        fleet = self.fleet
        self._reset(case)
        fleet.create(case.current, {})
        fleet.lowerings, fleet.usable_bytes = WAYS[way], float("inf")
        try:
            program = fleet.prepare(case.target)
        except InfeasibleTransition:
            raise
        except PlanError:  # no chain of primitives leads there through a common layout
            return None
        if way != "tight":
            return float("inf")
        high = float(program.dag.peak_bytes.max())
        low = float(program.dag.held_bytes.max())
        enough = high
        while high - low > 0.002 * enough:
            fleet.usable_bytes = (low + high) / 2
            try:
                fleet.prepare(case.target)
                high = fleet.usable_bytes
            except InfeasibleTransition:
                low = fleet.usable_bytes
        return high if high < enough else None

    def _row(
        self, case: Case, way: str, pages: str, listed: Sequence[Measured], raw: Sequence[dict[str, float]]
    ) -> dict[str, Any]:
        first, last = listed[0].transition, listed[-1].transition
        dag, digests = last.program.dag, listed[0].digests
        assert digests is not None
        seconds = [one.transition.seconds for one in listed]
        received = received_by_device(first)
        peaks = {g: max(one.transition.peak_bytes.get(g, 0) for one in listed) for g in first.peak_bytes}
        predicted = {g: float(dag.peak_bytes[g]) if g < len(dag.peak_bytes) else 0.0 for g in peaks}
        taken = {lowering for m, lowering in dag.lowerings.items() if m != ACTOR_GENERATION}
        return {
            "transition": case.name,
            "devices": case.devices,
            "parameters": case.parameters,
            "state_fraction": case.state_fraction,
            "state_bytes": sum(case.specs[m].num_bytes for m in case.moved),
            "way": way,
            "pages": pages,
            "lowering": "+".join(sorted(taken)),
            "transport": self.transport,
            "seconds": statistics.median(seconds),
            "least_s": min(seconds),
            "primitives_s": statistics.median(one.transition.primitives_s for one in listed),
            "bytes_received": sum(received.values()),
            "bytes_lower_bound": case.lower_bound_bytes,
            "busiest_bytes": max(received.values(), default=0),
            "predicted_s": dag.seconds,
            "predicted_over_measured": dag.seconds / last.seconds,
            "peak_bytes": max(peaks.values()),
            "predicted_peak_bytes": max(predicted.values()),
            "peak_off_bytes": max(abs(peaks[g] - predicted[g]) for g in peaks),
            "staging_bytes": listed[-1].staging_bytes,
            "kept_bytes": max(one.kept_bytes for one in listed),
            "edges": len(dag.edges),
            "digest_equal": digests[0] == digests[1],
            "cpu_s": statistics.median(one.cpu_s for one in listed),
            **{name: statistics.median(turn[name] for turn in raw) for name in raw[0]},
        }

    # -- the raw limit -----------------------------------------------------------------------------------------------

    def _raw(self, case: Case, pages: str) -> dict[str, float]:
        """Seconds to receive what the direct lowering receives; and with what it copies on the spot."""
        flows, copied = raw_traffic(case)
        alone_s, alone_cpu_s = self._exchange(flows, {}, pages)
        both_s, both_cpu_s = self._exchange(flows, copied, pages)
        return {
            "raw_s": alone_s,
            "raw_with_copies_s": both_s,
            "raw_cpu_s": alone_cpu_s,
            "raw_with_copies_cpu_s": both_cpu_s,
        }

    def _exchange(
        self, flows: Mapping[tuple[int, int], int], copied: Mapping[int, int], pages: str
    ) -> tuple[float, float]:
        """Seconds by the clock, and of the processor over all devices."""
        cluster, devices = self.cluster, self.cluster.devices
        self._everywhere("reset", {})
        sent: dict[int, dict[int, int]] = {g: {} for g in devices}
        received: dict[int, dict[int, int]] = {g: {} for g in devices}
        for (source, target), size in flows.items():
            sent[source][target] = received[target][source] = size
        offered = {g: max([*sent[g].values(), min(copied.get(g, 0), 2**30)]) for g in devices}
        places = cluster.call("raw_offer", {g: (size,) for g, size in offered.items()}).results()
        orders = {
            g: (sent[g], received[g], copied.get(g, 0), {s: places[s] for s in received[g]}, devices)
            for g in devices
            if sent[g] or received[g] or copied.get(g)
        }
        if pages == "fresh":
            self._everywhere("trim")
        used_s, began = self._cpu_s(), time.perf_counter()
        if orders:
            cluster.call("raw_exchange", orders).results()
        seconds = time.perf_counter() - began
        used_s = self._cpu_s() - used_s
        self._everywhere("raw_end")
        return seconds, used_s

    def _rates(self) -> Rates:
        """What this transport does on this machine now: one device, all devices at once, a copy, a call."""
        self.fleet.create(Plan(()), {})
        devices, probe = self.cluster.devices, PROBE_BYTES
        ring = {(g, devices[i - 1]): probe // 2 for i, g in enumerate(devices)}
        one = min(self._exchange({(devices[0], devices[1]): probe}, {}, "fresh")[0] for _ in range(3))
        all_of_them = min(self._exchange(ring, {}, "fresh")[0] for _ in range(3))
        copy = min(self._exchange({}, {devices[0]: probe}, "fresh")[0] for _ in range(3))
        began = time.perf_counter()
        self._everywhere("ping")
        setup_s = time.perf_counter() - began
        return Rates(
            intra_bytes_s=probe / one,
            inter_bytes_s=probe / one,
            copy_bytes_s=probe / copy,
            node_bytes_s=sum(ring.values()) / all_of_them,
            setup_s=setup_s,
        )


def received_by_device(transition: Transition) -> dict[int, int]:
    """Bytes from other devices, as the devices counted them."""
    found: dict[int, int] = {}
    for span in transition.spans:
        for device, num_bytes in span.received.items():
            found[device] = found.get(device, 0) + num_bytes
    return found


def raw_traffic(case: Case) -> tuple[dict[tuple[int, int], int], dict[int, int]]:
    """Bytes from device to device, and bytes copied on the spot, in tensors whose shape changes."""
    flows: dict[tuple[int, int], int] = {}
    copied: dict[int, int] = {}
    for m, old, new in changes_of(case.current, case.target):
        if m == ACTOR_GENERATION or old is None or new is None:
            continue
        spec = case.specs[m]
        sources, targets = spec.holdings(old), spec.holdings(new)
        plan = plan_moves(spec, sources, targets)
        traffic = flows_of(spec, plan.moves)
        for source, target, size in zip(traffic.source, traffic.target, traffic.num_bytes, strict=True):
            pair = (int(source), int(target))
            flows[pair] = flows.get(pair, 0) + int(size)
        for gpu, kept in plan.kept_bytes.items():
            same = {n: i for n, i in targets[gpu].items() if sources.get(gpu, {}).get(n) == i}
            copied[gpu] = copied.get(gpu, 0) + kept - spec.holding_bytes(same)
    return flows, {gpu: size for gpu, size in copied.items() if size}


# -- summary ---------------------------------------------------------------------------------------------------------


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The aims and how far each is reached. ok: what is no matter of speed."""
    direct = [row for row in rows if row["way"] == "direct"]
    equal = [row["bytes_received"] == row["bytes_lower_bound"] for row in direct]
    digests = all(row["digest_equal"] for row in rows)
    return {
        "ok": all(equal) and digests,
        "bytes_equal_bound": f"{sum(equal)} of {len(equal)}",
        "digests_equal": digests,
        "peak_off_bytes": max((row["peak_off_bytes"] for row in rows), default=0),
        "peak_above_planned": any(row["peak_bytes"] > row["predicted_peak_bytes"] for row in rows),
        "predicted_over_measured": _spread(row["predicted_over_measured"] for row in rows if _moves(row)),
        **{
            f"{transport}, {pages} pages": _speed([row for row in rows if _is(row, transport, pages)])
            for transport in TRANSPORTS
            for pages in PAGES
        },
        "aims": AIMS,
    }


def _moves(row: Mapping[str, Any]) -> bool:
    return bool(row["bytes_received"] > 0)


def _is(row: Mapping[str, Any], transport: str, pages: str) -> bool:
    return row["transport"] == transport and row["pages"] == pages and _moves(row)


def _speed(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of one transport and one kind of pages."""
    direct = [row for row in rows if row["way"] == "direct"]
    over = {
        "over_raw": ("primitives_s", "raw_s"),
        "over_raw_with_copies": ("primitives_s", "raw_with_copies_s"),
        "cpu_over_raw": ("cpu_s", "raw_cpu_s"),
        "cpu_over_raw_with_copies": ("cpu_s", "raw_with_copies_cpu_s"),
    }
    staged = {row["transition"]: row["seconds"] for row in rows if row["way"] == "staged"}
    return {
        **{name: _spread(row[a] / row[b] for row in direct) for name, (a, b) in over.items()},
        "staged_over_direct": _spread(
            staged[row["transition"]] / row["seconds"] for row in direct if row["transition"] in staged
        ),
        "times_faster_than": {
            name: _spread(
                row["peers"][name] / row["cpu_s" if name.endswith("_cpu_s") else "seconds"]
                for row in direct
                if name in row["peers"]
            )
            for name in sorted({name for row in direct for name in row["peers"]})
        },
    }


def _spread(values: Iterator[float]) -> dict[str, float]:
    listed = sorted(values)
    return {"least": listed[0], "median": statistics.median(listed), "most": listed[-1]} if listed else {}


SHOWN = ("seconds", "primitives_s", "raw_s", "raw_with_copies_s", "predicted_s")


def lines(found: Mapping[str, Any]) -> list[str]:
    """The bench as text."""
    rows = [
        f"{row['transition']}, {row['transport']}, {row['lowering']}, {row['pages']} pages: "
        + ", ".join(f"{name} {row[name]:.3f}" for name in SHOWN)
        + f", {row['bytes_received'] / 1e9:.3f} of at least {row['bytes_lower_bound'] / 1e9:.3f} GB, "
        + f"peak {row['peak_bytes'] / 1e9:.3f} GB, planned {row['predicted_peak_bytes'] / 1e9:.3f}"
        + ("" if row["digest_equal"] else ", STATE DIFFERS")
        for row in found["rows"]
    ]
    return [*rows, *summary_lines(dict(found))]
