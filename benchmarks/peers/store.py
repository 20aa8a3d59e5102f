"""Interface of the compared disk caches."""

from __future__ import annotations

import hashlib
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

BATCH = 64
"""Blocks of a batch, by default."""


class Arena:
    """Memory for one batch: page-aligned, in huge pages if wanted and granted."""

    def __init__(self, block_bytes: int, huge_pages: bool = True, batch: int = BATCH) -> None:
        self.block_bytes, self.batch = block_bytes, batch
        self.buffer = mmap.mmap(
            -1, batch * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self.buffer.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
        self.blocks: Bytes = np.frombuffer(self.buffer, np.uint8).reshape(batch, block_bytes)
        self.blocks[:] = 0


class Store(ABC):
    """Blocks on disk, by number. The cache gets only keys and memory.

    The caller guarantees
        a batch has at most as many numbers as the arena has blocks, all different. Only stored
        blocks are loaded, and only new ones stored. Before a batch is stored its blocks lie in the
        arena, the i-th at place i.
    The implementer provides
        ``store`` and ``load`` return when the cache reports the whole batch as done. Only they are
        timed.
    """

    version: str
    """Version of the installed project."""

    def __init__(self, arena: Arena, folder: Path, num_blocks: int) -> None:
        self.arena, self.folder, self.num_blocks = arena, folder, num_blocks

    def prepare(self, numbers: Sequence[int]) -> None:  # noqa: B027  most need nothing
        """Do the work before ``store`` that is not the cache's. Not timed."""

    @abstractmethod
    def store(self, numbers: Sequence[int]) -> None:
        """Write the blocks of the arena under these numbers. Raises if one was refused."""

    @abstractmethod
    def load(self, numbers: Sequence[int]) -> None:
        """Read these blocks into memory. Raises if one was missing."""

    def loaded(self, place: int) -> Bytes:
        """Return the block that the last ``load`` read for its number at ``place``. Not timed."""
        return self.arena.blocks[place]

    def clear(self) -> None:
        """Clear the memory that ``load`` fills. Not timed."""
        self.arena.blocks[:] = 0

    def release(self) -> None:  # noqa: B027  most need nothing
        """Release the blocks of the last ``load``. Not timed."""

    def files(self, numbers: Sequence[int]) -> list[Path]:
        """Return the files of these blocks; all of the folder if blocks share files."""
        return [path for path in self.folder.rglob("*") if path.is_file()]

    def lookup(self, numbers: Sequence[int]) -> Callable[[], int]:
        """Return a call that looks these blocks up. It returns the length of the stored prefix."""
        raise NotImplementedError

    @abstractmethod
    def forget(self, numbers: Sequence[int]) -> None:
        """Remove these blocks. Not timed."""

    def close(self) -> None:  # noqa: B027  most need nothing
        """End threads, close files."""


def key_of(number: int) -> bytes:
    """Return 32 bytes, like the hash of a block's tokens."""
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()
