"""Direct reads from storage into an engine's own memory."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.ladder.loads import Loads
from kvtier.ladder.topology import Topology
from kvtier.plan import Copy
from kvtier.transfer import Mover
from kvtier.types import BlockId, Direct, Slot


class Straight:
    """By the rule of every load: always, or where the memory on the way is short of room.

    No tier has what has arrived there. Until it has, or has not, the blocks stay in storage.
    """

    def __init__(self, row: Topology, mover: Mover, loads: Loads) -> None:
        self._row = row
        self._mover = mover
        self._loads = loads

    @property
    def is_for_all(self) -> bool:
        """Whether blocks from any storage can do without room on the way."""
        row = self._row
        is_above = row.device is not None and bool(row.storages)
        return is_above and (row.direct | row.direct_at_need).issuperset(row.storages)

    def how(self, storage: str) -> Direct:
        """Whether blocks come straight from there now: not while reads hang."""
        device = self._row.device
        if device is None or not self._mover.accepts((storage, device)):
            return Direct.OFF
        if storage in self._row.direct:
            return Direct.ON
        return Direct.AUTO if storage in self._row.direct_at_need else Direct.OFF

    def read(self, blocks: Sequence[BlockId], storage: str, places: Sequence[Slot]) -> None:
        """Begin to read blocks that storage has. places: where they go to, as the mover knows."""
        assert self._row.device is not None, "no engine has memory above the tiers"
        self._loads.load_straight(Copy(storage, self._row.device, blocks), places)
