"""The native index and its Python twin, for tests that both have to pass."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest

from kvtier.core import hot
from kvtier.core.types import BlockId
from kvtier.index import PromptIndex
from kvtier.index.native_index import NativeIndex
from kvtier.index.policies import EvictionPolicy, LruPolicy
from kvtier.index.policies.replayed import LRU, POLICIES
from kvtier.index.python_index import PythonIndex

INDEXES = ("native", "python")
LEARNING = tuple(name for name in POLICIES if name != LRU)
"""Policies that learn from requests."""


class FollowingPolicy(EvictionPolicy):
    """Evicts the blocks that another index chose, and checks that each of them may be evicted."""

    def __init__(self) -> None:
        self.chosen: list[BlockId] = []
        self._candidates: set[BlockId] = set()

    def touch(self, block: BlockId, now: float) -> None:
        return

    def add(self, block: BlockId) -> None:
        self._candidates.add(block)

    def discard(self, block: BlockId) -> None:
        self._candidates.discard(block)

    def forget(self, block: BlockId) -> None:
        self._candidates.discard(block)

    def victim(self) -> BlockId | None:
        if not self.chosen:
            return None
        block = self.chosen.pop(0)
        assert block in self._candidates, "a block left that had to stay"
        return block

    def candidates(self) -> set[BlockId]:
        return set(self._candidates)


def make(
    kind: str,
    tiers: Sequence[str],
    learning: Collection[str] = (),
    policy: str = "runs",
) -> PromptIndex:
    """Make an empty index under LRU; ``learning`` tiers of a native one are under ``policy``.

    The test is skipped if there is no native core.
    """
    if kind == "python":
        assert not learning, "only the native core has other policies"
        return PythonIndex({tier: LruPolicy() for tier in tiers})
    if not hot.NATIVE:
        pytest.skip(f"no native core: {hot.NATIVE_REASON}")
    return NativeIndex({tier: policy if tier in learning else "lru" for tier in tiers})


class Both:
    """Calls the native index and its twin alike, and checks that they agree.

    In ``learning`` tiers the twin evicts what the native index chose, if it may be evicted.
    """

    def __init__(
        self,
        tiers: Sequence[str],
        learning: Collection[str] = (),
        policy: str = "runs",
    ) -> None:
        self.native = make("native", tiers, learning, policy)
        self._following = {tier: FollowingPolicy() for tier in learning}
        self.twin = make("python", tiers)
        if learning:
            policies: dict[str, EvictionPolicy] = {
                tier: self._following.get(tier) or LruPolicy() for tier in tiers
            }
            self.twin = PythonIndex(policies)

    def __len__(self) -> int:
        assert len(self.native) == len(self.twin)
        return len(self.native)

    def evict(self, tier: str, num_blocks: int) -> Sequence[BlockId]:
        chosen = self.native.evict(tier, num_blocks)
        if tier in self._following:
            self._following[tier].chosen = list(chosen)
        assert list(self.twin.evict(tier, num_blocks)) == list(chosen)
        return chosen

    def admit(
        self, blocks: Sequence[BlockId], tier: str, num_free: int, least_chance: float = 0.0
    ) -> Sequence[BlockId]:
        """Return the native index's choice; the twin admits everything."""
        return self.native.admit(blocks, tier, num_free, least_chance)

    def __getattr__(self, name: str) -> Any:
        native, twin = getattr(self.native, name), getattr(self.twin, name)
        if not callable(native):
            assert native == twin
            return native

        def call(*arguments: Any, **named: Any) -> Any:
            result, expected = native(*arguments, **named), twin(*arguments, **named)
            if isinstance(expected, np.ndarray):
                assert result.tolist() == expected.tolist()
            else:
                assert result == expected, f"{name} differs"
            return result

        return call
