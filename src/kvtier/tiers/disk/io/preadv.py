"""Plain system calls on a few threads: works everywhere."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum

import numpy as np

from kvtier.devices.base import Finding
from kvtier.errors import Closed
from kvtier.process import OwnerProcess
from kvtier.tiers.disk.io.base import (
    IO_ALIGNMENT,
    Int64s,
    IoEngine,
    Uint64s,
    check_batch,
    is_direct,
)

NUM_THREADS = 8
"""Per direction. A disk is kept busy by a few."""

MAX_RETRIES = 64
"""Of a call that the kernel asks to repeat."""


class _Way(Enum):
    READ = "read"
    WRITE = "write"


class PreadvEngine(IoEngine):
    """``preadv`` and ``pwritev``, a block at a time on each of ``num_threads`` threads a direction.

    A call that the kernel has begun cannot be cancelled: a deadline only keeps blocks from being
    begun, and further pieces of a short one.
    """

    name = "preadv"

    def __init__(self, fd: int, num_threads: int = NUM_THREADS, note: str = "") -> None:
        self._process = OwnerProcess()
        self._fd = fd
        self._note = note
        self._direct = is_direct(fd)
        self._num_threads = num_threads
        self._is_closed = False
        # A pool starts its threads with its first batch.
        self._pools = {way: ThreadPoolExecutor(num_threads, f"kvtier-{way.value}") for way in _Way}

    def read(
        self, offsets: Int64s, addresses: Uint64s, sizes: Int64s, deadline_s: float | None = None
    ) -> Int64s:
        return self._batch(_Way.READ, offsets, addresses, sizes, deadline_s)

    def write(
        self, offsets: Int64s, addresses: Uint64s, sizes: Int64s, deadline_s: float | None = None
    ) -> Int64s:
        return self._batch(_Way.WRITE, offsets, addresses, sizes, deadline_s)

    def sync(self) -> None:
        self._check_open()
        os.fdatasync(self._fd)

    def findings(self) -> list[Finding]:
        words = f"preadv, {self._num_threads} threads per direction"
        return [Finding("disk I/O", words, self._note)]

    def close(self) -> None:
        self._is_closed = True
        if self._process.is_here:  # a forked child has none of their threads
            for pool in self._pools.values():
                pool.shutdown()

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("this I/O engine was closed; open another for the file")
        self._process.must_be_here("this I/O engine")

    def _batch(
        self,
        way: _Way,
        offsets: Int64s,
        addresses: Uint64s,
        sizes: Int64s,
        deadline_s: float | None,
    ) -> Int64s:
        self._check_open()
        check_batch(offsets, addresses, sizes, self._direct)
        until = None if deadline_s is None else time.monotonic() + deadline_s
        blocks = list(zip(offsets.tolist(), addresses.tolist(), sizes.tolist(), strict=True))
        results = np.zeros(len(blocks), np.int64)
        # One job per thread, not per block: a job costs as much as a small read.
        left = deque(range(len(blocks)))

        def work() -> None:
            with suppress(IndexError):  # all blocks taken
                while True:
                    i = left.popleft()
                    results[i] = self._move(way, *blocks[i], until)

        jobs = [self._pools[way].submit(work) for _ in range(min(self._num_threads, len(blocks)))]
        for job in jobs:
            job.result()
        return results

    def _move(self, way: _Way, offset: int, address: int, size: int, until: float | None) -> int:
        """Bytes moved or -errno, for one block."""
        call: Callable[[int, Sequence[memoryview], int], int]
        call = os.preadv if way is _Way.READ else os.pwritev
        if not size:
            return 0
        left = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        retries = 0
        while left:
            if until is not None and time.monotonic() >= until:
                return -errno.ECANCELED
            done = size - len(left)
            try:
                moved = call(self._fd, [left], offset + done)
            except BlockingIOError:
                retries += 1
                if retries > MAX_RETRIES:
                    return -errno.EAGAIN
                continue
            except OSError as error:
                return -(error.errno or errno.EIO)
            if not moved and way is _Way.WRITE:
                return -errno.EIO  # write(2) has no end of file
            left = left[moved:]
            # With O_DIRECT only the end of the file cuts a page, and no read may begin there.
            if not moved or (way is _Way.READ and self._direct and moved % IO_ALIGNMENT):
                break
        return size - len(left)
