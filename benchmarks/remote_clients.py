"""R1: a store's tier, the store's own client, and others' ways to the same store, in turns."""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.table import Table

from benchmarks.peer_processes import Worker, start
from benchmarks.remote_stores import Client, Memory, Place, Tier
from benchmarks.targets import Bounds, bounds, estimate, judged, ratio
from kvtier.serve_bench.stats import Estimate
from kvtier.types import BlockKey

MIB = 1 << 20
GET, PUT = "get", "put"
LEAST_SHARE, MOST_CPU = 0.90, 1.15
Figures = dict[str, tuple[float, float]]
"""By direction: GB/s, and CPU seconds per GB."""


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
class PeerRow:
    """Another project's way to a store, in a process of its own."""

    store: str
    peer: str
    block: str
    direction: str
    gb_per_s: float
    cpu_s_per_gb: float
    gb_per_s_between: Bounds
    cpu_s_per_gb_between: Bounds


Move = Callable[[Sequence[BlockKey], Memory, slice], None]


def timed(work: Callable[[], None], num_bytes: int) -> tuple[float, float]:
    """GB/s, and CPU seconds of this process per GB."""
    began, cpu = time.perf_counter(), time.process_time()
    work()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return num_bytes / 1e9 / seconds, cpu * 1e9 / num_bytes


def in_threads(
    move: Move, keys: Sequence[BlockKey], memory: Memory, num_threads: int, pool: ThreadPoolExecutor
) -> tuple[float, float]:
    """All blocks, in as many parts as there are threads; how fast, and at which cost."""
    cuts = np.linspace(0, len(keys), num_threads + 1).astype(int).tolist()
    parts = [slice(first, end) for first, end in pairwise(cuts)]

    def work() -> None:
        for each in [pool.submit(move, keys[part], memory, part) for part in parts]:
            each.result()

    return timed(work, memory.blocks.nbytes)


def measure(
    place: Place, block: str, block_bytes: int, options: argparse.Namespace, folder: Path
) -> tuple[list[Row], list[PeerRow], dict[str, str]]:
    """One store and size: rounds of puts and gets in turns, the first one to warm up. Also the
    versions of others that took part."""
    num = max(options.threads, options.mib * MIB // block_bytes)
    memory = Memory(num, block_bytes)
    sides: list[Tier | Client] = [
        place.tier(block_bytes, num * 4, options.threads),
        place.client(options.threads),
    ]
    peers, versions = start(
        place.peers(options.threads), folder / block, block_bytes, num, batch=num
    )
    found: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    moved: list[float] = []
    with ThreadPoolExecutor(options.threads) as pool:
        turns = [
            *(
                partial(_turn, side, at, memory, options.threads, pool)
                for at, side in enumerate(sides)
            ),
            *(partial(_peer_turn, peer, num, block_bytes) for peer in peers),
        ]
        for turn in range(options.rounds + 1):
            first = turn % len(turns)
            for at in (*range(first, len(turns)), *range(first)):
                for direction, figures in turns[at](turn).items():
                    if turn:
                        found[at, direction].append(figures)
            moved.append(timed(memory.move, num * block_bytes)[1])
    for each in (*sides, *peers):
        each.close()
    rows = [_row(place, block, way, found, statistics.median(moved)) for way in (PUT, GET)]
    peer_rows = [
        _peer_row(place, peer, block, way, found[at, way])
        for way in (PUT, GET)
        for at, peer in enumerate(peers, len(sides))
    ]
    return rows, peer_rows, versions


def _turn(
    side: Tier | Client,
    at: int,
    memory: Memory,
    num_threads: int,
    pool: ThreadPoolExecutor,
    turn: int,
) -> Figures:
    """All blocks put, and got again, and compared; they are removed then."""
    keys = memory.keys(turn, at)
    memory.fill(turn)
    figures = {PUT: in_threads(side.put, keys, memory, num_threads, pool)}
    memory.clear()
    figures[GET] = in_threads(side.get, keys, memory, num_threads, pool)
    side.deliver(memory)
    memory.check(turn)
    side.drop(keys)
    return figures


def _peer_turn(peer: Worker, num: int, block_bytes: int, turn: int) -> Figures:
    """The same, by another process; what it has put it reads once more, outside the clock."""
    new = [*range((turn + 1) * num, (turn + 2) * num)]
    gb = num * block_bytes / 1e9
    figures = {}
    for direction, do, numbers in ((PUT, "write", new), (GET, "read", [*range(num)])):
        answer = peer.ask(do, batches=[numbers])
        figures[direction] = (gb / answer["seconds"], answer["cpu_s"] / gb)
    return figures


def _row(
    place: Place,
    block: str,
    direction: str,
    found: dict[tuple[int, str], list[tuple[float, float]]],
    moved: float,
) -> Row:
    (rate, cpu), (their_rate, their_cpu) = (
        zip(*found[at, direction], strict=True) for at in (0, 1)
    )
    return Row(
        place.name,
        place.client_name,
        block,
        direction,
        *map(statistics.median, (rate, their_rate, cpu, their_cpu)),
        moved,
        *map(bounds, (rate, their_rate, cpu, their_cpu)),
    )


def _peer_row(
    place: Place, peer: Worker, block: str, direction: str, found: list[tuple[float, float]]
) -> PeerRow:
    rate, cpu = zip(*found, strict=True)
    medians = map(statistics.median, (rate, cpu))
    name = peer.contestant.name
    return PeerRow(place.name, name, block, direction, *medians, bounds(rate), bounds(cpu))


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


def peer_table(rows: Sequence[PeerRow]) -> Table:
    made = Table(title="others' ways to the same stores")
    for heading in ("store", "by", "block", "way"):
        made.add_column(heading, no_wrap=True)
    for heading in ("GB/s", "CPU s/GB"):
        made.add_column(heading, justify="right")
    for each in rows:
        figures = (f"{each.gb_per_s:.3f}", f"{each.cpu_s_per_gb:.3f}")
        made.add_row(each.store, each.peer, each.block, each.direction, *figures)
    return made
