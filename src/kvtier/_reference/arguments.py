"""Arguments of the twins, checked as the native core checks them."""

from __future__ import annotations

import operator

MAX_THREADS = 256
END_OF_MEMORY = 2**63
"""Processes have the lower half of the addresses."""


def check_threads(threads: int) -> None:
    """Raise unless this is a number of threads that may be asked for."""
    if not 1 <= operator.index(threads) <= MAX_THREADS:
        raise ValueError(f"threads must be between 1 and {MAX_THREADS}, not {threads}")


def check_memory(name: str, address: int, num_bytes: int) -> None:
    """Raise unless these bytes can lie in memory; no bytes lie anywhere."""
    if num_bytes and (address == 0 or address + num_bytes > END_OF_MEMORY):
        raise ValueError(f"{name}{num_bytes} bytes at address {address} do not lie in memory")


def pieces_of(addresses: object, sizes: object) -> list[tuple[int, int]]:
    """Pieces of memory, ``sizes[i]`` bytes at ``addresses[i]``. Raise unless all can be there."""
    starts, lengths = words_of("addresses", addresses), words_of("sizes", sizes)
    if len(starts) != len(lengths):
        raise ValueError(
            f"addresses and sizes must have equal lengths, not {len(starts)} and {len(lengths)}"
        )
    pieces = list(zip(starts.tolist(), lengths.tolist(), strict=True))
    for i, (start, length) in enumerate(pieces):
        check_memory(f"addresses[{i}]: ", start, length)
    return pieces


def words_of(name: str, array: object) -> memoryview:
    """The items of a one-dimensional, C-contiguous array of uint64."""
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
