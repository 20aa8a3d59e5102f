"""Python equivalents, as lists, of the native arrays of block numbers and keys."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Generic, TypeVar

import numpy as np

Item = TypeVar("Item")


class _Packed(list[Item], Generic[Item]):
    """Immutable sequence that equals any list of the same items.

    The native classes store the items contiguously: slices are views, NumPy and the core can use
    the memory directly, and there is no Python object per item.
    """

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return super().__eq__(list(other) if isinstance(other, tuple) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    @classmethod
    def joined(cls, *parts: Iterable[Item]) -> _Packed[Item]:
        """Return a sequence of the items of all parts, in order."""
        return cls(chain.from_iterable(parts))


class Numbers(_Packed[Item]):
    """Block or slot numbers, 0 .. 2**63 - 1. NumPy sees an array of int64."""

    def __init__(self, items: Iterable[Item] = ()) -> None:
        super().__init__(items.tolist() if isinstance(items, np.ndarray) else items)
        for item in self:
            if not isinstance(item, int):
                raise TypeError(f"a number must be an int, not {type(item).__name__}")
            if not 0 <= item < 1 << 63:
                raise ValueError(f"{item} is not in 0 .. 2**63 - 1")

    @staticmethod
    def counted(first: int, end: int) -> Numbers[int]:
        """Return the numbers first .. end - 1."""
        if end < first:
            raise ValueError(f"the end {end} is before the first {first}")
        return Numbers(range(first, end))


class Keys(_Packed[Item]):
    """Keys of blocks, 32 bytes each. NumPy sees an array of V32."""

    def __init__(self, items: Iterable[Item] = ()) -> None:
        super().__init__(items)
        for item in self:
            if not isinstance(item, bytes):
                raise TypeError(f"a key must be bytes, not {type(item).__name__}")
            if len(item) != 32:
                raise ValueError(f"a key has 32 bytes, not {len(item)}")
