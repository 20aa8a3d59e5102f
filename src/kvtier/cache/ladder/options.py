"""Options of the ladder, and functions that it calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtier.core.types import BlockId

OnChange = Callable[[str, Sequence[BlockId], bool], object]
"""Called with a tier, the blocks that entered or left it, and whether they left."""


@dataclass(frozen=True, slots=True)
class LadderOptions:
    """Options of the ladder.

    Attributes:
        block_bytes: bytes of one block, or of a rank's part of it.
        demotes: whether blocks evicted from the fastest tier are copied one tier down (write_back).
        patience_s: longest delay of an eviction by such a copy.
        archive_after_uses: uses before a block in memory is worth a write to storage.
        bytes_per_day: limit of writes per storage tier; 0 or no entry for no limit.
        piece_blocks: blocks per read or write of storage.
        lookup_patience_s: longest wait of a request for storage that does not answer look-ups at
            once.
        block_size: tokens per block, if the cost of computing is weighed: a request then waits for
            storage no longer than computing takes, and blocks that take longer to compute are worth
            more room. 0 to not weigh it.
        num_shards: number of ranks that each keep a part of every block.
    """

    block_bytes: int
    demotes: bool = False
    patience_s: float = 1.0
    archive_after_uses: int = 1
    bytes_per_day: Mapping[str, int] = field(default_factory=dict)
    piece_blocks: int = 64
    lookup_patience_s: float = 0.0
    block_size: int = 0
    num_shards: int = 1


@dataclass(frozen=True, slots=True)
class LadderCallbacks:
    """Functions that the ladder calls. All but ``on_end`` are called on the cache's thread.

    Attributes:
        on_change: called when blocks have entered a tier, or leave it.
        on_left_out: called with a tier, and blocks that it did not admit.
        on_end: called each time a transfer has ended, on the thread that ended it. It lets an owner
            sleep until ``Ladder.poll`` has work.
        may_write: return whether anything is written to storage now. Until then queued blocks wait
            as long as they stay in memory.
    """

    on_change: OnChange | None = None
    on_left_out: Callable[[str, Sequence[BlockId]], object] | None = None
    on_end: Callable[[], object] | None = None
    may_write: Callable[[], bool] = lambda: True
