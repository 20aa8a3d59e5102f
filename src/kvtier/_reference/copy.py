"""The batched copy, one ``memmove`` per fragment."""

from __future__ import annotations

import ctypes
import operator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_THREADS = 256
_END_OF_MEMORY = 2**64


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
    words = {"dst": _words("dst", dst), "src": _words("src", src), "size": _words("size", size)}
    lengths = [len(view) for view in words.values()]
    if len(set(lengths)) != 1:
        raise ValueError(
            "dst, src and size must have equal lengths, "
            f"not {lengths[0]}, {lengths[1]} and {lengths[2]}"
        )
    if not 1 <= operator.index(threads) <= _MAX_THREADS:
        raise ValueError(f"threads must be between 1 and {_MAX_THREADS}, not {threads}")

    to, from_, num_bytes = (view.tolist() for view in words.values())
    for i, length in enumerate(num_bytes):
        for name, address in (("dst", to[i]), ("src", from_[i])):
            if length and (address == 0 or address + length >= _END_OF_MEMORY):
                raise ValueError(
                    f"{name}[{i}]: {length} bytes at address {address} do not lie in memory"
                )
    for address, source, length in zip(to, from_, num_bytes, strict=True):
        ctypes.memmove(address, source, length)
    return sum(num_bytes)


def _words(name: str, array: object) -> memoryview:
    """The items of an array of uint64, checked as the native core checks them."""
    try:
        view = memoryview(array)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        raise TypeError(
            f"{name} must be an array of uint64, not {type(array).__qualname__}"
        ) from None
    if view.itemsize != 8 or view.format not in ("Q", "L"):
        raise TypeError(f"{name} must be an array of uint64; its items have format {view.format!r}")
    if view.ndim != 1:
        raise ValueError(f"{name} must have one dimension, not {view.ndim}")
    if not view.c_contiguous:
        raise ValueError(f"{name} must be C-contiguous; pass numpy.ascontiguousarray({name})")
    return view
