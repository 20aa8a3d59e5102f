"""N6: how long a look-up waits while the journal is compacted.

Waits are wall-clock time, so a busy machine adds to them. The control is a look-up in another slab
during such a compaction: it shares nothing with the compaction but the machine and the interpreter.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread

import numpy as np

from benchmarks.report.targets import judged
from benchmarks.scale.part import Part, Row, exponent
from benchmarks.scale.slabs import abandoned, write_slab
from kvtier.tiers.disk import DiskOptions, DiskTier
from kvtier.tiers.disk.format.records import RecordKind
from kvtier.tools.report.stats import Estimate

SIZES = (10**4, 10**5, 10**6, 10**7)
TARGET_MS = 10.0
BATCH = 64
NUM_OTHER = 10_000
DURING = "look-up during a compaction"
BESIDE = "look-up in another slab meanwhile"


def measure(quick: bool) -> Part:
    """Measure journals of several sizes, with half of their records dead."""
    rows = [row for num in (SIZES[:2] if quick else SIZES) for row in _rows(num)]
    return Part(rows, _targets(rows))


def _targets(rows: Sequence[Row]) -> list[dict[str, object]]:
    worst = {
        name: max(max(row.seconds) for row in rows if row.operation == name) * 1e3
        for name in (DURING, BESIDE)
    }
    grown = exponent([row for row in rows if row.operation == DURING])
    found = judged(
        "N6",
        Estimate(worst[DURING]),
        TARGET_MS,
        at_least=False,
        unit="ms, the longest wait",
        in_another_slab=round(worst[BESIDE], 3),
        exponent=round(grown.value, 3),
    )
    return [found]


def _rows(num_records: int) -> list[Row]:
    num_blocks = num_records // 2
    with tempfile.TemporaryDirectory() as folder:
        options = write_slab(Path(folder) / "slab", num_blocks, num_dead=num_records - num_blocks)
        another = write_slab(Path(folder) / "another", min(NUM_OTHER, num_blocks))
        during, seconds = _compacted(options, None)
        options = write_slab(Path(folder) / "again", num_blocks, num_dead=num_records - num_blocks)
        beside, _ = _compacted(options, another)
    return [
        Row(DURING, "kvtier", "records", num_records, during),
        Row(BESIDE, "kvtier", "records", num_records, beside),
        Row("compaction", "kvtier", "records", num_records, [seconds]),
    ]


def _compacted(options: DiskOptions, another: DiskOptions | None) -> tuple[list[float], float]:
    """Look blocks up while a slab is compacted, in it or in another one.

    Return the seconds that each look-up waited, and those of the compaction.
    """
    with abandoned(options) as tier:
        slab = tier.blocks.parts[0].slab
        thread = Thread(target=slab.compact)
        began = time.perf_counter()
        thread.start()
        if another is None:
            waits = _waits(tier, thread.is_alive)
        else:
            with abandoned(another) as other:
                waits = _waits(other, thread.is_alive)
        thread.join()
        seconds = time.perf_counter() - began
        assert slab.num_dead == 0, "nothing was compacted"
        num_blocks = tier.num_unindexed
    with abandoned(options) as tier:
        assert tier.num_unindexed == num_blocks, "blocks were lost"
    return waits, seconds


def _waits(tier: DiskTier, goes_on: Callable[[], bool]) -> list[float]:
    """Return the wall-clock seconds of look-ups: a waiting thread uses no CPU time."""
    slab, rng = tier.blocks.parts[0].slab, np.random.default_rng(1)
    seconds: list[float] = []
    while goes_on() or not seconds:
        slots = rng.integers(0, tier.blocks.num_slots, BATCH)
        began = time.perf_counter()
        records, _ = slab.look_up(slots)
        seconds.append(time.perf_counter() - began)
        assert (records["kind"] == RecordKind.PUT).all(), "a block was not found"
        time.sleep(1e-4)
    return seconds
