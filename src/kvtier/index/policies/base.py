"""Interface of eviction policies, which order the eviction candidates of one tier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from kvtier.core.hints import BlockHint
from kvtier.core.types import BlockId
from kvtier.index.residency import Residency


class EvictionPolicy(ABC):
    """Orders the blocks of one tier for eviction.

    The caller guarantees
        ``add`` is called when a block becomes a candidate: it is ready, not leased and, in a group
        that needs all blocks, a leaf within the tier. ``discard`` is called when any of that
        ends. ``touch`` is called on every use of a block, candidate or not, and ``forget`` when the
        tier no longer holds it. ``now`` is finite and never decreases within one policy.
    The implementer provides
        ``victim``, the candidate to evict first. Every call is O(log n) or better.
    Outcomes
        ``victim`` returns None if there is no candidate. Nothing raises.

    A policy that ``knows_prompts`` gets further calls: ``on_request`` for every request, before its
    blocks enter the tier, and ``entered`` for each block whose write begins, or that is there at
    once. A block that it returned as a victim counts as evicted.

    Only the Python index calls policies in Python; the native index has its own, by name.
    """

    knows_prompts: ClassVar[bool] = False

    @abstractmethod
    def touch(self, block: BlockId, now: float) -> None:
        """Report that the block was used, or entered the tier, at ``now`` (seconds)."""

    @abstractmethod
    def add(self, block: BlockId) -> None:
        """Add the block to the candidates."""

    @abstractmethod
    def discard(self, block: BlockId) -> None:
        """Remove the block from the candidates. It may become one again."""

    @abstractmethod
    def forget(self, block: BlockId) -> None:
        """Drop all state of a block that the tier no longer holds."""

    def see(self, residency_of: Callable[[BlockId], Residency]) -> None:
        """Give the policy a function that returns the residency of a block in the tier."""
        return

    def set_room(self, num_blocks: int) -> None:
        """Set the capacity of the tier in blocks."""
        return

    def on_request(self, path: Sequence[int], found: Sequence[BlockId], now: float) -> None:
        """Report a new request.

        path: names of all prefixes of its prompt, 64 bits each. found: the first blocks of the
        prompt, as far as the tier holds them. now: time in seconds.
        """
        return

    def retain(
        self, path: Sequence[int], found: Sequence[BlockId], block_hint: BlockHint, now: float
    ) -> None:
        """Apply a hint on a prompt's future use. For path and found see ``on_request``."""
        return

    def set_recompute_slope(self, at_blocks: float) -> None:
        """Set how the value of a block grows with its depth.

        at_blocks: see ``BlockIndex.set_recompute_slope``.
        """
        return

    def admit(
        self, names: Sequence[int], num_free: int, least_chance: float = 0.0
    ) -> Sequence[int]:
        """Return the positions of the blocks to admit; see ``BlockIndex.admit``.

        names: names of the blocks' prefixes.
        """
        return range(len(names))

    def entered(self, block: BlockId, name: int, parent: BlockId | None, at: int) -> None:
        """Report that the block entered the tier.

        Args:
            block: the block.
            name: name of its prefix.
            parent: the block before it; None if the tier does not hold that.
            at: number of blocks before it in the prompt.
        """
        return

    def begin_evicting(self) -> None:
        """Report that the following victims belong to one eviction."""
        return

    @abstractmethod
    def victim(self) -> BlockId | None:
        """Return the candidate to evict first. It stays a candidate until ``discard``."""

    def check_invariants(self) -> None:
        """Raise AssertionError if the policy's state is inconsistent; for tests."""
        return

    @abstractmethod
    def candidates(self) -> set[BlockId]:
        """Return all candidates; for tests and invariants only."""
