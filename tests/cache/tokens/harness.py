"""A whole cache over tiny blocks in numpy memory, with a clock, a faulty device and an engine.

The bytes of a block are a pure function of its namespace and whole prefix. So the expected content
of every slot is known, and a wrong block is always detected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.cache.ladder import Prefetch
from kvtier.cache.lease import Lease
from kvtier.cache.tokens import Cache
from kvtier.cache.transfer import Lane, LocalMover
from kvtier.core.config import CacheConfig
from kvtier.core.keys import token_labels
from kvtier.core.types import DEVICE, HOST, Label, PrefetchPolicy, WritePolicy
from kvtier.devices import Device, Direction, Memory
from kvtier.index import State
from kvtier.index.trie import Node
from kvtier.layout import DType, full_attention, named_layout
from kvtier.observe import Metrics
from kvtier.observe.block_events import BlockLog
from kvtier.testing import BlockBytes, FaultyDevice, MemoryStorage, StoredBlocks, host_memory
from kvtier.tiers import (
    ArenaOptions,
    DeviceTier,
    HostTier,
    MemoryTier,
    StorageFacts,
    StorageTier,
)
from tests.cache.tokens.locking import LockingDevice

Content = npt.NDArray[np.uint8]
BLOCK_SIZE = 2
GROUP = full_attention(2, 1, 2, DType.FLOAT16, BLOCK_SIZE)
DEADLINE_S = 60.0
IN_STEPS = ArenaOptions(
    at_once_bytes=0,
    first_bytes=2 * GROUP.bytes_per_block,
    segment_bytes=3 * GROUP.bytes_per_block,
    page_bytes=GROUP.bytes_per_block,
)
"""A host tier that begins with two slots, and opens three more when a test calls ``open_more``."""
NS = b"namespace"
A, B, C = [1] * 8, [2] * 8, [3] * 8
"""Prompts of four blocks, of which three can be reused: a token is left to compute."""


class Clock:
    """A clock in seconds that only tests advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Request:
    """A request of the engine: the prompt, its lease, and the blocks computed into its slots."""

    namespace: bytes
    labels: Sequence[Label]
    num_tokens: int
    lease: Lease
    num_computed: int = 0

    @property
    def num_written(self) -> int:
        """Number of leading blocks whose bytes are in the lease's slots."""
        return max(self.lease.num_shared, self.num_computed)

    def prefix(self, position: int) -> Sequence[Label]:
        """Return the name of the block at ``position``."""
        return self.labels[: position + 1]


