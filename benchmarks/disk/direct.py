"""R4: loads from disk directly into the device pool, compared with loads through host memory.

    python -m benchmarks.disk.direct            a table
    python -m benchmarks.disk.direct --json -   JSON on stdout, the table on stderr

Both ways load the same blocks of one slab into the same slots of one layer-first pool, by the same
mover, in turn. See README.md for the method.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.table import Table

from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, set_usual, table_of
from benchmarks.report.targets import Bounds, bounds, estimate, judged, ratio
from kvtier.cache.ladder.loads import DIRECT_PIECES, piece_sizes
from kvtier.cache.transfer import LocalMover, Move
from kvtier.core.types import DEVICE, DISK, HOST, BlockKey, BlockName, Direct, IoKind, Slot, Verify
from kvtier.devices import Memory
from kvtier.devices.cpu import CpuDevice
from kvtier.layout import DType, KVGroup, full_attention, latent_attention, named_layout, repack
from kvtier.tiers import DeviceTier, HostTier
from kvtier.tiers.disk import DiskOptions, DiskTier, bounce
from kvtier.tiers.disk.direct import Pool

MIB = 1 << 20
TARGET = 0.6
LOAD_BYTES = 8 * MIB
"""Bytes of the first pieces, as ``CacheConfig.load_batch_bytes``."""
SHAPES = {
    "GQA, 64 tokens": full_attention(32, 8, 128, DType.BFLOAT16, 64),
    "GQA, 16 tokens": full_attention(36, 8, 128, DType.BFLOAT16, 16),
    "MLA, 64 tokens": latent_attention(61, 512, 64, DType.BFLOAT16, 64),
}
SMALL = {f"{size} KiB": full_attention(32, 1, 128, DType.BFLOAT16, 4 * size) for size in (4, 8, 16)}
"""Shapes with small pieces, to find the size from which loads go directly. They have no targets."""
DIRECT, THROUGH = "direct", "through host memory"

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Row:
    """One shape of blocks, with checksums or without. GB are 1e9 bytes."""

    block: str
    pieces: str
    io: str
    verify: bool
    cpu_s_per_gb: float
    host_cpu_s_per_gb: float
    gb_per_s: float
    host_gb_per_s: float
    cpu_s_per_gb_between: Bounds
    host_cpu_s_per_gb_between: Bounds
    rounds: int

    def target(self) -> dict[str, object]:
        found = ratio(
            estimate(self.cpu_s_per_gb, self.cpu_s_per_gb_between),
            estimate(self.host_cpu_s_per_gb, self.host_cpu_s_per_gb_between),
        )
        return judged("R4", found, TARGET, at_least=False, block=self.block, verify=self.verify)


class Bench:
    """A slab with as many blocks as the pool can hold, and their content."""

    def __init__(self, folder: Path, group: KVGroup, options: argparse.Namespace) -> None:
        io = options.io
        self.group, self.io = group, io
        self.num = max(2, options.mib * MIB // group.bytes_per_block)
        layout = named_layout("layer_first", group, self.num)
        pages = mmap.mmap(-1, layout.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if options.huge:  # as for the embedded engine's pool
            pages.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: Bytes = np.frombuffer(pages, np.uint8)
        self.bytes[:] = np.random.default_rng(1).integers(0, 256, len(self.bytes), np.uint8)
        self.content = self.bytes.copy()
        memory = Memory(self.bytes.ctypes.data, layout.nbytes, "cpu", pages)
        self.pool = DeviceTier(memory, layout)
        self.device = CpuDevice(threads=1)
        self.host = HostTier(group, self.num * group.bytes_per_block, self.device)
        self.names = [BlockName(b"n" * 32, at, BlockKey(b"%032d" % at)) for at in range(self.num)]
        self.options = DiskOptions(folder, self.num * group.bytes_per_block, io=io)
        self.order: list[Slot] = [Slot(at) for at in range(self.num)]

    def open(self, verify: Verify, direct: Direct) -> tuple[DiskTier, LocalMover]:
        options = DiskOptions(
            self.options.path, self.options.capacity_bytes, verify=verify, direct=direct, io=self.io
        )
        disk = DiskTier(options, self.group, self.host.ready_memory, pool=Pool.of(self.pool))
        return disk, LocalMover({DEVICE: self.pool, HOST: self.host, DISK: disk}, self.device)

    def store(self) -> None:
        disk, mover = self.open(Verify.ALWAYS, Direct.AUTO)
        job = mover.begin(Move(DEVICE, DISK, self.order, self.order, self.names))
        job.wait()
        assert job.succeeded, "the blocks were not written"
        mover.close(60)
        disk.close()

    def run(self, mover: LocalMover, way: str, turn: int) -> tuple[float, float]:
        """Load all blocks one way and compare them. Return seconds and CPU seconds."""
        places = np.random.default_rng(turn).permutation(self.num).tolist()
        expected = np.zeros_like(self.content)
        layout = self.pool.layout
        repack(self.content, layout, range(self.num), expected, layout, places)
        self.bytes[:] = 0
        began, cpu = time.perf_counter(), time.process_time()
        jobs, at = [], 0
        first = max(1, LOAD_BYTES // self.group.bytes_per_block)
        for size in piece_sizes(self.num, DIRECT_PIECES * first if way == DIRECT else first):
            part = slice(at, at := at + size)
            to = [Slot(place) for place in places[part]]
            if way == DIRECT:
                jobs.append(mover.begin(Move(DISK, DEVICE, to, to, self.names[part])))
                continue
            here = self.order[part]
            read = mover.begin(Move(DISK, HOST, here, here, self.names[part]))
            read.wait()
            jobs += [read, mover.begin(Move(HOST, DEVICE, here, to))]
        for job in jobs:
            job.wait()
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        assert all(job.succeeded for job in jobs), f"{way}: a block did not come"
        assert np.array_equal(self.bytes, expected), f"{way}: wrong bytes"
        return seconds, cpu


def measure(folder: Path, name: str, group: KVGroup, options: argparse.Namespace) -> list[Row]:
    """Measure one shape, both ways in turn. The first round warms up."""
    bench = Bench(folder, group, options)
    bench.store()
    gb = bench.num * group.bytes_per_block / 1e9
    found: dict[tuple[bool, str, str], list[float]] = defaultdict(list)
    for turn in range(options.rounds + 1):
        for verify in (Verify.ALWAYS, Verify.OFF):
            disk, mover = bench.open(verify, Direct.ON)
            disk.find([name.key for name in bench.names])
            ways = (DIRECT, THROUGH) if turn % 2 else (THROUGH, DIRECT)
            for way in ways:
                seconds, cpu = bench.run(mover, way, turn)
                if turn:
                    found[verify is Verify.ALWAYS, way, "cpu"].append(cpu / gb)
                    found[verify is Verify.ALWAYS, way, "rate"].append(gb / seconds)
            mover.close(60)
            disk.close()
    bench.host.close()
    pieces = str(Pool.of(bench.pool))
    return [row(name, pieces, options.io, verify, found) for verify in (True, False)]


def row(
    name: str,
    pieces: str,
    io: IoKind,
    verify: bool,
    found: dict[tuple[bool, str, str], list[float]],
) -> Row:
    cpu, host_cpu = found[verify, DIRECT, "cpu"], found[verify, THROUGH, "cpu"]
    rate, host_rate = found[verify, DIRECT, "rate"], found[verify, THROUGH, "rate"]
    return Row(
        block=name,
        pieces=pieces,
        io=io,
        verify=verify,
        cpu_s_per_gb=statistics.median(cpu),
        host_cpu_s_per_gb=statistics.median(host_cpu),
        gb_per_s=statistics.median(rate),
        host_gb_per_s=statistics.median(host_rate),
        cpu_s_per_gb_between=bounds(cpu),
        host_cpu_s_per_gb_between=bounds(host_cpu),
        rounds=len(cpu),
    )


def table(rows: Sequence[Row]) -> Table:
    lines = []
    for each in rows:
        figures = (
            each.cpu_s_per_gb,
            each.host_cpu_s_per_gb,
            each.cpu_s_per_gb / each.host_cpu_s_per_gb,
            each.gb_per_s,
            each.host_gb_per_s,
        )
        about = (each.block, each.pieces, each.io, "yes" if each.verify else "no")
        lines.append((*about, *(f"{figure:.3f}" for figure in figures)))
    return table_of(
        "blocks from disk to a layer-first pool, CPU seconds per GB",
        ("block", "in", "I/O", "checksums"),
        (DIRECT, "through host", "ratio", "GB/s", "GB/s through host"),
        lines,
    )


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of("disk.direct", __doc__)
    parser.add_argument("--quick", action="store_true", help="fewer of everything: to see it run")
    parser.add_argument("--path", type=Path, help="directory on the disk (the system's, for now)")
    parser.add_argument("--rounds", type=int, help="(9)")
    parser.add_argument("--mib", type=int, help="moved at a time (256)")
    parser.add_argument("--io", type=IoKind, default=IoKind.AUTO, help="auto, uring or preadv")
    parser.add_argument("--huge", action=argparse.BooleanOptionalAction, default=True, help="pages")
    parser.add_argument("--small", action="store_true", help="small pieces instead, no targets")
    options = parser.parse_args(arguments)
    set_usual(options, {"rounds": 9, "mib": 256}, {"rounds": 1, "mib": 16})
    if options.small:
        bounce.LEAST_PIECE_BYTES = bounce.ALIGNMENT  # directly, even where it does not pay
    machine, rows = machine_facts(), []
    for name, group in (SMALL if options.small else SHAPES).items():
        with tempfile.TemporaryDirectory(prefix="kvtier-direct-", dir=options.path) as folder:
            rows += measure(Path(folder) / "slab", name, group, options)
    plan = {name: getattr(options, name) for name in ("rounds", "mib")}
    found = [] if options.small else [each.target() for each in rows]
    report(options.json, "direct", machine, rows, found, table(rows), plan=plan)


if __name__ == "__main__":
    main()
