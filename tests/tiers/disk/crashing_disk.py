"""A disk system that ends the process in the middle of a chosen operation."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kvtier.devices.base import Memory
from kvtier.tiers.disk import DiskSystem, IoKind
from kvtier.tiers.disk.arrays import Int64s, Uint64s
from kvtier.tiers.disk.io import IoEngine
from tests.tiers.disk.harness import Harness, harness
from tests.tiers.disk.wrapped_engine import SECTOR_BYTES, WrappedEngine, open_plain


class Crash(BaseException):
    """The process ends here. Not an ``Exception``, so that no handler catches it."""


class CrashingDisk(DiskSystem):
    """Crashes at the ``at``-th operation; a write is half done then."""

    def __init__(self, at: int) -> None:
        self.left = at

    def step(self) -> None:
        """Count one operation; raise ``Crash`` at the chosen one."""
        self.left -= 1
        if self.left == 0:
            raise Crash

    def open_engine(
        self, fd: int, kind: IoKind, buffers: Sequence[Memory], queue_depth: int
    ) -> IoEngine:
        return _CrashingEngine(super().open_engine(fd, kind, buffers, queue_depth), fd, self)

    def write_at(self, fd: int, data: bytes, offset: int) -> None:
        try:
            self.step()
        except Crash:
            super().write_at(fd, data[: len(data) // 2 + 7], offset)
            raise
        super().write_at(fd, data, offset)

    def sync(self, fd: int) -> None:
        self.step()
        super().sync(fd)

    def truncate(self, fd: int, num_bytes: int) -> None:
        self.step()
        super().truncate(fd, num_bytes)

    def reserve(self, fd: int, num_bytes: int) -> None:
        self.step()
        super().reserve(fd, num_bytes)

    def reserve_ahead(self, fd: int, num_bytes: int) -> None:
        self.step()
        super().reserve_ahead(fd, num_bytes)

    def stamp(self, fd: int) -> os.stat_result:
        self.step()
        return super().stamp(fd)

    def replace(self, source: Path, target: Path) -> None:
        self.step()
        super().replace(source, target)
        self.step()


def crashes(
    folder: Path,
    num_slots: int,
    system: DiskSystem,
    life: Callable[[Harness], object],
    num_parts: int = 1,
    **settings: object,
) -> bool:
    """Let a harness live until its system crashes; return whether it does."""
    here = None
    try:
        with harness(folder, num_slots, num_parts, system=system, **settings) as here:
            try:
                life(here)
            except Crash:
                here.crash()
                raise
    except Crash:
        if here is not None:
            here.crash()
        return True
    return False


class _CrashingEngine(WrappedEngine):
    def __init__(self, inner: IoEngine, fd: int, system: CrashingDisk) -> None:
        super().__init__(inner, fd)
        self._system = system

    def write(
        self, offsets: Int64s, addresses: Uint64s, sizes: Int64s, deadline_s: float | None = None
    ) -> Int64s:
        done = np.zeros(len(offsets), np.int64)
        for i in range(len(offsets)):
            try:
                self._system.step()
            except Crash:
                half = int(sizes[i]) // 2 // SECTOR_BYTES * SECTOR_BYTES
                _write_plain(self.fd, int(offsets[i]), ctypes.string_at(int(addresses[i]), half))
                raise
            done[i : i + 1] = self.inner.write(
                offsets[i : i + 1], addresses[i : i + 1], sizes[i : i + 1], deadline_s
            )
        return done

    def sync(self) -> None:
        self._system.step()
        self.inner.sync()


def _write_plain(fd: int, offset: int, data: bytes) -> None:
    """Write any number of bytes anywhere."""
    with open_plain(fd) as file:
        file.seek(offset)
        file.write(data)
