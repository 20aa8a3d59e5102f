"""Batched copy, with one ``memmove`` per fragment."""

from __future__ import annotations

import ctypes
import operator
from typing import TYPE_CHECKING

import numpy as np

from kvtier.core.reference.arguments import END_OF_MEMORY, check_memory, check_threads, words_of
from kvtier.core.reference.crc import crc32c

if TYPE_CHECKING:
    from numpy.typing import NDArray


def copy_batch(
    dst: NDArray[np.uint64],
    src: NDArray[np.uint64],
    size: NDArray[np.uint64],
    threads: int = 1,
) -> int:
    """Copy ``size[i]`` bytes from address ``src[i]`` to address ``dst[i]``, for every i.

    The caller guarantees that the memory exists, and that no destination overlaps another
    destination or a source: the order of the copies is undefined.

    Args:
        dst: uint64 [n], C-contiguous, destination addresses.
        src: uint64 [n], C-contiguous, source addresses.
        size: uint64 [n], C-contiguous, bytes to copy; 0 is skipped.
        threads: 1 to 256; checked and otherwise ignored here.

    Returns:
        Number of copied bytes, after all copies are done.

    Raises:
        TypeError, ValueError: an argument is invalid; nothing was copied.
    """
    batch = _Batch(dst, src, size)
    check_threads(threads)
    batch.move()
    return sum(batch.sizes)


def copy_checked(
    dst: NDArray[np.uint64],
    src: NDArray[np.uint64],
    size: NDArray[np.uint64],
    pieces: int = 1,
) -> NDArray[np.uint32]:
    """Copy as ``copy_batch`` does, and return the crc32c of each block: uint32 [num_blocks].

    Checksums are those of the destinations. The native core reads each byte once. This function
    reads the destination again, so concurrent writes to it are in the checksum.

    pieces: number of consecutive fragments per block; there is a whole number of blocks.
    """
    batch = _Batch(dst, src, size)
    if operator.index(pieces) < 1 or len(batch.sizes) % pieces:
        raise ValueError(
            f"{len(batch.sizes)} fragments are no whole number of blocks of {pieces} pieces"
        )
    batch.move()
    checksums = []
    for first in range(0, len(batch.sizes), pieces):
        checksum = 0
        for at in range(first, first + pieces):
            checksum = crc32c(batch.to[at], batch.sizes[at], checksum)
        checksums.append(checksum)
    return np.array(checksums, np.uint32)


class _Batch:
    """The three arrays of a copy, as checked lists. Raises the same errors as a copy."""

    def __init__(self, dst: object, src: object, size: object) -> None:
        views = {"dst": dst, "src": src, "size": size}
        words = [words_of(name, array) for name, array in views.items()]
        lengths = [len(view) for view in words]
        if len(set(lengths)) != 1:
            raise ValueError(
                "dst, src and size must have equal lengths, "
                f"not {lengths[0]}, {lengths[1]} and {lengths[2]}"
            )
        self.to, self.at, self.sizes = (view.tolist() for view in words)
        total = 0
        for i, length in enumerate(self.sizes):
            for name, address in (("dst", self.to[i]), ("src", self.at[i])):
                check_memory(f"{name}[{i}]: ", address, length)
            if (total := total + length) > END_OF_MEMORY:
                raise ValueError(
                    f"size: the first {i + 1} fragments are more bytes than there is memory"
                )

    def move(self) -> None:
        for address, source, length in zip(self.to, self.at, self.sizes, strict=True):
            ctypes.memmove(address, source, length)
