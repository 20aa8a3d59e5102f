"""Counters shared by all policies over one tier."""

from __future__ import annotations

from typing import Protocol


class Core(Protocol):
    """Interface of a policy object that has the counters."""

    def num_blocks(self) -> int: ...
    def num_history(self) -> int: ...
    def num_bytes(self) -> int: ...
    def check_invariants(self) -> None: ...


class PolicyCounters:
    """Counters of the policy ``_core``, which subclasses create."""

    __slots__ = ()
    _core: Core

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the tier."""
        return self._core.num_blocks()

    @property
    def num_history(self) -> int:
        """Number of history entries of evicted blocks: at most twice the capacity."""
        return self._core.num_history()

    @property
    def num_bytes(self) -> int:
        """Memory of the policy in bytes."""
        return self._core.num_bytes()

    def check_invariants(self) -> None:
        """Raise AssertionError if the policy's state is inconsistent. O(all blocks)."""
        self._core.check_invariants()
