"""Counts that every policy over one tier has."""

from __future__ import annotations

from typing import Protocol


class Core(Protocol):
    """A policy of the native core, or its twin."""

    def num_blocks(self) -> int: ...
    def num_history(self) -> int: ...
    def num_bytes(self) -> int: ...
    def check_invariants(self) -> None: ...


class Counted:
    """Counts of the policy ``_core``, which subclasses make."""

    __slots__ = ()
    _core: Core

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks in the tier."""
        return self._core.num_blocks()

    @property
    def num_history(self) -> int:
        """Entries kept of blocks that have left: at most twice the capacity."""
        return self._core.num_history()

    @property
    def num_bytes(self) -> int:
        """Return the policy's memory in bytes."""
        return self._core.num_bytes()

    def check_invariants(self) -> None:
        """Raise AssertionError where the policy disagrees with itself. O(all blocks)."""
        self._core.check_invariants()
