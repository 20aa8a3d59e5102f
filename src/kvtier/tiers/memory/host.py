"""Host tier: one arena of DRAM, with huge pages and page-locked if the system grants it."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.core.errors import ConfigError
from kvtier.core.system.memory import available_bytes
from kvtier.core.types import HOST, Slot
from kvtier.devices.base import Device, Finding, Memory
from kvtier.layout import KVGroup, named_layout
from kvtier.tiers.base import MemoryTier
from kvtier.tiers.memory import pages
from kvtier.tiers.memory.arena import Arena, ArenaOptions, Touch
from kvtier.tiers.memory.slots import SlotPool

RESERVE_BYTES = 1 << 30
"""Bytes reserved for the system when the arena's size is checked."""


class HostTier(MemoryTier):
    """Memory tier of ``capacity_bytes`` of host DRAM; each block is contiguous (``block_first``).

    A large tier opens its first slots at construction, and the others while it serves, as their
    memory is touched and page-locked. Slots whose memory cannot be allocated stay closed.

    Args:
        group: shape of the blocks.
        capacity_bytes: capacity, rounded down to whole blocks.
        device: device that locks the memory.
        options: options of the memory; the defaults if None.
        touch: see ``Arena``.

    Raises:
        ConfigError: the capacity is below one block, or above what the machine or the control group
            has left.
    """

    def __init__(
        self,
        group: KVGroup,
        capacity_bytes: int,
        device: Device,
        options: ArenaOptions | None = None,
        touch: Touch = pages.touch,
    ) -> None:
        num_blocks = capacity_bytes // group.bytes_per_block
        if num_blocks < 1:
            raise ConfigError(
                f"host tier: a capacity of {capacity_bytes} bytes is below one block "
                f"({group.bytes_per_block} bytes at block_size={group.block_size}, "
                f"{group.num_layers} layers); raise host capacity or lower block_size"
            )
        options = options or ArenaOptions()
        is_there = options.file is not None and options.file.exists()
        if not is_there:
            check_host_capacity(capacity_bytes)
        layout = named_layout("block_first", group, num_blocks)
        self.arena = Arena(layout, device, options, touch)
        super().__init__(HOST, self.arena.memory, layout)
        self.seams = self.arena.seams
        self._slots = SlotPool(num_blocks, num_open=0)
        self._open_ready()

    def _open_ready(self) -> None:
        """Open the slots that became ready meanwhile. Only the owner's thread opens slots."""
        num_new = self.arena.num_ready_blocks - self._slots.num_open
        if num_new:
            self._slots.open(num_new)

    @property
    def num_open(self) -> int:
        self._open_ready()
        return self._slots.num_open

    @property
    def num_free(self) -> int:
        self._open_ready()
        return self._slots.num_free

    @property
    def num_used(self) -> int:
        return self._slots.num_used

    def allocate(self, num_slots: int) -> Sequence[Slot] | None:
        self._open_ready()
        return self._slots.allocate(num_slots)

    @property
    def ready_memory(self) -> Memory:
        """Part of ``memory`` whose pages are ready now."""
        return self.arena.ready_memory

    def findings(self) -> list[Finding]:
        return [*super().findings(), *self.arena.findings()]

    def close(self) -> None:
        self.arena.close()


def check_host_capacity(capacity_bytes: int) -> None:
    """Raise ``ConfigError`` if the machine or the control group has less memory left."""
    left, limited_by = available_bytes()
    if capacity_bytes + RESERVE_BYTES > left:
        raise ConfigError(
            f"host tier: a capacity of {capacity_bytes / 2**30:.2f} GiB does not fit: "
            f"{left / 2**30:.2f} GiB are left ({limited_by}) and "
            f"{RESERVE_BYTES / 2**30:.0f} GiB stay reserved; lower host capacity"
        )
