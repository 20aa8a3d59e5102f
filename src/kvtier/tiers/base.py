"""The seam of tiers: places with a fixed number of slots for blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvtier.devices.base import Finding, Memory
from kvtier.layout import Layout
from kvtier.tiers.slots import SlotPool, check_slots
from kvtier.types import BlockKey, BlockName, Slot

Addresses = npt.NDArray[np.uint64]
"""Where blocks begin in the memory of this process: one per block."""


class Tier(ABC):
    """Room for ``num_slots`` blocks. What is in a slot is the index's business.

    The caller guarantees
        one thread allocates and frees; a slot is freed once, when nothing copies from or to it.
    The implementer provides
        ``allocate`` and ``free`` in O(slots asked for); capacity is a hard bound.
    Outcomes and errors
        no room is None, not an error. A capacity that can't be had is a ``ConfigError`` at
        construction. Slots that the tier does not have, and fewer than none, are a ``ValueError``.
        After ``close`` the tier is not used again.
    """

    name: str
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
    """A tier whose slots lie in memory, in a layout: a device copies to and from it directly.

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

    def allocate(self, num_slots: int) -> list[Slot] | None:
        return self._slots.allocate(num_slots)

    def free(self, slots: list[Slot]) -> None:
        self._slots.free(slots)

    def longest_run(self) -> int:
        """Length of the longest run of neighbours that are free."""
        return self._slots.longest_run()

    def addresses(self, slots: Sequence[Slot]) -> Addresses:
        """Where the blocks in ``slots`` begin, for a layout that keeps each block in one piece.

        Raises ``ValueError`` where a slot is none of the tier's.
        """
        check_slots(slots, self.num_slots)
        return self.memory.address + np.asarray(slots, np.uint64) * np.uint64(
            self.layout.group.bytes_per_block
        )

    def findings(self) -> list[Finding]:
        size_gib = self.layout.block_bytes / 2**30
        return [Finding(f"{self.name} tier", f"{self.num_slots} blocks, {size_gib:.2f} GiB")]


class LoadResult(Enum):
    """What became of one block that was read."""

    OK = "ok"
    """Its bytes are in place, and are the right ones."""
    CORRUPT = "corrupt"
    """Something else was found there: the block is lost."""
    FAILED = "failed"
    """It could not be read."""


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """What a scrub saw. corrupt: slots with wrong bytes. failed: slots that can't be read."""

    num_checked: int
    num_bytes: int
    corrupt: tuple[Slot, ...]
    failed: tuple[Slot, ...]

    @classmethod
    def sum(cls, reports: Sequence[ScrubReport]) -> ScrubReport:
        """What several scrubs saw."""
        return cls(
            sum(report.num_checked for report in reports),
            sum(report.num_bytes for report in reports),
            tuple(slot for report in reports for slot in report.corrupt),
            tuple(slot for report in reports for slot in report.failed),
        )


class StorageTier(Tier):
    """A tier that is reached by reading and writing whole blocks, and outlives the process.

    The caller guarantees
        one thread at a time calls ``store``, one ``load``, one everything else; the memory at each
        address is ``bytes_per_block`` long, stays alive and is touched by nobody else meanwhile.
        A slot that is being read or written is not freed.
    The implementer provides
        ``store`` and ``load`` return when nothing of them is under way any more. A block that was
        loaded with ``OK`` is the block that was stored under that key, bit for bit.
        Blocks found at the start are nobody's until they are claimed; unclaimed ones count as free,
        and ``allocate`` drops them when it needs the room.
    Outcomes and errors
        a block that could not be stored or loaded is an outcome per block, not an error. A tier
        that fails again and again stops itself for a while: then nothing is stored, or nothing is
        loaded, and serving goes on.
    """

    bytes_per_block: int

    @property
    def can_load(self) -> bool:
        """Whether it makes sense to load now; otherwise all of it would fail, at once."""
        return True

    @property
    def can_store(self) -> bool:
        """The same for storing."""
        return True

    @property
    @abstractmethod
    def num_unclaimed(self) -> int:
        """Blocks that were found at the start and not claimed or dropped since."""

    @abstractmethod
    def claim(self, keys: Sequence[BlockKey]) -> list[Slot]:
        """Slots of the longest leading run of ``keys`` that are unclaimed; in use from now on."""

    @abstractmethod
    def store(
        self, names: Sequence[BlockName], slots: Sequence[Slot], addresses: Addresses
    ) -> list[bool]:
        """Write blocks into ``slots``. True where the block is there for good."""

    @abstractmethod
    def load(
        self, keys: Sequence[BlockKey], slots: Sequence[Slot], addresses: Addresses
    ) -> list[LoadResult]:
        """Read the blocks in ``slots`` to ``addresses``, and see that they are right."""

    def scrub(self, max_bytes: int) -> ScrubReport:
        """Verify some blocks, about ``max_bytes`` of them, that nobody asked for; each call goes on
        where the last one ended. Called like ``load``, by one thread at a time."""
        del max_bytes
        return ScrubReport(0, 0, (), ())

    def num_welcome(self, num_blocks: int) -> int:
        """How many of ``num_blocks`` new blocks may be written now; the answer uses them up.

        For tiers that writing wears out, or that can't be written to now.
        """
        return num_blocks
