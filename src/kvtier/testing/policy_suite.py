"""Conformance suite of eviction policies. It does not test the order of victims."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod

import pytest

from kvtier.core.types import BlockId
from kvtier.index.policies.base import EvictionPolicy


class PolicySuite(ABC):
    """Conformance suite of eviction policies. Implement ``make_policy``."""

    @abstractmethod
    def make_policy(self) -> EvictionPolicy:
        """Make a policy without any blocks."""

    def test_no_candidate_means_no_victim(self) -> None:
        policy = self.make_policy()
        assert policy.victim() is None
        policy.touch(BlockId(1), 0.0)
        assert policy.victim() is None
        assert policy.candidates() == set()

    def test_victim_stays_until_it_is_discarded(self) -> None:
        policy = self._with_candidates(5)
        victim = policy.victim()
        assert victim is not None
        assert policy.victim() == victim
        policy.discard(victim)
        assert policy.victim() not in (victim, None)

    def test_discarded_block_may_become_a_candidate_again(self) -> None:
        policy = self._with_candidates(1)
        policy.discard(BlockId(0))
        assert policy.victim() is None
        policy.add(BlockId(0))
        assert policy.victim() == 0

    def test_adding_twice_is_adding_once(self) -> None:
        policy = self._with_candidates(1)
        policy.add(BlockId(0))
        policy.discard(BlockId(0))
        assert policy.victim() is None
        assert policy.candidates() == set()

    def test_discarding_a_block_that_is_no_candidate_changes_nothing(self) -> None:
        policy = self._with_candidates(2)
        policy.touch(BlockId(7), 2.0)
        policy.discard(BlockId(7))
        policy.discard(BlockId(8))
        assert policy.candidates() == {0, 1}

    def test_forgotten_block_is_never_a_victim(self) -> None:
        policy = self._with_candidates(3)
        for block in range(3):
            policy.forget(BlockId(block))
        assert policy.victim() is None
        assert policy.candidates() == set()

    def test_forgotten_block_may_enter_again(self) -> None:
        policy = self._with_candidates(2)
        policy.forget(BlockId(0))
        policy.touch(BlockId(0), 5.0)
        policy.add(BlockId(0))
        assert policy.candidates() == {0, 1}
        assert sorted(self._drain(policy)) == [0, 1]

    def test_blocks_touched_at_the_same_moment_are_all_found(self) -> None:
        policy = self.make_policy()
        for block in range(20):
            policy.touch(BlockId(block), 1.0)
            policy.add(BlockId(block))
        assert sorted(self._drain(policy)) == list(range(20))

    @pytest.mark.parametrize("seed", range(20))
    def test_victims_are_exactly_the_candidates(self, seed: int) -> None:
        rng = random.Random(seed)
        policy = self.make_policy()
        held: set[int] = set()
        candidates: set[int] = set()
        for step in range(400):
            block = rng.randrange(30)
            if block not in held:
                held.add(block)
                policy.touch(BlockId(block), float(step))
            match rng.randrange(5):
                case 0:
                    policy.touch(BlockId(block), float(step))
                case 1 | 2:
                    policy.add(BlockId(block))
                    candidates.add(block)
                case 3:
                    policy.discard(BlockId(block))
                    candidates.discard(block)
                case _:
                    policy.forget(BlockId(block))
                    candidates.discard(block)
                    held.discard(block)
            assert policy.candidates() == candidates
            victim = policy.victim()
            assert (victim in candidates) if candidates else (victim is None)
        assert sorted(self._drain(policy)) == sorted(candidates)

    def _with_candidates(self, num_blocks: int) -> EvictionPolicy:
        policy = self.make_policy()
        for block in range(num_blocks):
            policy.touch(BlockId(block), float(block))
            policy.add(BlockId(block))
        return policy

    @staticmethod
    def _drain(policy: EvictionPolicy) -> list[int]:
        """Evict all candidates, one after the other; return them in order."""
        victims: list[int] = []
        while (victim := policy.victim()) is not None:
            assert victim not in victims, "a discarded block was a victim again"
            victims.append(victim)
            policy.discard(victim)
            policy.forget(victim)
        return victims
