"""S5: the disk tier against the disk caches of SGLang, LMCache and vLLM.

    python -m benchmarks.disk.against_peers            a table
    python -m benchmarks.disk.against_peers --json -   JSON on stdout, the table on stderr

All contestants read batches of 64 blocks cold from one disk, in turn. Only peers that `make peers`
installed take part. See README.md for the method.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from benchmarks.disk.peer_processes import Worker, start
from benchmarks.disk.throughput import FIO, FIO_DEPTHS, fio
from benchmarks.peers import CONTESTANTS, OURS, Contestant
from benchmarks.peers.store import BATCH
from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, table_of
from benchmarks.report.targets import Bounds, bounds, estimate, judged, ratio
from kvtier.tools.report.stats import Estimate

MIB = 1 << 20
SIZES = {"1 MiB": MIB, "2.5 MiB": 5 * MIB // 2}
READ, WRITE = "read", "write"
TIMES_FASTER = 1.5
SHARE_OF_CPU = 0.2
COLD = 0.95
"""Least share of a contestant's reads that must come from the disk."""


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant, one size, one direction: GB/s and CPU of the median round. GB: 1e9 bytes."""

    contestant: str
    peer: str
    block: str
    direction: str
    gb_per_s: float
    best_gb_per_s: float
    worst_gb_per_s: float
    cpu_s_per_gb: float | None = None
    acknowledged_gb_per_s: float | None = None
    """Write rate until the cache reports completion. ``gb_per_s`` is the rate until the data left
    the page cache."""
    from_disk: float | None = None
    """Bytes fetched from the disk per byte read."""
    gb_per_s_between: Bounds = (None, None)
    cpu_s_per_gb_between: Bounds = (None, None)

    @property
    def rate(self) -> Estimate:
        """Rate in GB/s, with its interval."""
        return estimate(self.gb_per_s, self.gb_per_s_between)

    @property
    def cost(self) -> Estimate:
        """CPU seconds per GB, with its interval."""
        return estimate(self.cpu_s_per_gb or 0.0, self.cpu_s_per_gb_between)


class Numbers:
    """Draws numbers of stored blocks to read, and issues numbers of new blocks to write."""

    def __init__(self, num_blocks: int, batch: int = BATCH) -> None:
        self._num_blocks, self._batch = num_blocks, batch
        self._next = num_blocks

    def stored(self, num_batches: int, seed: int) -> list[list[int]]:
        """Return batches of different blocks: a second read would come from the page cache."""
        rng = np.random.default_rng(seed)
        drawn = rng.choice(self._num_blocks, (num_batches, self._batch), replace=False)
        return [batch.tolist() for batch in drawn]

    def new(self, num_batches: int) -> list[list[int]]:
        first = self._next
        self._next += num_batches * self._batch
        places = range(first, self._next, self._batch)
        return [list(range(at, at + self._batch)) for at in places]


def measure_size(
    workers: Sequence[Worker], block: str, block_bytes: int, plan: argparse.Namespace, path: Path
) -> list[Row]:
    """Measure all rows of one size.

    The first round warms up. Another contestant is first in each round.
    """
    num_blocks = num_blocks_of(plan.gib, block_bytes, plan.batch)
    numbers = Numbers(num_blocks, plan.batch)
    gb = plan.batches * plan.batch * block_bytes / 1e9
    found: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    limits: dict[str, list[float]] = defaultdict(list)
    for turn in range(plan.rounds + 1):
        batches, new = numbers.stored(plan.batches, turn), numbers.new(plan.batches)
        first = turn % len(workers)
        for worker in [*workers[first:], *workers[:first]]:
            for direction, which in ((READ, batches), (WRITE, new)):
                answer = worker.ask(direction, batches=which)
                if turn:
                    found[worker.contestant.name, direction].append(answer)
        if turn and shutil.which(FIO):
            for direction in (READ, WRITE):
                rates = [
                    fio(path, direction == WRITE, block_bytes, n, plan.batches * plan.batch)
                    for n in FIO_DEPTHS
                ]
                limits[direction].append(max(rates))
    rows = [
        row(worker.contestant, block, direction, gb, found[worker.contestant.name, direction])
        for direction in (READ, WRITE)
        for worker in workers
    ]
    for direction, rates in limits.items():
        rates.sort()
        rows.append(Row(FIO, FIO, block, direction, statistics.median(rates), rates[-1], rates[0]))
    return rows


def row(
    contestant: Contestant,
    block: str,
    direction: str,
    gb: float,
    answers: list[dict[str, float]],
) -> Row:
    def median(what: str) -> float | None:
        values = [answer[what] for answer in answers if what in answer]
        return statistics.median(values) if values else None

    seconds = sorted(answer["seconds"] for answer in answers)
    acknowledged, from_disk = median("acknowledged_s"), median("from_disk")
    if from_disk is not None and from_disk < COLD:
        print(
            f"{contestant.name}, {block}: only {from_disk:.0%} of its reads came from the disk",
            file=sys.stderr,
        )
    return Row(
        contestant=contestant.name,
        peer=contestant.peer,
        block=block,
        direction=direction,
        gb_per_s=gb / statistics.median(seconds),
        best_gb_per_s=gb / seconds[0],
        worst_gb_per_s=gb / seconds[-1],
        cpu_s_per_gb=statistics.median(answer["cpu_s"] for answer in answers) / gb,
        acknowledged_gb_per_s=gb / acknowledged if acknowledged else None,
        from_disk=from_disk,
        gb_per_s_between=bounds([gb / second for second in seconds]),
        cpu_s_per_gb_between=bounds([answer["cpu_s"] / gb for answer in answers]),
    )


def targets(
    rows: Sequence[Row],
    wanted: Callable[[str], tuple[float, float | None]] = lambda peer: (TIMES_FASTER, SHARE_OF_CPU),
) -> list[dict[str, object]]:
    """Return S5 for cold reads: GB/s and CPU time relative to each peer's.

    A peer counts by its fastest and by its cheapest variant. The worst size counts.

    Args:
        rows: all rows.
        wanted: both targets against a peer; None if CPU time is no target.
    """
    reads = [each for each in rows if each.direction == READ and each.peer != FIO]
    peers = list(dict.fromkeys(read.peer for read in reads if read.peer != OURS))
    found: list[dict[str, object]] = []
    for ours in dict.fromkeys(read.contestant for read in reads if read.peer == OURS):
        for peer in peers:
            times, shares = [], []
            for mine in (read for read in reads if read.contestant == ours):
                theirs = [e for e in reads if e.peer == peer and e.block == mine.block]
                fastest = max(theirs, key=lambda each: each.gb_per_s)
                cheapest = min(theirs, key=lambda each: each.cost.value)
                times.append(ratio(mine.rate, fastest.rate))
                shares.append(ratio(mine.cost, cheapest.cost))
            common = {"contestant": ours, "peer": peer}
            least, most = (
                min(times, key=lambda each: each.value),
                max(shares, key=lambda each: each.value),
            )
            times_faster, share = wanted(peer)
            found.append(judged("S5", least, times_faster, at_least=True, **common, measure="GB/s"))
            if share is not None:
                found.append(judged("S5", most, share, at_least=False, **common, measure="CPU"))
    return found


def table(rows: Sequence[Row], batch: int = BATCH) -> Table:
    """Return a table with a section per size and direction."""
    return table_of(
        f"{batch}-block batches; reads are cold, writes until they left the page cache",
        ("block", "direction", "cache"),
        ("GB/s", "best", "worst", "CPU s/GB", "acknowledged", "from disk"),
        (
            (
                row.block,
                row.direction,
                row.contestant,
                *(f"{rate:.2f}" for rate in (row.gb_per_s, row.best_gb_per_s, row.worst_gb_per_s)),
                "" if row.cpu_s_per_gb is None else f"{row.cpu_s_per_gb:.3f}",
                "" if row.acknowledged_gb_per_s is None else f"{row.acknowledged_gb_per_s:.2f}",
                "" if row.from_disk is None else f"{row.from_disk:.0%}",
            )
            for row in rows
        ),
        sections=2,
    )


def num_blocks_of(gib: float, block_bytes: int, batch: int) -> int:
    """Return the number of blocks in ``gib``, as whole batches."""
    return max(1, int(gib * (1 << 30)) // (batch * block_bytes)) * batch


def run(
    plan: argparse.Namespace,
    chosen: Sequence[Contestant],
    also: Callable[[Sequence[Worker], str, int], None] | None = None,
) -> tuple[list[Row], dict[str, str]]:
    """Return all rows, and the contestants' versions.

    Args:
        plan: the options.
        chosen: contestants; the installed ones take part.
        also: further measurement of each size, called with the workers, the size's name and the
            number of stored blocks.
    """
    rows: list[Row] = []
    versions: dict[str, str] = {}
    for block, block_bytes in plan.sizes.items():
        with tempfile.TemporaryDirectory(prefix="kvtier-peers-", dir=plan.folder) as name:
            folder = Path(name)
            limit = folder / "limit"
            num_blocks = num_blocks_of(plan.gib, block_bytes, plan.batch)
            if plan.batches * plan.batch > num_blocks:
                few = f"--batches {plan.batches} of {plan.batch} blocks"
                sys.exit(f"{few}: more than --gib {plan.gib}")
            if shutil.which(FIO):
                make_file(limit, num_blocks * block_bytes)
            workers, found = start(
                chosen, folder, block_bytes, num_blocks, plan.small_pages, plan.batch
            )
            versions.update(found)
            try:
                rows += measure_size(workers, block, block_bytes, plan, limit)
                if also is not None:
                    also(workers, block, num_blocks)
            finally:
                for worker in workers:
                    worker.close()
    return rows, versions


def make_file(path: Path, num_bytes: int) -> None:
    """Write a file for fio: all of its bytes are allocated, and none is in the page cache."""
    with path.open("wb") as file:
        for start_ in range(0, num_bytes, MIB):
            file.write(os.urandom(min(MIB, num_bytes - start_)))
        file.flush()
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main(arguments: list[str] | None = None, sizes: dict[str, int] = SIZES) -> None:
    parser = parser_of("disk.against_peers", __doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    parser.add_argument("--gib", type=float, default=1.5, help="blocks of each contestant (1.5)")
    parser.add_argument("--rounds", type=int, default=6, help="(6)")
    parser.add_argument("--batches", type=int, default=8, help="per round and direction (8)")
    parser.add_argument("--small-pages", action="store_true", help="for the peers, as they have")
    parser.add_argument("--peers", nargs="*", help="only these: sglang lmcache vllm")
    plan = parser.parse_args(arguments)
    plan.sizes = sizes
    machine = machine_facts()
    plan.batch = BATCH
    rows, versions = run(
        plan, [each for each in CONTESTANTS if not plan.peers or each.peer in (OURS, *plan.peers)]
    )
    report(
        plan.json,
        "disk_peers",
        machine,
        rows,
        targets(rows),
        table(rows),
        versions=versions,
        peers_have_small_pages=plan.small_pages,
    )


if __name__ == "__main__":
    main()
