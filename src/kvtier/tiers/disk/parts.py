"""Blocks in several parts: one per rank or disk, and there only when all of them are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Thread
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.tiers.disk.format.records import RecordKind, same_keys
from kvtier.tiers.disk.format.rows import SlotRows

Part = TypeVar("Part")
Result = TypeVar("Result")
SLICE_SLOTS = 1 << 16


def complete(tables: Sequence[SlotRows]) -> npt.NDArray[np.bool_]:
    """Slots in which every part holds the same block, of the same write.

    Records of all its parts have one number. tables: per part the record of each slot.
    """
    same: npt.NDArray[np.bool_] = tables[0].kinds == RecordKind.PUT
    for table in tables[1:]:
        same &= table.kinds == RecordKind.PUT
        for start in range(0, len(table), SLICE_SLOTS):
            part = slice(start, start + SLICE_SLOTS)
            same[part] &= same_keys(table.keys[part], tables[0].keys[part])
            same[part] &= table["seq"][part] == tables[0]["seq"][part]
    return same


def on_all(parts: Sequence[Part], work: Callable[[int, Part], Result]) -> list[Result]:
    """Return the results of ``work(rank, part)`` for all parts, run at the same time.

    A call that raises raises here, after the others have ended.
    """
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, parts[rank])
        except BaseException as error:  # raised again by the caller's thread
            errors.append(error)

    # Threads that a disk which hangs can't keep the process from ending with.
    others = [Thread(target=run, args=(rank,), daemon=True) for rank in range(1, len(parts))]
    for thread in others:
        thread.start()
    run(0)
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(len(parts))]
