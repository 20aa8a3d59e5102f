"""Base of failing disks: a wrapper of the real engine, and access to its file past the wrapper."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from kvtier.tiers.disk.arrays import Int64s, Uint64s
from kvtier.tiers.disk.io import IoEngine

SECTOR_BYTES = 512
"""Bytes that a disk writes whole or not at all."""


class WrappedEngine(IoEngine):
    """Passes all calls on; subclasses override some."""

    def __init__(self, inner: IoEngine, fd: int) -> None:
        self.inner = inner
        self.fd = fd

    def _transfer(
        self,
        write: bool,
        offsets: Int64s,
        addresses: Uint64s,
        sizes: Int64s,
        deadline_s: float | None,
    ) -> Int64s:
        move = self.inner.write if write else self.inner.read
        return move(offsets, addresses, sizes, deadline_s)

    def sync(self) -> None:
        self.inner.sync()

    def close(self) -> None:
        self.inner.close()


def open_plain(fd: int) -> BinaryIO:
    """Open the same file through the page cache, without alignment rules."""
    return Path(f"/proc/self/fd/{fd}").open("r+b")
