"""Eviction policies that only the native core implements: the learned policy, and published ones.

The native index runs the policy called ``native_name``, and reports all requests to it. The Python
index, which is used without the native core, runs LRU instead.

``native/policy/list_policies.hpp`` and ``lfuda.hpp`` implement the published policies and name
their sources. They count a request for a block as its use, evict the end of a prompt before its
start, and admit every block.
"""

from __future__ import annotations

from kvtier.index.policies.lru import LruPolicy


class NativePolicy(LruPolicy):
    """Base class of the native core's policies that learn from requests."""

    knows_prompts = True


class RunsPolicy(NativePolicy):
    """kvtier's learned policy, which learns which prompts are reused, and when."""

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
    """LFU with dynamic ageing: the least frequently used block first; old uses count less."""

    native_name = "lfuda"


class SievePolicy(NativePolicy):
    """SIEVE: a hand from the oldest block to the newest evicts those unused since its last pass."""

    native_name = "sieve"
