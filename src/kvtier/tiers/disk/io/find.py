"""The engine to use."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.devices.base import Memory
from kvtier.tiers.disk.io.base import IoEngine
from kvtier.tiers.disk.io.preadv import PreadvEngine


def open_engine(fd: int, kind: str, buffers: Sequence[Memory], queue_depth: int) -> IoEngine:
    """An engine for the open file ``fd``."""
    return PreadvEngine(fd)
