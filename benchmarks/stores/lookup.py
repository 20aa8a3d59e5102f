"""R2: how long it takes to look up which blocks a store has."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from benchmarks.report.output import table_of
from benchmarks.report.targets import Bounds, estimate, judged
from benchmarks.stores.servers import Memory, Place
from kvtier.tools.report.figures import TOO_FEW
from kvtier.tools.report.stats import P99_VALUES, Floats
from kvtier.tools.report.stats import estimate as sampled

ROUND_TRIP_S, ASKED, LOOKUPS = 0.02, 1000, 400
BLOCK_BYTES = 1 << 16
KNOWN_MS, ASKED_MS = 0.5, 1000 * (2 * ROUND_TRIP_S + 0.010)
"""Most milliseconds: without a request to the store, and with two round trips."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Time to look up so many blocks in a store."""

    store: str
    blocks: int
    lookups: int
    round_trip_ms: float
    """Delay of the network; 0 if a look-up sends no request."""
    p50_ms: float
    p99_ms: float
    p99_ms_between: Bounds

    def target(self) -> dict[str, object]:
        wanted = ASKED_MS if self.round_trip_ms else KNOWN_MS
        found = estimate(self.p99_ms, self.p99_ms_between)
        return judged("R2", found, wanted, at_least=False, store=self.store, measure="p99, ms")


def measure_lookup(place: Place, num_lookups: int) -> Lookup | None:
    """Measure look-ups of blocks that are all stored, with the network's delay per request.

    Return None for a store without a network.
    """
    far = place.far(ROUND_TRIP_S, BLOCK_BYTES, 2 * ASKED)
    if far is None:
        return None
    memory = Memory(ASKED, BLOCK_BYTES)
    keys = memory.keys(0, 0)
    far.put(keys, memory, slice(0, ASKED))
    far.settle()
    times = []
    for _ in range(num_lookups):
        began = time.perf_counter()
        num_found = far.num_found(keys)
        times.append([1000 * (time.perf_counter() - began)])
        assert num_found == ASKED, "a block was not found"
    far.close()
    delay_ms = 1000 * ROUND_TRIP_S if place.has_to_ask else 0.0
    p50, p99 = np.percentile(times, [50, 99]).tolist()
    between = sampled(times, _p99, P99_VALUES).interval_json()
    return Lookup(place.name, ASKED, num_lookups, delay_ms, p50, p99, (between[0], between[1]))


def _p99(rows: Floats) -> Floats:
    return np.asarray(np.percentile(rows[..., 0], 99, axis=-1))


def lookup_table(lookups: Sequence[Lookup]) -> Table:
    lines = []
    for lookup in lookups:
        low, high = lookup.p99_ms_between
        sure = TOO_FEW if low is None else f"{low:.2f} to {high:.2f}"
        figures = (f"{lookup.p50_ms:.2f}", f"{lookup.p99_ms:.2f}")
        lines.append((lookup.store, f"{lookup.round_trip_ms:.0f}", *figures, sure))
    headings = ("round trip ms", "p50 ms", "p99 ms", "95 % sure")
    return table_of(f"which of {ASKED} blocks are there?", ("store",), headings, lines)
