"""N3, S4, N4: opening a slab, reporting its blocks to the deciding process, memory of a rank.

The ranks of N3 have the same blocks. They are executors of their own over one slab, because eight
tables would not fit into the machine. Their reports are sent as bytes. In a second row each rank
has lost some blocks, as in a crash.
"""

from __future__ import annotations

import gc
import pickle
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.report.targets import judged
from benchmarks.scale.part import Part, Row, exponent
from benchmarks.scale.slabs import GROUP, abandoned, random_keys, write_slab
from kvtier.cache.block_cache import BlockState
from kvtier.cache.ladder import LadderOptions
from kvtier.cache.local import LocalBlockCache
from kvtier.cache.transfer import LocalMover
from kvtier.cache.transfer.ranks import Hello, RankExecutor, RankMover, Report
from kvtier.core.keys import next_key
from kvtier.core.types import DISK, HOST
from kvtier.devices import find_device
from kvtier.index import make_key_index
from kvtier.index.policies.replayed import LRU
from kvtier.tiers import DistantAllocator, HostTier, KeptKeys, Quota
from kvtier.tiers.disk import DiskOptions, DiskTier
from kvtier.tools.report.stats import Estimate

SIZES = (10**4, 10**5, 10**6, 10**7)
NUM_RANKS = 8
NAMESPACE = b"n" * 32
NUM_ASKED = 500
"""Blocks whose keys follow from labels, so that the cache can look them up."""
ONE_IN = 100_000
"""Each rank has lost one block in so many, in the second row."""


def measure(quick: bool) -> Part:
    """Measure slabs of several sizes."""
    rows: list[Row] = []
    for num_blocks in SIZES[:2] if quick else SIZES:
        with tempfile.TemporaryDirectory() as folder:
            options = write_slab(Path(folder) / "slab", num_blocks, keys=_keys)
            rows += _opening(num_blocks, options)
            with abandoned(options) as tier:
                rows += _restart("all alike", num_blocks, [tier.kept_keys()] * NUM_RANKS, tier)
                lossy = [_Without(tier.kept_keys(), rank) for rank in range(NUM_RANKS)]
                rows += _restart("each lost some", num_blocks, lossy, tier)
    return Part(rows, _targets(rows))


def _label(number: int) -> bytes:
    return b"label %8d" % number


def _keys(start: int, end: int, rng: np.random.Generator) -> npt.NDArray[np.void]:
    keys = random_keys(start, end, rng).copy()
    for number in range(start, min(end, NUM_ASKED)):
        keys[number - start] = np.void(next_key(NAMESPACE, _label(number)))
    return keys


# -- S4, and memory --------------------------------------------------------------------------------


def _opening(num_blocks: int, options: DiskOptions) -> list[Row]:
    journal = options.path / "journal"
    began = time.thread_time()
    with journal.open("rb", 0) as file:
        while file.read(1 << 22):
            pass
    reading = time.thread_time() - began
    seconds, waits, resident, counted = [], [], 0.0, 0
    for _ in range(3):
        gc.collect()
        before = _resident_bytes()
        began, wall = time.thread_time(), time.perf_counter()
        with abandoned(options) as tier:
            seconds.append(time.thread_time() - began)
            waits.append(time.perf_counter() - wall)
            gc.collect()
            resident = max(resident, _resident_bytes() - before)
            counted = tier.memory_bytes
            assert tier.num_unindexed == num_blocks, "blocks were lost"
    more: dict[str, object] = {
        "only_reading_ms": round(reading * 1e3, 3),
        "wall_ms": round(min(waits) * 1e3, 3),
        "bytes_per_block": round(counted / num_blocks, 1),
        "resident_bytes_per_block": round(resident / num_blocks, 1),
    }
    return [Row("open", "kvtier", "blocks", num_blocks, seconds, more)]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# -- N3 --------------------------------------------------------------------------------------------


