"""S1 and S2: batches of blocks between host memory and one preallocated file, past the page cache.

    python -m benchmarks.disk.throughput            a table
    python -m benchmarks.disk.throughput --json -   JSON on stdout, the table on stderr

Each engine reads and writes the same batches of 64 blocks in random order, in turns. fio measures
the limit of the disk in the same run. See README.md for the method.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.table import Table

from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, table_of
from benchmarks.report.targets import Bounds, bounds, estimate, judged, ratio
from kvtier.core.errors import TierError
from kvtier.core.hot import crc32c_many
from kvtier.core.types import IoKind
from kvtier.devices import Memory
from kvtier.tiers.disk.io import IoEngine, open_engine
from kvtier.tools.report.stats import Estimate

BATCH = 64
MIB = 1 << 20
SIZES = {"1 MiB": MIB, "2.5 MiB": 5 * MIB // 2}
FIO = "fio"
FIO_DEPTHS = (1, 8, 32)
TARGET_RATIO = 0.95
TARGETS_CPU = {False: 0.03, True: 0.10}
"""CPU seconds per GB, without and with checksums."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Row:
    """One engine, one size, one direction; medians of the rounds. GB are 1e9 bytes."""

    engine: str
    block: str
    direction: str
    verify: bool
    gb_per_s: float
    cpu_s_per_gb: float
    rounds: int
    gb_per_s_between: Bounds
    cpu_s_per_gb_between: Bounds


