"""This process: its cores, and the resources that it owns.

A forked child has a copy of everything except threads. The copy shares files, locks and
registrations with the original, so closing it, or releasing it at the child's exit, would take them
from the parent.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

from kvtier.core.errors import Closed
from kvtier.core.system.control_groups import cpu_quota


def num_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use: those it may run on, or its quota.

    root: where ``proc`` and ``sys`` are mounted.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = cpu_quota(root)
    # More threads than the quota allows are all stopped at once when it is used up.
    return cores if quota is None else max(1, min(cores, int(quota)))


def give_way(by: int) -> None:
    """Lower this thread's priority, if the system has priorities of threads.

    This cannot be undone.
    """
    if sys.platform == "linux":
        nice = os.getpriority(os.PRIO_PROCESS, os.getpid()) + by
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


class OwnerProcess:
    """The process that created this object. Each check costs a system call."""

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process and not a forked child."""
        return os.getpid() == self.pid

    def must_be_here(self, what: str) -> None:
        """Raise ``Closed`` in a forked child. what: names the object in the message."""
        if not self.is_here:
            raise Closed(
                f"{what} belongs to process {self.pid}, and process {os.getpid()} was forked from "
                "it; make a new one here, or start the process by spawn"
            )
