"""S4: opening a slab whose journal has a million records.

    python -m benchmarks.disk.recovery            a table
    python -m benchmarks.disk.recovery --json -   JSON on stdout, the table on stderr

The slab's data file is sparse, because opening reads the journal and no block. Each round opens the
tier as a server does (lock, superblocks, replay, index of keys, free slots), and checks that keys
are found. See README.md for the method.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.table import Table

from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, table_of
from benchmarks.scale.slabs import abandoned, random_keys, write_slab
from kvtier.core.types import BlockKey
from kvtier.tiers import Outcome
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.disk.format.records import RECORD_BYTES

TARGET_S = 1.0
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


class Sample:
    """Keys of some blocks of a slab, to look for after it was opened."""

    def __init__(self) -> None:
        self.keys: list[BlockKey] = []

    def __call__(self, start: int, end: int, rng: np.random.Generator) -> npt.NDArray[np.void]:
        keys = random_keys(start, end, rng)
        if start >= 0:  # others are dead
            self.keys += map(BlockKey, keys[:: max(1, len(keys) // NUM_CHECKED)].tolist())
        return keys

    def check(self, tier: DiskTier, num_blocks: int) -> None:
        """Check that every block was recovered, and that these are found."""
        num_found = tier.num_unindexed
        assert num_found == num_blocks, f"{num_found} of {num_blocks} blocks found"
        assert set(tier.find(self.keys)) == {Outcome.THERE}, "a block was not found"


def measure(case: str, num_records: int, share_dead: float, folder: Path, rounds: int) -> Row:
    num_dead, sample = int(num_records * share_dead), Sample()
    num_slots = num_records - num_dead
    options = write_slab(folder, num_slots, num_dead, sample)
    found: list[tuple[float, float, float]] = []
    for _ in range(rounds + 1):
        began, cpu_began = time.perf_counter(), time.process_time()
        with abandoned(options) as tier:
            opened, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
            sample.check(tier, num_slots)
        began = time.perf_counter()
        content: npt.NDArray[np.uint8] = np.fromfile(folder / "journal", np.uint8)
        found.append((opened, cpu_s, time.perf_counter() - began))
        assert len(content) == RECORD_BYTES * (num_records + 1)
    seconds, cpu, reading = zip(*found[1:], strict=True)  # the first round warms up
    return Row(
        case,
        num_records,
        num_slots,
        statistics.median(seconds),
        min(seconds),
        max(seconds),
        statistics.median(cpu),
        statistics.median(reading),
        rounds,
    )


def table(rows: list[Row]) -> Table:
    return table_of(
        "Opening a slab; read: only reading the journal's file",
        ("case",),
        ("records", "blocks", "s", "best", "worst", "CPU s", "read s"),
        (
            (
                row.case,
                f"{row.num_records:,}",
                f"{row.num_blocks:,}",
                *(
                    f"{value:.3f}"
                    for value in (row.median_s, row.best_s, row.worst_s, row.cpu_s, row.read_s)
                ),
            )
            for row in rows
        ),
    )


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of("disk.recovery", __doc__)
    parser.add_argument("--records", type=int, default=1_000_000, help="(1000000)")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (7)")
    parser.add_argument("--folder", type=Path, help="where to make the slabs (a temporary one)")
    options = parser.parse_args(arguments)

    machine = machine_facts()
    rows = []
    for case, share_dead in (("all live", 0.0), ("half dead", 0.5)):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            slab = Path(folder) / "slab"
            rows.append(measure(case, options.records, share_dead, slab, options.rounds))
    worst = max(row.median_s for row in rows)
    targets = [{"id": "S4", "value": round(worst, 3), "target": TARGET_S, "met": worst <= TARGET_S}]
    report(options.json, "slab_recovery", machine, rows, targets, table(rows))


if __name__ == "__main__":
    main()
