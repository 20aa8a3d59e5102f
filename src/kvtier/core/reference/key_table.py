"""Python equivalent of the native ``KeyTable``: slots by key, in a dictionary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

KEY_BYTES = 32
MAX_SLOT = 2**32 - 1

Keys = npt.NDArray[np.void]
Int64s = npt.NDArray[np.int64]


class KeyTable:
    """Table of the slot of each key. Not thread-safe.

    Invalid arguments raise ValueError or TypeError without any change.

    keys: V32 [n], C-contiguous; of equal keys the last one counts. slots: int64 [n], in
    0 .. 2**32 - 1.
    """

    def __init__(self, keys: Keys, slots: Int64s) -> None:
        self._slots: dict[bytes, int] = {}
        self.put(keys, slots)

    def __len__(self) -> int:
        return len(self._slots)

    def num_bytes(self) -> int:
        """Return the approximate memory of the table in bytes."""
        return 200 * len(self._slots)

    def find(self, keys: Keys) -> Int64s:
        """Return the slot of each key: int64 [n]; -1 for a missing key."""
        check_array("keys", keys, np.dtype(f"V{KEY_BYTES}"))
        found = [self._slots.get(key, -1) for key in as_bytes(keys)]
        return np.array(found, np.int64)

    def put(self, keys: Keys, slots: Int64s) -> None:
        """Set the slots of keys."""
        _check_pairs(keys, slots)
        self._slots.update(zip(as_bytes(keys), slots.tolist(), strict=True))

    def remove(self, keys: Keys, slots: Int64s) -> None:
        """Remove keys that are in these slots; keys in other slots stay."""
        _check_pairs(keys, slots)
        for key, slot in zip(as_bytes(keys), slots.tolist(), strict=True):
            if self._slots.get(key) == slot:
                del self._slots[key]


def as_bytes(keys: Keys) -> list[bytes]:
    """Return keys as a list of bytes."""
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
    """Raise unless ``array`` is a one-dimensional, C-contiguous array of ``dtype``."""
    kind = f"V{KEY_BYTES}" if dtype.kind == "V" else dtype.name
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be an array of {kind}, not {type(array).__qualname__}")
    if array.dtype != dtype:
        raise TypeError(f"{name} must be an array of {kind}, not of {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, not {array.ndim}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} must be C-contiguous; pass numpy.ascontiguousarray({name})")
