"""R1, R2, R3: stores, each against its own client; and what a dead one costs.

    python -m benchmarks.remote            a table
    python -m benchmarks.remote --json -   one JSON object on stdout, the table on stderr

Real servers on loopback, started here; as many threads on both sides, the same memory to read into
and to write from, in turns. README.md says the method.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from benchmarks.machine import machine_facts
from benchmarks.remote_docked import MooncakePlace, NixlPlace
from benchmarks.remote_stores import Client, Memory, Place, S3Place, Tier, ValkeyPlace
from benchmarks.report import report
from benchmarks.targets import Bounds, bounds, estimate, judged, ratio
from kvtier.serve_bench.stats import Estimate, summarize
from kvtier.types import BlockKey

if TYPE_CHECKING:
    from benchmarks.remote_dead import DeadRow

MIB = 1 << 20
SIZES = {"64 KiB": MIB // 16, "1 MiB": MIB, "2.5 MiB": 5 * MIB // 2}
PARTS = CLIENTS, DEAD = "clients", "dead-store"
GET, PUT = "get", "put"
LEAST_SHARE, MOST_CPU = 0.90, 1.15
ROUND_TRIP_S, ASKED, LOOKUPS = 0.02, 1000, 100
LOOKUP_S = 2 * ROUND_TRIP_S + 0.010
STORES: dict[str, type[Place]] = {
    place.name: place for place in (ValkeyPlace, S3Place, MooncakePlace, NixlPlace)
}


@dataclass(frozen=True, slots=True)
class Row:
    """One store, one size, one direction. allowed_cpu_s_per_gb: of the client's, with a memmove."""

    store: str
    client: str
    block: str
    direction: str
    gb_per_s: float
    client_gb_per_s: float
    cpu_s_per_gb: float
    client_cpu_s_per_gb: float
    memmove_cpu_s_per_gb: float
    gb_per_s_between: Bounds
    client_gb_per_s_between: Bounds
    cpu_s_per_gb_between: Bounds
    client_cpu_s_per_gb_between: Bounds

    def targets(self) -> list[dict[str, object]]:
        common = {"store": self.store, "block": self.block, "direction": self.direction}
        rate = ratio(
            estimate(self.gb_per_s, self.gb_per_s_between),
            estimate(self.client_gb_per_s, self.client_gb_per_s_between),
        )
        ours = estimate(self.cpu_s_per_gb, self.cpu_s_per_gb_between)
        theirs = estimate(self.client_cpu_s_per_gb, self.client_cpu_s_per_gb_between)
        cost = ratio(ours, _more(theirs, self.memmove_cpu_s_per_gb / MOST_CPU))
        return [
            judged("R1", rate, LEAST_SHARE, at_least=True, **common, measure="GB/s"),
            judged("R1", cost, MOST_CPU, at_least=False, **common, measure="CPU"),
        ]


def _more(found: Estimate, added: float) -> Estimate:
    if not found.is_bounded:
        return Estimate(found.value + added)
    return Estimate(found.value + added, found.low + added, found.high + added)


@dataclass(frozen=True, slots=True)
class Lookup:
    """What it takes to hear which of so many blocks a store has. requests: 0 where it knows."""

    store: str
    blocks: int
    round_trip_ms: float
    p50_ms: float
    p99_ms: float | None

    def target(self) -> dict[str, object]:
        wanted = 0.5 if not self.round_trip_ms else 1000 * LOOKUP_S
        found = Estimate(self.p99_ms if self.p99_ms is not None else self.p50_ms)
        return judged("R2", found, wanted, at_least=False, store=self.store, measure="p99, ms")


Move = Callable[[Sequence[BlockKey], Memory, slice], None]


def timed(work: Callable[[], None], num_bytes: int) -> tuple[float, float]:
    """GB/s, and CPU seconds of this process per GB."""
    began, cpu = time.perf_counter(), time.process_time()
    work()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return num_bytes / 1e9 / seconds, cpu * 1e9 / num_bytes


def in_threads(
    move: Move, keys: Sequence[BlockKey], memory: Memory, num_threads: int, pool: ThreadPoolExecutor
) -> None:
    """All blocks, in as many parts as there are threads."""
    cuts = np.linspace(0, len(keys), num_threads + 1).astype(int).tolist()
    parts = [slice(first, end) for first, end in pairwise(cuts)]
    for each in [pool.submit(move, keys[part], memory, part) for part in parts]:
        each.result()


