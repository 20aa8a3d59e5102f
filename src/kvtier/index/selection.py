"""Some of many blocks or slots, without a Python object for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from kvtier.core.hot import Numbers

Number = TypeVar("Number", bound=int)
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def as_array(numbers: Sequence[int] | Int64s) -> Int64s:
    """Return blocks or slots as an array: int64 [n]. It is not to be written to."""
    return np.asarray(numbers, np.int64)


def as_numbers(array: Int64s) -> Sequence[Number]:
    """Return blocks or slots in an array as a sequence."""
    return cast("Sequence[Number]", Numbers(array))


def select(numbers: Sequence[Number], which: Bools | Int64s) -> Sequence[Number]:
    """Return the blocks or slots at some positions, or where a mask is True."""
    return as_numbers(as_array(numbers)[which])


def are_neighbours(numbers: Int64s) -> bool:
    """Whether numbers follow each other without a gap."""
    num_steps = len(numbers) - 1
    if num_steps < 0 or int(numbers[-1]) - int(numbers[0]) != num_steps:
        return False
    return bool(np.count_nonzero(numbers[1:] > numbers[:-1]) == num_steps)


def are_distinct(numbers: Int64s) -> bool:
    """Whether no number is there twice. Fastest for ascending ones."""
    num_steps = max(0, len(numbers) - 1)
    if np.count_nonzero(numbers[1:] > numbers[:-1]) == num_steps:
        return True
    ordered = np.sort(numbers)
    return bool(np.count_nonzero(ordered[1:] != ordered[:-1]) == num_steps)
