"""Token ids as bytes, through numpy."""

from __future__ import annotations

import numpy as np


def pack_tokens(tokens: object) -> bytes | None:
    """The ids as little-endian uint32.

    tokens: a list or tuple of int, or an array of integers with four or eight bytes each: one axis,
    contiguous, in the machine's byte order. None for anything else, and where an id lies outside
    0 .. 2**32 - 1: then it is for the caller to look closer.
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
            view = memoryview(tokens)  # type: ignore[arg-type]  # that is the question
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
