"""Requests to the kernel about pages: huge pages, NUMA placement, and pages touched in advance.

Addresses, not buffers: ``mmap.madvise`` holds the interpreter's lock while the kernel clears pages,
calls through ``ctypes`` don't.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

MADV_DONTNEED = 4
MADV_HUGEPAGE, MADV_NOHUGEPAGE = 14, 15
MADV_DONTDUMP = 16
MADV_POPULATE_WRITE = 23
"""Advice of madvise(2), Linux 5.14 and newer."""

MPOL_PREFERRED = 1
"""Pages come from the node while it has some, and from elsewhere then (mbind(2))."""

MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call; the C library has no function for it."""

HUGE_PAGE_BYTES = 2 << 20
"""The least on x86-64 and arm64. Larger ones are not waited for."""

PIECE_BYTES = 32 << 20
"""Touched by one call. While it runs, no other thread can map memory: some milliseconds."""

_libc = ctypes.CDLL(None, use_errno=True)


def anonymous(num_bytes: int) -> mmap.mmap:
    """Memory of this process, from a page on, all zero.

    In huge pages where it has room for one and the system has them: the kernel, and with it direct
    I/O, takes a page at a time. Core dumps leave it out: blocks may come into it.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    leave_out_of_dumps(np.frombuffer(memory, np.uint8).ctypes.data, num_bytes)
    if num_bytes >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def advise(address: int, num_bytes: int, advice: int) -> None:
    """``madvise``; raises ``OSError``."""
    call = _libc.madvise
    _check(call(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(advice)))


def leave_out_of_dumps(address: int, num_bytes: int) -> None:
    """Leave each page of some memory out of core dumps, for prompts can be read from KV.

    On a system that can't do so nothing happens.
    """
    before = address % mmap.PAGESIZE
    with suppress(OSError):
        advise(address - before, before + num_bytes, MADV_DONTDUMP)


def prefer_node(address: int, num_bytes: int, node: int) -> None:
    """Take pages from a NUMA node where it has some left; raises ``OSError``."""
    number = MBIND.get(platform.machine())
    if number is None or os.name != "posix":
        raise OSError(errno.ENOSYS, f"not known for {platform.machine()}")
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    _check(
        _libc.syscall(
            ctypes.c_long(number),
            ctypes.c_void_p(address),
            ctypes.c_ulong(num_bytes),
            ctypes.c_long(MPOL_PREFERRED),
            mask,
            ctypes.c_ulong(len(mask) * bits + 1),  # the kernel leaves the last one out
            ctypes.c_ulong(0),
        )
    )


def touch(
    address: int, num_bytes: int, num_threads: int, is_wanted: Callable[[], bool] = lambda: True
) -> bool:
    """Have all pages now: a first store should not pay for them, nor find that there are too few.

    False where ``is_wanted`` said no on the way. Raises ``OSError`` where pages can't be had. What
    is in memory stays there only where ``madvise`` knows how to populate, so nothing may be in it.
    """
    address, end = address - address % mmap.PAGESIZE, address + num_bytes
    # Pieces end where huge pages do, for two threads that need the same one wait for each other.
    starts = [address, *range((address // PIECE_BYTES + 1) * PIECE_BYTES, end, PIECE_BYTES)]

    def touch_piece(start: int) -> bool:
        if not is_wanted():
            return False
        _touch_piece(start, min(start - start % PIECE_BYTES + PIECE_BYTES, end) - start)
        return True

    if num_threads == 1 or len(starts) == 1:
        return all(map(touch_piece, starts))
    with ThreadPoolExecutor(num_threads, "kvtier-touch") as threads:
        return all(list(threads.map(touch_piece, starts)))


def _touch_piece(address: int, num_bytes: int) -> None:
    try:
        advise(address, num_bytes, MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        write_to_each_page(address, num_bytes)  # Linux before 5.14


def write_to_each_page(address: int, num_bytes: int) -> None:
    """A zero into each page of memory that nothing is in yet."""
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
    memory[:: mmap.PAGESIZE] = 0


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
