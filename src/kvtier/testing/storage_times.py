"""Conformance tests of storage tiers for deadlines."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

import pytest

from kvtier.core.types import BlockName
from kvtier.testing.storage_user import NAMESPACE, Scattered, User, stored_key
from kvtier.tiers.storage import Outcome, StorageTier

THERE, ABSENT, _, FAILED = Outcome


class StorageTimes(ABC):
    """Part of ``StorageSuite`` for tiers whose medium can be made to hang."""

    @abstractmethod
    def make_storage(self, num_blocks: int) -> StorageTier:
        """Make an empty tier for exactly ``num_blocks`` blocks of ``group``.

        A test may make several, one after the other.
        """

    @abstractmethod
    def next_process(self, storage: StorageTier) -> StorageTier:
        """Close the tier, and make the one of the next process."""

    @abstractmethod
    def end(self, storage: StorageTier) -> None:
        """Check the tier, and close it."""

    def hang(self, storage: StorageTier) -> AbstractContextManager[None] | None:
        """Return a context manager during which the medium hangs; None if that is impossible."""
        return self.stall(storage, 0)

    def stall(self, storage: StorageTier, num_blocks: int) -> AbstractContextManager[None] | None:
        """Return a context manager during which the medium moves ``num_blocks`` blocks, then hangs.

        The number may count parts of blocks instead. None if that is impossible.
        """
        del storage, num_blocks
        return None

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
