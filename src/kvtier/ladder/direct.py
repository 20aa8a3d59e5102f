"""Direct reads from storage into an engine's own memory."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.ladder.loads import Loads
from kvtier.ladder.topology import Topology
from kvtier.plan import Copy
from kvtier.transfer import Mover
from kvtier.types import BlockId, Direct, Slot


class DirectLoads:
    """Reads from storage into the engine's own memory, past every tier.

    As with every load, storage is read directly always, or if the memory on the way is short of
    room. The blocks stay in storage until the read has ended. No tier has what has arrived.
    """

    def __init__(self, topology: Topology, mover: Mover, loads: Loads) -> None:
        self._topology = topology
        self._mover = mover
        self._loads = loads

    @property
    def is_for_all(self) -> bool:
        """Whether blocks from any storage can do without room on the way."""
        topology, at_need = self._topology, self._topology.direct_at_need
        is_above = topology.device is not None and bool(topology.storages)
        return is_above and (topology.direct | at_need).issuperset(topology.storages)

    def how(self, storage: str) -> Direct:
        """Return whether blocks are read directly from there now: not while reads hang."""
        device = self._topology.device
        if device is None or not self._mover.accepts((storage, device)):
            return Direct.OFF
        if storage in self._topology.direct:
            return Direct.ON
        return Direct.AUTO if storage in self._topology.direct_at_need else Direct.OFF

    def read(self, blocks: Sequence[BlockId], storage: str, places: Sequence[Slot]) -> None:
        """Begin to read blocks from storage. places: destinations, as the mover knows them."""
        assert self._topology.device is not None, "no engine has memory above the tiers"
        self._loads.load_direct(Copy(storage, self._topology.device, blocks), places)
