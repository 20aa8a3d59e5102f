"""Slots by key: the twin of the native table, in a dictionary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

KEY_BYTES = 32

Keys = npt.NDArray[np.void]
Int64s = npt.NDArray[np.int64]


class KeyTable:
    """The slot of each key. Not safe to be used by several threads at once.

    keys: V32 [n], C-contiguous. slots: int64 [n], not negative. Of equal keys the last one counts.
    """

    def __init__(self, keys: Keys, slots: Int64s) -> None:
        self._slots: dict[bytes, int] = {}
        self.put(keys, slots)

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, keys: Keys) -> Int64s:
        """int64 [n]: the slot of each key, -1 where it is not there."""
        found = [self._slots.get(key, -1) for key in _as_bytes(keys)]
        return np.array(found, np.int64)

    def put(self, keys: Keys, slots: Int64s) -> None:
        """The keys are in these slots from now on."""
        _check(keys, slots)
        self._slots.update(zip(_as_bytes(keys), slots.tolist(), strict=True))

    def remove(self, keys: Keys, slots: Int64s) -> None:
        """The keys are in these slots no more; one that is elsewhere stays there."""
        _check(keys, slots)
        for key, slot in zip(_as_bytes(keys), slots.tolist(), strict=True):
            if self._slots.get(key) == slot:
                del self._slots[key]


def _as_bytes(keys: Keys) -> list[bytes]:
    whole = keys.tobytes()
    return [whole[at : at + KEY_BYTES] for at in range(0, len(whole), KEY_BYTES)]


def _check(keys: Keys, slots: Int64s) -> None:
    if keys.itemsize != KEY_BYTES or keys.shape != slots.shape or keys.ndim != 1:
        raise ValueError(
            f"keys must be V{KEY_BYTES} [n] and slots int64 [n], not {keys.dtype} {keys.shape} and "
            f"{slots.dtype} {slots.shape}"
        )
    if slots.min(initial=0) < 0:
        raise ValueError(f"slots must not be negative, got {slots.min()}")
