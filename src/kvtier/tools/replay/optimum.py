"""The optimum: what a cache that knew the future would hit.

Belady's rule with bypass: keep the blocks whose next use is soonest, of one request the shallow
ones; what is used later than all that is kept is not taken in. Exact for blocks of one size and
hits that must be prefixes (Belady, A Study of Replacement Algorithms, 1966).

A segment comes in when its previous request ends and goes when its own begins, so what is kept for
request j is a number: the deepest blocks leave first, and what is left is a prefix.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from kvtier.tools.replay.segments import Segments
from kvtier.tools.replay.trace import Ints


class Optimum:
    """The optimum of one trace, for any size."""

    def __init__(self, segments: Segments) -> None:
        self._num = segments.num_requests
        reuse = np.flatnonzero(segments.is_reuse)
        reuse = reuse[np.argsort(segments.previous[reuse], kind="stable")]
        comes = segments.previous[reuse]
        # Segments that come in after request i: next_use[ends[i]:ends[i + 1]].
        self._ends: list[int] = np.searchsorted(comes, np.arange(self._num + 1)).tolist()
        self._next_use: list[int] = segments.request[reuse].tolist()
        self._length: list[int] = segments.length[reuse].tolist()

    def hits(self, capacity: int) -> Ints:
        """Blocks that each request finds in a cache of ``capacity`` blocks: int64
        [num_requests]."""
        kept = [0] * self._num
        latest: list[int] = []  # requests with something kept, the last one first
        used = 0
        ends, next_use, length = self._ends, self._next_use, self._length
        for now in range(self._num):
            used -= kept[now]  # these are hits; what of them is used again comes in below
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
