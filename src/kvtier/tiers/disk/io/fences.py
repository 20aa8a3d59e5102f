"""Fences of the accelerator that transfers have to wait for, since no stream orders them."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from typing import Final

from kvtier.core.errors import DeviceError
from kvtier.devices.base import Fence

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.0002


class PendingFences:
    """Fences that each direction of transfers waits for, once per fence. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fences: dict[bool, deque[Fence]] = {False: deque(), True: deque()}

    def add(self, fence: Fence) -> None:
        with self._lock:
            for fences in self._fences.values():
                while fences and _has_passed(fences[0]):  # bounds the queue of an unused direction
                    fences.popleft()
                fences.append(fence)

    def wait(self, write: bool, ends_at: float | None) -> int:
        """Wait until the fences of a direction have passed. Return 0, or -errno.

        ECANCELED: ``ends_at`` (``monotonic``) came first. EIO: the work before a fence failed. The
        remaining fences are kept for the next call.
        """
        with self._lock:
            fences, self._fences[write] = self._fences[write], deque()
        code = 0
        while fences and not code:
            try:
                if ends_at is None:
                    fences[0].wait()
                elif not _passes(fences[0], ends_at):
                    code = -errno.ECANCELED
                    break
            except DeviceError as error:
                logger.warning("a transfer waited for work that failed: %s", error)
                code = -errno.EIO
            fences.popleft()
        with self._lock:
            self._fences[write].extendleft(reversed(fences))
        return code


def _passes(fence: Fence, ends_at: float) -> bool:
    """Wait for a fence; return whether it passed in time."""
    while not fence.passed:
        if time.monotonic() >= ends_at:
            return False
        time.sleep(LOOK_S)
    return True


def _has_passed(fence: Fence) -> bool:
    try:
        return fence.passed
    except DeviceError:
        return False  # ``wait`` reports the error
