"""The lines in front of all storage tiers: who joins them, and whose writes begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.index import BlockIndex, State
from kvtier.ladder.options import LadderOptions
from kvtier.ladder.topology import Topology
from kvtier.ladder.write_queue import WriteQueue
from kvtier.plan import WriteBudget
from kvtier.telemetry import Metrics
from kvtier.types import BlockId

WRITE_BLOCKS = 1024
"""Whose writes begin at a time, one piece at least."""
WRITE_SHARE = 128
"""Of a long line a piece is one in so many: each costs the deciding thread something, too."""


class WriteQueues:
    """One line for each storage tier of ``row``.

    begin: begins to write blocks to a tier, and returns how many of them.
    """

    def __init__(
        self,
        row: Topology,
        index: BlockIndex,
        metrics: Metrics,
        options: LadderOptions,
        begin: Callable[[Sequence[BlockId], str], int],
        clock: Callable[[], float],
    ) -> None:
        self._index = index
        self._begin = begin
        self._piece_blocks = options.piece_blocks
        self._lines = {
            name: WriteQueue(
                name,
                row,
                index,
                metrics,
                block_bytes=options.block_bytes,
                after_uses=options.archive_after_uses,
                budget=WriteBudget(options.bytes_per_day.get(name, 0), clock=clock),
            )
            for name in row.storages
        }

    def __contains__(self, tier: str) -> bool:
        """Whether it is a storage tier."""
        return tier in self._lines

    @property
    def waiting(self) -> list[str]:
        """Tiers that some block waits for."""
        return [name for name, line in self._lines.items() if len(line)]

    def offer(self, blocks: Sequence[BlockId]) -> None:
        """Blocks are in memory, perhaps: those that are worth a write join the lines."""
        for line in self._lines.values():
            line.offer(blocks)

    def write(self) -> None:
        """Begin the writes whose turn has come; of a long line a part, for an engine waits."""
        for tier, line in self._lines.items():
            piece = max(self._piece_blocks, len(line) // WRITE_SHARE)
            left = max(piece, WRITE_BLOCKS)
            while left > 0 and (wanted := line.take(min(piece, left))):
                left -= len(wanted)
                line.began(self._begin(wanted, tier))

    def ended(self, tier: str, num_blocks: int) -> None:
        """So many are not on their way to a tier any more, written or not."""
        self._lines[tier].ended(num_blocks)

    def least_chance(self, tier: str, is_full: bool) -> float:
        """Return the least chance of reuse at which a block is worth a write to ``tier`` now."""
        return self._lines[tier].least_chance(is_full)

    def has(self, block: BlockId) -> bool:
        """Whether a block waits for its write to storage, or is being written."""
        return any(
            block in line or self._index.state(block, name) is State.WRITING
            for name, line in self._lines.items()
        )

    def are_in_line(self, blocks: Sequence[BlockId | None]) -> list[bool]:
        """Return which blocks wait for their write to storage; blocks being written do not."""
        lines = [line for line in self._lines.values() if len(line)]
        if not lines:
            return [False] * len(blocks)
        return [block is not None and any(block in line for line in lines) for block in blocks]

    def clear(self) -> None:
        """Nothing is to be written any more."""
        for line in self._lines.values():
            line.clear()
