"""Conformance suite for caches of blocks by an engine's keys."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.cache.block_cache import BlockCache, BlockState, Reserved
from kvtier.core.hints import Action, Hint, HintOutcome
from kvtier.core.types import HOST

GROUP_BYTES = 4
"""Bytes at the end of a key that name its KV group."""
PATIENCE_S = 30.0
NOWHERE, ARRIVING, MEMORY, STORAGE, UNKNOWN = BlockState


class BlockCacheHarness(ABC):
    """A cache under test, and what happens around it.

    Attributes:
        cache: the cache, which has memory for ``num_slots`` blocks, and storage for more.
        num_slots: at least 8, at most 64.
    """

    cache: BlockCache
    num_slots: int

    @abstractmethod
    def settle(self, num_blocks: int) -> None:
        """Wait until so many blocks are in storage, and nothing else is on its way there."""

    @abstractmethod
    def fail_reads(self) -> None:
        """Let reads of blocks that are in storage by now fail."""

    @abstractmethod
    def stop(self) -> None:
        """Let everything below the cache answer nothing until ``resume``."""

    @abstractmethod
    def resume(self) -> None:
        """End ``stop``."""

    @abstractmethod
    def restart(self) -> None:
        """Lose the memory in a crash. ``cache`` has the same storage afterwards."""

    @abstractmethod
    def close(self) -> None:
        """Close everything. A stopped cache is resumed before."""


class BlockCacheSuite(ABC):
    """Rules that every ``BlockCache`` keeps.

    Attributes:
        num_groups: KV groups of a model. With several, the last ``GROUP_BYTES`` bytes of a key name
            the group.
    """

    num_groups = 1
    longest_call_s = 2.0
    """Longest time of a call while everything below the cache is stopped."""

    @abstractmethod
    def make_harness(self, folder: Path) -> BlockCacheHarness:
        """Return an empty cache. folder: for its files."""

    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[BlockCacheHarness]:
        made = self.make_harness(tmp_path)
        yield made
        made.close()

    def keys(self, first: int, num: int) -> list[bytes]:
        """Return ``num`` keys of a prompt, other ones than of any other range of numbers."""
        places = (divmod(number, self.num_groups) for number in range(first, first + num))
        return [b"%032d" % place + group.to_bytes(GROUP_BYTES, "big") for place, group in places]

    # -- memory ------------------------------------------------------------------------------------

    def test_block_is_found_after_its_commit_only(self, harness: BlockCacheHarness) -> None:
        keys = self.keys(0, 3)
        assert _known(harness.cache, keys) == [NOWHERE] * 3
        room = _reserve(harness.cache, keys)
        assert list(room.keys) == keys
        assert len(set(room.slots)) == 3
        assert set(harness.cache.lookup(keys).states) <= {NOWHERE, ARRIVING, UNKNOWN}
        harness.cache.commit(keys[:2], [0, 1])
        harness.cache.abort(keys[2:])
        assert _known(harness.cache, keys) == [MEMORY, MEMORY, NOWHERE]
        assert harness.cache.origins(keys[:2]) == [HOST] * 2
        harness.cache.check_invariants()

    def test_block_in_memory_is_not_reserved_again(self, harness: BlockCacheHarness) -> None:
        keys = self.keys(0, 4)
        _store(harness.cache, keys[:2])
        assert list(_reserve(harness.cache, keys).keys) == keys[2:]
        harness.cache.abort(keys[2:])

    def test_held_slots_are_those_that_were_written(self, harness: BlockCacheHarness) -> None:
        keys = self.keys(0, 4)
        slots = dict(zip(keys, _store(harness.cache, keys).slots, strict=True))
        assert _known(harness.cache, keys) == [MEMORY] * 4
        held = harness.cache.hold(keys[1:3])
        assert list(held.slots) == [slots[key] for key in keys[1:3]]
        harness.cache.release(keys[1:3])

    def test_held_block_is_not_evicted(self, harness: BlockCacheHarness) -> None:
        keys = self.keys(0, 2)
        _store(harness.cache, keys)
        assert _known(harness.cache, keys) == [MEMORY] * 2
        slots = harness.cache.hold(keys).slots
        for number in range(4):
            harness.cache.poll()
            others = self.keys(100 * (number + 1), harness.num_slots // 2)
            room = _reserve(harness.cache, others)
            assert set(room.slots).isdisjoint(slots)
            harness.cache.commit(room.keys, range(len(room.keys)))
        assert _known(harness.cache, keys) == [MEMORY] * 2
        harness.cache.release(keys)
        harness.cache.check_invariants()

    def test_no_slot_is_given_while_all_are_in_use(self, harness: BlockCacheHarness) -> None:
        keys = self.keys(0, harness.num_slots)
        _reserve(harness.cache, keys)
        assert harness.cache.reserve(self.keys(500, 1)) is None
        harness.cache.abort(keys[:1])
        _until(lambda: harness.cache.reserve(self.keys(500, 1)) is not None)
        harness.cache.abort([*keys[1:], *self.keys(500, 1)])
        harness.cache.check_invariants()

    def test_failed_copy_to_memory_is_given_up(self, harness: BlockCacheHarness) -> None:
        keys = self.keys(0, 2)
        room = _reserve(harness.cache, keys)
        harness.cache.distrust(room.slots[:1])
        harness.cache.commit(keys, [0, 1])
        assert _known(harness.cache, keys) == [NOWHERE, MEMORY]

    def test_failed_copy_from_memory_is_given_up(self, harness: BlockCacheHarness) -> None:
        keys = self.keys(0, 2)
        _store(harness.cache, keys)
        _known(harness.cache, keys)
        held = harness.cache.hold(keys)
        harness.cache.distrust(held.slots[:1])
        assert harness.cache.lookup(keys).states[0] is not MEMORY
        harness.cache.release(keys)
        harness.cache.poll()
        assert harness.cache.lookup(keys).states[1] is MEMORY

    def test_copies_that_were_forgotten_leave_no_slot_in_use(
        self, harness: BlockCacheHarness
    ) -> None:
        keys = self.keys(0, harness.num_slots)
        _reserve(harness.cache, keys)
        harness.cache.end_copies()
        harness.cache.copies_have_ended()
        _until(lambda: harness.cache.reserve(keys) is not None)
        harness.cache.abort(keys)
        harness.cache.clear()
        harness.cache.copies_have_ended()
        harness.cache.check_invariants()

    def test_private_block_is_found_by_private_look_ups_at_most(
        self, harness: BlockCacheHarness
    ) -> None:
        keys = self.keys(0, 2)
        _reserve(harness.cache, keys)
        harness.cache.commit(keys, [0, 1], to_storage=False)
        assert set(harness.cache.lookup_private(keys)) <= {MEMORY, NOWHERE}
        harness.settle(0)
        harness.restart()
        assert _known(harness.cache, keys) == [NOWHERE] * 2

    def test_use_changes_what_leaves_and_nothing_else(self, harness: BlockCacheHarness) -> None:
        keys = self.keys(0, 4)
        harness.cache.on_request(keys[:3])
        _store(harness.cache, keys)
        harness.cache.continues(keys[3:], keys[2])
        harness.cache.touch(keys)
        harness.cache.wait(keys, True)
        (result,) = harness.cache.hint(keys, Hint(ended=True), 16)
        assert result.action is Action.RELEASE
        harness.cache.wait(keys, False)
        assert _known(harness.cache, keys) == [MEMORY] * 4

    # -- storage -----------------------------------------------------------------------------------

    def test_stored_block_is_read_after_a_crash(self, harness: BlockCacheHarness) -> None:
        keys, storage = self.keys(0, 3), self._store_and_crash(harness)
        assert harness.cache.sources(keys) == [storage] * 3
        assert harness.cache.lookup_again(keys[0], STORAGE) is STORAGE
        assert harness.cache.promote(keys) == 3
        waiter = harness.cache.wait_for_reads(keys)
        _until(lambda: waiter.is_over, harness.cache)
        assert _known(harness.cache, keys) == [MEMORY] * 3
        assert harness.cache.origins(keys) == [storage] * 3
        harness.cache.hold(keys)
        harness.cache.release(keys)
        assert harness.cache.origins(keys) == [HOST] * 3, "it came from storage once"
        harness.cache.poll()
        assert (storage, HOST) in harness.cache.cost_snapshot().seconds_per_byte, "it was measured"

    def test_prefetched_blocks_are_in_memory_before_their_request(
        self, harness: BlockCacheHarness
    ) -> None:
        keys = self.keys(0, 3)
        self._store_and_crash(harness)
        (result,) = harness.cache.hint(keys, Hint(prefetch_within_s=0.1), 16)
        assert result.action is Action.PREFETCH
        assert result.outcome in (HintOutcome.BEGUN, HintOutcome.SCHEDULED, HintOutcome.SENT)
        _until(lambda: harness.cache.lookup(keys).states == [MEMORY] * 3, harness.cache)
        harness.cache.on_request(keys)
        harness.cache.poll()
        harness.cache.check_invariants()

    def test_demoted_blocks_are_found_in_storage_only(self, harness: BlockCacheHarness) -> None:
        keys = self.keys(0, 3)
        _store(harness.cache, keys)
        harness.settle(3)
        harness.cache.poll()
        wanted = [MEMORY, STORAGE, STORAGE]

        def is_demoted() -> bool:
            """A block that is still being written is held, and not demoted."""
            (result,) = harness.cache.hint(keys, Hint(demote_from=16), 16)
            assert result.action is Action.DEMOTE
            return harness.cache.lookup(keys).states == wanted

        _until(is_demoted, harness.cache)
        harness.cache.poll()
        harness.cache.check_invariants()

    def test_failed_read_is_a_miss(self, harness: BlockCacheHarness) -> None:
        keys = self.keys(0, 3)
        self._store_and_crash(harness)
        harness.fail_reads()
        harness.cache.promote(keys)
        waiter = harness.cache.wait_for_reads(keys)
        _until(lambda: waiter.is_over, harness.cache)
        assert MEMORY not in harness.cache.lookup(keys).states
        harness.cache.check_invariants()

    def _store_and_crash(self, harness: BlockCacheHarness) -> str:
        """Store three blocks, and have storage find them after a crash. Return its name."""
        keys = self.keys(0, 3)
        _store(harness.cache, keys)
        harness.settle(3)
        harness.restart()
        _until(lambda: harness.cache.lookup(keys).states == [STORAGE] * 3, harness.cache)
        (storage,) = harness.cache.storages
        return storage

    # -- limits ------------------------------------------------------------------------------------

    def test_no_call_waits_for_what_is_stopped(self, harness: BlockCacheHarness) -> None:
        keys = self.keys(0, 3)
        self._store_and_crash(harness)
        cache = harness.cache
        harness.stop()
        calls: list[Callable[[], object]] = [
            lambda: cache.lookup(keys),
            lambda: cache.lookup_again(keys[0]),
            lambda: cache.promote(keys),
            lambda: cache.wait_for_reads(keys),
            lambda: cache.reserve(self.keys(100, 2)),
            lambda: cache.commit(self.keys(100, 2), [0, 1]),
            lambda: cache.touch(keys),
            cache.poll,
        ]
        for call in calls:
            began_s = time.monotonic()
            call()
            assert time.monotonic() - began_s < self.longest_call_s
        assert MEMORY not in cache.lookup(keys).states
        harness.resume()
        _until(lambda: cache.lookup(keys).states[0] in (STORAGE, MEMORY), cache)

    def test_usage_counts_what_is_in_use(self, harness: BlockCacheHarness) -> None:
        _store(harness.cache, self.keys(0, 3))
        usage = harness.cache.usage()
        assert all(0 <= each.num_used <= each.num_open for each in usage.values())
        assert HOST not in usage or usage[HOST].num_used == 3


def _until(is_so: Callable[[], bool], cache: BlockCache | None = None) -> None:
    """Wait until a condition holds. cache: it is polled meanwhile."""
    until_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until_s
        if cache is not None:
            cache.poll()
        time.sleep(0.01)


def _known(cache: BlockCache, keys: Sequence[bytes]) -> list[BlockState]:
    """Return the states of blocks, once the cache knows them."""
    _until(lambda: UNKNOWN not in cache.lookup(keys).states, cache)
    return cache.lookup(keys).states


def _reserve(cache: BlockCache, keys: Sequence[bytes]) -> Reserved:
    """Reserve slots. They may take a moment to be free."""
    found: list[Reserved] = []

    def reserve() -> bool:
        room = cache.reserve(keys)
        found.extend(() if room is None else (room,))
        return bool(found)

    _until(reserve, cache)
    return found[0]


def _store(cache: BlockCache, keys: Sequence[bytes]) -> Reserved:
    room = _reserve(cache, keys)
    cache.commit(room.keys, range(len(room.keys)))
    return room
