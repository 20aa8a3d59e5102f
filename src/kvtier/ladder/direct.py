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

    Depending on the storage tier's setting, its blocks are read directly always, or only if the
    staging memory is short of free slots. Blocks can't be evicted from storage until the read has
    ended. Blocks that have arrived belong to no tier.
    """

    def __init__(self, topology: Topology, mover: Mover, loads: Loads) -> None:
        self._topology = topology
        self._mover = mover
        self._loads = loads

    @property
    def is_for_all(self) -> bool:
        """Whether blocks from every storage tier can be read without staging memory."""
        topology, at_need = self._topology, self._topology.direct_at_need
        is_above = topology.device is not None and bool(topology.storages)
        return is_above and (topology.direct | at_need).issuperset(topology.storages)

    def how(self, storage: str) -> Direct:
        """Return whether blocks of ``storage`` are read directly now. OFF while its reads hang."""
        device = self._topology.device
        if device is None or not self._mover.accepts((storage, device)):
            return Direct.OFF
        if storage in self._topology.direct:
            return Direct.ON
        return Direct.AUTO if storage in self._topology.direct_at_need else Direct.OFF

    def read(self, blocks: Sequence[BlockId], storage: str, places: Sequence[Slot]) -> None:
        """Begin to read blocks from storage.

        Args:
            blocks: the blocks.
            storage: their tier.
            places: destination of each block, by the mover's numbering.
        """
        assert self._topology.device is not None, "no engine has memory above the tiers"
        self._loads.load_direct(Copy(storage, self._topology.device, blocks), places)
