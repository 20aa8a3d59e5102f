"""Stateful test of a storage tier against a model: random calls and restarts."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvtier.testing.storage_suite import StorageSuite
from kvtier.testing.storage_user import User
from kvtier.tiers.storage import Outcome

NUM_BLOCKS = 5
THERE, ABSENT = Outcome.THERE, Outcome.ABSENT
some_numbers = st.lists(st.integers(0, 9), max_size=4, unique=True)


def check_against_dictionary(suite: StorageSuite) -> None:
    """Run random sequences of calls, each on a new tier that ``suite`` makes."""
    profile = settings(
        max_examples=15,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )

    class OfSuite(StorageMachine):
        def __init__(self) -> None:
            super().__init__(suite)

    run_state_machine_as_test(OfSuite, settings=profile)


class StorageMachine(RuleBasedStateMachine):
    """Model of a storage tier, as sets of block numbers.

    kept: blocks that must exist.
    unindexed: blocks of an earlier process; they exist until their room
    is needed. maybe: blocks that may have been dropped or evicted.
    """

    def __init__(self, suite: StorageSuite) -> None:
        super().__init__()
        self.suite = suite
        self.storage = suite.make_storage(NUM_BLOCKS)
        self.kept: set[int] = set()
        self.unindexed: set[int] = set()
        self.maybe: set[int] = set()

    @property
    def user(self) -> User:
        return User(self.storage)

    def teardown(self) -> None:
        self.storage.close()

    @rule(numbers=some_numbers)
    def put(self, numbers: list[int]) -> None:
        before = self.kept & set(numbers)
        num_new = len(set(numbers) - self.kept)
        outcomes = self.user.put(*numbers)
        there = {
            number for number, outcome in zip(numbers, outcomes, strict=True) if outcome is THERE
        }
        if self.storage.facts.evicts:
            self.maybe |= self.kept | there
            return
        assert before <= there, "what is there needs no room"
        room = NUM_BLOCKS - len(self.kept)
        assert len(there - before) == min(room, num_new), "a block that there was room for failed"
        self.kept |= there
        self.unindexed -= there
        if len(self.kept | self.unindexed | self.maybe) > NUM_BLOCKS:
            self.maybe |= self.unindexed
            self.unindexed = set()
        self.maybe -= there

    @rule(numbers=some_numbers)
    def get(self, numbers: list[int]) -> None:
        outcomes = self.user.get(*numbers)
        for number, outcome in zip(numbers, outcomes, strict=True):
            if number in self.kept:
                assert outcome is THERE
            elif number not in self.unindexed | self.maybe:
                assert outcome is ABSENT
            else:
                assert outcome in (THERE, ABSENT)
                if outcome is THERE:
                    self._was_found(number)

    @rule(numbers=some_numbers)
    def find(self, numbers: list[int]) -> None:
        is_leading = True
        for number, outcome in zip(numbers, self.user.find(*numbers), strict=True):
            assert outcome in (THERE, ABSENT)
            if outcome is THERE:
                assert number in self.kept | self.unindexed | self.maybe
                self._was_found(number)
            elif is_leading:
                assert number not in self.kept | self.unindexed
            is_leading &= outcome is THERE

    def _was_found(self, number: int) -> None:
        """Update the model: a found block must stay, unless the tier evicts."""
        self.unindexed.discard(number)
        self.maybe.discard(number)
        (self.maybe if self.storage.facts.evicts else self.kept).add(number)

    @rule(numbers=some_numbers, for_good=st.booleans())
    def drop(self, numbers: list[int], for_good: bool) -> None:
        self.user.drop(*numbers, for_good=for_good)
        for known in (self.kept, self.unindexed):
            if not for_good:
                self.maybe |= known & set(numbers)
            known.difference_update(numbers)
        if for_good:
            self.maybe.difference_update(numbers)

    @rule(max_bytes=st.integers(0, 1000))
    def scrub(self, max_bytes: int) -> None:
        report = self.storage.scrub(max_bytes)
        assert (report.num_damaged, report.num_failed) == (0, 0)

    @rule()
    def restart(self) -> None:
        self.storage = self.suite.next_process(self.storage)
        if self.storage.facts.evicts:
            self.maybe |= self.kept
        else:
            self.unindexed |= self.kept
        self.kept = set()

    @invariant()
    def room_is_a_hard_bound(self) -> None:
        assert len(self.kept) <= NUM_BLOCKS
        self.suite.check(self.storage)
