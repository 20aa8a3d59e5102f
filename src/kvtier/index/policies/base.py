"""The seam of eviction policies: order the candidates of one column."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from kvtier.hints import Said
from kvtier.index.residency import Residency
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

    A policy that ``knows_prompts`` is told more: ``on_request`` of every request, before its blocks
    enter the column, and ``entered`` of each block that begins to be written, or is there at once.
    A block that it gave as a victim counts as gone.

    native_name: the native core's name for the very same policy. Where it is set in the class
    itself, the native index is used and the object only names the policy; otherwise the index in
    Python calls the object.
    """

    native_name: ClassVar[str] = ""
    knows_prompts: ClassVar[bool] = False

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

    def see(self, residency_of: Callable[[BlockId], Residency]) -> None:
        """Give the policy a function that returns the residency of a block in the column."""
        return

    def set_room(self, num_blocks: int) -> None:
        """The column has room for so many blocks."""
        return

    def on_request(self, path: Sequence[int], found: Sequence[BlockId], now: float) -> None:
        """Report a request that begins.

        path: names of its prefixes, 64 bits each. found: the first blocks, as far as the column has
        them.
        """
        return

    def retain(self, path: Sequence[int], found: Sequence[BlockId], said: Said, now: float) -> None:
        """Take a hint on a prompt into account. The prompt is given as to ``on_request``."""
        return

    def set_recompute_slope(self, at_blocks: float) -> None:
        """Set the depth, in blocks, at which a block is worth twice the first one, in proportion.

        0: all are worth the same.
        """
        return

    def admit(
        self, names: Sequence[int], num_free: int, least_chance: float = 0.0
    ) -> Sequence[int]:
        """Return the positions of those absent blocks that are worth their room and a write.

        See ``BlockIndex.admit``.
        """
        return range(len(names))

    def entered(self, block: BlockId, name: int, parent: BlockId | None, at: int) -> None:
        """The block is in the column from now on.

        name: of its prefix. parent: the block in front of it, None where the column has not got
        that. at: how many blocks are in front of it.
        """
        return

    def begin_evicting(self) -> None:
        """The victims that follow are one eviction's."""
        return

    @abstractmethod
    def victim(self) -> BlockId | None:
        """The candidate to lose first; it stays one until ``discard``."""

    def check_invariants(self) -> None:
        """Raise AssertionError where the policy disagrees with itself; for tests."""
        return

    @abstractmethod
    def candidates(self) -> set[BlockId]:
        """All candidates; for tests and invariants only."""
