"""Exact LRU hits for all cache sizes, from one pass.

LRU is a stack: a cache of C blocks holds the C topmost blocks, ordered by the last request that
touched them, and within one request shallow blocks above deep ones, since a tree evicts leaves
first. A reference is a hit if the block's position just before is at most C; that position is its
stack distance (Mattson et al., Evaluation Techniques for Storage Hierarchies, 1970).

The blocks of a segment that request p touched last are adjacent in the stack, below the blocks that
later requests have touched. The number of the latter is the number of blocks in segments between p
and this one whose own previous request was p or earlier.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtier.tools.replay.segments import Segments
from kvtier.tools.replay.trace import Ints


@dataclass(frozen=True, eq=False)
class Distances:
    """Stack distances of a trace's segments.

    above: number of blocks above the first block of each segment, int64 [num_segments]; undefined
    for new blocks. Block k of a segment has the distance ``above + k + 1``.
    """

    segments: Segments
    above: Ints

    def hits(self, capacity: int) -> Ints:
        """Return the blocks that each request finds in a cache: int64 [num_requests].

        capacity: blocks of the cache.
        """
        segments = self.segments
        found = np.clip(capacity - self.above, 0, segments.length)
        return segments.per_request(np.where(segments.is_reuse, found, 0))


def find_distances(segments: Segments) -> Distances:
    """Return the stack distances of segments.

    Cost: O(s log n) for s segments of n requests, in array operations.
    """
    # References up to and including each request.
    touched = np.cumsum(segments.per_request(segments.length))
    earlier = _sum_before(segments.request, segments.previous, segments.length)
    above = earlier - np.where(segments.is_reuse, touched[segments.previous], 0)
    return Distances(segments, above)


def _sum_before(request: Ints, previous: Ints, weight: Ints) -> Ints:
    """Return, per event, the weight of events with smaller ``request`` and not larger ``previous``.

    At the highest bit in which two requests differ, the smaller one has 0. So for each bit, from
    the highest on, events are grouped by all higher bits, each group ordered by ``previous``, and
    events with bit 1 get the sum of those with bit 0 before them. Each group is then split by the
    bit, which keeps the order.

    request: int64 [n], ascending.
    """
    num = len(request)
    found = np.zeros(num, np.int64)
    if not num:
        return found
    num_bits = int(request[-1]).bit_length()
    # first[r]: events of requests below r.
    first = np.searchsorted(request, np.arange((1 << num_bits) + 1))
    order = np.argsort(previous, kind="stable")
    places = np.arange(num)
    for bit in range(num_bits - 1, -1, -1):
        group = request[order] >> bit
        is_low = (group & 1) == 0
        start = first[(group >> 1) << (bit + 1)]
        sums = np.zeros(num + 1, np.int64)
        np.cumsum(np.where(is_low, weight[order], 0), out=sums[1:])
        gained = sums[:-1] - sums[start]
        found[order] += np.where(is_low, 0, gained)
        counts = np.zeros(num + 1, np.int64)
        np.cumsum(is_low, out=counts[1:])
        num_low = counts[:-1] - counts[start]
        goes_to = np.where(is_low, start + num_low, first[group << bit] + places - start - num_low)
        moved = np.empty_like(order)
        moved[goes_to] = order
        order = moved
    return found
