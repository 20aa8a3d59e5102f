"""Fence that storage waits for before it touches memory a device computes in."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.devices import Fence
from kvtier.tiers import Pieces

Blocks = Callable[[], Pieces]
"""Says where blocks lie, on the thread of the worker that is about to read or write them."""


def behind(fence: Fence, blocks: Blocks) -> Blocks:
    """``blocks``, once what the device computes before ``fence`` is done.

    It may still use, or make, what lies there. No read or write of storage's is ordered by a
    stream.
    """

    def after_compute() -> Pieces:
        fence.wait()
        return blocks()

    return after_compute
