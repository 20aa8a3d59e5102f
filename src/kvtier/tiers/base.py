"""The seam of tiers: places with a fixed number of slots for blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvtier.devices.base import Finding, Memory
from kvtier.layout import Layout
from kvtier.tiers.slots import SlotPool
from kvtier.types import Slot


class Tier(ABC):
    """Room for ``num_slots`` blocks. What is in a slot is the index's business.

    The caller guarantees
        one thread allocates and frees; a slot is freed once, when nothing copies from or to it.
    The implementer provides
        ``allocate`` and ``free`` in O(slots asked for); capacity is a hard bound.
    Outcomes and errors
        no room is None, not an error. A capacity that can't be had is a ``ConfigError`` at
        construction. After ``close`` the tier is not used again.
    """

    name: str
    num_slots: int

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Slots that ``allocate`` could give now."""

    @abstractmethod
    def allocate(self, num_slots: int) -> list[Slot] | None:
        """That many free slots, neighbours where possible; None where there are not enough."""

    @abstractmethod
    def free(self, slots: list[Slot]) -> None:
        """Give slots back."""

    @abstractmethod
    def findings(self) -> list[Finding]:
        """For ``kvtier doctor``."""

    @abstractmethod
    def close(self) -> None:
        """Give the tier's memory or files back."""


class MemoryTier(Tier):
    """A tier whose slots lie in memory, in a layout: a device copies to and from it directly."""

    def __init__(self, name: str, memory: Memory, layout: Layout) -> None:
        self.name = name
        self.memory = memory
        self.layout = layout
        self.num_slots = layout.num_blocks
        self._slots = SlotPool(layout.num_blocks)

    @property
    def num_free(self) -> int:
        return self._slots.num_free

    def allocate(self, num_slots: int) -> list[Slot] | None:
        return self._slots.allocate(num_slots)

    def free(self, slots: list[Slot]) -> None:
        self._slots.free(slots)

    def longest_run(self) -> int:
        """Length of the longest run of neighbours that are free."""
        return self._slots.longest_run()

    def findings(self) -> list[Finding]:
        size_gib = self.layout.nbytes / 2**30
        return [Finding(f"{self.name} tier", f"{self.num_slots} blocks, {size_gib:.2f} GiB")]
