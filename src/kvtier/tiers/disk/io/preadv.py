"""Plain system calls, one after the other."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import numpy as np

from kvtier.tiers.disk.io.base import Int64s, IoEngine, Uint64s


class PreadvEngine(IoEngine):
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, offsets: Int64s, addresses: Uint64s, sizes: Int64s, deadline_s: float) -> Int64s:
        return self._each(os.preadv, offsets, addresses, sizes)

    def write(
        self, offsets: Int64s, addresses: Uint64s, sizes: Int64s, deadline_s: float | None = None
    ) -> Int64s:
        return self._each(os.pwritev, offsets, addresses, sizes)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        pass

    def _each(
        self,
        call: Callable[[int, list[memoryview], int], int],
        offsets: Int64s,
        addresses: Uint64s,
        sizes: Int64s,
    ) -> Int64s:
        done = np.zeros(len(offsets), np.int64)
        for i in range(len(offsets)):
            buffer = (ctypes.c_char * int(sizes[i])).from_address(int(addresses[i]))
            try:
                done[i] = call(self._fd, [memoryview(buffer).cast("B")], int(offsets[i]))
            except OSError as error:
                done[i] = -(error.errno or 5)
        return done
