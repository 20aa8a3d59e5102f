"""Work of the accelerator that transfers have to wait for: no stream orders them."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from typing import Final

from kvtier.devices.base import Fence
from kvtier.errors import DeviceError

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.0002


class HeldFor:
    """Fences that each direction waits for, once. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fences: dict[bool, deque[Fence]] = {False: deque(), True: deque()}

    def add(self, fence: Fence) -> None:
        with self._lock:
            for fences in self._fences.values():
                while fences and _has_passed(fences[0]):  # of a direction that is not used
                    fences.popleft()
                fences.append(fence)

    def wait(self, write: bool, ends_at: float | None) -> int:
        """0 when the fences of a direction have passed, else -errno, and the others stay.

        ECANCELED where ``ends_at`` (``monotonic``) came first, EIO where the work before one
        failed.
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
    """Whether it passes in time."""
    while not fence.passed:
        if time.monotonic() >= ends_at:
            return False
        time.sleep(LOOK_S)
    return True


def _has_passed(fence: Fence) -> bool:
    try:
        return fence.passed
    except DeviceError:
        return False  # whoever waits for it hears of that
