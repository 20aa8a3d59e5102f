"""Requests to the kernel about pages: huge pages, NUMA placement, and pages touched in advance.

Functions take addresses, not buffers: ``mmap.madvise`` holds the interpreter lock while the kernel
clears pages; calls through ``ctypes`` don't.
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
"""Advice value of madvise(2), Linux 5.14 and newer."""

MPOL_PREFERRED = 1
"""Policy of mbind(2): allocate from the node while it has free pages, then from other nodes."""

MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the mbind(2) system call by machine; the C library has no function for it."""

HUGE_PAGE_BYTES = 2 << 20
"""Smallest huge page of x86-64 and arm64."""

PIECE_BYTES = 32 << 20
"""Bytes touched per call. No other thread can map memory while it runs: some milliseconds."""

_libc = ctypes.CDLL(None, use_errno=True)


def anonymous(num_bytes: int) -> mmap.mmap:
    """Map zeroed private memory that starts at a page boundary.

    It asks for huge pages if it is large enough for one: the kernel, and so direct I/O, handles one
    page at a time. Core dumps leave the memory out, because it may hold blocks.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    leave_out_of_dumps(np.frombuffer(memory, np.uint8).ctypes.data, num_bytes)
    if num_bytes >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def advise(address: int, num_bytes: int, advice: int) -> None:
    """Call madvise(2). Raises ``OSError``."""
    call = _libc.madvise
    _check(call(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(advice)))


def leave_out_of_dumps(address: int, num_bytes: int) -> None:
    """Leave the pages of some memory out of core dumps, because KV reveals prompts.

    Does nothing on a system without support for it.
    """
    before = address % mmap.PAGESIZE
    with suppress(OSError):
        advise(address - before, before + num_bytes, MADV_DONTDUMP)


def prefer_node(address: int, num_bytes: int, node: int) -> None:
    """Allocate the pages of some memory on a NUMA node if possible. Raises ``OSError``."""
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
            ctypes.c_ulong(len(mask) * bits + 1),  # the kernel ignores the last bit
            ctypes.c_ulong(0),
        )
    )


def touch(
    address: int, num_bytes: int, num_threads: int, is_wanted: Callable[[], bool] = lambda: True
) -> bool:
    """Allocate all pages of some memory in advance.

    Otherwise the first store would pay for them, or find that there are too few. The memory must
    not hold data: kernels that can't populate with ``madvise`` have it overwritten with zeros.

    Args:
        address: start of the memory.
        num_bytes: bytes of the memory.
        num_threads: number of threads that touch pages.
        is_wanted: returns False to stop; called before each piece.

    Returns:
        False if ``is_wanted`` returned False.

    Raises:
        OSError: pages cannot be allocated.
    """
    address, end = address - address % mmap.PAGESIZE, address + num_bytes
    # Pieces end at huge page boundaries: two threads that touch the same huge page would block
    # each other.
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
    """Write a zero to each page of memory that holds no data yet."""
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
    memory[:: mmap.PAGESIZE] = 0


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
