"""The I/O engine to use.

For host memory io_uring where it can be had, plain system calls elsewhere; for an accelerator's
memory its vendor's file library.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock

from kvtier.devices.base import Device, Memory
from kvtier.errors import TierError
from kvtier.tiers.disk.io.base import IoEngine
from kvtier.tiers.disk.io.direct import DirectEngine
from kvtier.tiers.disk.io.preadv import PreadvEngine
from kvtier.tiers.disk.io.uring import UringEngine
from kvtier.tiers.disk.io.vendors import KINDS
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


def open_direct(
    fd: int, device: Device, memories: Sequence[Memory], may_bounce: bool
) -> DirectEngine:
    """An engine between the open file ``fd`` and ``memories`` of ``device``, by its file library.

    ``probe`` has found that it works. may_bounce: only by way of host memory, inside the library;
    else that way is forbidden. Raises ``TierError``.
    """
    made, _ = KINDS[device.file_library]
    with _environment(made.vendor.variables(may_bounce)):
        return made(fd, memories, device.use)


_changing = Lock()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables of this process, for a while: drivers read theirs when they open."""
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
