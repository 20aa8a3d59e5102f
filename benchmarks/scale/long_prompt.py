"""N5: a prompt of up to a million tokens from storage, on the thread that decides; and what a poll
costs with many transfers under way, and many leases.

The cache is a real one, device pool, host tier and storage, over blocks of 64 bytes: what is
measured is the account that is kept of them. Storage answers from memory at once. A piece that is
read first has four blocks, as one of 8 MiB has of a model with 2 MiB in a block.

fetch       what the engine calls when the request comes
poll        each of the calls until the lease is ready; ``worst_us`` is the longest of all runs
release     at the request's end
in all      their sum
plan        of these the planner alone
after a restart   the same, of a prompt that the index does not know: its keys are hashed
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from benchmarks.scale.part import Row
from kvtier.cache import Cache
from kvtier.config import CacheConfig
from kvtier.devices.cpu import CpuDevice
from kvtier.keys import Labels, token_labels
from kvtier.layout import DType, full_attention, named_layout
from kvtier.lease import Lease
from kvtier.testing import MemoryStorage, Shelf, host_memory, memory_bytes
from kvtier.tiers import DeviceTier, StorageFacts
from kvtier.types import DEVICE, HOST

BLOCK_SIZE = 16
GROUP = full_attention(1, 1, 1, DType.FLOAT16, BLOCK_SIZE)
PIECE_BLOCKS = 4
NAMESPACE = b"benchmark"
FACTS = StorageFacts(finds_at_once=True)
SIZES = (1 << 14, 1 << 16, 1 << 18, 1 << 20)
QUICK_SIZES = (1 << 12, 1 << 14)
NUM_RUNS = 3
NUM_LEASES = (10, 500)
NUM_TRANSFERS = (1, 100, 1000)
NUM_POLLS = 50


@dataclass
class Times:
    """Seconds of the deciding thread, of one request each."""

    fetch: list[float] = field(default_factory=list)
    polls: list[float] = field(default_factory=list)
    worst_poll: list[float] = field(default_factory=list)
    release: list[float] = field(default_factory=list)
    plan: list[float] = field(default_factory=list)
    num_polls: int = 0

    @property
    def in_all(self) -> list[float]:
        return [sum(each) for each in zip(self.fetch, self.polls, self.release, strict=True)]


class World:
    """A cache of three tiers with room for one prompt, and the shelf that outlives it."""

    def __init__(self, num_blocks: int, shelf: Shelf) -> None:
        layout = named_layout("block_first", GROUP, num_blocks + 1)
        pool = DeviceTier(host_memory(layout.nbytes), layout)
        self.content = memory_bytes(pool.memory).reshape(num_blocks + 1, GROUP.bytes_per_block)
        config = CacheConfig(
            host_capacity=num_blocks * GROUP.bytes_per_block,
            store_batch_bytes=PIECE_BLOCKS * GROUP.bytes_per_block,
            load_batch_bytes=PIECE_BLOCKS * GROUP.bytes_per_block,
        )
        storage = MemoryStorage(GROUP, num_blocks, shelf, facts=FACTS)
        self.cache = Cache(config, CpuDevice(threads=1), pool, storage=[storage])

    def compute(self, labels: Labels, content: np.ndarray) -> None:
        """A request that finds nothing, from start to end; its blocks are in storage then."""
        lease = self._fetched(labels)
        self.content[lease.slots[: len(labels)]] = content
        self.cache.commit(lease, len(labels))
        self.cache.release(lease)
        assert self.cache.drain(600.0)

    def lose_memory(self) -> None:
        """Only storage has the blocks from now on."""
        self.cache.clear(DEVICE)
        self.cache.clear(HOST)
        used = self.cache.used_slots()
        assert used[DEVICE] == used[HOST] == 0

    def load(self, labels: Labels, content: np.ndarray, times: Times) -> None:
        """A request that finds all of its blocks in storage."""
        began = time.thread_time()
        lease = self._fetched(labels)
        times.fetch.append(time.thread_time() - began)
        polls = self._polls(lease)
        assert not lease.broken
        assert lease.num_shared == len(labels)
        assert np.array_equal(self.content[lease.slots[: len(labels)]], content), "wrong bytes"
        times.polls.append(sum(polls))
        times.worst_poll.append(max(polls))
        times.num_polls += len(polls)
        began = time.thread_time()
        match = self.cache.match(NAMESPACE, labels)
        self.cache.release(lease)
        times.release.append(time.thread_time() - began)
        assert match.num_blocks == len(labels)

    def plan(self, labels: Labels, times: Times) -> None:
        match = self.cache.match(NAMESPACE, labels)
        began = time.thread_time()
        plan = self.cache.plan(match, len(labels) * BLOCK_SIZE + 1)
        times.plan.append(time.thread_time() - began)
        assert plan.num_reused_blocks == len(labels)

    def _fetched(self, labels: Labels) -> Lease:
        num_tokens = len(labels) * BLOCK_SIZE + 1
        lease = self.cache.fetch(NAMESPACE, labels, num_tokens, len(labels) + 1)
        assert lease is not None
        return lease

    def _polls(self, lease: Lease) -> list[float]:
        polls = []
        while not lease.ready:
            time.sleep(0.001)  # as an engine that computes meanwhile
            began = time.thread_time()
            self.cache.poll()
            polls.append(time.thread_time() - began)
        return polls


def load_prompt(num_tokens: int, num_runs: int) -> dict[str, Times]:
    """What a prompt costs, by whether the index knew it."""
    rng = np.random.default_rng(num_tokens)
    labels = token_labels(rng.integers(0, 128_000, num_tokens), BLOCK_SIZE)
    content = rng.integers(0, 256, (len(labels), GROUP.bytes_per_block), np.uint8)
    shelf = Shelf()
    world = World(len(labels), shelf)
    world.compute(labels, content)
    known, restarted = Times(), Times()
    for _ in range(num_runs):
        world.lose_memory()
        world.plan(labels, known)
        world.load(labels, content, known)
    world.cache.close()
    for _ in range(num_runs):
        world = World(len(labels), shelf)
        world.load(labels, content, restarted)
        world.cache.close()
    return {"known": known, "after a restart": restarted}


def rows_of(num_tokens: int, contestant: str, times: Times) -> list[Row]:
    found = {
        "fetch": times.fetch,
        "all polls": times.polls,
        "worst poll": times.worst_poll,
        "release": times.release,
        "in all": times.in_all,
        "plan": times.plan,
    }
    more: dict[str, object] = {"polls": times.num_polls}
    return [
        Row(operation, contestant, "tokens", num_tokens, seconds, more)
        for operation, seconds in found.items()
        if seconds
    ]
