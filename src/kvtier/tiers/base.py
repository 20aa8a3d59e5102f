"""The seam of memory tiers: places with a fixed number of slots for blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import cast

import numpy as np
import numpy.typing as npt

from kvtier.devices.base import Finding, Memory
from kvtier.errors import LayoutError
from kvtier.layout import Fragments, Layout, fragments, named_layout
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.slots import SlotPool, check_slots
from kvtier.types import DEVICE, Slot


class Room(ABC):
    """Slots for ``num_slots`` blocks. What is in a slot is the index's business.

    The caller guarantees
        one thread allocates and frees; a slot is freed once, when nothing copies from or to it.
    The implementer provides
        ``allocate`` and ``free`` in O(slots asked for); capacity is a hard bound.
    Outcomes and errors
        no room is None, not an error. Slots that the tier does not have, and fewer than none, are a
        ``ValueError``.
    """

    num_slots: int

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Slots that ``allocate`` could give now."""

    @property
    def num_open(self) -> int:
        """Slots that are there by now, free or not: a tier may open some while it serves."""
        return self.num_slots

    @property
    def num_used(self) -> int:
        """Slots that were given out and not given back."""
        return self.num_open - self.num_free

    @abstractmethod
    def allocate(self, num_slots: int) -> Sequence[Slot] | None:
        """Allocate slots, neighbours if possible; None if there are too few."""

    @abstractmethod
    def free(self, slots: Sequence[Slot]) -> None:
        """Give slots back."""

    def longest_run(self) -> int:
        """Length of the longest run of neighbours that are free."""
        return self.num_free

    def close(self) -> None:
        """Give memory or files back, where there are any."""
        return


class DistantRoom(Room):
    """Slots of memory that other processes have: all of them closed until these say so."""

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
        """The first ``num_open`` slots can be used from now on; never fewer than before."""
        if num_open > self.num_open:
            self._slots.open(num_open - self.num_open)

    def allocate(self, num_slots: int) -> Sequence[Slot] | None:
        return self._slots.allocate(num_slots)

    def free(self, slots: Sequence[Slot]) -> None:
        self._slots.free(slots)


class MemoryTier(Room):
    """A tier whose slots lie in memory, in a layout: a device copies to and from it directly.

    A capacity that can't be had is a ``ConfigError`` at construction. After ``close`` the tier is
    not used again.

    seams: int64, offsets into the memory that no copy may run across, ascending: there one
    registration with the driver ends and another begins. No slot lies across one.
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
        """Length of the longest run of neighbours that are free."""
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
        """The pieces of a block, in the order of its bytes."""
        return fragments(self.layout, named_layout("block_first", self.layout.group, 1))

    def findings(self) -> list[Finding]:
        """Return findings for ``kvtier doctor``."""
        size_gib = self.layout.block_bytes / 2**30
        return [Finding(f"{self.name} tier", f"{self.num_slots} blocks, {size_gib:.2f} GiB")]

    @abstractmethod
    def close(self) -> None:
        """Give the tier's memory back."""


class Quota(Room):
    """Room where blocks are kept by key: a number of them, and no places; slots are only counted.

    limit: of blocks, as it is now; what a tier lost of its room since it was made is not used.
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
        # Here, so that ``kvtier doctor`` can say why the core can't be used.
        from kvtier._hot import Numbers

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
        assert len(slots) <= self.num_used, "more room given back than was taken"
        self._back += slots


class DeviceTier(MemoryTier):
    """Slots in the pool that attention reads. The engine owns the memory.

    memory: at least ``layout.nbytes`` bytes, alive as long as the tier.
    """

    def __init__(self, memory: Memory, layout: Layout) -> None:
        if memory.nbytes < layout.nbytes:
            raise LayoutError(
                f"the device pool has {memory.nbytes} bytes, its layout needs {layout.nbytes}"
            )
        super().__init__(DEVICE, memory, layout)

    def close(self) -> None:
        """Nothing to give back: the engine owns the pool."""
