"""Hits of a trace under a policy, by size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from kvtier.core.errors import ConfigError
from kvtier.core.hot import NATIVE
from kvtier.index.policies.replayed import LRU, RUNS, PolicyReplay
from kvtier.index.policies.replayed import POLICIES as SERVED
from kvtier.tools.replay.lru import find_distances
from kvtier.tools.replay.segments import Segments
from kvtier.tools.replay.trace import Ints, Trace

OPTIMUM = "opt"
ASKED = tuple(name for name in SERVED if name != LRU)
"""Policies that are simulated request by request."""

POLICIES = (LRU, *ASKED, OPTIMUM)
"""Policies that can be replayed."""


class Optimum:
    """Hits of a cache that knows the future of one trace, for any size.

    Belady's rule with bypass: keep the blocks whose next use is soonest, and of one request the
    shallow ones; do not admit blocks that are used later than all blocks kept. It is exact for
    blocks of one size and hits that must be prefixes (Belady, A Study of Replacement Algorithms,
    1966).

    A segment enters when its previous request ends and leaves when its own begins. The deepest
    blocks are evicted first, so the blocks kept for request j are a prefix, and a count suffices.
    """

    def __init__(self, segments: Segments) -> None:
        self._num = segments.num_requests
        reuse = np.flatnonzero(segments.is_reuse)
        reuse = reuse[np.argsort(segments.previous[reuse], kind="stable")]
        comes = segments.previous[reuse]
        # Segments that enter after request i: next_use[ends[i]:ends[i + 1]].
        self._ends: list[int] = np.searchsorted(comes, np.arange(self._num + 1)).tolist()
        self._next_use: list[int] = segments.request[reuse].tolist()
        self._length: list[int] = segments.length[reuse].tolist()

    def hits(self, capacity: int) -> Ints:
        """Return the blocks that each request finds in a cache: int64 [num_requests].

        capacity: blocks of the cache.
        """
        kept = [0] * self._num
        latest: list[int] = []  # requests with kept blocks, the last one first
        used = 0
        ends, next_use, length = self._ends, self._next_use, self._length
        for now in range(self._num):
            used -= kept[now]  # these are hits; those used again enter below
            for at in range(ends[now], ends[now + 1]):
                request = next_use[at]
                if not kept[request]:
                    heappush(latest, -request)
                kept[request] += length[at]
                used += length[at]
            while used > capacity:
                request = -latest[0]
                drop = min(kept[request], used - capacity)
                kept[request] -= drop
                used -= drop
                if not kept[request]:
                    heappop(latest)
        return np.array(kept, np.int64)


@dataclass(frozen=True, eq=False)
class ReplayHits:
    """Result of a cache of ``capacity`` blocks.

    found: blocks that each request finds, int64 [num_requests]. num_stored: total number of blocks
    written to the cache.
    """

    capacity: int
    found: Ints
    num_stored: int


class Replayer:
    """Replays one trace under any policy and size.

    tell: called during a simulation, with the numbers of requests done and in total.
    """

    def __init__(
        self, trace: Trace, segments: Segments, tell: Callable[[int, int], None] | None = None
    ) -> None:
        self._trace = trace
        self._distances = find_distances(segments)
        self._optimum = Optimum(segments)
        self._tell = tell

    def hits(self, policy: str, capacity: int) -> ReplayHits:
        """Return the hits under one of ``POLICIES``. capacity: blocks of the cache."""
        if policy == LRU:
            found = self._distances.hits(capacity)
            # The part of a path that fits is stored; blocks that were found are not written again.
            stored = int((np.minimum(self._trace.lengths, capacity) - found).sum())
            return ReplayHits(capacity, found, stored)
        if policy == OPTIMUM:
            return ReplayHits(capacity, self._optimum.hits(capacity), 0)
        return self.asked(policy, capacity)

    def asked(self, policy: str, capacity: int) -> ReplayHits:
        """Return the hits under a policy that is simulated request by request."""
        if not capacity:
            return ReplayHits(0, np.zeros(self._trace.num_requests, np.int64), 0)
        replay = PolicyReplay(policy, capacity)
        trace, num = self._trace, self._trace.num_requests
        found = np.zeros(num, np.int64)
        ends, times = trace.offsets.tolist(), trace.times.tolist()
        for at in range(num):
            found[at] = replay.request(trace.keys[ends[at] : ends[at + 1]], times[at])
            if self._tell is not None and not at % 256:
                self._tell(at, num)
        return ReplayHits(capacity, found, int(replay.num_stored))


def usual_policies() -> tuple[str, ...]:
    """Return the policies to replay by default.

    The first one is this installation's default policy, for which sizes are recommended; LRU and
    the optimum follow. Without the native core the default policy is LRU.
    """
    return (RUNS, LRU, OPTIMUM) if NATIVE else (LRU, OPTIMUM)


def check_policies(names: tuple[str, ...]) -> None:
    """Raise ``ConfigError`` for a policy that can't be replayed."""
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"policies: {name!r} is unknown; use some of {', '.join(POLICIES)}")
    if len(set(names)) < len(names) or not set(names) - {OPTIMUM}:
        raise ConfigError(
            "policies: name each once, and one that a cache can run (the optimum knows the future)"
        )
