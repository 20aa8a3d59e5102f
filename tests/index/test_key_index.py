"""The flat index by key: its rules, and the native one compared with its twin."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier.core.hot import NATIVE
from kvtier.core.keys import PackedKeys, next_key
from kvtier.core.types import DISK, HOST, NO_BLOCK, BlockId, BlockName, Slot
from kvtier.index import KeyIndex, State
from kvtier.index.key_index import KeyMatches
from kvtier.index.native_key_index import NativeKeyIndex
from kvtier.index.policies.replayed import LRU
from kvtier.index.python_key_index import PythonKeyIndex

TIERS = (HOST, DISK)
NS = b"n" * 32
KEYS = [bytes([number // 2]) * 35 + bytes([number % 2]) for number in range(8)]
"""Pairs of keys that differ in their last byte only, as those of two groups do."""
MAKERS = [NativeKeyIndex, PythonKeyIndex] if NATIVE else [PythonKeyIndex]

Make = Callable[..., KeyIndex]


@pytest.fixture(params=MAKERS, ids=lambda make: make.__name__)
def index(request: pytest.FixtureRequest) -> KeyIndex:
    return request.param(dict.fromkeys(TIERS, LRU), lambda: NS)


def put(index: KeyIndex, keys: list[bytes], tier: str = HOST) -> Sequence[BlockId]:
    """Store blocks; a block's slot is its position in ``KEYS``."""
    blocks = index.make(keys)
    index.begin_write(blocks, tier, [Slot(KEYS.index(key)) for key in keys])
    index.commit(blocks, tier, 0.0)
    return blocks


def leaving(index: KeyIndex, num: int, tier: str = HOST) -> list[bytes]:
    """Evict the next blocks. Return their keys."""
    blocks = index.evict(tier, num)
    keys = index.keys(blocks)
    index.forget(blocks, tier)
    return keys


def test_a_block_is_found_by_its_key_in_every_tier_that_has_it(index: KeyIndex) -> None:
    blocks = put(index, KEYS[:2])
    index.begin_write(blocks[:1], DISK, [Slot(7)])
    assert index.find_all(KEYS[:3]) == KeyMatches(
        [*blocks, NO_BLOCK],
        bytes([State.READY, State.WRITING, State.READY, State.ABSENT, 0, 0]),
    )
    assert index.find(KEYS[0]) == (blocks[0], (State.READY, State.WRITING))
    assert index.find(KEYS[2]) is None
    assert index.find(b"of another length") is None


def test_packed_keys_are_found_like_any(index: KeyIndex) -> None:
    blocks = put(index, KEYS[:3])
    packed = PackedKeys(b"".join(KEYS[1:]), 36)
    assert index.find_all(packed) == index.find_all(KEYS[1:])
    assert index.find_all(packed).known == blocks[1:]
    assert index.make(packed[:2]) == blocks[1:]
    missing, ready = index.missing(packed, HOST)
    assert (list(missing), ready) == (KEYS[3:], blocks[1:])
    assert list(index.missing(packed, DISK).keys) == KEYS[1:]
    with pytest.raises(ValueError, match="a key has 35 bytes"):
        index.make(PackedKeys(bytes(70), 35))


def test_missing_key_that_is_named_twice_is_missing_once(index: KeyIndex) -> None:
    [block] = put(index, KEYS[:1])
    named = [KEYS[2], KEYS[0], KEYS[1], KEYS[2], KEYS[1]]
    assert index.missing(named, HOST) == ([KEYS[2], KEYS[1]], [block])
    index.begin_write(index.make(KEYS[1:2]), HOST, [Slot(1)])
    assert index.missing(dict.fromkeys(named), HOST) == ([KEYS[2]], [block])


def test_block_is_found_by_its_slot(index: KeyIndex) -> None:
    blocks = put(index, KEYS[:4])
    assert index.in_slots([Slot(3), Slot(1), Slot(7)], HOST) == [blocks[1], blocks[3]]
    assert index.in_slots([Slot(3)], DISK) == []
    leaving(index, len(blocks))
    assert index.in_slots([Slot(3)], HOST) == []


