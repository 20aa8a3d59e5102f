"""Neighbours that are alike: a long prompt lies in few runs, and a run is one step of work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TypeVar

T = TypeVar("T")


def runs_of(values: Iterable[T], first: int = 0) -> Iterator[tuple[T, range]]:
    """Each value with the positions of the neighbours that have it, in order. first: position of
    the first value."""
    for value, alike in groupby(values):
        end = first + len(list(alike))
        yield value, range(first, end)
        first = end
