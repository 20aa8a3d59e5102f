"""The batched copy, one ``memmove`` per fragment."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from kvtier._reference.arguments import END_OF_MEMORY, check_memory, check_threads, words_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


def copy_batch(
    dst: NDArray[np.uint64],
    src: NDArray[np.uint64],
    size: NDArray[np.uint64],
    threads: int = 1,
) -> int:
    """Copy ``size[i]`` bytes from address ``src[i]`` to address ``dst[i]``, for every i.

    dst, src, size: C-contiguous uint64 arrays of one length; sizes in bytes, 0 is skipped.
    threads: 1 to 256; checked and otherwise ignored here.
    Returns the number of bytes copied, when all of them are there.
    The caller guarantees that the memory exists, and that no destination overlaps another
    destination or a source: the order of the copies is not defined.
    Raises TypeError or ValueError for bad arguments, before anything is copied.
    """
    words = {
        "dst": words_of("dst", dst),
        "src": words_of("src", src),
        "size": words_of("size", size),
    }
    lengths = [len(view) for view in words.values()]
    if len(set(lengths)) != 1:
        raise ValueError(
            "dst, src and size must have equal lengths, "
            f"not {lengths[0]}, {lengths[1]} and {lengths[2]}"
        )
    check_threads(threads)

    to, from_, num_bytes = (view.tolist() for view in words.values())
    total = 0
    for i, length in enumerate(num_bytes):
        for name, address in (("dst", to[i]), ("src", from_[i])):
            check_memory(f"{name}[{i}]: ", address, length)
        if (total := total + length) > END_OF_MEMORY:
            raise ValueError(
                f"size: the first {i + 1} fragments are more bytes than there is memory"
            )
    for address, source, length in zip(to, from_, num_bytes, strict=True):
        ctypes.memmove(address, source, length)
    return total
