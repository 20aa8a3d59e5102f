"""S3: crc32c of blocks, in the cache and from memory.

    python -m benchmarks.micro.crc            a table
    python -m benchmarks.micro.crc --json -   JSON on stdout, the table on stderr

Times are CPU seconds of one thread. The reference is a memcpy of the same bytes into a small buffer
that stays in the CPU's cache: the cost of only reading them. See README.md for the method.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.table import Table

from benchmarks.micro.copy import allocate
from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, table_of
from benchmarks.report.targets import Bounds, bounds, estimate, judged
from kvtier.core import hot
from kvtier.core.reference import crc as reference

MIB = 1 << 20
TARGET_GB_PER_S = 10.0
OURS = "crc32c_many"
READING = "memcpy into the cache"
SMALL = 128 * 1024  # the buffer that memcpy writes again and again

Uint64s = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Case:
    """Blocks of one size, all of them read once or more per round."""

    name: str
    block_bytes: int
    num_blocks: int


CASES = (
    Case("64 KiB, in the second cache", 64 * 1024, 1),
    Case("1 MiB, in the last cache", MIB, 1),
    Case("1 MiB blocks, from memory", MIB, 256),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One method on one case. Rates in bytes per CPU second of one thread."""

    case: str
    method: str
    median_s: float
    best_s: float
    worst_s: float
    gb_per_s: float
    ratio: float
    num_bytes: int
    rounds: int
    gb_per_s_between: Bounds


def memcpy_pieces(target: int, blocks: list[tuple[int, int]]) -> None:
    """Copy every block to one small place, in pieces of at most ``SMALL`` bytes."""
    for address, size in blocks:
        for start in range(0, size, SMALL):
            ctypes.memmove(target, address + start, min(SMALL, size - start))


def contestants(
    case: Case, memory: npt.NDArray[np.uint8], round_bytes: int, rng: np.random.Generator
) -> tuple[dict[str, Callable[[], object]], int]:
    """Return the calls by method, and the bytes that each reads.

    Blocks are in random order, as in a cache.
    """
    order = rng.permutation(case.num_blocks)
    order = np.tile(order, max(1, round_bytes // (case.block_bytes * case.num_blocks)))
    addresses = (memory.ctypes.data + order * case.block_bytes).astype(np.uint64)
    sizes = np.full(len(order), case.block_bytes, np.uint64)
    small = np.zeros(SMALL, np.uint8)
    blocks = list(zip(addresses.tolist(), sizes.tolist(), strict=True))
    found: dict[str, Callable[[], object]] = {
        READING: lambda: memcpy_pieces(small.ctypes.data, blocks)
    }
    if hot.NATIVE:
        found[OURS] = lambda: hot.crc32c_many(addresses, sizes)
    return found, int(sizes.sum())


def check(memory: npt.NDArray[np.uint8], block_bytes: int) -> None:
    """Check that the native core and its Python twin agree on some blocks.

    The twin is tested against the definition.
    """
    starts = np.arange(0, memory.size, max(block_bytes, memory.size // 8))
    addresses = (memory.ctypes.data + starts).astype(np.uint64)
    sizes = np.full(len(starts), block_bytes, np.uint64)
    ours, twin = (many(addresses, sizes) for many in (hot.crc32c_many, reference.crc32c_many))
    if not np.array_equal(ours, twin):
        raise AssertionError(f"crc32c of blocks of {block_bytes} bytes: core and twin differ")


def run_case(case: Case, rounds: int, round_bytes: int) -> list[Row]:
    rng = np.random.default_rng(0)
    memory = allocate(case.block_bytes * case.num_blocks)
    memory[:] = rng.integers(0, 256, memory.size, np.uint8)
    check(memory, case.block_bytes)
    calls, num_bytes = contestants(case, memory, round_bytes, rng)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for done in range(rounds + 1):  # the first round warms up
        for name, call in calls.items():
            began = time.thread_time()
            call()
            if done:
                times[name].append(time.thread_time() - began)
    rates = {name: num_bytes / statistics.median(taken) for name, taken in times.items()}
    return [
        Row(
            case.name,
            name,
            statistics.median(taken),
            min(taken),
            max(taken),
            rates[name] / 1e9,
            rates[name] / rates[READING],
            num_bytes,
            len(taken),
            bounds([num_bytes / each / 1e9 for each in taken]),
        )
        for name, taken in times.items()
    ]


def targets(rows: list[Row]) -> list[dict[str, object]]:
    """Return S3 for the slowest case of blocks."""
    ours = [row for row in rows if row.method == OURS]
    if not ours:
        return []
    worst = min(ours, key=lambda row: row.gb_per_s)
    found = estimate(worst.gb_per_s, worst.gb_per_s_between)
    return [judged("S3", found, TARGET_GB_PER_S, at_least=True)]


def table(rows: list[Row]) -> Table:
    """Return a table with a section per case."""
    return table_of(
        "crc32c, one thread; ratio: to reading the same bytes by memcpy",
        ("case", "method"),
        ("CPU ms", "best", "worst", "GB/s", "ratio"),
        (
            (
                row.case,
                row.method,
                *(f"{1e3 * value:.1f}" for value in (row.median_s, row.best_s, row.worst_s)),
                f"{row.gb_per_s:.2f}",
                f"{row.ratio:.2f}",
            )
            for row in rows
        ),
        sections=1,
    )


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of("micro.crc", __doc__)
    parser.add_argument("--rounds", type=int, default=11, help="timed rounds (11)")
    parser.add_argument("--mib", type=int, default=256, help="read per round and case (256)")
    options = parser.parse_args(arguments)

    machine = machine_facts()
    rows = [row for case in CASES for row in run_case(case, options.rounds, options.mib * MIB)]
    report(options.json, "crc", machine, rows, targets(rows), table(rows))


if __name__ == "__main__":
    main()
