"""The tiers as they stand: what is above and below each."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.plan import Ways, ways_of
from kvtier.tiers import Room, StorageFacts
from kvtier.types import Direct


class Row:
    """Memories, fastest first, and storage tiers beside each other below the slowest of them.

    Storage is read into ``staging``, the slowest memory, and written from there. Some may be read
    straight into the fastest one: always (``direct``), or where ``staging`` is short of room.

    rooms: of all tiers, the memories first. storages: those of them that are storage.
    """

    def __init__(self, rooms: Mapping[str, Room], storages: Mapping[str, StorageFacts]) -> None:
        self.rooms = dict(rooms)
        self.storages = [name for name in rooms if name in storages]
        self.memories = [name for name in rooms if name not in storages]
        self.fastest, self.staging = self.memories[0], self.memories[-1]
        wants = {name: storages[name].direct for name in self.storages if self.is_staged}
        self.direct = frozenset(name for name, how in wants.items() if how is Direct.ON)
        self.direct_at_need = frozenset(name for name, how in wants.items() if how is Direct.AUTO)

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

    def ways(self, device: str | None = None) -> Ways:
        """From each tier to the fastest one; to ``device``, where an engine has one above it."""
        memories = self.memories if device is None else [device, *self.memories]
        return ways_of(memories, self.storages, self.direct)
