"""Argument checks of the Python equivalents, the same as in the native core."""

from __future__ import annotations

import operator

MAX_THREADS = 256
END_OF_MEMORY = 2**63
"""End of the addresses that a process can have: the lower half of the address space."""


def check_threads(threads: int) -> None:
    """Raise ValueError unless ``threads`` is in the permitted range."""
    if not 1 <= operator.index(threads) <= MAX_THREADS:
        raise ValueError(f"threads must be between 1 and {MAX_THREADS}, not {threads}")


def check_memory(name: str, address: int, num_bytes: int) -> None:
    """Raise ValueError unless these bytes can be in memory. 0 bytes may have any address."""
    if num_bytes and (address == 0 or address + num_bytes > END_OF_MEMORY):
        raise ValueError(f"{name}{num_bytes} bytes at address {address} do not lie in memory")


def pieces_of(addresses: object, sizes: object) -> list[tuple[int, int]]:
    """Return (address, size) of each piece of memory.

    Raises TypeError or ValueError for bad arrays, or an impossible piece.
    """
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
    """Return a view of a one-dimensional, C-contiguous array of uint64; raise for others."""
    try:
        view = memoryview(array)  # type: ignore[arg-type]  # checked here
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
