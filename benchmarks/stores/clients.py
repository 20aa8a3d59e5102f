"""R1: a store's tier and the store's own client, in turns and in several processes.

Processes differ more than the turns of one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from rich.table import Table

from benchmarks.report.output import table_of
from benchmarks.report.targets import Bounds, bounds, estimate, judged
from benchmarks.stores.servers import Client, Memory, Place, Tier
from kvtier.core.types import BlockKey

MIB = 1 << 20
GET, PUT = "get", "put"
LEAST_SHARE, MAX_CPU = 0.90, 1.15
Figures = dict[str, tuple[float, float]]
"""(GB/s, CPU seconds per GB) by direction."""


@dataclass(frozen=True, slots=True)
class Row:
    """One store, one size, one direction; medians over processes.

    Both ratios are taken within a process. Their bounds are those of the median over processes.
    """

    store: str
    client: str
    block: str
    direction: str
    gb_per_s: float
    client_gb_per_s: float
    cpu_s_per_gb: float
    client_cpu_s_per_gb: float
    memmove_cpu_s_per_gb: float
    share: float
    """kvtier's GB/s, divided by the client's."""
    share_between: Bounds
    cost: float
    """kvtier's CPU time, divided by the client's plus a memmove / 1.15."""
    cost_between: Bounds

    def targets(self) -> list[dict[str, object]]:
        common = {"store": self.store, "block": self.block, "direction": self.direction}
        share = estimate(self.share, self.share_between)
        cost = estimate(self.cost, self.cost_between)
        return [
            judged("R1", share, LEAST_SHARE, at_least=True, **common, measure="GB/s"),
            judged("R1", cost, MAX_CPU, at_least=False, **common, measure="CPU"),
        ]


Move = Callable[[Sequence[BlockKey], Memory, slice], None]


def timed(work: Callable[[], None], num_bytes: int) -> tuple[float, float]:
    """Run ``work``. Return GB/s, and CPU seconds of this process per GB."""
    began, cpu = time.perf_counter(), time.process_time()
    work()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return num_bytes / 1e9 / seconds, cpu * 1e9 / num_bytes


def in_threads(
    move: Move, keys: Sequence[BlockKey], memory: Memory, num_threads: int, pool: ThreadPoolExecutor
) -> tuple[float, float]:
    """Move all blocks, in as many parts as there are threads. Return what ``timed`` does."""
    cuts = np.linspace(0, len(keys), num_threads + 1).astype(int).tolist()
    parts = [slice(first, end) for first, end in pairwise(cuts)]

    def work() -> None:
        for each in [pool.submit(move, keys[part], memory, part) for part in parts]:
            each.result()

    return timed(work, memory.blocks.nbytes)


@dataclass(frozen=True, slots=True)
class Measured:
    """One store and size, in one process."""

    found: dict[tuple[int, str], tuple[float, float]]
    """Medians over rounds, by side (0 is kvtier, 1 the client) and direction."""
    moved: float
    """CPU seconds per GB of a memmove."""


def measure(place: Place, block_bytes: int, options: argparse.Namespace) -> Measured:
    """Measure puts and gets in turns. The first round warms up."""
    num = max(options.threads, options.mib * MIB // block_bytes)
    memory = Memory(num, block_bytes)
    sides: list[Tier | Client] = [
        place.tier(block_bytes, num * 4, options.threads),
        place.client(options.threads),
    ]
    found: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    moved: list[float] = []
    with ThreadPoolExecutor(options.threads) as pool:
        for turn in range(options.rounds + 1):
            for at in (0, 1) if turn % 2 == 0 else (1, 0):
                measured = _turn(sides[at], at, memory, options.threads, pool, turn)
                for direction, figures in measured.items():
                    if turn:
                        found[at, direction].append(figures)
            moved.append(timed(memory.move, num * block_bytes)[1])
    for side in sides:
        side.close()
    medians = {
        key: (statistics.median(rate), statistics.median(cpu))
        for key, (rate, cpu) in ((key, zip(*each, strict=True)) for key, each in found.items())
    }
    return Measured(medians, statistics.median(moved))


def _turn(
    side: Tier | Client,
    at: int,
    memory: Memory,
    num_threads: int,
    pool: ThreadPoolExecutor,
    turn: int,
) -> Figures:
    """Put all blocks, get and compare them, and remove them."""
    keys = memory.keys(turn, at)
    memory.fill(turn)
    figures = {PUT: in_threads(side.put, keys, memory, num_threads, pool)}
    memory.clear()
    figures[GET] = in_threads(side.get, keys, memory, num_threads, pool)
    side.deliver(memory)
    memory.check(turn)
    side.drop(keys)
    return figures


def rows_of(kind: type[Place], block: str, processes: Sequence[Measured]) -> list[Row]:
    """Return the rows of one store and size, over all processes."""
    return [_row(kind, block, direction, processes) for direction in (PUT, GET)]


def _row(kind: type[Place], block: str, direction: str, processes: Sequence[Measured]) -> Row:
    rate, cpu = _over(processes, 0, direction)
    their_rate, their_cpu = _over(processes, 1, direction)
    moved = [process.moved for process in processes]
    shares = [one / other for one, other in zip(rate, their_rate, strict=True)]
    costs = [
        one / (other + memmove / MAX_CPU)
        for one, other, memmove in zip(cpu, their_cpu, moved, strict=True)
    ]
    return Row(
        kind.name,
        kind.client_name,
        block,
        direction,
        *map(statistics.median, (rate, their_rate, cpu, their_cpu, moved)),
        share=statistics.median(shares),
        share_between=bounds(shares),
        cost=statistics.median(costs),
        cost_between=bounds(costs),
    )


def _over(
    processes: Sequence[Measured], at: int, direction: str
) -> tuple[list[float], list[float]]:
    found = [process.found[at, direction] for process in processes]
    return [rate for rate, _ in found], [cpu for _, cpu in found]


def table(rows: Sequence[Row]) -> Table:
    return table_of(
        "blocks between a store and memory",
        ("store", "block", "way"),
        ("GB/s", "its client", "share", "CPU s/GB", "its client", "a memmove", "cost"),
        (
            (
                row.store,
                row.block,
                row.direction,
                *(
                    f"{figure:.3f}"
                    for figure in (
                        row.gb_per_s,
                        row.client_gb_per_s,
                        row.share,
                        row.cpu_s_per_gb,
                        row.client_cpu_s_per_gb,
                        row.memmove_cpu_s_per_gb,
                        row.cost,
                    )
                ),
            )
            for row in rows
        ),
    )
