"""The seam of eviction policies: order the candidates of one column."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from kvtier.types import BlockId


class EvictionPolicy(ABC):
    """Orders the blocks of one column that may leave it.

    The caller guarantees
        a block becomes a candidate when it is ready, unleased and, in a group that needs all
        blocks, a leaf within the column (``add``), and stops being one when any of that ends
        (``discard``); ``touch`` is called on every use of a block, candidate or not; ``forget``
        when the column no longer holds it. ``now`` is finite
        and never runs backwards within one policy.
    The implementer provides
        ``victim``: the candidate to lose first. Every call is O(log n) or better.
    Outcomes
        ``victim`` gives None when there is no candidate. Nothing raises.

    native_name: the native core's name for the very same policy. Where it is set in the class
    itself, the native index is used and the object only names the policy; otherwise the index in
    Python calls the object.
    """

    native_name: ClassVar[str] = ""

    @abstractmethod
    def touch(self, block: BlockId, now: float) -> None:
        """The block was used, or entered the column, at ``now`` (seconds)."""

    @abstractmethod
    def add(self, block: BlockId) -> None:
        """The block became a candidate."""

    @abstractmethod
    def discard(self, block: BlockId) -> None:
        """The block is no longer a candidate (it may become one again)."""

    @abstractmethod
    def forget(self, block: BlockId) -> None:
        """The column no longer holds the block: drop all state about it."""

    @abstractmethod
    def victim(self) -> BlockId | None:
        """The candidate to lose first; it stays one until ``discard``."""

    @abstractmethod
    def candidates(self) -> set[BlockId]:
        """All candidates; for tests and invariants only."""