def measure(
    place: Place, block: str, block_bytes: int, options: argparse.Namespace
) -> tuple[list[Row], list[Lookup]]:
    """One store and size: rounds of puts and gets in turns, the first one to warm up."""
    num = max(options.threads, options.mib * MIB // block_bytes)
    memory = Memory(num, block_bytes)
    sides: list[Tier | Client] = [
        place.tier(block_bytes, num * 4, options.threads),
        place.client(options.threads),
    ]
    found: dict[tuple[int, str, str], list[float]] = defaultdict(list)
    moved: list[float] = []
    num_bytes = num * block_bytes
    with ThreadPoolExecutor(options.threads) as pool:
        for turn in range(options.rounds + 1):
            order = (0, 1) if turn % 2 else (1, 0)
            for at in order:
                side, keys = sides[at], memory.keys(turn, at)
                memory.fill(turn)
                for direction, work in ((PUT, side.put), (GET, side.get)):
                    if direction == GET:
                        memory.clear()

                    job = partial(in_threads, work, keys, memory, options.threads, pool)
                    figures = timed(job, num_bytes)
                    if turn:
                        found[at, direction, "rate"].append(figures[0])
                        found[at, direction, "cpu"].append(figures[1])
                side.deliver(memory)
                memory.check(turn)
                side.drop(keys)
            moved.append(timed(memory.move, num_bytes)[1])
    rows = [
        row(place, block, direction, found, statistics.median(moved)) for direction in (PUT, GET)
    ]
    lookups = measure_lookup(place, memory) if block_bytes == SIZES["64 KiB"] else []
    for side in sides:
        side.close()
    return rows, lookups


def row(
    place: Place,
    block: str,
    direction: str,
    found: dict[tuple[int, str, str], list[float]],
    moved: float,
) -> Row:
    rate, their_rate = (found[at, direction, "rate"] for at in (0, 1))
    cpu, their_cpu = (found[at, direction, "cpu"] for at in (0, 1))
    return Row(
        place.name,
        place.client_name,
        block,
        direction,
        *map(statistics.median, (rate, their_rate, cpu, their_cpu)),
        moved,
        *map(bounds, (rate, their_rate, cpu, their_cpu)),
    )


def measure_lookup(place: Place, memory: Memory) -> list[Lookup]:
    """Of blocks that are all there, with the network's delay where a request has to be made."""
    far = place.far(ROUND_TRIP_S, memory.block_bytes, 2 * ASKED)
    if far is None:
        return []
    keys = memory.many_keys(ASKED)
    for start in range(0, ASKED, memory.num):
        part = keys[start : start + memory.num]
        far.put(part, memory, slice(0, len(part)))
    far.settle()
    times = []
    for _ in range(LOOKUPS):
        began = time.perf_counter()
        assert far.num_found(keys) == ASKED, "a block was not found"
        times.append(1000 * (time.perf_counter() - began))
    spread = summarize(times)
    assert spread is not None, "there were look-ups"
    delay_ms = 1000 * ROUND_TRIP_S if place.has_to_ask else 0.0
    p99 = None if spread.p99 is None else round(spread.p99, 2)
    far.close()
    return [Lookup(place.name, ASKED, delay_ms, round(spread.p50, 2), p99)]


def table(rows: Sequence[Row]) -> Table:
    made = Table(title="blocks between a store and memory")
    for heading in ("store", "block", "way"):
        made.add_column(heading, no_wrap=True)
    for heading in ("GB/s", "its client", "CPU s/GB", "its client", "a memmove"):
        made.add_column(heading, justify="right")
    for each in rows:
        figures = (
            each.gb_per_s,
            each.client_gb_per_s,
            each.cpu_s_per_gb,
            each.client_cpu_s_per_gb,
            each.memmove_cpu_s_per_gb,
        )
        made.add_row(each.store, each.block, each.direction, *(f"{f:.3f}" for f in figures))
    return made


def lookup_table(lookups: Sequence[Lookup]) -> Table:
    made = Table(title=f"which of {ASKED} blocks are there?")
    for heading in ("store", "round trip ms", "p50 ms", "p99 ms"):
        made.add_column(heading, justify="right")
    for each in lookups:
        p99 = "too few" if each.p99_ms is None else f"{each.p99_ms:.1f}"
        made.add_row(each.store, f"{each.round_trip_ms:.0f}", f"{each.p50_ms:.2f}", p99)
    return made


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.remote", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the result here; - is stdout")
    parser.add_argument("--quick", action="store_true", help="fewer of everything: to see it run")
    parser.add_argument("--stores", nargs="*", default=[*STORES], help=f"{' '.join(STORES)} (all)")
    parser.add_argument("--parts", nargs="*", default=[*PARTS], choices=PARTS, help="(all)")
    parser.add_argument("--rounds", type=int, help="(7)")
    parser.add_argument("--pairs", type=int, help="of prompts, beside a dead store (400)")
    parser.add_argument("--mib", type=int, help="moved at a time (128)")
    parser.add_argument("--threads", type=int, default=2, help="of each side (2)")
    options = parser.parse_args(arguments)
    usual = {"rounds": 7, "mib": 128, "pairs": 400}
    if options.quick:
        usual = {"rounds": 1, "mib": 8, "pairs": 8}
    for name, value in usual.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    machine, rows, lookups = machine_facts(), [], []
    versions: dict[str, str] = {}
    there = []
    for name in options.stores:
        if reason := STORES[name].missing():
            print(f"{name}: left out: {reason}", file=sys.stderr)
        else:
            there.append(name)
    for name in there if CLIENTS in options.parts else ():
        with tempfile.TemporaryDirectory(prefix="kvtier-store-") as folder:
            place = STORES[name](Path(folder))
            versions |= place.versions()
            try:
                for block, block_bytes in SIZES.items():
                    some, more = measure(place, block, block_bytes, options)
                    rows += some
                    lookups += more
            finally:
                place.close()
    tables = [table(rows), lookup_table(lookups)] if CLIENTS in options.parts else []
    dead: list[DeadRow] = []
    if DEAD in options.parts:
        from benchmarks.remote_dead import dead_table, measure_dead

        dead = measure_dead([STORES[name] for name in there], options.pairs)
        tables.append(dead_table(dead))
    result = {
        "benchmark": "remote",
        "machine": machine,
        "versions": versions,
        "plan": {name: getattr(options, name) for name in ("parts", *usual, "threads")},
        "rows": [
            *(asdict(each) for each in (*rows, *lookups)),
            *(each.as_json() for each in dead),
        ],
        "targets": [
            *(target for each in rows for target in each.targets()),
            *(each.target() for each in lookups),
            *(each.target() for each in dead),
        ],
    }
    report(result, options.json, *tables)


if __name__ == "__main__":
    main()
