"""Interface of memory tiers: a fixed number of slots for blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import cast

import numpy as np
import numpy.typing as npt

from kvtier.core.errors import LayoutError
from kvtier.core.types import DEVICE, Slot
from kvtier.devices.base import Finding, Memory
from kvtier.layout import Fragments, Layout, fragments, named_layout
from kvtier.tiers.memory.slots import SlotPool, check_slots
from kvtier.tiers.pieces import Pieces


class SlotAllocator(ABC):
    """Allocator of ``num_slots`` slots for blocks. The index knows the contents of the slots.

    The caller guarantees
        one thread allocates and frees. A slot is freed once, when nothing copies from or to it.
    The implementer provides
        ``allocate`` and ``free`` in O(requested slots). The capacity is a hard bound.
    Outcomes and errors
        ``allocate`` returns None if there are too few slots; that is not an error. A slot that the
        tier does not have, and a negative number of slots, raise ``ValueError``.
    """

    num_slots: int
    """Slots have numbers below it."""

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Number of slots that ``allocate`` could return now."""

    @property
    def capacity(self) -> int:
        """Number of blocks that the tier will hold once all its slots are open."""
        return self.num_slots

    @property
    def num_open(self) -> int:
        """Number of open slots, free or not. A tier may open more while it serves."""
        return self.num_slots

    @property
    def num_used(self) -> int:
        """Number of slots that are allocated and not freed."""
        return self.num_open - self.num_free

    @abstractmethod
    def allocate(self, num_slots: int) -> Sequence[Slot] | None:
        """Allocate slots, neighbours if possible; None if there are too few."""

    @abstractmethod
    def free(self, slots: Sequence[Slot]) -> None:
        """Free allocated slots."""

    def longest_run(self) -> int:
        """Return the length of the longest run of free neighbouring slots."""
        return self.num_free

    def close(self) -> None:
        """Release memory or files, if there are any."""
        return


class DistantAllocator(SlotAllocator):
    """Slots in the memory of other processes. They are closed until ``open`` is called."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots = SlotPool(num_slots, num_open=0)

    @property
    def num_free(self) -> int:
        return self._slots.num_free

    @property
    def num_open(self) -> int:
        return self._slots.num_open

    def open(self, num_open: int) -> None:
        """Open the first ``num_open`` slots. A number below the current one has no effect."""
        if num_open > self.num_open:
            self._slots.open(num_open - self.num_open)

    def allocate(self, num_slots: int) -> Sequence[Slot] | None:
        return self._slots.allocate(num_slots)

    def free(self, slots: Sequence[Slot]) -> None:
        self._slots.free(slots)


class MemoryTier(SlotAllocator):
    """Tier whose slots lie in memory, in a layout. A device copies to and from it directly.

    The constructor raises ``ConfigError`` if the capacity cannot be allocated. After ``close`` the
    tier is not used again.

    seams: int64, ascending offsets into the memory that no copy may cross: there one registration
    with the driver ends and another begins. No slot crosses one.
    """

    seams: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def __init__(self, name: str, memory: Memory, layout: Layout) -> None:
        self.name = name
        self.memory = memory
        self.layout = layout
        self.num_slots = layout.num_blocks
        self._slots = SlotPool(layout.num_blocks)

    @property
    def num_free(self) -> int:
        return self._slots.num_free

    def allocate(self, num_slots: int) -> Sequence[Slot] | None:
        return self._slots.allocate(num_slots)

    def free(self, slots: Sequence[Slot]) -> None:
        self._slots.free(slots)

    def longest_run(self) -> int:
        """Return the length of the longest run of free neighbouring slots."""
        return self._slots.longest_run()

    def pieces(self, slots: Sequence[Slot]) -> Pieces:
        """Return the locations of the blocks in ``slots``.

        Raises ``ValueError`` for a slot that is not the tier's.
        """
        check_slots(slots, self.num_slots)
        begins = self._lies.src(np.asarray(slots, np.int64)).astype(np.uint64)
        return Pieces(begins + np.uint64(self.memory.address), self._lies.size, self.memory.kind)

    @cached_property
    def _lies(self) -> Fragments:
        """Pieces of a block in the order of its bytes."""
        return fragments(self.layout, named_layout("block_first", self.layout.group, 1))

    def findings(self) -> list[Finding]:
        """Return findings for ``kvtier doctor``."""
        size_gib = self.layout.block_bytes / 2**30
        return [Finding(f"{self.name} tier", f"{self.num_slots} blocks, {size_gib:.2f} GiB")]

    @abstractmethod
    def close(self) -> None:
        """Release the tier's memory."""


class Quota(SlotAllocator):
    """Slots of a tier that keeps blocks by key. They are only counted; they name no location.

    limit: returns the number of blocks that the tier has room for now. It may shrink.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self.num_slots = limit()
        self._limit = limit
        self._num_given = 0
        self._back: list[Slot] = []

    @property
    def num_open(self) -> int:
        return self._limit()

    @property
    def num_free(self) -> int:
        return max(0, self._limit() - self.num_used)

    @property
    def num_used(self) -> int:
        return self._num_given - len(self._back)

    def allocate(self, num_slots: int) -> Sequence[Slot] | None:
        # Imported here, so that ``kvtier doctor`` can report why the native core can't be used.
        from kvtier.core.hot import Numbers

        if num_slots > self.num_free:
            return None
        rest = max(0, len(self._back) - num_slots)
        slots = self._back[rest:]
        del self._back[rest:]
        first, self._num_given = self._num_given, self._num_given + num_slots - len(slots)
        return cast(
            "Sequence[Slot]", Numbers.joined(slots, Numbers.counted(first, self._num_given))
        )

    def free(self, slots: Sequence[Slot]) -> None:
        assert len(slots) <= self.num_used, "more slots freed than allocated"
        self._back += slots


class DeviceTier(MemoryTier):
    """Slots in the KV pool that attention reads. The engine owns the memory.

    memory: at least ``layout.nbytes`` bytes; it must outlive the tier.
    """

    def __init__(self, memory: Memory, layout: Layout) -> None:
        if memory.nbytes < layout.nbytes:
            raise LayoutError(
                f"the device pool has {memory.nbytes} bytes, its layout needs {layout.nbytes}"
            )
        super().__init__(DEVICE, memory, layout)

    def close(self) -> None:
        """Do nothing: the engine owns the pool."""
