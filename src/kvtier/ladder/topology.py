"""The tiers as they stand: what is above and below each."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.plan import Ways, ways_of
from kvtier.tiers import Room, StorageFacts
from kvtier.types import Direct


class Topology:
    """Memories, fastest first, and storage tiers beside each other below the slowest of them.

    Storage is read into ``staging``, the slowest memory, and written from there. Some storage may
    be read directly into the fastest one: always (``direct``), or if ``staging`` is short of room.

    rooms: of all tiers, the memories first. storages: those of them that are storage, as they are
    now. device: memory of an engine's above the fastest tier, which is then what storage may be
    read directly into; no tier has what is there.
    """

    def __init__(
        self,
        rooms: Mapping[str, Room],
        storages: Mapping[str, StorageFacts],
        device: str | None = None,
    ) -> None:
        self.rooms = dict(rooms)
        self.storages = [name for name in rooms if name in storages]
        self.memories = [name for name in rooms if name not in storages]
        self.fastest, self.staging = self.memories[0], self.memories[-1]
        self.device = device
        self._facts = storages

    @property
    def direct(self) -> frozenset[str]:
        """Storage that is always read directly."""
        return self._those(Direct.ON)

    @property
    def direct_at_need(self) -> frozenset[str]:
        """Storage that is read directly if ``staging`` is short of room."""
        return self._those(Direct.AUTO)

    def _those(self, how: Direct) -> frozenset[str]:
        if not self.is_staged and self.device is None:
            return frozenset()
        return frozenset(name for name in self.storages if self._facts[name].direct is how)

    @property
    def is_staged(self) -> bool:
        """Whether what comes from storage passes through a memory below the fastest one."""
        return self.staging != self.fastest

    def above(self, tier: str) -> str:
        """The tier that blocks are copied to from ``tier``, towards the fastest one."""
        if tier in self.storages:
            return self.staging
        return self.memories[self.memories.index(tier) - 1]

    def below(self, tier: str) -> str | None:
        """The next slower tier in memory."""
        after = self.memories.index(tier) + 1
        return self.memories[after] if after < len(self.memories) else None

    def ways(self) -> Ways:
        """From each tier to the fastest one; to ``device``, where an engine has one above it."""
        memories = self.memories if self.device is None else [self.device, *self.memories]
        return ways_of(memories, self.storages, self.direct)
