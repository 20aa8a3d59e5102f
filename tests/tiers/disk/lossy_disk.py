"""A disk that loses its power: synced writes stay, and some of the others."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.devices.base import Memory
from kvtier.tiers.disk import DiskSystem, IoKind
from kvtier.tiers.disk.arrays import Int64s, Uint64s
from kvtier.tiers.disk.io import IoEngine
from tests.tiers.disk.wrapped_engine import SECTOR_BYTES, WrappedEngine


@dataclass(slots=True)
class _File:
    """Synced content of a file, and the writes since."""

    path: Path
    content: bytearray
    unsynced: list[tuple[int, bytes]] = field(default_factory=list)


class LossyDisk(DiskSystem):
    """Records synced content. ``power_cut`` keeps that, and some later writes in any order."""

    def __init__(self) -> None:
        self._files: dict[int, _File] = {}

    def power_cut(self, rng: random.Random) -> None:
        """Change the files to a state that a power cut may leave. Close the tier first.

        Some of the writes that were not synced are lost, and some are torn at a sector. The others
        may have reached the disk in another order than they were written.
        """
        for file in self._files.values():
            if not file.path.exists():
                continue
            kept = [write for write in file.unsynced if rng.random() < 0.6]
            rng.shuffle(kept)
            content = bytearray(file.content)
            for offset, data in kept:
                if rng.random() < 0.3:
                    data = data[: rng.randrange(len(data)) // SECTOR_BYTES * SECTOR_BYTES]
                content.extend(bytes(max(0, offset + len(data) - len(content))))
                content[offset : offset + len(data)] = data
            file.path.write_bytes(content)
        self._files.clear()

    def note(self, fd: int, offset: int, data: bytes) -> None:
        """Note that a write to this range follows."""
        self._file(fd).unsynced.append((offset, data))

    def _file(self, fd: int) -> _File:
        number = os.fstat(fd).st_ino
        if number not in self._files:
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
            self._files[number] = _File(path, bytearray(path.read_bytes()))
        return self._files[number]

    def open_engine(
        self, fd: int, kind: IoKind, buffers: Sequence[Memory], queue_depth: int
    ) -> IoEngine:
        return _LossyEngine(super().open_engine(fd, kind, buffers, queue_depth), fd, self)

    def write_at(self, fd: int, data: bytes, offset: int) -> None:
        self.note(fd, offset, bytes(data))
        super().write_at(fd, data, offset)

    def sync(self, fd: int) -> None:
        file = self._file(fd)  # nothing to wait for: this disk's power is cut by us
        file.content = bytearray(file.path.read_bytes())
        file.unsynced.clear()

    def replace(self, source: Path, target: Path) -> None:
        if target.exists():
            self._files.pop(target.stat().st_ino, None)  # another file may get its number
        os.replace(source, target)
        self._files.pop(target.stat().st_ino, None)
        fd = os.open(target, os.O_RDONLY)
        self._file(fd)
        os.close(fd)


class _LossyEngine(WrappedEngine):
    def __init__(self, inner: IoEngine, fd: int, system: LossyDisk) -> None:
        super().__init__(inner, fd)
        self._system = system

    def write(
        self, offsets: Int64s, addresses: Uint64s, sizes: Int64s, deadline_s: float | None = None
    ) -> Int64s:
        for offset, address, size in zip(
            offsets.tolist(), addresses.tolist(), sizes.tolist(), strict=True
        ):
            self._system.note(self.fd, offset, ctypes.string_at(address, size))
        return self.inner.write(offsets, addresses, sizes, deadline_s)

    def sync(self) -> None:
        self._system.sync(self.fd)