class _Without(KeptKeys):
    """Recovered keys without the blocks that one rank has lost."""

    def __init__(self, inner: KeptKeys, rank: int) -> None:
        self._inner = inner
        self._rank = rank

    @property
    def num_keys(self) -> int:
        return self._inner.num_keys

    @property
    def num_places(self) -> int:
        return self._inner.num_places

    def in_order(self, start: int, end: int) -> npt.NDArray[np.void]:
        return self._left(self._inner.in_order(start, end))

    def at(self, start: int, end: int) -> npt.NDArray[np.void]:
        return self._left(self._inner.at(start, end))

    def _left(self, keys: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        return keys[_word(keys) % ONE_IN != self._rank]


def _word(keys: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(keys).view("<u8").reshape(len(keys), 4)[:, 3]


@dataclass
class _Decider:
    """The deciding process, with the CPU and wall-clock seconds of its steps."""

    mover: RankMover
    cache: LocalBlockCache
    host: DistantAllocator
    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    num_bytes: int = 0

    def step(self, contents: Sequence[bytes]) -> bytes:
        """Process the ranks' reports. Return the orders for them."""
        began, wall = time.thread_time(), time.perf_counter()
        report = reduce(Report.and_also, map(pickle.loads, contents))
        self.mover.hear(report)
        self.host.open(self.mover.num_open)
        self.cache.poll()
        orders = pickle.dumps(self.mover.take_orders(), 5)
        self.cpu_s.append(time.thread_time() - began)
        self.wall_s.append(time.perf_counter() - wall)
        self.num_bytes += sum(map(len, contents))
        return orders


def _decider(num_blocks: int) -> _Decider:
    mover = RankMover({DISK: DiskTier.facts}, GROUP.bytes_per_block, NUM_RANKS, NUM_RANKS)
    host, ticks = DistantAllocator(NUM_ASKED), count(0.0)
    clock = partial(next, ticks)
    rooms = {HOST: host, DISK: Quota(lambda: num_blocks)}
    index = make_key_index(dict.fromkeys(rooms, LRU), lambda: NAMESPACE)
    options = LadderOptions(GROUP.bytes_per_block)
    cache = LocalBlockCache(
        index,
        rooms,
        mover,
        options,
        lambda: NAMESPACE,
        clock,
        knows_storage=lambda: mover.is_complete,
    )
    return _Decider(mover, cache, host)


def _restart(case: str, num_blocks: int, kept: Sequence[KeptKeys], tier: DiskTier) -> list[Row]:
    gc.collect()  # garbage of the last case is not freed in a timed step
    memory = HostTier(GROUP, 4 * GROUP.bytes_per_block, find_device("cpu"))
    local = LocalMover({HOST: memory, DISK: tier}, None)
    began = time.thread_time()
    executors = [
        RankExecutor(memory, local, {DISK: each}, rank, NUM_RANKS) for rank, each in enumerate(kept)
    ]
    digesting = (time.thread_time() - began) / NUM_RANKS
    here = _decider(num_blocks)
    hellos = [
        Report(hellos={rank: Hello(4, executor.found())}) for rank, executor in enumerate(executors)
    ]
    orders = here.step([pickle.dumps(hello, 5) for hello in hellos])
    slowest: list[float] = []
    while True:
        _check(here, is_over := here.mover.is_complete)
        if is_over:
            break
        contents, seconds = [], []
        for executor in executors:
            rank_began = time.thread_time()
            for order in pickle.loads(orders):
                executor.carry_out(order)
            report = Report(pieces=executor.take_pieces())
            contents.append(pickle.dumps(report, 5))
            seconds.append(time.thread_time() - rank_began)
        slowest.append(max(seconds))
        orders = here.step(contents)
    num_lost = _num_lost(here, kept)
    for executor in executors[:1]:
        assert executor.close(10), "nothing was under way"
    memory.close()
    more: dict[str, object] = {
        "steps": len(here.cpu_s),
        "in_all_s": round(sum(here.cpu_s) + sum(slowest), 3),
        "worst_wall_ms": round(max(here.wall_s) * 1e3, 3),
        "worst_rank_ms": round(max(slowest) * 1e3, 3),
        "digests_at_start_ms": round(digesting * 1e3, 3),
        "bytes_per_block": round(here.num_bytes / num_blocks, 2),
        "not_everywhere": num_lost,
    }
    return [Row(f"a step of adopting, {case}", "kvtier", "blocks", num_blocks, here.cpu_s, more)]


def _check(here: _Decider, is_over: bool) -> None:
    """Check that blocks are unknown or in storage, and that in the end all are known."""
    keys = [_label(number) for number in (*range(NUM_ASKED), -1)]
    here.cache.adopt(keys, stops_at_gap=False)
    places = here.cache.locate_all(keys)
    unknown = BlockState.NOWHERE if is_over else BlockState.UNKNOWN
    assert places[-1] is unknown, "a block that nobody has"
    assert set(places[:-1]) <= {unknown, BlockState.STORAGE}, "a block is somewhere else"
    if is_over:
        num_there = places.count(BlockState.STORAGE)
        assert num_there >= NUM_ASKED - 5, f"{num_there} of {NUM_ASKED} blocks were found"


def _num_lost(here: _Decider, kept: Sequence[KeptKeys]) -> int:
    """Return how many blocks are not on all ranks. Check that all others were found."""
    num_found = num_kept = 0
    inner = kept[0]._inner if isinstance(kept[0], _Without) else kept[0]
    for start in range(0, inner.num_places, 1 << 18):
        keys = inner.at(start, start + (1 << 18))
        num_kept += len(keys)
        words = _word(keys) % ONE_IN
        is_everywhere = words >= NUM_RANKS if inner is not kept[0] else np.ones(len(keys), bool)
        num_found += int(is_everywhere.sum())
    num_adopted = here.cache.usage()[DISK].num_used
    adoption = here.mover._adoptions[DISK]
    assert adoption.num_unindexed + num_adopted == num_found, (
        "found and not everywhere, or the reverse"
    )
    return num_kept - num_found


# -- targets ---------------------------------------------------------------------------------------


def _targets(rows: Sequence[Row]) -> list[dict[str, object]]:
    largest = max(row.num for row in rows)
    opened, alike, _ = (row for row in rows if row.num == largest)
    steps = [row for row in rows if row.operation.startswith("a step")]
    figures = (
        ("S4", "s", _million(rows), 1.0),
        ("N3", "ms, the longest step", max(max(row.seconds) for row in steps) * 1e3, 20.0),
        ("N3", "s until all is known", _number(alike, "in_all_s"), 10.0),
        ("N3", "bytes per block on the wire", _number(alike, "bytes_per_block"), 33.0),
        ("N4", "bytes per block in a rank", _number(opened, "bytes_per_block"), 64.0),
    )
    grown = {
        name: round(exponent([row for row in rows if row.operation == name]).value, 3)
        for name in dict.fromkeys(row.operation for row in rows)
    }
    return [
        judged(name, Estimate(value), target, at_least=False, unit=unit, exponents=grown)
        for name, unit, value, target in figures
    ]


def _million(rows: Sequence[Row]) -> float:
    """Seconds to open the largest slab of at most a million blocks."""
    opened = [row for row in rows if row.operation == "open" and row.num <= 10**6]
    return max(opened, key=lambda row: row.num).median_s


def _number(row: Row, name: str) -> float:
    value = row.more[name]
    assert isinstance(value, float), f"{name} is no figure"
    return value
