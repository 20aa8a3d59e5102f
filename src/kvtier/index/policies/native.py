"""Eviction policies that only the native core has: kvtier's learned policy, and published ones.

The native index runs the policy called ``native_name``, and tells it which requests ask for which
blocks. The index in Python, which is used where the core was not built, runs LRU in its place.

``native/policy/list_policies.hpp`` and ``lfuda.hpp`` implement the published policies and name
their sources. These count a request for a block as its use, evict the end of a prompt before its
beginning, and admit every block.
"""

from __future__ import annotations

from kvtier.index.policies.lru import LruPolicy


class NativePolicy(LruPolicy):
    """A policy of the native core that is told of requests."""

    knows_prompts = True


class RunsPolicy(NativePolicy):
    """kvtier's learned policy: it learns which prompts are used again, and when."""

    native_name = "runs"


class ArcPolicy(NativePolicy):
    """ARC: one LRU list of blocks requested once, one of blocks requested more often.

    Misses on recently evicted blocks move the boundary between them.
    """

    native_name = "arc"


class S3FifoPolicy(NativePolicy):
    """S3-FIFO: new blocks enter a small FIFO queue of a tenth of the capacity.

    Blocks requested again there, or soon after eviction, enter the main one.
    """

    native_name = "s3fifo"


class LfudaPolicy(NativePolicy):
    """LFU with dynamic ageing.

    The least frequently used block leaves first, and old uses count less.
    """

    native_name = "lfuda"


class SievePolicy(NativePolicy):
    """SIEVE: a hand from the oldest block to the newest evicts those unused since its last pass."""

    native_name = "sieve"
