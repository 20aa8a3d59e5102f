"""I/O engines that read and write the slab, and the selection of one.

Host memory: io_uring if available, else plain system calls. Accelerator memory: the vendor's file
library.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock

from kvtier.core.errors import TierError
from kvtier.core.types import IoKind
from kvtier.devices.base import Device, Memory
from kvtier.tiers.disk.io.base import IoEngine
from kvtier.tiers.disk.io.direct import DirectEngine
from kvtier.tiers.disk.io.preadv import PreadvEngine
from kvtier.tiers.disk.io.uring import UringEngine
from kvtier.tiers.disk.io.vendors import VENDORS

__all__ = ["IoEngine", "open_direct", "open_engine"]

logger = logging.getLogger(__name__)


def open_engine(
    fd: int,
    kind: IoKind = IoKind.AUTO,
    buffers: Sequence[Memory] = (),
    queue_depth: int = 32,
) -> IoEngine:
    """Open an I/O engine for the open file ``fd``.

    buffers: memory that most blocks lie in, to be registered. queue_depth: requests in flight per
        direction.

    Raises ``TierError`` if ``kind`` is ``uring``, and io_uring is not available.
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


def open_direct(
    fd: int, device: Device, memories: Sequence[Memory], may_bounce: bool
) -> DirectEngine:
    """Open an engine between a file and accelerator memory; see ``DirectEngine``.

    may_bounce: allow the library to move bytes through host memory; False forbids it.
    """
    vendor = VENDORS[device.file_library]
    with _environment(vendor.variables(may_bounce)):
        return DirectEngine(vendor, fd, memories, device.use)


_changing = Lock()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables temporarily: drivers read them when they open."""
    with _changing:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
