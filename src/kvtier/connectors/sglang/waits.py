"""What requests in SGLang's queue wait for."""

from __future__ import annotations

from enum import IntEnum


class Wait(IntEnum):
    """Of several ranks, the greatest counts."""

    OVER = 0
    READS = 1
    """What storage has, on its way to host memory."""
    ANSWERS = 2
    """A store was asked what it has. When all ranks have heard, it is time for another look."""
