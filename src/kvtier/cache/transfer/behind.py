"""Fence that storage waits for before it accesses memory that a device computes in."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.devices import Fence
from kvtier.tiers import Pieces

Blocks = Callable[[], Pieces]
"""Returns the pieces of the blocks. Called on the worker thread that is about to read or write
them."""


def behind(fence: Fence, blocks: Blocks) -> Blocks:
    """Return ``blocks``, delayed until the compute queued before ``fence`` is done.

    That compute may still read or write this memory, and a stream does not order storage I/O.
    """

    def after_compute() -> Pieces:
        fence.wait()
        return blocks()

    return after_compute
