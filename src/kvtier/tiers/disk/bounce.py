"""Aligned memory for blocks that can't be read or written where they lie."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import numpy.typing as npt

from kvtier.devices.base import Memory

Uint64s = npt.NDArray[np.uint64]


class Bounce:
    """Room for ``num_slots`` slots of ``slot_bytes``, aligned to pages. One thread uses it.

    What lies behind a block in its slot is zero, and stays so: only blocks are copied in.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = max(1, num_slots)
        num_bytes = self.num_slots * slot_bytes
        buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = np.frombuffer(buffer, np.uint8).ctypes.data
        self.memory = Memory(address, num_bytes, "host", buffer)
        self.addresses: Uint64s = (address + np.arange(self.num_slots) * slot_bytes).astype(
            np.uint64
        )

    def copy_in(self, addresses: Uint64s, block_bytes: int) -> None:
        """The block at ``addresses[i]`` to place i."""
        for at, to in zip(addresses.tolist(), self.addresses.tolist(), strict=False):
            ctypes.memmove(to, at, block_bytes)

    def copy_out(self, addresses: Uint64s, block_bytes: int) -> None:
        """The block at place i to ``addresses[i]``."""
        for to, at in zip(addresses.tolist(), self.addresses.tolist(), strict=False):
            ctypes.memmove(to, at, block_bytes)
