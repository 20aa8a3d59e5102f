"""A slab that several threads call: the result of each call, and when it returns."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kvtier.connectors.common.blocking_calls import CALL_BLOCKS, BlockingCalls
from kvtier.connectors.common.names import block_key
from kvtier.core.errors import TierError
from kvtier.observe.specs import PLANNED_BLOCKS, SAVED_TOKENS
from kvtier.testing import MemoryStorage, StoredBlocks, host_memory, memory_bytes
from kvtier.tiers import Pieces, StorageFacts
from tests.connectors.storage_harness import BLOCK_BYTES, DIGEST, bytes_of, memory

SIZES = (BLOCK_BYTES // 4, BLOCK_BYTES // 2, BLOCK_BYTES // 4)
PATIENCE_S = 60


def key_of(number: int) -> bytes:
    return b"%032d" % number


class Caller:
    """Caller of ``BlockingCalls``, with blocks of three pieces that are far apart in memory.

    now_s: the clock. options: options of ``BlockingCalls``.
    """

    def __init__(self, tier: MemoryStorage, num_blocks: int = 600, **options: Any) -> None:
        self.tier = tier
        self.now_s = 0.0
        self.digest = DIGEST
        self._owner = host_memory(num_blocks * BLOCK_BYTES)
        starts = np.cumsum((0, *SIZES[:-1])) * num_blocks
        steps = np.arange(num_blocks)[:, None] * np.array(SIZES)
        offsets = starts + steps
        self._bytes = memory_bytes(self._owner)
        self._pieces = Pieces((offsets + self._owner.address).astype(np.uint64), np.array(SIZES))
        self._offsets = offsets
        self.calls = BlockingCalls(
            tier,
            SIZES,
            lambda: self.digest,
            hold_s=10.0,
            **options,
            clock=lambda: self.now_s,
        )

    def write(self, at: int, content: np.ndarray) -> None:
        for offset, piece in zip(
            self._offsets[at], np.split(content, np.cumsum(SIZES)[:-1]), strict=True
        ):
            self._bytes[offset : offset + len(piece)] = piece

    def read(self, at: int) -> np.ndarray:
        return np.concatenate(
            [self._bytes[o : o + s] for o, s in zip(self._offsets[at], SIZES, strict=True)]
        )

    def store(self, *numbers: int, before: Sequence[int] = ()) -> list[bool]:
        for at, number in enumerate(numbers):
            self.write(at, bytes_of(key_of(number)))
        keys = [key_of(number) for number in numbers]
        earlier = [key_of(number) for number in before]
        return self.calls.store(keys, self._pieces.pick(slice(len(keys))), earlier)

    def load(self, *numbers: int, before: Sequence[int] = ()) -> list[bool]:
        """Load blocks that are reported present, and compare their bytes."""
        self._bytes[:] = 0
        keys = [key_of(number) for number in numbers]
        earlier = [key_of(number) for number in before]
        found = self.calls.load(keys, self._pieces.pick(slice(len(keys))), earlier)
        for at, (key, is_there) in enumerate(zip(keys, found, strict=True)):
            assert not is_there or (self.read(at) == bytes_of(key)).all(), "wrong bytes"
        return found

    def num_found(self, *numbers: int) -> int:
        return self.calls.num_found([key_of(n) for n in numbers])


def until_over(caller: Caller) -> None:
    """Repeat look-ups until no probe of the storage is in flight."""
    deadline_s = time.monotonic() + PATIENCE_S
    while caller.calls._probes:
        assert time.monotonic() < deadline_s
        caller.num_found(1)
        caller.now_s += 0.01
        time.sleep(0.001)


@pytest.fixture
def caller() -> Iterator[Caller]:
    made = Caller(memory(8))
    yield made
    made.tier.open_reads.set()
    made.tier.open_writes.set()
    made.calls.close()


def test_what_was_stored_is_found_and_loaded(caller: Caller) -> None:
    assert caller.num_found(1, 2) == 0
    assert caller.store(1, 2, 3) == [True] * 3
    assert caller.num_found(1, 2, 3, 4) == 3
    assert caller.num_found(9, 1) == 0
    assert caller.load(1, 9, 3) == [True, False, True]


def test_long_call_goes_in_turns() -> None:
    num = 2 * CALL_BLOCKS + 5
    caller = Caller(memory(num))
    assert caller.store(*range(num)) == [True] * num
    assert caller.num_found(*range(num)) == num
    assert caller.load(*range(num)) == [True] * num
    caller.calls.close()


def test_restart_finds_what_was_acknowledged() -> None:
    stored_blocks = StoredBlocks()
    before = Caller(memory(4, stored_blocks))
    before.store(1, 2)
    before.calls.close()
    after = Caller(memory(4, stored_blocks))
    assert after.num_found(1, 2, 3) == 2
    assert after.load(1, 2) == [True, True]
    after.calls.close()


def test_store_that_others_use_is_asked_what_it_has() -> None:
    stored_blocks, facts = StoredBlocks(), StorageFacts(evicts=True, is_shared=True)
    first = Caller(memory(8, stored_blocks, facts))
    assert first.store(1, 2, 3) == [True] * 3
    second = Caller(memory(8, stored_blocks, facts))
    assert second.num_found(1, 2, 3, 4) == 3
    assert second.load(1, 2, 3) == [True] * 3
    second.tier.was_asked.clear()
    assert second.num_found(1, 2, 3) == 3
    assert not second.tier.was_asked.is_set(), "it is known by now"
    first.calls.close()
    second.calls.close()


def test_end_of_a_prompt_leaves_before_its_beginning(caller: Caller) -> None:
    caller.store(*range(4))
    assert caller.load(2, 3, before=[0, 1]) == [True, True]
    caller.store(*range(10, 14))
    assert caller.store(20, 21) == [True, True]
    assert caller.num_found(0, 1, 2, 3) == 2


def test_block_that_was_found_stays_until_its_time_is_over(caller: Caller) -> None:
    caller.store(*range(4))
    assert caller.num_found(0, 1, 2, 3) == 4
    caller.store(*range(10, 18))
    assert caller.load(0, 1, 2, 3) == [True] * 4
    assert caller.num_found(0, 1, 2, 3) == 4
    caller.now_s = 11.0
    caller.store(*range(20, 28))
    assert caller.num_found(0, 1, 2, 3) == 0


def test_holds_leave_room_for_what_is_stored(caller: Caller) -> None:
    caller.store(*range(8))
    assert caller.num_found(*range(8)) == 8
    assert caller.store(*range(10, 18)).count(True) == 4


def test_nothing_is_known_before_the_weights_are(caller: Caller) -> None:
    caller.digest = b""
    assert caller.store(1) == [False]
    assert caller.num_found(1) == 0
    caller.digest = DIGEST
    assert caller.store(1) == [True]


def test_nothing_is_stored_past_a_failure() -> None:
    num = 2 * CALL_BLOCKS
    caller = Caller(memory(2 * num))
    caller.tier.refused.add(block_key(DIGEST, key_of(3)))
    stored = caller.store(*range(num))
    assert stored[:3] == [True] * 3
    assert not any(stored[CALL_BLOCKS:])
    assert caller.num_found(*range(CALL_BLOCKS, num)) == 0
    caller.calls.close()


def test_damaged_block_is_not_there_and_can_be_stored_again(caller: Caller) -> None:
    caller.store(1, 2)
    caller.tier.spoiled.add(block_key(DIGEST, key_of(1)))
    assert caller.load(1, 2) == [False, True]
    assert caller.num_found(1) == 0
    caller.tier.spoiled.clear()
    assert caller.store(1) == [True]
    assert caller.load(1) == [True]


def test_key_twice_in_a_call_is_in_place_once(caller: Caller) -> None:
    caller.store(1)
    assert sorted(caller.load(1, 1)) == [False, True]


def test_cleared_slab_is_empty_and_usable(caller: Caller) -> None:
    caller.store(1, 2)
    caller.num_found(1, 2)
    caller.calls.clear()
    assert caller.num_found(1) == 0
    assert caller.store(1) == [True]


def test_read_does_not_wait_for_a_write(caller: Caller) -> None:
    caller.store(1)
    caller.tier.open_writes.clear()
    caller.tier.is_writing.clear()
    writer = threading.Thread(target=caller.store, args=(5,))
    writer.start()
    try:
        assert caller.tier.is_writing.wait(PATIENCE_S)
        assert caller.num_found(1) == 1
        keys, pieces = [key_of(1)], caller._pieces.pick(slice(9, 10))
        assert caller.calls.load(keys, pieces) == [True]
    finally:
        caller.tier.open_writes.set()
        writer.join(PATIENCE_S)
    assert caller.num_found(5) == 1


def test_nothing_is_found_while_a_read_takes_too_long() -> None:
    caller = Caller(memory(8))
    caller.calls._late_s = 0.0  # any read does
    caller.store(1, 2)
    caller.tier.open_reads.clear()
    reader = threading.Thread(target=caller.load, args=(1,))
    reader.start()
    try:
        assert caller.tier.is_reading.wait(PATIENCE_S)
        assert caller.num_found(2) == 0
    finally:
        caller.tier.open_reads.set()
        reader.join(PATIENCE_S)
    assert caller.num_found(2) == 1
    caller.calls.close()


def has_slow_reads(caller: Caller) -> None:
    """Make reads look slow, twice: a scrub may have measured one, and one outlier is ignored."""
    for _ in range(2):
        caller.calls.cache.ladder.costs.observe_copy(("disk", "host"), 100 * BLOCK_BYTES, 10.0)


def test_what_is_faster_to_compute_is_not_found_and_some_of_it_read_by_nobody_who_waits() -> None:
    caller = Caller(memory(128), block_tokens=64)
    numbers = range(100)
    caller.store(*numbers)
    assert caller.num_found(*numbers) == 100  # nothing is known of prefill yet
    costs, route = caller.calls.cache.ladder.costs, ("disk", "host")
    has_slow_reads(caller)
    caller.calls.observe_prefill(0, 6400, 1.0)
    assert caller.num_found(*numbers) == 0
    assert caller.calls.num_recomputed == 100
    assert not caller.tier.reads
    caller.now_s = 40.0
    caller.tier.open_reads.clear()
    assert caller.num_found(*numbers) == 0
    assert caller.num_found(*numbers) == 0
    assert caller.tier.is_reading.wait(PATIENCE_S)
    assert len(caller.tier.reads) == 1, "while one probe is in flight, there is no other"
    caller.tier.open_reads.set()
    until_over(caller)
    for _ in range(100):
        costs.observe_copy(route, 100 * BLOCK_BYTES, 0.01)
    caller.now_s += 1.0
    assert caller.num_found(*numbers) == 100
    assert caller.load(*numbers) == [True] * 100
    caller.calls.close()


@pytest.mark.parametrize("always_loads", [False, True])
def test_what_is_decided_is_counted(always_loads: bool) -> None:
    caller = Caller(memory(128), block_tokens=64, always_loads=always_loads)
    numbers = range(100)
    caller.store(*numbers)
    has_slow_reads(caller)
    caller.calls.observe_prefill(0, 6400, 1.0)
    assert caller.num_found(*numbers) == (100 if always_loads else 0)
    assert caller.load(*range(10)) == [True] * 10
    counted = caller.calls.cache.ladder.metrics.take_recent()
    decisions = {
        labels: count for (metric, labels), count in counted.items() if metric is PLANNED_BLOCKS
    }
    assert decisions == {("load",) if always_loads else ("recompute",): 100}
    assert counted[SAVED_TOKENS, ()] == 640
    caller.calls.close()


def test_memory_of_a_read_that_does_not_end_is_kept_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier.cache.storage_only.CLOSE_WAIT_S", 0.05)
    monkeypatch.setattr("kvtier.cache.storage_only.END_WAIT_S", 0.05)
    kept: list[object] = []
    monkeypatch.setattr("kvtier.connectors.common.blocking_calls._ABANDONED", kept)
    caller = Caller(memory(128), block_tokens=64)
    caller.store(*range(100))
    has_slow_reads(caller)
    caller.calls.observe_prefill(0, 6400, 1.0)
    caller.now_s = 40.0
    caller.tier.open_reads.clear()
    assert caller.num_found(*range(100)) == 0
    assert caller.tier.is_reading.wait(PATIENCE_S)
    with pytest.raises(TierError):
        caller.calls.close()
    assert len(kept) == 1
    caller.tier.open_reads.set()
