"""N6: how long a look-up waits while the journal is compacted."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import numpy as np

from benchmarks.scale.part import Part, Row
from benchmarks.scale.slabs import abandoned, write_slab
from benchmarks.targets import judged
from kvtier.serve_bench.stats import Estimate
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.disk.records import Kind

SIZES = (10**4, 10**5, 10**6, 10**7)
TARGET_MS = 10.0
BATCH = 64
NUM_CALM = 2000


def measure(quick: bool) -> Part:
    """Journals of so many records, half of them dead."""
    rows: list[Row] = []
    for num_records in SIZES[:2] if quick else SIZES:
        rows += _rows(num_records)
    worst = max(
        max(row.seconds) * 1e3 for row in rows if row.operation == "look-up during a compaction"
    )
    found = judged("N6", Estimate(worst), TARGET_MS, at_least=False, unit="ms")
    return Part(rows, [found])


def _rows(num_records: int) -> list[Row]:
    num_blocks = num_records // 2
    with tempfile.TemporaryDirectory() as folder:
        options = write_slab(Path(folder) / "slab", num_blocks, num_dead=num_records - num_blocks)
        with abandoned(options) as tier:
            slab = tier.blocks.parts[0].slab
            calm = _waits(tier, lambda num: num < NUM_CALM)
            began = time.perf_counter()
            thread = Thread(target=slab.compact)
            thread.start()
            busy = _waits(tier, lambda _num: thread.is_alive())
            thread.join()
            seconds = time.perf_counter() - began
            assert slab.num_dead == 0, "nothing was compacted"
            assert tier.num_unfound == num_blocks, "blocks were lost"
        with abandoned(options) as tier:
            assert tier.num_unfound == num_blocks, "blocks were lost"
    return [
        Row("look-up", "kvtier", "records", num_records, calm),
        Row("look-up during a compaction", "kvtier", "records", num_records, busy),
        Row("compaction", "kvtier", "records", num_records, [seconds]),
    ]


def _waits(tier: DiskTier, goes_on: Callable[[int], bool]) -> list[float]:
    """Seconds of look-ups, on the wall: what waits takes no CPU time."""
    slab, rng = tier.blocks.parts[0].slab, np.random.default_rng(1)
    seconds: list[float] = []
    while goes_on(len(seconds)):
        slots = rng.integers(0, tier.blocks.num_slots, BATCH)
        began = time.perf_counter()
        records, _ = slab.look_up(slots)
        seconds.append(time.perf_counter() - began)
        assert (records["kind"] == Kind.PUT).all(), "a block was not found"
        time.sleep(1e-4)
    return seconds
