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
from kvtier.system.process import OwnerProcess
from kvtier.tiers.disk.io.base import (
    IO_ALIGNMENT,
    Int64s,
    IoEngine,
    Uint64s,
    check_batch,
    is_direct,
    runs,
)

NUM_THREADS = 8
"""Per direction. A disk is kept busy by a few."""

FUSED_BYTES = 4 << 20
"""A call moves neighbours in the file of up to this much, wherever they lie in memory."""

MAX_RETRIES = 64
"""Retries of a call that the kernel asks to repeat."""


class _Way(Enum):
    READ = "read"
    WRITE = "write"


class PreadvEngine(IoEngine):
    """``preadv`` and ``pwritev``, a call at a time on each of ``num_threads`` threads a direction.

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
        # One job per thread, not per call: a job costs as much as a small read.
        left = deque(runs(offsets, sizes, FUSED_BYTES, FUSED_BYTES))

        def work() -> None:
            with suppress(IndexError):  # all blocks taken
                while True:
                    run = left.popleft()
                    results[run] = self._move_run(way, blocks[run], until)

        jobs = [self._pools[way].submit(work) for _ in range(min(self._num_threads, len(left)))]
        for job in jobs:
            job.result()
        return results

    def _move_run(
        self, way: _Way, blocks: Sequence[tuple[int, int, int]], until: float | None
    ) -> list[int]:
        """Bytes moved or -errno, per block; they are neighbours in the file."""
        (offset, _, _), *others = blocks
        moved = self._move(way, offset, [where[1:] for where in blocks], until)
        if moved < 0 and moved != -errno.ECANCELED and others:  # whichever of them it is about
            return [self._move(way, at, [(to, size)], until) for at, to, size in blocks]
        if moved < 0:
            return [moved] * len(blocks)
        results = []
        for _, _, size in blocks:
            results.append(min(size, moved))
            moved -= results[-1]
        return results

    def _move(
        self, way: _Way, offset: int, pieces: Sequence[tuple[int, int]], until: float | None
    ) -> int:
        """Bytes moved or -errno, between one place in the file and pieces of memory.

        Address and size of each.
        """
        call: Callable[[int, Sequence[memoryview], int], int]
        call = os.preadv if way is _Way.READ else os.pwritev
        left = [
            memoryview((ctypes.c_char * size).from_address(address)).cast("B")
            for address, size in pieces
            if size
        ]
        retries = done = 0
        while left:
            if until is not None and time.monotonic() >= until:
                return -errno.ECANCELED
            try:
                moved = call(self._fd, left, offset + done)
            except BlockingIOError:
                retries += 1
                if retries > MAX_RETRIES:
                    return -errno.EAGAIN
                continue
            except OSError as error:
                return -(error.errno or errno.EIO)
            if not moved and way is _Way.WRITE:
                return -errno.EIO  # write(2) has no end of file
            done += moved
            left = _after(left, moved)
            # With O_DIRECT only the end of the file cuts a page, and no read may begin there.
            if not moved or (way is _Way.READ and self._direct and moved % IO_ALIGNMENT):
                break
        return done


def _after(pieces: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Return the pieces of memory left when their first ``num_bytes`` are done."""
    left = []
    for piece in pieces:
        if num_bytes < len(piece):
            left.append(piece[num_bytes:])
        num_bytes = max(0, num_bytes - len(piece))
    return left
