"""This process: the cores that it may use, and what it owns.

A forked child has a copy of everything, threads excepted.

The copy shares files, locks and registrations with the original, so that closing it, or only
letting it go when the child exits, would take them from the parent.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

from kvtier.errors import Closed


def num_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def give_way(by: int) -> None:
    """Lower this thread's priority, as far as the system knows priorities of threads.

    There is no way back.
    """
    if sys.platform == "linux":
        nice = os.getpriority(os.PRIO_PROCESS, os.getpid()) + by
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


class OwnerProcess:
    """The process that made this object. Costs a system call to ask."""

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process, and not a child that was forked from it."""
        return os.getpid() == self.pid

    def must_be_here(self, what: str) -> None:
        """Raise ``Closed`` in a forked child. what: is of no use there."""
        if not self.is_here:
            raise Closed(
                f"{what} belongs to process {self.pid}, and process {os.getpid()} was forked from "
                "it; make a new one here, or start the process by spawn"
            )
