"""Order of the tiers: which tier is above and below each."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.core.types import Direct
from kvtier.plan import Ways, Witnesses, ways_of
from kvtier.tiers import SlotAllocator, StorageFacts


class Topology:
    """Memory tiers, fastest first, and independent storage tiers below the slowest of them.

    Storage is read into ``staging``, the slowest memory, and written from there. Some storage may
    be read directly into the fastest memory: always (``direct``), or if ``staging`` is short of
    free slots (``direct_at_need``).

    Args:
        rooms: slots of all tiers, memory tiers first.
        storages: current facts on the storage tiers among them.
        device: an engine's memory above the fastest tier. Direct reads then go there. Blocks in it
            belong to no tier.
    """

    def __init__(
        self,
        allocators: Mapping[str, SlotAllocator],
        storages: Mapping[str, StorageFacts],
        device: str | None = None,
    ) -> None:
        self.allocators = dict(allocators)
        self.storages = [name for name in allocators if name in storages]
        self.memories = [name for name in allocators if name not in storages]
        self.fastest, self.staging = self.memories[0], self.memories[-1]
        self.device = device
        self._facts = storages

    @property
    def direct(self) -> frozenset[str]:
        """Storage tiers that are always read directly."""
        return self._those(Direct.ON)

    @property
    def direct_at_need(self) -> frozenset[str]:
        """Storage tiers that are read directly if ``staging`` is short of free slots."""
        return self._those(Direct.AUTO)

    @property
    def writable(self) -> list[str]:
        """Storage tiers that blocks are written to."""
        return [name for name in self.storages if self._facts[name].takes_writes]

    @property
    def can_read_all_directly(self) -> bool:
        """Whether blocks from every storage tier can be read without staging memory."""
        return (self.direct | self.direct_at_need).issuperset(self.storages)

    def _those(self, how: Direct) -> frozenset[str]:
        if not self.is_staged and self.device is None:
            return frozenset()
        return frozenset(name for name in self.storages if self._facts[name].direct is how)

    @property
    def is_staged(self) -> bool:
        """Whether blocks from storage pass through a memory tier below the fastest one."""
        return self.staging != self.fastest

    def above(self, tier: str) -> str:
        """Return the tier to which blocks are copied from ``tier``, towards the fastest one."""
        if tier in self.storages:
            return self.staging
        return self.memories[self.memories.index(tier) - 1]

    def below(self, tier: str) -> str | None:
        """Return the next slower memory tier; None if there is none."""
        after = self.memories.index(tier) + 1
        return self.memories[after] if after < len(self.memories) else None

    def ways(self) -> Ways:
        """Return the ways from each tier to the fastest one, or to ``device`` if there is one."""
        memories = self.memories if self.device is None else [self.device, *self.memories]
        return ways_of(memories, self.storages, self.direct)

    def witnesses(self) -> Witnesses:
        """Return the routes without probes: direct reads, and copies to an engine's own memory.

        A request joins blocks that are in flight to the device, and would wait for a probe.
        """
        device = self.fastest if self.device is None else self.device
        direct = {(name, device): (name, self.staging) for name in self.direct}
        return direct if self.device is None else {(self.fastest, device): None, **direct}
