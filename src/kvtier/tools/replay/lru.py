"""Least recently used, exactly, for all sizes from one pass.

LRU is a stack: a cache of C blocks has the C that stand highest, by the last request that touched
them, and within one request the shallow ones above the deep ones, as a tree gives up its leaves
first. A reference hits where the block stands at C or higher just before; that place is its
distance (Mattson et al., Evaluation Techniques for Storage Hierarchies, 1970).

The blocks of a segment that request p touched last stand next to each other: below those that some
request after p has touched. There are as many of these as segments before this one, and after p,
have touched whose own previous request was p or earlier.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtier.tools.replay.segments import Segments
from kvtier.tools.replay.trace import Ints


@dataclass(frozen=True, eq=False)
class Distances:
    """Stack distances of a trace's segments.

    above: blocks that stand above the first of each segment.

    The k-th has the distance ``above + k + 1``. int64 [num_segments]; of new blocks it means
    nothing.
    """

    segments: Segments
    above: Ints

    def hits(self, capacity: int) -> Ints:
        """Blocks that each request finds in a cache of ``capacity`` blocks.

        Int64 [num_requests].
        """
        segments = self.segments
        found = np.clip(capacity - self.above, 0, segments.length)
        return segments.per_request(np.where(segments.is_reuse, found, 0))


def find_distances(segments: Segments) -> Distances:
    """Cost: O(s log n) for s segments of n requests, each step over whole arrays."""
    # References up to each request and with it.
    touched = np.cumsum(segments.per_request(segments.length))
    earlier = _sum_before(segments.request, segments.previous, segments.length)
    above = earlier - np.where(segments.is_reuse, touched[segments.previous], 0)
    return Distances(segments, above)


def _sum_before(request: Ints, previous: Ints, weight: Ints) -> Ints:
    """Per event the weight of all with a smaller ``request`` and a ``previous`` not above its own.

    request: int64 [n], ascending. Two requests differ first in some bit: there the one with 0 is
    the smaller. So for each bit, from the highest on: events in groups that agree in all bits
    above it, each group in the order of ``previous``; those with 1 get the sum of those with 0
    in front of them. From bit to bit the groups are cut in two, which keeps their order.
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
