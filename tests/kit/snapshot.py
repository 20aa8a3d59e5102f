"""Comparable copy of the whole state of an object, to show that a call changes nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from itertools import count
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from kvtier.index import KeyIndex, PromptIndex
from kvtier.tiers import SlotAllocator

OURS = ("kvtier.", "tests.")
PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, type, ModuleType)


def snapshot(root: object) -> list[object]:
    """Return everything that can be reached from ``root``, each object once.

    An index is read by its own listing of blocks and orders, a closure by its variables, so a clock
    that counts its calls is compared, too. Objects of other libraries are compared by type.
    """
    seen: dict[int, tuple[int, object]] = {}
    return list(_walk(root, seen))


def _walk(each: Any, seen: dict[int, tuple[int, object]]) -> Iterator[object]:
    if isinstance(each, PLAIN):
        yield each
        return
    if id(each) in seen:
        yield "again", seen[id(each)][0]
        return
    seen[id(each)] = len(seen), each  # kept alive, or another could have its id
    yield type(each).__qualname__
    for part in _parts(each):
        yield from _walk(part, seen)


def _parts(each: Any) -> list[Any]:
    for kind, parts in PARTS.items():
        if isinstance(each, kind):
            return list(parts(each))
    if not type(each).__module__.startswith(OURS):
        return []
    names = [name for base in type(each).__mro__ for name in getattr(base, "__slots__", ())]
    slots = {name: getattr(each, name) for name in names if hasattr(each, name)}
    return [*slots.items(), *vars(each).items()] if hasattr(each, "__dict__") else [*slots.items()]


def _of_cell(cell: CellType) -> list[object]:
    try:
        return [cell.cell_contents]
    except ValueError:  # nothing was assigned yet
        return []


PARTS: Mapping[type, Callable[[Any], Any]] = {
    KeyIndex: lambda index: [repr(index.known()), *(list(index.order(t)) for t in index.tiers)],
    PromptIndex: lambda index: index.nodes(),
    SlotAllocator: lambda room: [room.num_used, room.num_open, room.num_free],
    dict: lambda found: [part for pair in found.items() for part in pair],
    set: lambda found: sorted(found, key=repr),
    frozenset: lambda found: sorted(found, key=repr),
    list: list,
    tuple: list,
    deque: list,
    np.ndarray: lambda array: [array.tobytes()],
    bytearray: lambda found: [bytes(found)],
    count: lambda counter: [repr(counter)],
    FunctionType: lambda function: function.__closure__ or (),
    CellType: _of_cell,
    MethodType: lambda method: [method.__self__],
}
"""By type, the parts of an object that are compared."""