class Harness:
    """A cache with all parts around it that tests observe or control."""

    @staticmethod
    def choose_device(cpu: Device, pool: Memory) -> Device:
        """Return the device that copies. Tests override this; the memory is the same."""
        del pool
        return cpu

    @staticmethod
    def make_events() -> BlockLog | None:
        """Return the listener of block events; None unless a test overrides this."""
        return None

    @staticmethod
    def make_cache(*given: Any, **named: Any) -> Cache:
        """Make the cache."""
        return Cache(*given, **named)

    @staticmethod
    def num_slots(lease: Lease, num_blocks: int) -> int:
        """Return how many slots a lease has."""
        return num_blocks

    def __init__(
        self,
        write_policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        device_blocks: int = 14,
        host_blocks: int = 20,
        layout: str = "layer_first",
        load_deadline_s: float = DEADLINE_S,
        store_after_uses: int = 2,
        store_batch_bytes: int = 0,
        disk_blocks: int = 0,
        shelf: StoredBlocks | None = None,
        archive_after_uses: int = 1,
        prefetch_policy: PrefetchPolicy = PrefetchPolicy.BEST_EFFORT,
        opens_in_steps: bool = False,
        storage_facts: StorageFacts | None = None,
        more_storage: tuple[StorageTier, ...] = (),
        eviction_policy: str = "runs",
    ) -> None:
        self.clock = Clock()
        self.locking = LockingDevice(num_granted=1 if opens_in_steps else None)
        pool_layout = named_layout(layout, GROUP, device_blocks)
        self.pool = DeviceTier(host_memory(pool_layout.nbytes), pool_layout)
        self.device = FaultyDevice(self.choose_device(self.locking, self.pool.memory))
        config = CacheConfig(
            host_capacity=host_blocks * GROUP.bytes_per_block,
            write_policy=write_policy,
            store_after_uses=store_after_uses,
            store_batch_bytes=store_batch_bytes,
            load_deadline_s=load_deadline_s,
            archive_after_uses=archive_after_uses,
            prefetch_policy=prefetch_policy,
            load_batch_bytes=2 * GROUP.bytes_per_block,
            eviction_policy=eviction_policy,
            strict=True,
        )
        self.shelf = shelf or StoredBlocks()
        self.storage = (
            MemoryStorage(GROUP, disk_blocks, self.shelf, facts=storage_facts)
            if disk_blocks
            else None
        )
        self.events = self.make_events()
        self.cache = self.make_cache(
            config,
            self.device,
            self.pool,
            self.clock,
            (*filter(None, (self.storage,)), *more_storage),
            IN_STEPS if opens_in_steps else None,
            self.events,
        )
        self.block_bytes = BlockBytes(GROUP)
        self.requests: list[Request] = []
        self.prefetches: list[Prefetch] = []

    # -- an engine ---------------------------------------------------------------------------------

    def fetch(
        self,
        tokens: Sequence[int],
        num_output_blocks: int = 0,
        grain_blocks: int = 1,
        load: bool = True,
        namespace: bytes = NS,
    ) -> Request | None:
        """Fetch a prompt, with slots for its last, partial block and its output."""
        self.clock.now += 0.01
        labels = token_labels(tokens, BLOCK_SIZE)
        num_blocks = len(tokens) // BLOCK_SIZE + 1 + num_output_blocks
        lease = self.cache.fetch(
            namespace, labels, len(tokens), num_blocks, grain_blocks=grain_blocks, load=load
        )
        if lease is None:
            return None
        assert len(lease.slots) == len(set(lease.slots)) == self.num_slots(lease, num_blocks)
        request = Request(namespace, labels, len(tokens), lease)
        self.requests.append(request)
        return request

    def ask(self, tokens: Sequence[int], load: bool = True, namespace: bytes = NS) -> Request:
        """``fetch``, where the test expects free slots."""
        request = self.fetch(tokens, load=load, namespace=namespace)
        assert request is not None, "the test expects room"
        return request

    def prefetch(self, tokens: Sequence[int], namespace: bytes = NS) -> Prefetch | None:
        """Prefetch for a request that is still queued."""
        prefetch = self.cache.prefetch(namespace, token_labels(tokens, BLOCK_SIZE))
        if prefetch is not None:
            self.prefetches.append(prefetch)
        return prefetch

    def end_prefetch(self, prefetch: Prefetch) -> None:
        self.prefetches.remove(prefetch)
        self.cache.end_prefetch(prefetch)

    def compute(self, request: Request, num_blocks: int) -> None:
        """Prefill the blocks up to ``num_blocks``: write their bytes into the slots."""
        for position in range(request.num_written, num_blocks):
            block = self.expected(request, position)
            slot = request.lease.slots[position]
            self.block_bytes.write(self.pool.memory, self.pool.layout, slot, block)
        request.num_computed = max(request.num_computed, num_blocks)

    def release(self, request: Request) -> None:
        self.requests.remove(request)
        self.cache.release(request.lease)

    def serve(self, tokens: Sequence[int], namespace: bytes = NS) -> Request:
        """Run a request from start to end, and wait for its transfers. Return it, released."""
        request = self.start(tokens, namespace)
        self.finish(request)
        return request

    def start(self, tokens: Sequence[int], namespace: bytes = NS) -> Request:
        """Fetch, and wait until the lease is ready."""
        request = self.ask(tokens, namespace=namespace)
        assert self.cache.drain()
        return request

    def finish(self, request: Request) -> None:
        """Check what was reused, compute the rest, commit, release, and wait for the stores."""
        self.check_request(request)
        self.compute(request, len(request.labels))
        self.cache.commit(request.lease, len(request.labels))
        self.check()
        self.release(request)
        assert self.cache.drain()
        self.check()

    def lose_the_device(self) -> None:
        """Evict everything from the device; what is stored below stays there."""
        self.cache.clear(DEVICE)
        assert self.cache.drain()
        assert self.held(DEVICE) == 0

    def put_on_host(self, tokens: Sequence[int]) -> None:
        """Leave the prompt's blocks in the host tier only, and hold loads from now on."""
        self.serve(tokens)
        self.lose_the_device()
        self.device.hold(Direction.LOAD)

    @property
    def host(self) -> HostTier:
        tier = self.cache._tiers[HOST]
        assert isinstance(tier, HostTier)
        return tier

    def open_more(self) -> None:
        """Open the next slots of the host tier."""
        self.locking.grant_next(self.host.arena)

    # -- checks ------------------------------------------------------------------------------------

    def expected(self, request: Request, position: int) -> Content:
        return self.block_bytes.expected(request.namespace, request.prefix(position))

    def check(self) -> None:
        """Check all bytes, slots and leases."""
        self.cache.check_invariants()
        contents = self.contents()
        self.check_tiers(contents)
        for request in self.requests:
            self.check_request(request, contents[DEVICE])

    def contents(self) -> dict[str, Content]:
        """Return the content of every slot, by tier."""
        return {
            name: self.block_bytes.read_all(tier.memory, tier.layout)
            for name, tier in self.cache._tiers.items()
            if isinstance(tier, MemoryTier)
        }

    def check_request(self, request: Request, content: Content | None = None) -> None:
        """Check that every slot that the engine may read holds exactly the bytes of its prefix."""
        lease = request.lease
        if lease.broken or not lease.ready or not request.num_written:
            return
        if content is None:
            content = self.contents()[DEVICE]
        assert set(lease.held) <= {DEVICE}, "a ready lease holds its blocks elsewhere"
        for position in range(request.num_written):
            is_right = np.array_equal(
                content[lease.slots[position]], self.expected(request, position)
            )
            assert is_right, f"wrong bytes in block {position} of a request"

    def check_tiers(self, contents: dict[str, Content]) -> None:
        """Check that every block that can be matched holds exactly the bytes of its prefix."""
        for node in self.nodes():
            namespace, prefix = path_of(node)
            expected = self.block_bytes.expected(namespace, prefix)
            for name, residency in zip(self.tiers, node.residencies, strict=True):
                if residency.state is State.READY:
                    held = contents[name][residency.slot] if name in contents else self.kept(node)
                    is_right = held is None or np.array_equal(held, expected)
                    assert is_right, f"wrong bytes in the {name} tier"

    def kept(self, node: Node) -> Content | None:
        """Return the stored bytes under the block's key.

        None if the block was found damaged and replaced; the cache notices that when it reads the
        block. Storage other than the harness's own may damage blocks by itself.
        """
        key = self.cache._index.key(node.block)
        if key not in self.shelf.blocks:
            was_damaged = self.storage is None or key in self.storage.spoiled
            assert was_damaged, "storage lost a block that was not damaged"
            return None
        return np.frombuffer(self.shelf.blocks[key], np.uint8)

    def nodes(self) -> Iterator[Node]:
        yield from self.cache._index.nodes()

    @property
    def tiers(self) -> tuple[str, ...]:
        return self.cache._index.tiers

    def wait(self) -> None:
        """Wait until all copies are done. The cache notices none before the next poll."""
        for transfer in self.cache._ladder._transfers.in_flight.all:
            assert transfer.job is None or transfer.job.wait(60), "a copy hangs"

    def wait_for_threads(self) -> None:
        """Wait until no thread has anything left to begin.

        Idle storage decides what is read ahead, and a transfer that has begun is not withdrawn.
        Held transfers have begun.
        """
        mover = self.cache._ladder._mover
        assert isinstance(mover, LocalMover)
        for job in mover._scrubs.values():
            assert job.wait(60), "a scrub hangs"
        for gate in mover._gates.values():
            until(self, partial(_is_taken_up, gate.lane), polls=False)

    def held(self, tier: str) -> int:
        """Return the number of blocks in ``tier``."""
        return self.cache._index.num_held(tier)

    def matched(self, tokens: Sequence[int], namespace: bytes = NS) -> list[str]:
        """Return the tier of each block of the cached prefix."""
        return list(self.cache.match(namespace, token_labels(tokens, BLOCK_SIZE)).tiers)

    def used(self) -> tuple[int, int]:
        used = self.cache.used_slots()
        return used[DEVICE], used[HOST]

    def open_storage(self) -> None:
        """Let the reads and writes go on that were held."""
        if self.storage is not None:
            self.storage.open_reads.set()
            self.storage.open_writes.set()

    def _finish(self) -> None:
        """Release every request, and finish every copy."""
        self.locking.grant_all()
        self.device.release()
        self.open_storage()
        for request in list(self.requests):
            self.release(request)
        for prefetch in list(self.prefetches):
            self.end_prefetch(prefetch)
        assert self.cache.drain()
        self.check()

    def end(self) -> None:
        """Finish everything, and close the cache as it is."""
        self._finish()
        self.cache.close()

    def close(self) -> None:
        """End everything. No leased block may be left."""
        self._finish()
        assert self.cache.used_slots() == {name: self.held(name) for name in self.tiers}
        assert all(r.leases == 0 for node in self.nodes() for r in node.residencies)
        for name in self.tiers:
            self.cache.clear(name)
            assert self.cache.drain()
        for name in self.tiers[::-1]:
            self.cache.clear(name)
        assert set(self.cache.used_slots().values()) == {0}
        assert len(self.cache._index) == 0
        self.cache.close()
        self.cache.close()


