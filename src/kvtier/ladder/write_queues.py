"""Write queues of all storage tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvtier.index import BlockIndex, State
from kvtier.ladder.options import LadderOptions
from kvtier.ladder.topology import Topology
from kvtier.ladder.write_queue import WriteQueue
from kvtier.plan import WriteBudget
from kvtier.telemetry import Metrics
from kvtier.types import BlockId


class WriteQueues:
    """One ``WriteQueue`` for each storage tier of ``topology``.

    is_open: whether anything is written to storage. While it is False, queued blocks wait as long
    as they stay in memory.
    """

    def __init__(
        self,
        topology: Topology,
        index: BlockIndex,
        metrics: Metrics,
        options: LadderOptions,
        clock: Callable[[], float],
    ) -> None:
        self.is_open = True
        self._index = index
        self._queues = {
            name: WriteQueue(
                name,
                topology,
                index,
                metrics,
                block_bytes=options.block_bytes,
                after_uses=options.archive_after_uses,
                budget=WriteBudget(options.bytes_per_day.get(name, 0), clock=clock),
            )
            for name in topology.storages
        }

    def __contains__(self, tier: str) -> bool:
        """Whether it is a storage tier."""
        return tier in self._queues

    def __iter__(self) -> Iterator[WriteQueue]:
        """Iterate over the queues, that of the fastest storage tier first."""
        return iter(self._queues.values())

    @property
    def waiting(self) -> list[str]:
        """Storage tiers with queued blocks."""
        return [name for name, queue in self._queues.items() if len(queue)]

    def offer(self, blocks: Sequence[BlockId]) -> None:
        """Queue those of ``blocks`` that are in memory and worth a write."""
        for queue in self._queues.values():
            queue.offer(blocks)

    def ended(self, tier: str, num_blocks: int) -> None:
        """Note that ``num_blocks`` writes to a tier have ended, successfully or not."""
        self._queues[tier].ended(num_blocks)

    def least_chance(self, tier: str, is_full: bool) -> float:
        """Return the least probability of reuse at which a block is worth a write to ``tier``."""
        return self._queues[tier].least_chance(is_full)

    def has(self, block: BlockId) -> bool:
        """Whether a block waits for its write to storage, or is being written."""
        return any(
            block in queue or self._index.state(block, name) is State.WRITING
            for name, queue in self._queues.items()
        )

    def are_queued(self, blocks: Sequence[BlockId]) -> list[bool]:
        """Return which blocks wait for their write to storage; blocks being written do not."""
        queues = [queue for queue in self._queues.values() if len(queue)]
        if not queues:
            return [False] * len(blocks)
        return [any(block in queue for queue in queues) for block in blocks]

    def clear(self) -> None:
        """Empty all queues."""
        for queue in self._queues.values():
            queue.clear()
