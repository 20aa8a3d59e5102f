"""I/O engine with ``preadv`` and ``pwritev`` on a few threads; works everywhere."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from kvtier.devices.base import Finding
from kvtier.tiers.disk.arrays import Int64s, Uint64s
from kvtier.tiers.disk.io.base import (
    IO_ALIGNMENT,
    IoEngine,
    check_batch,
    runs,
)

NUM_THREADS = 8
"""Threads per direction. A few keep a disk busy."""

FUSED_BYTES = 4 << 20
"""Maximum bytes of neighbouring blocks in the file that one call moves."""

MAX_RETRIES = 64
"""Maximum retries of a call that fails with EAGAIN."""


class PreadvEngine(IoEngine):
    """Engine that runs ``preadv`` and ``pwritev`` on ``num_threads`` threads per direction.

    A running call cannot be cancelled. A deadline only keeps further calls from being made.
    """

    name = "preadv"

    def __init__(self, fd: int, num_threads: int = NUM_THREADS, note: str = "") -> None:
        super().__init__(fd)
        self._note = note
        self._num_threads = num_threads
        # A pool starts its threads with the first batch.
        self._pools = [
            ThreadPoolExecutor(num_threads, f"kvtier-{way}") for way in ("read", "write")
        ]

    def findings(self) -> list[Finding]:
        words = f"preadv, {self._num_threads} threads per direction"
        return [Finding("disk I/O", words, self._note)]

    def close(self) -> None:
        self._is_closed = True
        if self._process.is_here:  # a forked child does not have the threads
            for pool in self._pools:
                pool.shutdown()

    def _transfer(
        self,
        write: bool,
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
        # One job per thread, not per call: submitting a job costs as much as a small read.
        left = deque(runs(offsets, sizes, FUSED_BYTES, FUSED_BYTES))

        def work() -> None:
            with suppress(IndexError):  # no runs are left
                while True:
                    run = left.popleft()
                    results[run] = self._move_run(write, blocks[run], until)

        jobs = [self._pools[write].submit(work) for _ in range(min(self._num_threads, len(left)))]
        for job in jobs:
            job.result()
        return results

    def _move_run(
        self, write: bool, blocks: Sequence[tuple[int, int, int]], until: float | None
    ) -> list[int]:
        """Move neighbouring blocks of the file; return bytes moved or -errno per block."""
        (offset, _, _), *others = blocks
        moved = self._move(write, offset, [where[1:] for where in blocks], until)
        if moved < 0 and moved != -errno.ECANCELED and others:  # find the block with the error
            return [self._move(write, at, [(to, size)], until) for at, to, size in blocks]
        if moved < 0:
            return [moved] * len(blocks)
        results = []
        for _, _, size in blocks:
            results.append(min(size, moved))
            moved -= results[-1]
        return results

    def _move(
        self, write: bool, offset: int, pieces: Sequence[tuple[int, int]], until: float | None
    ) -> int:
        """Move bytes between the file at ``offset`` and pieces of memory: (address, bytes).

        Return the bytes moved, or -errno.
        """
        call: Callable[[int, Sequence[memoryview], int], int]
        call = os.pwritev if write else os.preadv
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
            if not moved and write:
                return -errno.EIO  # a write must move something
            done += moved
            left = _after(left, moved)
            # With O_DIRECT a partial page means the end of the file; no read may begin there.
            if not moved or (self._direct and not write and moved % IO_ALIGNMENT):
                break
        return done


def _after(pieces: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Return the pieces of memory that remain after their first ``num_bytes`` bytes."""
    left = []
    for piece in pieces:
        if num_bytes < len(piece):
            left.append(piece[num_bytes:])
        num_bytes = max(0, num_bytes - len(piece))
    return left
