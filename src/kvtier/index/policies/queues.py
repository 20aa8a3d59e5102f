"""Published eviction policies that keep blocks in queues.

``native/policy/list_policies.hpp`` and ``lfuda.hpp`` implement them and name their sources. A use
of a block is a request that asks for it. The end of a prompt leaves before its beginning, and every
block is admitted.
"""

from __future__ import annotations

from kvtier.index.policies.learned import NativePolicy


class ArcPolicy(NativePolicy):
    """ARC: one LRU list of blocks requested once, one of blocks requested more often; misses on
    recently evicted blocks move the boundary between them."""

    native_name = "arc"


class S3FifoPolicy(NativePolicy):
    """S3-FIFO: new blocks enter a small FIFO queue of a tenth of the capacity; blocks requested
    again there, or soon after eviction, enter the main one."""

    native_name = "s3fifo"


class LfudaPolicy(NativePolicy):
    """LFU with dynamic ageing: the least frequently used block leaves first, and old uses count
    less."""

    native_name = "lfuda"


class SievePolicy(NativePolicy):
    """SIEVE: a hand moves from the oldest block to the newest and evicts blocks that were not used
    since its last pass."""

    native_name = "sieve"
