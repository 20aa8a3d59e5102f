"""Write queues: blocks in memory that wait for their write to a storage tier."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvtier.cache.ladder.options import LadderOptions
from kvtier.cache.ladder.topology import Topology
from kvtier.cache.transfer.ring import ring_blocks
from kvtier.core.grouping import has
from kvtier.core.types import DEVICE, BlockId
from kvtier.index import BlockIndex, State
from kvtier.observe import Metrics
from kvtier.observe.specs import UNWRITTEN_BLOCKS
from kvtier.plan import WriteBudget

MOVING_SHARE = 4
"""At most 1/MOVING_SHARE of the source slots may be in a write to storage, since they cannot be
evicted meanwhile. Writes from the device tier are also limited by the ring of host memory."""

LONGEST_QUEUE = 1 << 16
"""Most blocks in the queue. Storage that is this far behind will not catch up soon, so the blocks
that have waited longest are dropped. Their next use queues them again."""


LEAST_CHANCE = 0.125
"""Least probability of a use before eviction for a block to be written when writes are not limited.
docs/decisions/0047 compares other values."""
SCARCE_SHARE = 1 / 4
"""Share of the largest saved budget below which the admission threshold rises. Above it the budget
is spent freely, since unspent budget has no use."""


class WriteQueue:
    """Queue of blocks to be written to one storage tier.

    A queued block may be evicted from memory. It is then not written, but counted.

    Args:
        storage: the tier.
        topology: the tiers; blocks are written from its staging memory.
        index: blocks and their states.
        metrics: counts blocks that are not written.
        block_bytes: bytes that the write of a block takes from ``budget``.
        after_uses: number of uses from which on a block is worth a write.
        budget: limit of writes per day.
    """

    def __init__(
        self,
        storage: str,
        topology: Topology,
        index: BlockIndex,
        metrics: Metrics,
        *,
        block_bytes: int,
        after_uses: int,
        budget: WriteBudget,
    ) -> None:
        self.storage = storage
        self._source = topology.staging
        self._room = topology.allocators[topology.staging]
        self._index = index
        self._metrics = metrics
        self._block_bytes = block_bytes
        self._after_uses = after_uses
        self._budget = budget
        self._most_moving = (
            ring_blocks(block_bytes) if topology.staging == DEVICE else LONGEST_QUEUE
        )
        self._queue: deque[BlockId] = deque()  # in order of arrival
        self._waiting: set[BlockId] = set()  # the same blocks
        self._num_moving = 0

    def __len__(self) -> int:
        """Return the number of queued blocks."""
        return len(self._queue)

    def __contains__(self, block: BlockId) -> bool:
        """Whether a block is queued."""
        return block in self._waiting

    def offer(self, blocks: Sequence[BlockId]) -> None:
        """Queue those of ``blocks`` that are in memory and worth a write."""
        below = self._index.states_of(blocks, self.storage)
        if not has(below, State.ABSENT):
            return
        absent = _in_state(blocks, below, State.ABSENT)
        ready = _in_state(absent, self._index.states_of(absent, self._source), State.READY)
        after, waiting = self._after_uses, self._waiting
        uses = zip(ready, self._index.num_uses(ready), strict=True)
        new = [block for block, num in uses if num >= after and block not in waiting]
        self._queue += new
        self._waiting.update(new)
        # No longer than the memory: the blocks of a longer queue have been evicted in part.
        too_many = len(self._queue) - min(LONGEST_QUEUE, self._room.num_open)
        if too_many > 0:
            self._count(len(self._first(too_many)))

    def take(self, most: int) -> list[BlockId]:
        """Take up to ``most`` blocks out of the queue, in order of arrival.

        Report with ``began`` how many of them are being written.
        """
        share = min(max(1, self._room.num_open // MOVING_SHARE), self._most_moving)
        available = min(most, share - self._num_moving)
        taken: list[BlockId] = []
        while self._queue and len(taken) < available:
            some = self._first(available - len(taken))
            taken += self._storable(some)
        if taken and not self._budget.allows:
            self._count(len(taken))
            return []
        return taken

    def began(self, num_blocks: int) -> None:
        """Note that ``num_blocks`` of the blocks taken are being written, until ``ended``."""
        self._num_moving += num_blocks
        self._budget.spend(num_blocks * self._block_bytes)

    def least_chance(self, is_full: bool) -> float:
        """Return the least probability of reuse at which a block is worth a write now.

        It rises as the write budget runs out. It is 0 while the tier has free room and budget.
        """
        plenty = min(1.0, self._budget.share_left / SCARCE_SHARE)
        return float(LEAST_CHANCE**plenty) if is_full or plenty < 1.0 else 0.0

    def ended(self, num_blocks: int) -> None:
        """Note that ``num_blocks`` writes have ended, successfully or not."""
        self._num_moving -= num_blocks
        assert self._num_moving >= 0, "more writes have ended than were begun"

    def clear(self) -> None:
        """Empty the queue."""
        self._queue.clear()
        self._waiting.clear()

    def _first(self, num: int) -> list[BlockId]:
        """Take the first blocks out of the queue."""
        some = [self._queue.popleft() for _ in range(min(num, len(self._queue)))]
        self._waiting.difference_update(some)
        return some

    def _storable(self, blocks: Sequence[BlockId]) -> list[BlockId]:
        """Return those of ``blocks`` that are still in memory, and not yet in storage."""
        here = self._index.states_of(blocks, self._source)
        there = self._index.states_of(blocks, self.storage)
        self._count(len(blocks) - here.count(State.READY))
        return [
            block
            for block, above, below in zip(blocks, here, there, strict=True)
            if above is State.READY and below is State.ABSENT
        ]

    def _count(self, num_blocks: int) -> None:
        if num_blocks:
            self._metrics.count(UNWRITTEN_BLOCKS, num_blocks, tier=self.storage)


class WriteQueues:
    """One ``WriteQueue`` for each storage tier of ``topology``.

    may_write: see ``LadderCallbacks``.
    """

    def __init__(
        self,
        topology: Topology,
        index: BlockIndex,
        metrics: Metrics,
        options: LadderOptions,
        may_write: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._may_write = may_write
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
        self._open_queues = [self._queues[name] for name in topology.writable]

    def __contains__(self, tier: str) -> bool:
        """Whether it is a storage tier."""
        return tier in self._queues

    def __iter__(self) -> Iterator[WriteQueue]:
        """Iterate over the queues, that of the fastest storage tier first."""
        return iter(self._queues.values())

    @property
    def is_open(self) -> bool:
        """Whether anything is written to storage now."""
        return self._may_write()

    @property
    def waiting(self) -> list[str]:
        """Storage tiers with queued blocks."""
        return [name for name, queue in self._queues.items() if len(queue)]

    def offer(self, blocks: Sequence[BlockId]) -> None:
        """Queue those of ``blocks`` that are in memory and worth a write."""
        for queue in self._open_queues:
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


def _in_state(
    blocks: Sequence[BlockId], states: Sequence[State], wanted: State
) -> Sequence[BlockId]:
    """Return the blocks whose state is ``wanted``."""
    if states.count(wanted) == len(states):
        return blocks
    return [block for block, state in zip(blocks, states, strict=True) if state is wanted]
