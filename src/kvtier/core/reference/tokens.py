"""Packing of token ids into bytes, with NumPy."""

from __future__ import annotations

import numpy as np


def pack_tokens(tokens: object) -> bytes | None:
    """Return the ids as little-endian uint32.

    None for an unsupported type, or an id outside of 0 .. 2**32 - 1; the caller then finds out
    why.

    tokens: a list or tuple of int, or a one-dimensional, contiguous array of integers with four or
    eight bytes each, in native byte order.
    """
    if isinstance(tokens, (list, tuple)):
        if not all(type(token) is int for token in tokens):
            return None
        try:
            ids = np.array(tokens, np.int64)
        except OverflowError:
            return None
    else:
        try:
            view = memoryview(tokens)  # type: ignore[arg-type]  # checked here
        except TypeError:
            return None
        plain = (
            view.ndim == 1 and view.c_contiguous and view.format in ("i", "I", "l", "L", "q", "Q")
        )
        if not plain or view.itemsize not in (4, 8):
            return None
        ids = np.asarray(view)
    if ids.size and (ids.min() < 0 or ids.max() > 0xFFFF_FFFF):
        return None
    return ids.astype("<u4").tobytes()