def test_hash_follows_from_the_whole_key(index: KeyIndex) -> None:
    hashes = index.hashes(put(index, KEYS))
    assert len(set(hashes)) == len(KEYS)
    leaving(index, len(KEYS))
    assert index.hashes(put(index, KEYS[::-1])) == hashes[::-1]


def test_a_block_has_a_name_for_storage(index: KeyIndex) -> None:
    [block] = put(index, KEYS[:1])
    index.set_depths([block], [17])
    assert index.names([block]) == [BlockName(NS, 17, next_key(NS, KEYS[0]))]


def test_who_was_used_longest_ago_leaves_first_and_the_start_of_a_prompt_last(
    index: KeyIndex,
) -> None:
    blocks = put(index, KEYS[:6])
    index.touch(blocks[:3], 1.0)
    assert leaving(index, 9) == [KEYS[3], KEYS[4], KEYS[5], KEYS[2], KEYS[1], KEYS[0]]
    assert len(index) == 0


def test_a_late_commit_is_no_use(index: KeyIndex) -> None:
    blocks = index.make(KEYS[:3])
    index.begin_write(blocks, HOST, [Slot(0), Slot(1), Slot(2)])
    index.touch(blocks[:2], 1.0)
    index.commit(blocks[1::-1], HOST, 2.0)
    index.commit(blocks[2:], HOST, 2.0)
    assert leaving(index, 3) == [KEYS[1], KEYS[0], KEYS[2]]


def test_what_an_eviction_passed_over_is_met_once_and_leaves_next(index: KeyIndex) -> None:
    blocks = put(index, KEYS[:5])
    index.lease(blocks[:2], HOST)
    assert leaving(index, 1) == [KEYS[2]]
    assert index.order(HOST) == blocks[3:], "held blocks are not in the way any more"
    index.release(blocks[:1], HOST)
    assert index.num_evictable(HOST) == 3
    assert leaving(index, 9) == [KEYS[0], KEYS[3], KEYS[4]]
    index.touch(blocks[1:2], 1.0)
    index.release(blocks[1:2], HOST)
    assert leaving(index, 9) == [KEYS[1]]


def test_no_more_leave_than_may(index: KeyIndex) -> None:
    blocks = put(index, KEYS[:3])
    index.lease(blocks, HOST)
    assert leaving(index, 2) == []
    assert index.order(HOST) == blocks, "nothing was looked at in vain"
    index.release(blocks, HOST)


def test_a_number_is_never_that_of_another_block(index: KeyIndex) -> None:
    [block] = put(index, KEYS[:1])
    leaving(index, 1)
    [other] = put(index, KEYS[1:2])
    assert block != other
    assert index.state(block, HOST) is State.ABSENT
    with pytest.raises(KeyError):
        index.slots([block], HOST)


def test_keys_of_another_length_are_refused(index: KeyIndex) -> None:
    put(index, KEYS[:1])
    with pytest.raises(ValueError, match="a key has 3 bytes, those before it 36"):
        index.make([b"abc"])
    for wrong in (b"", bytes(257)):
        with pytest.raises(ValueError, match="1 to 256 bytes, not"):
            index.make([wrong])


@pytest.mark.skipif(not NATIVE, reason="hashes of the native core")
@pytest.mark.parametrize("num_bytes", range(1, 42))
def test_each_byte_of_a_key_counts_in_its_hash(num_bytes: int) -> None:
    keys = [bytes(num_bytes)]
    keys += [bytes(at) + b"\1" + bytes(num_bytes - at - 1) for at in range(num_bytes)]
    index = NativeKeyIndex({HOST: LRU}, lambda: NS)
    assert len(set(index.hashes(index.make(keys)))) == len(keys)