def _is_taken_up(lane: Lane) -> bool:
    """Whether the lane has no queued work or no free worker."""
    with lane._lock:
        stands = lane._urgent or lane._patient
        return not stands or len(lane._running) == lane._num_workers


def until(harness: Harness, is_so: Callable[[], bool], polls: bool = True) -> None:
    """Poll until the condition holds, which another thread brings about."""
    for _ in range(10_000):
        if is_so():
            return
        if polls:
            harness.cache.poll()
        time.sleep(0.001)
    raise AssertionError("it never came to be")


def store_slowly(harness: Harness, tokens: Sequence[int]) -> Request:
    """Store a prompt in a storage whose writes block for a while. Check ``stored`` meanwhile."""
    assert harness.storage is not None
    harness.storage.open_writes.clear()
    request = harness.start(tokens)
    num_blocks = len(request.labels)
    harness.compute(request, num_blocks)
    harness.cache.commit(request.lease, num_blocks)
    harness.release(request)
    until(harness, harness.storage.is_writing.is_set)
    assert harness.cache.stored(NS, request.labels) == (0, True)
    harness.storage.open_writes.set()
    until(harness, lambda: harness.cache.stored(NS, request.labels) == (num_blocks, False))
    return request


def path_of(node: Node) -> tuple[bytes, list[Label]]:
    """Return namespace and labels of a node's whole prefix."""
    labels: list[Label] = []
    while node.parent is not None:
        labels.append(node.label)
        node = node.parent
    return node.label, labels[::-1]


def count(metrics: Metrics, name: str, **labels: str) -> float:
    """Return a counter's value; 0 if it never counted."""
    return metrics.registry.get_sample_value(name, labels) or 0.0
