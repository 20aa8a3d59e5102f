"""Numbers and keys of many blocks: the twins of the native classes, as lists."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Generic, TypeVar

Item = TypeVar("Item")


class _Packed(list[Item], Generic[Item]):
    """Not changed once made, equal to any list of the same items.

    The native classes keep the items themselves, side by side: whoever takes a part has a view of
    it, and the core, numpy and the collector of garbage meet no object for each.
    """

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return super().__eq__(list(other) if isinstance(other, tuple) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    @classmethod
    def joined(cls, *parts: Iterable[Item]) -> _Packed[Item]:
        """The items of all parts, in order."""
        return cls(chain.from_iterable(parts))


class Numbers(_Packed[Item]):
    """Blocks or slots: 0 .. 2**63 - 1. To numpy an array of int64."""

    def __init__(self, items: Iterable[Item] = ()) -> None:
        super().__init__(items)
        for item in self:
            if not isinstance(item, int):
                raise TypeError(f"a number must be an int, not {type(item).__name__}")
            if not 0 <= item < 1 << 63:
                raise ValueError(f"{item} is not in 0 .. 2**63 - 1")

    @staticmethod
    def counted(first: int, end: int) -> Numbers[int]:
        """first, first + 1, ... end - 1."""
        if end < first:
            raise ValueError(f"the end {end} is before the first {first}")
        return Numbers(range(first, end))


class Keys(_Packed[Item]):
    """Keys of blocks: 32 bytes each. To numpy an array of V32."""

    def __init__(self, items: Iterable[Item] = ()) -> None:
        super().__init__(items)
        for item in self:
            if not isinstance(item, bytes):
                raise TypeError(f"a key must be bytes, not {type(item).__name__}")
            if len(item) != 32:
                raise ValueError(f"a key has 32 bytes, not {len(item)}")