def test_what_is_expected_has_room_and_what_is_known_stays(index: KeyIndex) -> None:
    blocks = put(index, KEYS)
    index.expect(100_000)
    index.expect(10)  # fewer than there are free slots for
    assert index.find_all(KEYS).blocks == blocks
    num_bytes = index.num_bytes if isinstance(index, NativeKeyIndex) else 0
    names = [number.to_bytes(36, "big") for number in range(1, 4_000)]
    more = index.make(names)
    index.begin_write(more, DISK, map(Slot, range(len(more))))
    assert index.find_all(names).blocks == more
    if isinstance(index, NativeKeyIndex):
        assert index.num_bytes == num_bytes, "nothing had to be made for them"
        with pytest.raises(ValueError, match="num_blocks: 4294967296 is more than"):
            index.expect(2**32)
    index.check_invariants()


def test_misuse_is_told(index: KeyIndex) -> None:
    [block] = put(index, KEYS[:1])
    with pytest.raises(KeyError, match="no tier"):
        index.slots([block], "tape")
    with pytest.raises(AssertionError, match="no move"):
        index.begin_write([block], HOST, [Slot(1)])
    with pytest.raises(AssertionError, match="released more often"):
        index.release([block], HOST)
    with pytest.raises(ValueError, match="slot -1"):
        index.begin_write([block], DISK, [Slot(-1)])
    index.lease([block], HOST)
    assert index.lose(block, HOST) is None
    index.begin_write([block], DISK, [Slot(1)])
    index.lease([block], DISK)
    with pytest.raises(AssertionError, match="leased block"):
        index.abort([block], DISK)


class Both:
    """Calls the native index and its twin alike, and checks that they agree.

    In ``learning`` tiers the twin evicts what the native index chose, if it may be evicted. The
    twin's own order does not matter there.
    """

    def __init__(
        self, learning: Collection[str] = (), policy: str = "runs", group_bytes: int = 0
    ) -> None:
        self._learning = learning
        self._twin = PythonKeyIndex(TIERS, lambda: NS)
        self._first: KeyIndex = self._twin
        if NATIVE:
            self._first = NativeKeyIndex(
                {tier: policy if tier in learning else LRU for tier in TIERS},
                lambda: NS,
                group_bytes,
            )

    def evict(self, tier: str, num_blocks: int) -> Sequence[BlockId]:
        chosen = self._first.evict(tier, num_blocks)
        if tier in self._learning:
            order = self._twin._orders[TIERS.index(tier)]
            for block in reversed(chosen):
                order[block] = None
                order.move_to_end(block, last=False)
            num_blocks = len(chosen)
        if NATIVE:
            assert list(self._twin.evict(tier, num_blocks)) == list(chosen)
        return chosen

    def write_new(self, keys: Sequence[bytes], tier: str, slots: Sequence[Slot]) -> None:
        """Write new blocks. Native index and twin hash with a seed of their own each."""
        blocks, hashes = self._first.write_new(keys, tier, slots, 0.0)
        assert list(hashes) == list(self._first.hashes(blocks))
        if NATIVE:
            assert list(self._twin.write_new(keys, tier, slots, 0.0)[0]) == list(blocks)

    def order(self, tier: str) -> Sequence[BlockId]:
        first = self._first.order(tier)
        assert tier in self._learning or list(self._twin.order(tier)) == list(first)
        return first

    def admit_keys(
        self, keys: Sequence[bytes], tier: str, num_free: int, least_chance: float = 0.0
    ) -> Sequence[bytes]:
        """Return the native index's choice; the twin admits everything."""
        return self._first.admit_keys(keys, tier, num_free, least_chance)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: object) -> object:
            answer = getattr(self._first, name)(*arguments)
            if NATIVE:
                other = getattr(self._twin, name)(*arguments)
                assert other == answer, f"{name}{arguments}: {answer}, {other}"
            return answer

        return call


tiers = st.sampled_from(TIERS)
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)


