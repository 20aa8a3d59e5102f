"""S4: opening a slab whose journal has a million records.

    python -m benchmarks.disk.recovery            a table
    python -m benchmarks.disk.recovery --json -   JSON on stdout, the table on stderr

The slab's data file is sparse, because opening reads the journal and no block. Each round opens the
tier as a server does (lock, superblocks, replay, index of keys, free slots), and checks that keys
are found. See README.md for the method.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.table import Table

from benchmarks.report.machine import machine_facts
from benchmarks.report.output import report
from kvtier.core.types import BlockKey
from kvtier.devices.base import Memory
from kvtier.layout import DType, full_attention
from kvtier.tiers import Outcome
from kvtier.tiers.disk import DiskOptions, DiskSystem, DiskTier, IoKind
from kvtier.tiers.disk.format.records import RECORD_BYTES, RecordKind, Records, blank, header, seal
from kvtier.tiers.disk.format.superblock import HALF_BYTES, Superblock, decode_both

TARGET_S = 1.0
GROUP = full_attention(2, 2, 64, DType.FLOAT16, 4)  # 4 KiB blocks fit a small file system
NUM_CHECKED = 1000


@dataclass(frozen=True, slots=True)
class Row:
    """Opening one slab. Times in seconds."""

    case: str
    num_records: int
    num_blocks: int
    median_s: float
    best_s: float
    worst_s: float
    cpu_s: float
    read_s: float
    rounds: int


class SparseDisk(DiskSystem):
    """A disk system that does not reserve space."""

    def reserve(self, fd: int, num_bytes: int) -> None:
        os.ftruncate(fd, num_bytes)


def make_records(num_slots: int, share_dead: float, rng: np.random.Generator) -> Records:
    """Return dead records, then a PUT for every slot in random order.

    Args:
        num_slots: slots of the slab.
        share_dead: share of the records that later ones overwrite.
        rng: source of slots, keys and times.
    """
    num_dead = int(num_slots * share_dead / (1 - share_dead))
    slots = np.concatenate([rng.integers(0, num_slots, num_dead), rng.permutation(num_slots)])
    records = blank(len(slots), RecordKind.PUT)
    records["kind"][: num_dead // 2] = RecordKind.DEL
    records["slot"] = slots
    records["seq"] = np.arange(1, len(slots) + 1)
    records["depth"] = rng.integers(0, 2000, len(slots))
    records["time"] = np.sort(rng.integers(1_790_000_000, 1_800_000_000, len(slots)))
    records["key"] = np.frombuffer(rng.bytes(32 * len(slots)), "V32")
    seal(records)
    return records


def write_slab(folder: Path, num_slots: int, records: Records) -> DiskOptions:
    """Write a slab in the state that a killed process leaves."""
    options = DiskOptions(folder, num_slots * GROUP.bytes_per_block, io=IoKind.PREADV)
    open_tier(options).close()
    content = (folder / "superblock").read_bytes()
    superblock, _ = decode_both(content)
    assert isinstance(superblock, Superblock)
    first = header(superblock.slab_id, superblock.generation)
    seal(first)
    with (folder / "journal").open("wb") as journal:
        journal.write(first.tobytes() + records.tobytes())
    dirty = dataclasses.replace(superblock, is_clean=False, epoch=superblock.epoch + 1)
    with (folder / "superblock").open("r+b") as file:
        file.seek(dirty.epoch % 2 * HALF_BYTES)
        file.write(dirty.encode())
    return options


def open_tier(options: DiskOptions) -> DiskTier:
    arena = np.zeros(1 << 16, np.uint8)
    return DiskTier(
        options, GROUP, Memory(arena.ctypes.data, arena.nbytes, "host", arena), SparseDisk()
    )


def check(tier: DiskTier, records: Records, num_slots: int) -> None:
    """Check that every block was recovered, and that keys lead to their slots."""
    num_found = tier.blocks.slots.num_unclaimed
    assert num_found == num_slots, f"{num_found} of {num_slots} blocks found"
    last = records[-num_slots:]
    for at in range(0, num_slots, max(1, num_slots // NUM_CHECKED)):
        key = BlockKey(last["key"][at].tobytes())
        assert tier.find([key]) == [Outcome.THERE], f"block {at} was not found"


def measure(case: str, num_records: int, share_dead: float, folder: Path, rounds: int) -> Row:
    num_slots = int(num_records * (1 - share_dead))
    records = make_records(num_slots, share_dead, np.random.default_rng(0))
    options = write_slab(folder, num_slots, records)
    times: list[float] = []
    cpu: list[float] = []
    read: list[float] = []
    for done in range(rounds + 1):
        began, cpu_began = time.perf_counter(), time.process_time()
        tier = open_tier(options)
        taken, cpu_taken = time.perf_counter() - began, time.process_time() - cpu_began
        check(tier, records, num_slots)
        tier.close()
        began = time.perf_counter()
        content: npt.NDArray[np.uint8] = np.fromfile(folder / "journal", np.uint8)
        reading = time.perf_counter() - began
        assert len(content) == RECORD_BYTES * (len(records) + 1)
        if done:  # the first round warms up
            times.append(taken)
            cpu.append(cpu_taken)
            read.append(reading)
    return Row(
        case,
        len(records),
        num_slots,
        statistics.median(times),
        min(times),
        max(times),
        statistics.median(cpu),
        statistics.median(read),
        rounds,
    )


def table(rows: list[Row]) -> Table:
    result = Table(title="Opening a slab; read: only reading the journal's file")
    result.add_column("case", no_wrap=True)
    for heading in ("records", "blocks", "s", "best", "worst", "CPU s", "read s"):
        result.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        result.add_row(
            row.case,
            f"{row.num_records:,}",
            f"{row.num_blocks:,}",
            *(
                f"{value:.3f}"
                for value in (row.median_s, row.best_s, row.worst_s, row.cpu_s, row.read_s)
            ),
        )
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disk.recovery", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the result here; - is stdout")
    parser.add_argument("--records", type=int, default=1_000_000, help="(1000000)")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (7)")
    parser.add_argument("--folder", type=Path, help="where to make the slabs (a temporary one)")
    options = parser.parse_args(arguments)

    machine = machine_facts()
    rows = []
    for case, share_dead in (("all live", 0.0), ("half dead", 0.5)):
        folder = Path(tempfile.mkdtemp(dir=options.folder)) / "slab"
        try:
            rows.append(measure(case, options.records, share_dead, folder, options.rounds))
        finally:
            shutil.rmtree(folder.parent)
    worst = max(row.median_s for row in rows)
    result = {
        "benchmark": "slab_recovery",
        "machine": machine,
        "rows": [asdict(row) for row in rows],
        "targets": [
            {"id": "S4", "value": round(worst, 3), "target": TARGET_S, "met": worst <= TARGET_S}
        ],
    }
    report(result, options.json, table(rows))


if __name__ == "__main__":
    main()
