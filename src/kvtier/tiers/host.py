"""The host tier: one arena of DRAM, huge pages and page-locked where the system grants them."""

from __future__ import annotations

import logging
import mmap

import numpy as np

from kvtier.devices.base import Device, Finding, Memory
from kvtier.errors import ConfigError
from kvtier.layout import KVGroup, named_layout
from kvtier.tiers.base import MemoryTier
from kvtier.tiers.system_memory import available_bytes
from kvtier.types import HOST

logger = logging.getLogger(__name__)

MADV_POPULATE_WRITE = 23
"""Of Linux 5.14 and newer (madvise(2)); Python has no name for it yet."""

RESERVE_BYTES = 1 << 30
"""Left to the system when the arena's size is checked."""


class HostTier(MemoryTier):
    """``capacity_bytes`` of host DRAM in whole blocks, each contiguous (``block_first``).

    Raises ``ConfigError`` where the capacity is below one block or above what the machine or the
    control group has left.
    """

    def __init__(self, group: KVGroup, capacity_bytes: int, device: Device) -> None:
        num_blocks = capacity_bytes // group.bytes_per_block
        if num_blocks < 1:
            raise ConfigError(
                f"host tier: a capacity of {capacity_bytes} bytes is below one block "
                f"({group.bytes_per_block} bytes at block_size={group.block_size}, "
                f"{group.num_layers} layers); raise host capacity or lower block_size"
            )
        left, limited_by = available_bytes()
        if capacity_bytes + RESERVE_BYTES > left:
            raise ConfigError(
                f"host tier: a capacity of {capacity_bytes / 2**30:.2f} GiB does not fit: "
                f"{left / 2**30:.2f} GiB are left ({limited_by}) and "
                f"{RESERVE_BYTES / 2**30:.0f} GiB stay reserved; lower host capacity"
            )
        layout = named_layout("block_first", group, num_blocks)
        arena = mmap.mmap(-1, layout.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._huge_pages = _ask_for_huge_pages(arena)
        _populate(arena)
        self._device = device
        address = np.frombuffer(arena, np.uint8).ctypes.data
        super().__init__(HOST, Memory(address, layout.nbytes, "host", arena), layout)
        self._page_locked = device.page_lock(self.memory)

    def findings(self) -> list[Finding]:
        why_not = f"the {self._device.name} device does not need or grant it"
        locked = ("yes", "") if self._page_locked else ("no", why_not)
        return [
            *super().findings(),
            Finding("huge pages", self._huge_pages),
            Finding("page-locked", *locked),
        ]

    def close(self) -> None:
        if self._page_locked:
            self._device.unlock(self.memory)
            self._page_locked = False
        # The arena goes with its last user: a view may still look at it.


def _populate(arena: mmap.mmap) -> None:
    """Have all pages now: a first store should not pay for them, nor find out there are too few."""
    try:
        arena.madvise(MADV_POPULATE_WRITE)
    except OSError:  # Linux before 5.14
        np.frombuffer(arena, np.uint8)[:: mmap.PAGESIZE] = 0


def _ask_for_huge_pages(arena: mmap.mmap) -> str:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return "no: this system has none"
    try:
        arena.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        logger.info("huge pages refused error=%s", error)
        return f"no: {error.strerror}"
    return "asked for"