class KeyIndexMachine(RuleBasedStateMachine):
    """Random writes, uses, leases and evictions.

    num_beside: how many other keys lie at the same place as a key.
    """

    learning: Collection[str] = ()
    policy = "runs"
    group_bytes = 0
    num_beside = 0

    def __init__(self) -> None:
        super().__init__()
        self.index = Both(self.learning, self.policy, self.group_bytes)
        self.num_slots = 0
        self.leases: list[tuple[BlockId, str]] = []
        self.leaving: list[tuple[BlockId, str]] = []

    def blocks(self, *states: State) -> list[tuple[BlockId, str]]:
        return [
            (each.block, tier)
            for each in self.index.known()
            for tier, (state, *_) in zip(TIERS, each.places, strict=True)
            if state in states
        ]

    def pick(self, data: st.DataObject, *states: State) -> tuple[BlockId, str] | None:
        found = self.blocks(*states)
        return data.draw(st.sampled_from(found)) if found else None

    @rule(keys=some_keys, tier=tiers, is_used=st.booleans())
    def begin(self, keys: list[bytes], tier: str, is_used: bool) -> None:
        found = [self.index.find(key) for key in keys]
        absent = [
            key
            for key, each in zip(keys, found, strict=True)
            if each is None or each[1][TIERS.index(tier)] is State.ABSENT
        ]
        slots = range(self.num_slots, self.num_slots + len(absent))
        self.num_slots += len(absent)
        if is_used:
            self.index.write_new(absent, tier, [Slot(slot) for slot in slots])
        else:
            self.index.begin_write(self.index.make(absent), tier, list(slots))

    @rule(tier=tiers, depth=st.integers(0, 1 << 31))
    def end_all(self, tier: str, depth: int) -> None:
        blocks = [block for block, at in self.blocks(State.WRITING) if at == tier]
        self.index.commit_prompt(blocks, range(depth, depth + len(blocks)), tier, 0.0)

    @rule(data=st.data(), is_good=st.booleans())
    def end(self, data: st.DataObject, is_good: bool) -> None:
        found = self.pick(data, State.WRITING)
        if found is not None and is_good:
            self.index.commit([found[0]], found[1], 0.0)
        elif found is not None and found not in self.leases:
            self.index.abort([found[0]], found[1])

    @rule(keys=some_keys)
    def touch(self, keys: list[bytes]) -> None:
        found = [self.index.find(key) for key in keys]
        self.index.touch([each[0] for each in found if each is not None], 0.0)

    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        found = self.pick(data, State.WRITING, State.READY)
        if found is not None:
            self.index.lease([found[0]], found[1])
            self.leases.append(found)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block, tier = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.index.release([block], tier)

    @rule(tier=tiers, num=st.integers(0, 5))
    def evict(self, tier: str, num: int) -> None:
        num_evictable = self.index.num_evictable(tier)
        chosen = self.index.evict(tier, num)
        # In learning tiers a block may be held by one behind it, and places are evicted as a whole.
        more = self.num_beside if num else 0
        assert len(chosen) <= min(num + more, num_evictable)
        assert len(chosen) >= min(num, num_evictable) or self.learning
        assert not {(block, tier) for block in chosen} & set(self.leases)
        self.leaving += [(block, tier) for block in chosen]

    @precondition(lambda self: self.leaving)
    @rule(stays=st.booleans())
    def leave(self, stays: bool) -> None:
        block, tier = self.leaving.pop(0)
        if stays:
            self.index.keep([block], tier)
        else:
            self.index.forget([block], tier)

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        found = self.pick(data, State.READY)
        if found is not None:
            is_held = found in self.leases
            assert (self.index.lose(*found) is None) == is_held

    @invariant()
    def are_alike(self) -> None:
        self.index.check_invariants()
        self.index.known()
        self.index.find_all(KEYS)
        self.index.facts([each.block for each in self.index.known()])
        for tier in TIERS:
            self.index.order(tier)
            self.index.missing([*KEYS, *KEYS[:3]], tier)
            self.index.in_slots([Slot(0), Slot(2), Slot(5)], tier)
            self.index.num_held(tier)
            self.index.num_evictable(tier)


def test_native_index_and_its_twin_do_the_same() -> None:
    run_state_machine_as_test(
        KeyIndexMachine, settings=settings(stateful_step_count=50, deadline=None)
    )
