"""Python equivalent of the native ``SlotTable``: slots by key, with keys in an external table."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.core.reference.key_table import KEY_BYTES, Int64s, Keys, as_bytes, check_array


class SlotTable:
    """Table of the slot of each listed key. Not thread-safe.

    Invalid arguments raise ValueError or TypeError without any change.

    keys: V32 [num_slots], key of each slot, with any stride. The array is not copied; the key of a
        listed slot must not change.
    slots: int64 [n], slots to list; of slots with equal keys the last one counts.
    """

    def __init__(self, keys: Keys, slots: Int64s) -> None:
        if not isinstance(keys, np.ndarray):
            raise TypeError(f"keys must be an array of V32, not {type(keys).__qualname__}")
        if keys.dtype != np.dtype(f"V{KEY_BYTES}"):
            raise TypeError(f"keys must be an array of V32, not of {keys.dtype}")
        if keys.ndim != 1:
            raise ValueError(f"keys must have one dimension, not {keys.ndim}")
        self._keys = keys
        self._slots: dict[bytes, int] = {}
        self.put(slots)

    def __len__(self) -> int:
        return len(self._slots)

    def num_bytes(self) -> int:
        """Return the approximate memory of the table in bytes."""
        return 200 * len(self._slots)

    def find(self, keys: Keys) -> Int64s:
        """Return the slot of each key: int64 [n]; -1 for a key that is not listed."""
        check_array("keys", keys, np.dtype(f"V{KEY_BYTES}"))
        return np.array([self._slots.get(key, -1) for key in as_bytes(keys)], np.int64)

    def put(self, slots: Int64s) -> None:
        """List slots; they replace other slots with the same keys."""
        self._check(slots)
        self._slots.update(zip(self._keys_of(slots), slots.tolist(), strict=True))

    def remove(self, slots: Int64s) -> None:
        """Remove slots from the list."""
        self._check(slots)
        for key, slot in zip(self._keys_of(slots), slots.tolist(), strict=True):
            if self._slots.get(key) == slot:
                del self._slots[key]

    def _keys_of(self, slots: Int64s) -> list[bytes]:
        return as_bytes(np.ascontiguousarray(self._keys[slots]))

    def _check(self, slots: npt.NDArray[np.int64]) -> None:
        check_array("slots", slots, np.dtype(np.int64))
        wrong = np.flatnonzero((slots < 0) | (slots >= len(self._keys)))
        if len(wrong):
            raise ValueError(
                f"slots[{wrong[0]}]: {slots[wrong[0]]} is not in 0 .. {len(self._keys) - 1}"
            )
