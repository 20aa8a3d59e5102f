"""Conformance suite of storage tiers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

import pytest

from kvtier.core.types import BlockKey, BlockName
from kvtier.devices.base import Finding
from kvtier.layout import DType, KVGroup, full_attention
from kvtier.testing.storage_user import (
    NAMESPACE,
    TIMEOUT_S,
    Scattered,
    User,
    cuts,
    stored_bytes,
    stored_key,
    together,
)
from kvtier.tiers.storage import Outcome, StorageFacts, StorageTier

THERE, ABSENT, DAMAGED, FAILED = Outcome
GROUP = full_attention(2, 2, 8, DType.FLOAT16, 2)
LAYOUTS = tuple(cuts(GROUP.bytes_per_block).values())
each_layout = pytest.mark.parametrize("sizes", LAYOUTS, ids=list(cuts(GROUP.bytes_per_block)))


class StorageSuite(ABC):
    """Conformance suite of storage tiers that reach host memory.

    Implement ``make_storage`` and ``reopen``.
    """

    group: KVGroup = GROUP
    """Shape of the blocks: 256 bytes each."""

    @abstractmethod
    def make_storage(self, num_blocks: int) -> StorageTier:
        """Make an empty tier for exactly ``num_blocks`` blocks of ``group``.

        A test may make several, one after the other.
        """

    @abstractmethod
    def reopen(self, storage: StorageTier) -> StorageTier:
        """Make the storage of the next process, with the same medium and capacity.

        storage: the previous tier, which was closed or abandoned.
        """

    # Optional hooks. Tests of unsupported ones are skipped.

    def spoil(self, storage: StorageTier, key: BlockKey) -> bool:
        """Change a byte of a block on the medium. Return False if that is not supported."""
        del storage, key
        return False

    def abandon(self, storage: StorageTier) -> bool:
        """End the tier as the end of its process would. Return False if not supported."""
        del storage
        return False

    def hang(self, storage: StorageTier) -> AbstractContextManager[None] | None:
        """Return a context manager during which the medium hangs; None if that is impossible."""
        return self.stall(storage, 0)

    def stall(self, storage: StorageTier, num_blocks: int) -> AbstractContextManager[None] | None:
        """Return a context manager during which the medium moves ``num_blocks`` blocks, then hangs.

        The number may count parts of blocks instead. None if that is impossible.
        """
        del storage, num_blocks
        return None

    def check(self, storage: StorageTier) -> None:
        """Check the tier's invariants. No other call runs meanwhile."""
        del storage

    def end(self, storage: StorageTier) -> None:
        """Check the tier, and close it."""
        self.check(storage)
        storage.close()

    def next_process(self, storage: StorageTier) -> StorageTier:
        self.end(storage)
        return self.reopen(storage)

    # -- properties --------------------------------------------------------------------------------

    def test_tier_says_what_it_is(self) -> None:
        storage = self.make_storage(3)
        assert storage.name
        assert storage.num_blocks == 3
        assert storage.bytes_per_block == self.group.bytes_per_block
        facts = storage.facts
        assert isinstance(facts, StorageFacts)
        assert facts.reaches
        assert min(facts.num_readers, facts.num_writers) >= 1
        assert facts.request_s >= 0
        findings = storage.findings()
        assert findings
        assert all(isinstance(line, Finding) for line in findings)
        self.end(storage)

    def test_nothing_can_be_asked_for(self) -> None:
        storage = self.make_storage(2)
        user = User(storage)
        assert user.find() == user.put() == user.get() == []
        user.drop()
        user.drop(for_good=True)
        assert storage.scrub(0).num_damaged == 0
        self.end(storage)

    # -- blocks ------------------------------------------------------------------------------------

    @each_layout
    def test_block_comes_back_bit_for_bit_whatever_lies_in_pieces(self, sizes: list[int]) -> None:
        storage = self.make_storage(4)
        assert User(storage, sizes).put(0, 1, 2) == [THERE] * 3
        for others in LAYOUTS:
            assert User(storage, others).get(2, 0, 1) == [THERE] * 3
        self.end(storage)

    @each_layout
    def test_next_process_finds_the_same_bytes(self, sizes: list[int]) -> None:
        storage = self.make_storage(4)
        assert User(storage, sizes).put(0, 1, 2) == [THERE] * 3
        storage = self.next_process(storage)
        assert storage.has_unindexed
        user = User(storage)
        assert user.find(0, 1, 2) == [THERE] * 3
        assert user.get(0, 1, 2) == [THERE] * 3
        assert user.find(3) == [ABSENT]
        self.end(storage)

    def test_known_blocks_are_counted_without_an_effect(self) -> None:
        storage = self.make_storage(4)
        assert User(storage).put(0, 1, 2) == [THERE] * 3
        storage = self.next_process(storage)
        before = storage.unindexed_keys()
        for _ in range(2):
            assert User(storage).num_known(0, 1, 3, 2) in (None, 2)
        assert storage.unindexed_keys() == before
        self.end(storage)

    def test_absent_block_leaves_memory_as_it_was(self) -> None:
        storage = self.make_storage(4)
        user = User(storage)
        assert user.find(7) == user.get(7) == [ABSENT]
        user.put(0)
        assert user.get(7, 8) == [ABSENT] * 2
        self.end(storage)

    def test_outcomes_come_in_the_order_asked_for(self) -> None:
        storage = self.make_storage(4)
        user = User(storage)
        user.put(0, 1)
        assert user.get(5, 1, 6, 0) == [ABSENT, THERE, ABSENT, THERE]
        assert user.find(1, 0, 5) == [THERE, THERE, ABSENT]
        assert user.find(0, 5, 1)[:2] == [THERE, ABSENT]
        self.end(storage)

    def test_block_that_is_there_can_be_put_again(self) -> None:
        storage = self.make_storage(3)
        user = User(storage)
        assert user.put(0, 1) == [THERE] * 2
        assert user.put(1, 2, 0) == [THERE] * 3
        assert user.get(0, 1, 2) == [THERE] * 3
        storage = self.next_process(storage)
        assert User(storage).found(0, 1, 2) == [0, 1, 2]
        self.end(storage)

    def test_names_may_be_any(self) -> None:
        storage = self.make_storage(8)
        user = User(storage)
        for number, namespace in enumerate((bytes(32), b"\xff" * 32, b"a" * 32)):
            assert user.put(number, namespace=namespace) == [THERE]
        for number, depth in enumerate((1, 1 << 20, 2**32 - 1), 3):
            assert user.put(number, depth=depth) == [THERE]
        storage = self.next_process(storage)
        user = User(storage)
        assert user.found(*range(6)) == list(range(6))
        assert user.get(*range(6)) == [THERE] * 6
        self.end(storage)

    def test_keys_that_are_alike_are_different(self) -> None:
        storage = self.make_storage(8)
        keys = [BlockKey(bytes(at) + b"\x01" + bytes(31 - at)) for at in (0, 7, 8, 16, 31)]
        keys += [BlockKey(bytes(32)), BlockKey(b"\xff" * 32)]
        memory = Scattered(len(keys), LAYOUTS[0])
        contents = [stored_bytes(key, storage.bytes_per_block) for key in keys]
        for at, content in enumerate(contents):
            memory.write(at, content)
        names = [BlockName(NAMESPACE, 0, key) for key in keys]
        assert storage.put(names, memory.pieces, TIMEOUT_S) == [THERE] * len(keys)
        memory.clear()
        assert storage.get(keys, memory.pieces, TIMEOUT_S) == [THERE] * len(keys)
        assert [memory.read(at) for at in range(len(keys))] == contents
        self.end(storage)

    # -- room --------------------------------------------------------------------------------------

    def test_room_is_a_hard_bound(self) -> None:
        storage = self.make_storage(4)
        user = User(storage)
        assert user.put(0, 1, 2, 3) == [THERE] * 4
        more = user.put(4, 5)
        there = user.found(*range(6))
        assert len(there) <= 4 or storage.facts.is_shared
        if not storage.facts.evicts:
            assert more == [FAILED] * 2
            assert there == [0, 1, 2, 3]
        assert user.get(*there) == [THERE] * len(there)
        self.end(storage)

    def test_more_than_there_is_room_for_is_put_as_far_as_it_goes(self) -> None:
        storage = self.make_storage(4)
        user = User(storage)
        user.put(0)
        outcomes = user.put(1, 2, 0, 3, 4, 5)
        if not storage.facts.evicts:
            assert outcomes.count(THERE) == 4, "block 0 is there, and there is room for three more"
            assert outcomes[2] is THERE
        assert len(user.found(*range(6))) <= 4 or storage.facts.is_shared
        self.end(storage)

    def test_found_blocks_stay_and_unindexed_ones_make_room(self) -> None:
        storage = self.make_storage(6)
        User(storage).put(*range(6))
        storage = self.next_process(storage)
        user = User(storage)
        assert user.find(1, 4) == [THERE] * 2
        new = user.put(10, 11, 12, 13)
        if not storage.facts.evicts:
            assert new == [THERE] * 4
            assert user.put(14) == [FAILED]
            assert user.found(*range(6)) == [1, 4]
        assert user.get(1, 4) == [THERE] * 2 or storage.facts.evicts
        assert len(user.found(*range(15))) <= 6 or storage.facts.is_shared
        self.end(storage)

    def test_dropped_block_gives_its_room_to_others(self) -> None:
        storage = self.make_storage(4)
        user = User(storage)
        user.put(0, 1, 2, 3)
        user.drop(1, 2)
        assert user.put(4, 5) == [THERE] * 2
        assert user.get(0, 3, 4, 5) == [THERE] * 4 or storage.facts.evicts
        assert user.found(1, 2) == [] or storage.facts.evicts
        self.end(storage)

    def test_dropped_block_can_be_put_again(self) -> None:
        storage = self.make_storage(2)
        user = User(storage)
        for for_good in (False, True, False):
            assert user.put(0) == [THERE]
            user.drop(0, for_good=for_good)
        assert user.put(0) == user.get(0) == [THERE]
        self.end(storage)

    def test_block_dropped_for_good_is_never_found_again(self) -> None:
        storage = self.make_storage(4)
        user = User(storage)
        user.put(0, 1, 2)
        user.drop(1, for_good=True)
        assert user.find(1) == user.get(1) == [ABSENT]
        storage = self.next_process(storage)
        user = User(storage)
        assert user.find(1) == [ABSENT]
        user.drop(2, for_good=True)  # a block that this process has not found
        storage = self.next_process(storage)
        assert User(storage).found(0, 1, 2) == [0]
        self.end(storage)

    def test_abandoned_tier_keeps_what_it_has_acknowledged(self) -> None:
        storage = self.make_storage(4)
        user = User(storage)
        user.put(0, 1, 2)
        user.drop(2, for_good=True)
        if not self.abandon(storage):
            storage.close()
            pytest.skip("this tier can't be abandoned")
        storage = self.reopen(storage)
        user = User(storage)
        assert user.found(0, 1, 2) == [0, 1]
        assert user.get(0, 1) == [THERE] * 2
        self.end(storage)

    # -- damage ------------------------------------------------------------------------------------

    def spoiled(self, storage: StorageTier, number: int) -> None:
        if not self.spoil(storage, stored_key(number)):
            storage.close()
            pytest.skip("bytes on this medium can't be changed")

    def scrubbed_storage(self, num_blocks: int) -> StorageTier:
        storage = self.make_storage(num_blocks)
        if not storage.facts.wants_scrubbing:
            storage.close()
            pytest.skip("this tier needs no scrubbing")
        return storage

    def test_damaged_block_is_never_taken_for_the_right_one(self) -> None:
        storage = self.make_storage(3)
        user = User(storage)
        user.put(0, 1, 2)
        self.spoiled(storage, 1)
        outcomes = user.get(0, 1, 2)
        assert outcomes[::2] == [THERE] * 2
        assert outcomes[1] in (DAMAGED, ABSENT)
        assert user.find(1) == user.get(1) == [ABSENT], "the tier has forgotten it"
        assert user.put(1) == [THERE], "its room is free, or it is overwritten"
        assert user.get(0, 1, 2) == [THERE] * 3
        self.end(storage)

    def test_damage_between_two_processes_is_noticed(self) -> None:
        storage = self.make_storage(3)
        User(storage).put(0, 1)
        self.check(storage)
        storage.close()
        self.spoiled(storage, 0)
        storage = self.reopen(storage)
        user = User(storage)
        if user.find(0) == [THERE]:
            assert user.get(0)[0] in (DAMAGED, ABSENT)
        assert user.find(1) == user.get(1) == [THERE]
        assert user.put(0) == user.get(0) == [THERE]
        self.end(storage)

    @pytest.mark.parametrize("is_found", [True, False])
    def test_scrub_finds_damage_before_somebody_needs_the_block(self, is_found: bool) -> None:
        storage = self.scrubbed_storage(3)
        User(storage).put(0, 1, 2)
        if not is_found:
            storage = self.next_process(storage)
        self.spoiled(storage, 1)
        report = storage.scrub(1 << 30)
        assert report.num_checked >= 3
        assert report.num_bytes >= 3 * storage.bytes_per_block
        assert (report.num_damaged, report.num_failed) == (1, 0)
        user = User(storage)
        assert user.get(1)[0] in (DAMAGED, ABSENT)
        assert user.put(1) == user.get(1) == [THERE]
        assert user.find(0, 2) == user.get(0, 2) == [THERE] * 2
        self.end(storage)

    def test_scrubbed_block_is_not_in_the_way_of_others(self) -> None:
        """The room of a damaged block can be reused, and its key does not find the new block."""
        storage = self.scrubbed_storage(2)
        User(storage).put(0, 1)
        storage = self.next_process(storage)
        self.spoiled(storage, 0)
        storage.scrub(1 << 30)
        user = User(storage)
        assert user.find(1) == [THERE]
        assert user.put(2) == [THERE]
        assert user.get(1, 2) == [THERE] * 2
        assert user.find(0) == user.get(0) == [ABSENT]
        assert user.put(0)[0] is FAILED or storage.facts.evicts
        self.end(storage)

    # -- deadlines ---------------------------------------------------------------------------------

    def hanging(self, storage: StorageTier, num_blocks: int = 0) -> AbstractContextManager[None]:
        hanging = self.stall(storage, num_blocks) if num_blocks else self.hang(storage)
        if hanging is None:
            storage.close()
            pytest.skip("this medium can't be made to hang")
        return hanging

    def test_call_returns_in_time_though_the_medium_hangs(self) -> None:
        storage = self.make_storage(4)
        User(storage).put(0, 1)
        hurried = User(storage, timeout_s=0.05)
        began = time.monotonic()
        with self.hanging(storage):
            assert hurried.get(0, 1) == [FAILED] * 2
            assert hurried.put(2, 3) == [FAILED] * 2
            assert hurried.find(0)[0] in (THERE, FAILED)
            assert hurried.find(2)[0] in (ABSENT, FAILED)
        assert time.monotonic() - began < 5, "soon after its time-out"
        self.end(storage)

    def test_nothing_is_under_way_when_a_late_call_has_returned(self) -> None:
        """After a late call has returned, it no longer accesses its memory."""
        storage = self.make_storage(4)
        User(storage).put(0, 1)
        memory = Scattered(2, [storage.bytes_per_block])
        with self.hanging(storage):
            keys = [stored_key(0), stored_key(1)]
            assert storage.get(keys, memory.pieces, 0.05) == [FAILED] * 2
            memory.clear()
            names = [BlockName(NAMESPACE, 0, stored_key(number)) for number in (2, 3)]
            assert storage.put(names, memory.pieces, 0.05) == [FAILED] * 2
        user = User(storage)
        assert user.get(0, 1) == [THERE] * 2, "a retry finds it"
        assert all(memory.is_untouched(at) for at in range(2)), "a late read changed memory"
        assert user.put(2, 3) == user.get(2, 3) == [THERE] * 2, "not the bytes of a late write"
        self.end(storage)

    def test_what_came_too_late_is_never_half_there(self) -> None:
        storage = self.make_storage(6)
        User(storage).put(0, 1)
        with self.hanging(storage, num_blocks=3):
            outcomes = User(storage, timeout_s=0.05).put(2, 3, 4, 5)
        assert FAILED in outcomes
        in_time = {at for at, outcome in enumerate(outcomes, 2) if outcome is THERE}
        for _ in range(2):
            user = User(storage)
            there = set(user.found(*range(6)))
            assert {0, 1} | in_time <= there
            assert user.get(*there) == [THERE] * len(there)
            assert set(user.get(*range(6))) <= {THERE, ABSENT}
            storage = self.next_process(storage)
        self.end(storage)

    def test_what_came_in_time_is_there_and_the_rest_has_failed(self) -> None:
        storage = self.make_storage(6)
        User(storage).put(*range(6))
        with self.hanging(storage, num_blocks=3):
            outcomes = User(storage, timeout_s=0.05).get(*range(6))
        assert set(outcomes) <= {THERE, FAILED}
        assert FAILED in outcomes
        assert User(storage).get(*range(6)) == [THERE] * 6
        self.end(storage)

    def test_time_that_is_over_is_no_error(self) -> None:
        storage = self.make_storage(4)
        User(storage).put(0)
        for timeout_s in (0.0, -1.0):
            late = User(storage, timeout_s=timeout_s)
            assert late.find(0)[0] in (THERE, FAILED)
            assert late.get(0)[0] in (THERE, FAILED)
            assert late.put(1)[0] in (THERE, FAILED)
        assert User(storage).get(0) == [THERE]
        self.end(storage)

    # -- concurrency -------------------------------------------------------------------------------

    def test_as_many_at_a_time_as_the_facts_say(self) -> None:
        """Readers, writers, and one thread that finds and drops run concurrently."""
        storage = self.make_storage(40)
        facts, rounds = storage.facts, 25
        User(storage).put(0, 1, 2, 3)
        own = {at: range(4 + 3 * at, 7 + 3 * at) for at in range(min(8, facts.num_writers))}
        old = range(30, 34)
        User(storage).put(*old)

        def read(at: int) -> None:
            assert User(storage, LAYOUTS[at % 3]).get(3, 1, 0, 2) == [THERE] * 4

        def write(at: int) -> None:
            user = User(storage, LAYOUTS[at % 3])
            assert user.put(*own[at]) == [THERE] * 3

        def look(at: int) -> None:
            user = User(storage)
            assert user.find(0, 1, 2, 3) == [THERE] * 4
            user.drop(*old, for_good=at % 2 == 0)
            assert user.find(50) == [ABSENT]

        jobs = [(read, at) for at in range(min(8, facts.num_readers))]
        jobs += [(write, at) for at in own]
        together([*jobs, (look, 0)], rounds)
        user = User(storage)
        for numbers in own.values():
            assert user.get(*numbers) == [THERE] * 3
        self.end(storage)

    def test_agrees_with_a_dictionary(self) -> None:
        """Run random calls and restarts against a model."""
        pytest.importorskip("hypothesis")
        from kvtier.testing.storage_machine import check_against_dictionary

        check_against_dictionary(self)
