"""N5: a prompt of up to a million tokens from storage, on the deciding thread.

Also measures a poll with many transfers in flight and many waiting leases.

The cache is a real one (device pool, host tier and storage) with blocks of 64 bytes: only the
bookkeeping is measured. Storage answers from memory at once. The first piece of a load has four
blocks, as a piece of 8 MiB has with blocks of 2 MiB. The garbage collector runs before each
measured load.

    fetch        the engine's call when the request arrives
    all polls    until the lease is ready; worst poll: the longest of them
    release      at the request's end
    in all       their sum
    keys         hashed before, on the thread that submits the request
    plan         the planner's part of fetch

    known        the index knew the prompt
    restarted    the prompt's keys had to be looked up in storage
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from benchmarks.report.targets import bounds, estimate, judged
from benchmarks.scale.instant import InstantShelf, InstantStorage
from benchmarks.scale.part import Part, Row, exponent, timed
from kvtier.cache.lease import Lease
from kvtier.cache.tokens import Cache
from kvtier.core.config import CacheConfig
from kvtier.core.keys import Labels, token_labels
from kvtier.core.types import DEVICE, HOST
from kvtier.devices.cpu import CpuDevice
from kvtier.layout import DType, full_attention, named_layout
from kvtier.testing import MemoryStorage, StoredBlocks, host_memory, memory_bytes
from kvtier.tiers import DeviceTier, StorageFacts, StorageTier

BLOCK_SIZE = 16
GROUP = full_attention(1, 1, 1, DType.FLOAT16, BLOCK_SIZE)
PIECE_BLOCKS = 4
NAMESPACE = b"benchmark"
SIZES = (1 << 14, 1 << 16, 1 << 18, 1 << 20)
QUICK_SIZES = (1 << 12, 1 << 14)
NUM_RUNS = 7
NUM_WAITING = (1, 10, 100, 1000)
QUICK_WAITING = (1, 10, 100)
NUM_POLLS = 200


def make_cache(
    num_blocks: int, storage: StorageTier, deadline_s: float = 600.0
) -> tuple[Cache, np.ndarray]:
    """Make a cache of three tiers with room for ``num_blocks`` and one more.

    Returns it with the device tier's content: uint8 [num_blocks + 1, bytes_per_block].
    """
    layout = named_layout("block_first", GROUP, num_blocks + 1)
    pool = DeviceTier(host_memory(layout.nbytes), layout)
    config = CacheConfig(
        host_capacity=num_blocks * GROUP.bytes_per_block,
        store_batch_bytes=PIECE_BLOCKS * GROUP.bytes_per_block,
        load_batch_bytes=PIECE_BLOCKS * GROUP.bytes_per_block,
        load_deadline_s=deadline_s,
    )
    content = memory_bytes(pool.memory).reshape(num_blocks + 1, GROUP.bytes_per_block)
    return Cache(config, CpuDevice(threads=1), pool, storage=[storage]), content


def fetched(cache: Cache, labels: Labels) -> Lease:
    """Return a lease on a whole prompt and one block more."""
    num_tokens = len(labels) * BLOCK_SIZE + 1
    lease = cache.fetch(NAMESPACE, labels, num_tokens, len(labels) + 1)
    assert lease is not None, "there is room"
    return lease


# -- one long prompt -------------------------------------------------------------------------------


@dataclass
class Times:
    """CPU seconds of the deciding thread, one value per request.

    ``num_polls`` is a total.
    """

    fetch: list[float] = field(default_factory=list)
    polls: list[float] = field(default_factory=list)
    worst_poll: list[float] = field(default_factory=list)
    release: list[float] = field(default_factory=list)
    keys: list[float] = field(default_factory=list)
    plan: list[float] = field(default_factory=list)
    num_polls: int = 0

    @property
    def in_all(self) -> list[float]:
        return [sum(each) for each in zip(self.fetch, self.polls, self.release, strict=True)]


class LongPrompt:
    """A prompt, the bytes of its blocks, and the storage that has them."""

    def __init__(self, num_tokens: int) -> None:
        rng = np.random.default_rng(num_tokens)
        self.num_tokens = num_tokens
        self._tokens = rng.integers(0, 128_000, num_tokens)
        self.labels = token_labels(self._tokens, BLOCK_SIZE)
        size = len(self.labels), GROUP.bytes_per_block
        self._content = rng.integers(0, 256, size, np.uint8)
        self._shelf = InstantShelf(GROUP, len(self.labels))
        self.known, self.restarted = Times(), Times()

    def run(self, num_runs: int) -> None:
        self._open(is_new=False)
        self._compute()
        for _ in range(num_runs):
            self._lose_memory()
            self._plan()
            self._load(self.known)
        self._cache.close()
        for _ in range(num_runs):
            self._open(is_new=True)
            self._load(self.restarted)
            self._cache.close()

    def _open(self, is_new: bool) -> None:
        storage = InstantStorage(self._shelf, is_new)
        self._cache, self._device = make_cache(len(self.labels), storage)

    def _compute(self) -> None:
        """Run a request that finds nothing, until storage has its blocks."""
        lease = fetched(self._cache, self.labels)
        self._device[lease.slots[: len(self.labels)]] = self._content
        self._cache.commit(lease, len(self.labels))
        self._cache.release(lease)
        assert self._cache.drain(600.0)

    def _lose_memory(self) -> None:
        """Clear device and host, so that only storage has the blocks."""
        self._cache.clear(DEVICE)
        self._cache.clear(HOST)
        used = self._cache.used_slots()
        assert used[DEVICE] == used[HOST] == 0
        self._device[:] = 0

    def _plan(self) -> None:
        match = self._cache.match(NAMESPACE, self.labels)
        self.known.plan += timed(lambda: self._cache.plan(match, self.num_tokens + 1), 1)

    def _load(self, times: Times) -> None:
        """Run a request that finds all of its blocks in storage."""
        labels = token_labels(self._tokens, BLOCK_SIZE)
        if self._cache.wants_keys(labels):  # as the submitting thread does
            times.keys += timed(partial(labels.compute_keys, NAMESPACE), 1)
        gc.collect()
        began = time.thread_time()
        lease = fetched(self._cache, labels)
        times.fetch.append(time.thread_time() - began)
        polls = []
        while not lease.ready:
            time.sleep(0.001)  # an engine computes meanwhile
            polls += timed(self._cache.poll, 1)
        assert not lease.broken
        there = self._device[lease.slots[: len(self.labels)]]
        assert lease.num_shared == len(self.labels)
        assert np.array_equal(there, self._content), "wrong bytes"
        times.polls.append(sum(polls))
        times.worst_poll.append(max(polls))
        times.num_polls += len(polls)
        times.release += timed(lambda: self._cache.release(lease), 1)

    def rows(self) -> list[Row]:
        return [
            *self._rows("known", self.known),
            *self._rows("restarted", self.restarted),
        ]

    def _rows(self, contestant: str, times: Times) -> list[Row]:
        found = {
            "fetch": times.fetch,
            "all polls": times.polls,
            "worst poll": times.worst_poll,
            "release": times.release,
            "in all": times.in_all,
            "keys": times.keys,
            "plan": times.plan,
        }
        more: dict[str, object] = {"polls": times.num_polls}
        return [
            Row(operation, contestant, "tokens", self.num_tokens, seconds, more)
            for operation, seconds in found.items()
            if seconds
        ]


# -- many that wait --------------------------------------------------------------------------------


def poll_while_waiting(num: int, per_prompt: int) -> Row:
    """Time a poll while storage does not answer.

    Args:
        num: transfers in flight.
        per_prompt: transfers of each lease.
    """
    num_prompts = max(1, num // per_prompt)
    rng = np.random.default_rng(num)
    # Each piece has two transfers: the read, and the copy to the device after it.
    blocks = max(1, per_prompt // 2) * PIECE_BLOCKS
    prompts = [
        token_labels(rng.integers(0, 128_000, blocks * BLOCK_SIZE), BLOCK_SIZE)
        for _ in range(num_prompts)
    ]
    num_blocks = num_prompts * (blocks + 1)
    storage = MemoryStorage(
        GROUP, num_blocks, StoredBlocks(), facts=StorageFacts(finds_at_once=True)
    )
    cache, _ = make_cache(num_blocks, storage)
    for labels in prompts:
        lease = fetched(cache, labels)
        cache.commit(lease, len(labels))
        cache.release(lease)
        assert cache.drain()
    cache.clear(DEVICE)
    cache.clear(HOST)
    storage.open_reads.clear()
    leases = [fetched(cache, labels) for labels in prompts]
    num_transfers = len(cache._ladder._transfers.in_flight.all)
    cache.poll()
    seconds = timed(cache.poll, NUM_POLLS)
    assert not any(lease.ready for lease in leases)
    storage.open_reads.set()
    assert cache.drain()
    for lease in leases:
        cache.release(lease)
    cache.close()
    more: dict[str, object] = {"transfers": num_transfers, "leases": num_prompts}
    return Row("poll while all wait", "kvtier", "transfers", num, seconds, more)


# -- the part --------------------------------------------------------------------------------------


def measure(quick: bool) -> Part:
    """Measure prompts of all sizes, and polls with all numbers of transfers."""
    sizes, num_runs = (QUICK_SIZES, 3) if quick else (SIZES, NUM_RUNS)
    rows: list[Row] = []
    for num_tokens in sizes:
        prompt = LongPrompt(num_tokens)
        prompt.run(num_runs)
        rows += prompt.rows()
    polls = [poll_while_waiting(num, 2) for num in (QUICK_WAITING if quick else NUM_WAITING)]
    return Part([*rows, *polls], [] if quick else _targets(rows, polls))


def _targets(rows: Sequence[Row], polls: Sequence[Row]) -> list[dict[str, object]]:
    """Return the targets at the longest prompt, and of the growth over the three longest."""
    targets = []
    for contestant in ("known", "restarted"):
        for operation, most_s in (("in all", 0.1), ("worst poll", 0.005)):
            last = _of(rows, operation, contestant)[-1]
            found = estimate(last.median_s * 1e3, tuple(_ms(bounds(last.seconds))))  # type: ignore[arg-type]
            name = f"{operation}, {contestant}, ms"
            targets.append(judged("N5", found, most_s * 1e3, at_least=False, what=name))
        grows = exponent(_of(rows, "in all", contestant)[-3:])
        targets.append(judged("N5", grows, 1.1, at_least=False, what=f"exponent, {contestant}"))
    found = exponent(polls)
    targets.append(judged("N1", found, 0.1, at_least=False, what="exponent of a poll, waiting"))
    return targets


def _of(rows: Sequence[Row], operation: str, contestant: str) -> list[Row]:
    return [row for row in rows if (row.operation, row.contestant) == (operation, contestant)]


def _ms(between: tuple[float | None, float | None]) -> list[float | None]:
    return [None if each is None else each * 1e3 for each in between]
