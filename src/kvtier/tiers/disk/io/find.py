"""The I/O engine to use: io_uring where it can be had, plain system calls elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvtier.devices.base import Memory
from kvtier.errors import TierError
from kvtier.tiers.disk.io.base import IoEngine
from kvtier.tiers.disk.io.preadv import PreadvEngine
from kvtier.tiers.disk.io.uring import UringEngine
from kvtier.types import IoKind

logger = logging.getLogger(__name__)


def open_engine(
    fd: int,
    kind: IoKind = IoKind.AUTO,
    buffers: Sequence[Memory] = (),
    queue_depth: int = 32,
) -> IoEngine:
    """An engine for the open file ``fd``.

    buffers: memory that blocks mostly lie in. queue_depth: requests at a time, per direction.
    Raises ``TierError`` where ``kind`` is ``uring`` and that can't be had.
    """
    reason = ""
    if kind is not IoKind.PREADV:
        try:
            return UringEngine(fd, buffers, queue_depth)
        except TierError as error:
            if kind is IoKind.URING:
                raise
            reason = str(error)
            logger.info("no io_uring reason=%s", reason)
    return PreadvEngine(fd, note=reason)
