"""Options of the ladder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LadderOptions:
    """Options of the ladder.

    block_bytes: of one block.

    demotes: what leaves the fastest tier goes one down (write_back). patience_s: how long that may
    hold up an eviction. archive_after_uses: when a block in memory is worth a write to storage.
    bytes_per_day: what may be written to a storage tier, 0 or none for no limit. piece_blocks: what
    is read from storage, or written, at a time. lookup_patience_s: how long a request waits for
    storage that has to be asked what it has. block_size: tokens of a block, where what computing it
    takes is weighed: a request waits for storage no longer, and what takes longer is worth more
    room; 0 where it is not. num_shards: ranks that each keep a part of every block; ``block_bytes``
    is one part.
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
