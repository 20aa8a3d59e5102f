"""Slots by key: the twin of the native table, in a dictionary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

KEY_BYTES = 32
MAX_SLOT = 2**32 - 1

Keys = npt.NDArray[np.void]
Int64s = npt.NDArray[np.int64]


class KeyTable:
    """The slot of each key. Not safe to be used by several threads at once.

    keys: V32 [n], C-contiguous. slots: int64 [n], 0 .. 2**32 - 1. Of equal keys the last counts.
    ValueError or TypeError for anything else, and nothing is changed then.
    """

    def __init__(self, keys: Keys, slots: Int64s) -> None:
        self._slots: dict[bytes, int] = {}
        self.put(keys, slots)

    def __len__(self) -> int:
        return len(self._slots)

    def num_bytes(self) -> int:
        """Memory of the table, about: a key, a number, and what the dictionary needs for both."""
        return 200 * len(self._slots)

    def find(self, keys: Keys) -> Int64s:
        """int64 [n]: the slot of each key, -1 where it is not there."""
        check_array("keys", keys, np.dtype(f"V{KEY_BYTES}"))
        found = [self._slots.get(key, -1) for key in as_bytes(keys)]
        return np.array(found, np.int64)

    def put(self, keys: Keys, slots: Int64s) -> None:
        """The keys are in these slots from now on."""
        _check_pairs(keys, slots)
        self._slots.update(zip(as_bytes(keys), slots.tolist(), strict=True))

    def remove(self, keys: Keys, slots: Int64s) -> None:
        """The keys are in these slots no more; one that is elsewhere stays there."""
        _check_pairs(keys, slots)
        for key, slot in zip(as_bytes(keys), slots.tolist(), strict=True):
            if self._slots.get(key) == slot:
                del self._slots[key]


def as_bytes(keys: Keys) -> list[bytes]:
    """The keys one by one."""
    whole = keys.tobytes()
    return [whole[at : at + KEY_BYTES] for at in range(0, len(whole), KEY_BYTES)]


def _check_pairs(keys: Keys, slots: Int64s) -> None:
    check_array("keys", keys, np.dtype(f"V{KEY_BYTES}"))
    check_array("slots", slots, np.dtype(np.int64))
    if len(keys) != len(slots):
        raise ValueError(
            f"keys and slots must have equal lengths, not {len(keys)} and {len(slots)}"
        )
    wrong = np.flatnonzero((slots < 0) | (slots > MAX_SLOT))
    if len(wrong):
        raise ValueError(f"slots[{wrong[0]}]: {slots[wrong[0]]} is not in 0 .. 2**32 - 1")


def check_array(name: str, array: object, dtype: np.dtype[np.generic]) -> None:
    """Raise where ``array`` is not a one-dimensional, C-contiguous array of ``dtype``."""
    kind = f"V{KEY_BYTES}" if dtype.kind == "V" else dtype.name
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be an array of {kind}, not {type(array).__qualname__}")
    if array.dtype != dtype:
        raise TypeError(f"{name} must be an array of {kind}, not of {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, not {array.ndim}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} must be C-contiguous; pass numpy.ascontiguousarray({name})")
