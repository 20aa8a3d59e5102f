"""Opens files so that nobody can truncate them through the descriptor, by Landlock.

The kernel notes at open(2) whether the thread may truncate files, and keeps to it for this
descriptor in every process that gets it (Linux 6.2). A thread can't give up its restriction, so
each file is opened on a thread of its own.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

T = TypeVar("T")

CREATE_RULESET, RESTRICT_SELF = 444, 446
"""Numbers of system calls; the C library has no functions for them."""
ACCESS_FS_TRUNCATE = 1 << 14
PR_SET_NO_NEW_PRIVS = 38
"""Without it only root may restrict a thread."""


@cache
def can_forbid_truncation() -> bool:
    """Return whether this kernel can."""
    return _on_thread(_forbid)


def open_untruncatable(path: str) -> int:
    """Open a file for reading and writing, but not for truncation where the kernel can forbid it.

    Raises ``OSError``.
    """

    def work() -> int:
        _forbid()
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    return _on_thread(work)


def _forbid() -> bool:
    """Forbid this thread to truncate files. Return False if the kernel can't."""
    libc = ctypes.CDLL(None, use_errno=True)
    handled = (ctypes.c_uint64 * 1)(ACCESS_FS_TRUNCATE)
    rules = libc.syscall(CREATE_RULESET, ctypes.byref(handled), ctypes.sizeof(handled), 0)
    if rules < 0:
        return False
    try:
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        return bool(libc.syscall(RESTRICT_SELF, rules, 0) == 0)
    finally:
        os.close(rules)


def _on_thread(work: Callable[[], T]) -> T:
    try:
        with ThreadPoolExecutor(1, "kvtier-open") as pool:
            return pool.submit(work).result()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, f"no thread can be started: {error}") from error