class Bench:
    """A file, memory for one batch, and the blocks' content."""

    def __init__(self, path: Path, block_bytes: int, file_bytes: int) -> None:
        self.path = path
        self.block_bytes = block_bytes
        self.num_blocks = file_bytes // block_bytes
        arena = mmap.mmap(-1, BATCH * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        arena.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: Bytes = np.frombuffer(arena, np.uint8)
        self.bytes[:] = np.random.default_rng(1).integers(0, 256, len(self.bytes), np.uint8)
        self.content = self.bytes.copy()
        self.memory = Memory(self.bytes.ctypes.data, len(self.bytes), "host", arena)
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.fd, 0, self.num_blocks * block_bytes)
        self.addresses = np.uint64(self.memory.address) + np.arange(
            BATCH, dtype=np.uint64
        ) * np.uint64(block_bytes)
        self.sizes = np.full(BATCH, block_bytes, np.int64)
        self.crcs = crc32c_many(self.addresses, self.sizes.astype(np.uint64))

    def fill(self, engine: IoEngine) -> None:
        """Fill the file: place n holds block n modulo the batch size."""
        for start in range(0, self.num_blocks - BATCH + 1, BATCH):
            offsets = np.arange(start, start + BATCH, dtype=np.int64) * self.block_bytes
            assert (engine.write(offsets, self.addresses, self.sizes) == self.sizes).all()
        engine.sync()

    def batch(self, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Return offsets of one batch: random places that hold blocks 0 .. 63, in this order."""
        rows = rng.integers(0, self.num_blocks // BATCH, BATCH)
        return (rows * BATCH + np.arange(BATCH)) * self.block_bytes

    def run(
        self, engine: IoEngine, write: bool, verify: bool, num_batches: int, seed: int
    ) -> tuple[float, float]:
        """Move some batches back to back, as fio does. Return seconds and CPU seconds.

        Afterwards each batch is read again and compared.
        """
        rng = np.random.default_rng(seed)
        batches = [self.batch(rng) for _ in range(num_batches)]
        began, cpu = time.perf_counter(), _cpu_s()
        for offsets in batches:
            done = self.move(engine, offsets, write, verify)
            assert (done == self.sizes).all(), f"{engine.name}: a block was not moved whole"
        seconds, cpu_s = time.perf_counter() - began, _cpu_s() - cpu
        for offsets in batches:
            self.bytes[:] = 0
            self.move(engine, offsets, write=False, verify=verify)
            assert np.array_equal(self.bytes, self.content), f"{engine.name}: wrong bytes"
        return seconds, cpu_s

    def move(
        self, engine: IoEngine, offsets: npt.NDArray[np.int64], write: bool, verify: bool
    ) -> npt.NDArray[np.int64]:
        """Move one batch. ``verify`` adds the checksums that the disk tier computes."""
        if write:
            if verify:
                crc32c_many(self.addresses, self.sizes.astype(np.uint64))
            return engine.write(offsets, self.addresses, self.sizes)
        if not verify:
            return engine.read(offsets, self.addresses, self.sizes)
        done, crcs = engine.read_checked(offsets, self.addresses, self.sizes, self.block_bytes)
        assert (crcs == self.crcs).all(), "a checksum differs"
        return done


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def fio(path: Path, write: bool, block_bytes: int, depth: int, num_blocks: int) -> float:
    """Return the GB/s that fio reaches with ``num_blocks`` blocks in random places."""
    command = [
        FIO, "--name=limit", f"--filename={path}", "--direct=1", "--ioengine=io_uring",
        f"--rw={'randwrite' if write else 'randread'}", f"--bs={block_bytes}",
        f"--iodepth={depth}", f"--io_size={num_blocks * block_bytes}", "--norandommap",
        "--randrepeat=0", "--fixedbufs=1", "--registerfiles=1", "--output-format=json",
        "--allow_file_create=0",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout)["jobs"][0]
    return float(job["write" if write else "read"]["bw_bytes"]) / 1e9


@contextmanager
def _engines(bench: Bench) -> Iterator[list[IoEngine]]:
    engines = []
    for kind in (IoKind.URING, IoKind.PREADV):
        try:
            engines.append(open_engine(bench.fd, kind, [bench.memory]))
        except TierError as error:
            print(f"{kind}: left out: {error}", file=sys.stderr)
    yield engines
    for engine in engines:
        engine.close()


def measure(folder: Path, file_bytes: int, rounds: int, num_batches: int) -> list[Row]:
    """Measure all rows. Contestants take turns in every round."""
    has_fio = shutil.which(FIO) is not None
    if not has_fio:
        print("fio is not installed: no limit, so no S1", file=sys.stderr)
    rows = []
    for name, block_bytes in SIZES.items():
        path = folder / "blocks"
        bench = Bench(path, block_bytes, file_bytes)
        found: dict[tuple[str, str, bool], list[tuple[float, float]]] = {}
        gb = num_batches * BATCH * block_bytes / 1e9
        with _engines(bench) as engines:
            for turn in range(rounds):
                bench.fill(engines[0])  # fio writes to it, too
                # The disk may still be busy with that, which would slow down the first engine.
                bench.run(engines[0], False, False, num_batches, rounds + turn)
                for write in (False, True):
                    direction = "write" if write else "read"
                    for engine in engines[turn % len(engines) :] + engines[: turn % len(engines)]:
                        for verify in (False, True):
                            spent = bench.run(engine, write, verify, num_batches, turn)
                            found.setdefault((engine.name, direction, verify), []).append(spent)
                    if has_fio:
                        rates = [
                            fio(path, write, block_bytes, depth, num_batches * BATCH)
                            for depth in FIO_DEPTHS
                        ]
                        best = (gb / max(rates), float("nan"))
                        found.setdefault((FIO, direction, False), []).append(best)
        rows += [
            Row(
                engine=engine,
                block=name,
                direction=direction,
                verify=verify,
                gb_per_s=gb / statistics.median(seconds for seconds, _ in spent),
                cpu_s_per_gb=statistics.median(cpu for _, cpu in spent) / gb,
                rounds=rounds,
                gb_per_s_between=bounds([gb / seconds for seconds, _ in spent]),
                cpu_s_per_gb_between=(None, None)
                if engine == FIO
                else bounds([cpu / gb for _, cpu in spent]),
            )
            for (engine, direction, verify), spent in found.items()
        ]
        os.close(bench.fd)
        path.unlink()
    return rows


def targets(rows: list[Row]) -> list[dict[str, object]]:
    """Return S1 and S2.

    S1 is the worst ratio to fio over sizes and directions, S2 the worst CPU time per GB.
    """
    found: list[dict[str, object]] = []
    ours = [row for row in rows if row.engine == "uring"]
    limit = {(row.block, row.direction): _rate(row) for row in rows if row.engine == FIO}
    if ours and limit:
        ratios = [
            ratio(_rate(row), limit[row.block, row.direction]) for row in ours if not row.verify
        ]
        worst = min(ratios, key=lambda each: each.value)
        found.append(judged("S1", worst, TARGET_RATIO, at_least=True, digits=4))
    for verify, target in TARGETS_CPU.items():
        if ours:
            row = max((r for r in ours if r.verify is verify), key=lambda row: row.cpu_s_per_gb)
            cost = estimate(row.cpu_s_per_gb, row.cpu_s_per_gb_between)
            found.append(judged("S2", cost, target, at_least=False, digits=4, verify=verify))
    return found


def _rate(row: Row) -> Estimate:
    return estimate(row.gb_per_s, row.gb_per_s_between)


def table(rows: list[Row]) -> Table:
    lines = []
    for row in sorted(rows, key=lambda row: (row.block, row.direction, row.verify, row.engine)):
        cpu = "" if np.isnan(row.cpu_s_per_gb) else f"{row.cpu_s_per_gb:.3f}"
        verify = "yes" if row.verify else ""
        lines.append((row.block, row.direction, row.engine, verify, f"{row.gb_per_s:.2f}", cpu))
    return table_of(
        "64-block batches, O_DIRECT, random places",
        ("block", "direction", "engine", "verify"),
        ("GB/s", "CPU s/GB"),
        lines,
    )


def main() -> None:
    parser = parser_of("disk.throughput", __doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    parser.add_argument("--file-gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batches", type=int, default=4, help="per round, engine and direction")
    options = parser.parse_args()
    least = BATCH * max(SIZES.values())
    if options.file_gib * (1 << 30) < least:
        parser.error(
            f"--file-gib {options.file_gib}: one batch has {BATCH} blocks; give at least "
            f"{least / (1 << 30):.3f}"
        )
    machine = machine_facts()
    with tempfile.TemporaryDirectory(prefix="kvtier-disk-", dir=options.folder) as folder:
        file_bytes = int(options.file_gib * (1 << 30))
        rows = measure(Path(folder), file_bytes, options.rounds, options.batches)
    made = [
        {k: None if isinstance(v, float) and np.isnan(v) else v for k, v in asdict(row).items()}
        for row in rows
    ]
    report(options.json, "disk", machine, made, targets(rows), table(rows))


if __name__ == "__main__":
    main()
