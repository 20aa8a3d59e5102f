"""Segments of requests: runs of blocks that the same earlier request touched last.

Each request touches all blocks from the root on. So the blocks of a request consist of segments,
each of which one earlier request touched last, and of new blocks at the end. LRU and the optimum
keep or evict whole segments or their ends, so a replay costs two or three steps per request,
however long the prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.tools.replay.trace import Ints, Trace

_KEYS_AT_ONCE = 1 << 22
"""Most keys that are sorted together, so that they fit into the processor's cache."""

Tell = Callable[[int, int], None]
"""Progress callback: (done, total)."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Segments of all requests, in the order of requests and of blocks within them.

    Attributes:
        request: the request of each segment, int64 [num_segments].
        previous: the request that touched its blocks last; -1 for new blocks, int64 [num_segments].
        first: position of its first block in the prompt, int64 [num_segments].
        length: number of its blocks, int64 [num_segments].
        num_requests: number of requests.
        num_unique: number of distinct blocks.
    """

    request: Ints
    previous: Ints
    first: Ints
    length: Ints
    num_requests: int
    num_unique: int

    @property
    def is_reuse(self) -> npt.NDArray[np.bool_]:
        return self.previous >= 0

    @property
    def num_reused(self) -> Ints:
        """Number of each request's blocks that an earlier one had: int64 [num_requests]."""
        return self.per_request(np.where(self.is_reuse, self.length, 0))

    def per_request(self, values: Ints) -> Ints:
        """Return the sums of the segments' values per request: int64 [num_requests]."""
        sums = np.bincount(self.request, weights=values, minlength=self.num_requests)
        return sums.astype(np.int64)


def find_segments(trace: Trace, tell: Tell | None = None) -> Segments:
    """Cut the requests into segments. Cost: one sort of the keys, in pieces."""
    lengths = trace.lengths
    request_of = np.repeat(np.arange(trace.num_requests, dtype=np.int32), lengths)
    previous = _previous_requests(trace, request_of, tell)
    begins = np.empty(len(previous), np.bool_)
    begins[1:] = previous[1:] != previous[:-1]
    begins[trace.offsets[:-1][lengths > 0]] = True
    starts = np.flatnonzero(begins)
    request = request_of[starts].astype(np.int64)
    before = previous[starts].astype(np.int64)
    return Segments(
        request,
        before,
        starts - trace.offsets[request],
        np.diff(np.append(starts, len(previous))),
        trace.num_requests,
        int(np.count_nonzero(previous < 0)),
    )


def _previous_requests(
    trace: Trace, request_of: npt.NDArray[np.int32], tell: Tell | None
) -> npt.NDArray[np.int32]:
    """Return, per reference, the last earlier request with the same key, or -1.

    int32 [num_references].
    """
    previous = np.full(trace.num_references, -1, np.int32)
    num_bits = max(0, (trace.num_references // _KEYS_AT_ONCE).bit_length())
    for part in range(1 << num_bits):
        if num_bits:
            chosen = np.flatnonzero(trace.keys >> np.uint64(64 - num_bits) == part)
        else:
            chosen = np.arange(trace.num_references)
        some = trace.keys[chosen]
        order = np.argsort(some, kind="stable")
        some, chosen = some[order], chosen[order]
        same = some[1:] == some[:-1]
        previous[chosen[1:][same]] = request_of[chosen[:-1][same]]
        if tell is not None:
            tell(part + 1, 1 << num_bits)
    return previous
