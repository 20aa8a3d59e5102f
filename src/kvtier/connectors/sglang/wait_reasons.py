"""Reasons for which requests in SGLang's queue wait."""

from __future__ import annotations

from enum import IntEnum


class RankWait(IntEnum):
    """Reason of one rank. The greatest of all ranks counts."""

    OVER = 0
    READS = 1
    """Blocks of storage are being read to host memory."""
    ANSWERS = 2
    """A store was asked what it has. When all ranks have heard, it is time for another look."""
