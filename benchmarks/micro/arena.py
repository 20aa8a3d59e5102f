"""Time until the host tier's memory can be used.

    python -m benchmarks.micro.arena            a table
    python -m benchmarks.micro.arena --json -   JSON on stdout, the table on stderr

Fresh memory is touched by one call and by several threads, in huge pages and in small ones; and a
whole host tier is made, until its first slot can be used and until all can. README.md says the
method.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.report.machine import machine_facts
from kvtier.devices.cpu import CpuDevice
from kvtier.layout import DType, full_attention
from kvtier.tiers import ArenaOptions, HostTier, HugePages, pages

GROUP = full_attention(28, 8, 128, DType.BFLOAT16, 16)
"""Blocks of 1.75 MiB."""

ONE_CALL = "one call"
"""Name of the former way: ``madvise`` over everything, which holds the interpreter's lock."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way of having memory. gib_per_s: by the median."""

    case: str
    huge_pages: bool
    method: str
    gib: float
    median_s: float
    best_s: float
    worst_s: float
    gib_per_s: float
    rounds: int


def fresh(num_bytes: int, huge: bool) -> tuple[mmap.mmap, int]:
    """Anonymous memory that nobody has touched, and where it begins."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    pages.advise(address, num_bytes, pages.MADV_HUGEPAGE if huge else pages.MADV_NOHUGEPAGE)
    return memory, address


def check_resident(address: int, num_bytes: int) -> None:
    """Every page is in memory; ends the benchmark where one is not."""
    num_pages = -(-num_bytes // mmap.PAGESIZE)
    resident = np.zeros(num_pages, np.uint8)
    result = ctypes.CDLL(None, use_errno=True).mincore(
        ctypes.c_void_p(address),
        ctypes.c_size_t(num_bytes),
        ctypes.c_void_p(resident.ctypes.data),
    )
    missing = num_pages - int((resident & 1).sum())
    if result or missing:
        raise SystemExit(f"{missing} of {num_pages} pages are not there")


def in_one_call(memory: mmap.mmap, address: int) -> None:
    try:
        memory.madvise(pages.MADV_POPULATE_WRITE)
    except OSError:
        pages.write_to_each_page(address, len(memory))


def by_threads(num_threads: int) -> Callable[[mmap.mmap, int], None]:
    def touch(memory: mmap.mmap, address: int) -> None:
        pages.touch(address, len(memory), num_threads)

    return touch


def seconds_to_touch(touch: Callable[[mmap.mmap, int], None], num_bytes: int, huge: bool) -> float:
    memory, address = fresh(num_bytes, huge)
    began = time.perf_counter()
    touch(memory, address)
    seconds = time.perf_counter() - began
    check_resident(address, num_bytes)
    memory.close()
    return seconds


def touch_rows(num_bytes: int, thread_counts: list[int], rounds: int) -> list[Row]:
    methods = {ONE_CALL: in_one_call} | {f"{n} threads": by_threads(n) for n in thread_counts}
    rows: list[Row] = []
    for huge in (True, False):
        times: dict[str, list[float]] = {name: [] for name in methods}
        for done in range(rounds + 1):
            for name in in_turn(list(methods), done):
                seconds = seconds_to_touch(methods[name], num_bytes, huge)
                if done:  # the first round warms up
                    times[name].append(seconds)
        rows += [_row("touch", huge, name, num_bytes, taken) for name, taken in times.items()]
    return rows


def start_rows(num_bytes: int, rounds: int) -> list[Row]:
    """A host tier: until the first slot, and until all; against one call over everything."""
    rows: list[Row] = []
    for huge in (True, False):
        times: dict[str, list[float]] = {ONE_CALL: [], "first slot": [], "all slots": []}
        for done in range(rounds + 1):
            found: dict[str, float] = {}
            for name in in_turn([ONE_CALL, "tier"], done):
                if name == ONE_CALL:
                    found[name] = seconds_to_touch(in_one_call, num_bytes, huge)
                else:
                    found["first slot"], found["all slots"] = seconds_to_open(num_bytes, huge)
            if done:
                for name, seconds in found.items():
                    times[name].append(seconds)
        rows += [_row("start", huge, name, num_bytes, taken) for name, taken in times.items()]
    return rows


def in_turn(names: list[str], done: int) -> list[str]:
    """Another one is first in each round.

    It finds what the last one left of free memory, and a virtual machine may have to be given
    memory first.
    """
    first = done % len(names)
    return names[first:] + names[:first]


def seconds_to_open(num_bytes: int, huge: bool) -> tuple[float, float]:
    options = ArenaOptions(huge_pages=HugePages.AUTO if huge else HugePages.OFF)
    began = time.perf_counter()
    tier = HostTier(GROUP, num_bytes, CpuDevice(), options)
    first = time.perf_counter() - began
    if not tier.num_free:
        raise SystemExit("no slot is open though the tier is made")
    tier.arena.wait()
    whole = time.perf_counter() - began
    if tier.num_free != tier.num_slots:
        raise SystemExit(f"{tier.num_free} of {tier.num_slots} slots are open")
    check_resident(tier.memory.address, tier.memory.nbytes)
    tier.close()
    return first, whole


def _row(case: str, huge: bool, name: str, num_bytes: int, taken: list[float]) -> Row:
    median = statistics.median(taken)
    gib = num_bytes / 2**30
    return Row(case, huge, name, gib, median, min(taken), max(taken), gib / median, len(taken))


def table(rows: list[Row]) -> Table:
    result = Table(title="Host memory: from nothing to touched")
    for heading in ("case", "pages", "method", "GiB", "s", "best", "worst", "GiB/s"):
        result.add_column(heading, no_wrap=True)
    for row in rows:
        if row.method == ONE_CALL:
            result.add_section()
        times = (f"{value:.3f}" for value in (row.median_s, row.best_s, row.worst_s))
        kind = "huge" if row.huge_pages else "small"
        rate = "" if row.method == "first slot" else f"{row.gib_per_s:.2f}"
        result.add_row(row.case, kind, row.method, f"{row.gib:.2f}", *times, rate)
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro.arena", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the result here; - is stdout")
    parser.add_argument("--gib", type=float, default=1.0, help="memory that is touched (1)")
    parser.add_argument("--start-gib", type=float, default=8.0, help="size of the host tier (8)")
    cores = os.cpu_count() or 1
    counts = sorted({1, 2, *(n for n in (4, 8, 16) if n <= cores)})
    parser.add_argument("--threads", type=int, nargs="+", default=counts)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (5)")
    parser.add_argument("--start-rounds", type=int, default=3, help="host tiers made (3)")
    options = parser.parse_args(arguments)

    machine = machine_facts()
    rows = touch_rows(int(options.gib * 2**30), options.threads, options.rounds)
    rows += start_rows(int(options.start_gib * 2**30), options.start_rounds)
    result = {
        "benchmark": "arena",
        "machine": machine,
        "rows": [asdict(row) for row in rows],
        "targets": [],
    }
    Console(stderr=options.json == "-").print(table(rows))
    if options.json == "-":
        json.dump(result, sys.stdout, indent=1)
        print()
    elif options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
