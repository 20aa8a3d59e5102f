"""A trace: the blocks of each request, as columns.

Keys identify whole prefixes, whatever the file contains: two requests share a key exactly if their
prompts are equal up to the end of that block. So each key has one parent, and requests are paths in
a tree, which makes the replay fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvtier.core.errors import ConfigError
from kvtier.core.system.memory import available_bytes

Keys = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_GOLDEN = 0x9E3779B97F4A7C15
_CHUNK = 1 << 20
"""Keys that are collected before they are merged into one array."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order of their arrival. Immutable.

    Memory: 8 bytes per reference; a replay takes about three times as much.

    Attributes:
        times: float64 [num_requests], seconds, ascending.
        offsets: int64 [num_requests + 1]; the blocks of request i are
            ``keys[offsets[i]:offsets[i + 1]]``.
        keys: uint64 [num_references].
        input_tokens, output_tokens: int64 [num_requests]; 0 if unknown.
        block_tokens: tokens per block.
        notes: assumptions made when reading the file, in sentences.
        has_year: False if ``times`` are from a log without years.
        has_contents: False if only the lengths of prompts are known, and not which begin alike.
    """

    times: Floats
    offsets: Ints
    keys: Keys
    input_tokens: Ints
    output_tokens: Ints
    block_tokens: int
    notes: tuple[str, ...] = ()
    has_year: bool = True
    has_contents: bool = True

    @property
    def num_requests(self) -> int:
        return len(self.times)

    @property
    def num_references(self) -> int:
        return len(self.keys)

    @property
    def lengths(self) -> Ints:
        """Number of blocks of each request: int64 [num_requests]."""
        return np.diff(self.offsets)

    @property
    def window_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.times[-1] - self.times[0]) if len(self.times) else 0.0


MAX_BLOCKS = 1 << 28
"""Most block references of one trace; more would take hours to replay."""
BYTES_PER_BLOCK = 40
"""Peak memory per block reference, while reading or replaying."""
BLOCKS_PER_REQUEST = 16
"""Memory per request besides its blocks, in blocks."""


class TraceBuilder:
    """Collects requests in any order.

    The trace is limited by ``MAX_BLOCKS`` and by the memory that is free at the start.

    block_tokens: tokens per block of the file. coarsen: number of blocks to merge into one.
    """

    def __init__(self, block_tokens: int, coarsen: int = 1) -> None:
        self.block_tokens = block_tokens
        self._coarsen = coarsen
        self.max_blocks = max(1, min(MAX_BLOCKS, available_bytes()[0] // BYTES_PER_BLOCK))
        self._num_used = 0
        self._times: list[float] = []
        self._lengths: list[int] = []
        self._inputs: list[int] = []
        self._outputs: list[int] = []
        self._pending: list[Keys] = []
        self._num_pending = 0
        self._parts: list[Keys] = []

    @property
    def num_requests(self) -> int:
        return len(self._times)

    def has_room(self, num_blocks: int) -> bool:
        """Whether a request of this many blocks of the file may be added."""
        return self._num_used + num_blocks // self._coarsen <= self.max_blocks

    def add(self, time_s: float, keys: Keys, input_tokens: int, output_tokens: int) -> None:
        """Add a request. keys: keys of its blocks, from ``chained``."""
        if self._coarsen > 1:
            keys = keys[self._coarsen - 1 :: self._coarsen].copy()
        self._num_used += len(keys) + BLOCKS_PER_REQUEST
        self._times.append(time_s)
        self._lengths.append(len(keys))
        self._inputs.append(input_tokens)
        self._outputs.append(output_tokens)
        self._pending.append(keys)
        self._num_pending += len(keys)
        if self._num_pending >= _CHUNK:
            self._put_away()

    def _put_away(self) -> None:
        if self._pending:
            self._parts.append(np.concatenate(self._pending))
            self._pending, self._num_pending = [], 0

    def build(self, notes: Sequence[str] = ()) -> Trace:
        """Return the trace, ordered by time; requests of equal time as they were added."""
        self._put_away()
        offsets = np.zeros(len(self._lengths) + 1, np.int64)
        np.cumsum(self._lengths, out=offsets[1:])
        keys = np.empty(int(offsets[-1]), np.uint64)
        at = 0
        for number, part in enumerate(self._parts):
            keys[at : at + len(part)] = part
            at += len(part)
            self._parts[number] = part[:0]  # frees its memory
        trace = Trace(
            np.array(self._times, np.float64),
            offsets,
            keys,
            np.array(self._inputs, np.int64),
            np.array(self._outputs, np.int64),
            self.block_tokens * self._coarsen,
            tuple(notes),
        )
        return in_order(trace)


def chained(ids: npt.NDArray[np.uint64], seed: int = 0) -> Keys:
    """Return the keys of a request's blocks from the file's ids. Each depends on all before it.

    key[k] = sum of mix(ids[j], j) over j <= k. It is not collision resistant against chosen ids.

    ids: uint64 [n], in prompt order. seed: distinguishes the ids of different files.
    """
    with np.errstate(over="ignore"):
        places = np.arange(1, len(ids) + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        start = np.uint64(seed * 0xD1B54A32D192ED03 & (1 << 64) - 1)
        found: Keys = np.cumsum(mixed(ids ^ mixed(places + start)), dtype=np.uint64)
        return found


def mixed(values: Keys) -> Keys:
    """Return values mixed by a bijection in which every result bit depends on every input bit.

    Source: SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
    """
    with np.errstate(over="ignore"):
        values = values + np.uint64(_GOLDEN)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def in_order(trace: Trace) -> Trace:
    """Return the trace sorted by time; requests of equal time keep their order."""
    order = np.argsort(trace.times, kind="stable")
    if np.array_equal(order, np.arange(len(order))):
        return trace
    lengths = trace.lengths[order]
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    keys = np.empty_like(trace.keys)
    starts = trace.offsets[:-1][order]
    for at, start, length in zip(
        offsets[:-1].tolist(), starts.tolist(), lengths.tolist(), strict=True
    ):
        keys[at : at + length] = trace.keys[start : start + length]
    return replace(
        trace,
        times=trace.times[order],
        offsets=offsets,
        keys=keys,
        input_tokens=trace.input_tokens[order],
        output_tokens=trace.output_tokens[order],
    )


def joined(traces: Sequence[Trace]) -> Trace:
    """Return several traces merged into one, as if their servers shared one cache."""
    if len(traces) == 1:
        return traces[0]
    sizes = sorted({trace.block_tokens for trace in traces})
    if len(sizes) > 1:
        raise ConfigError(
            f"traces: blocks of {sizes[0]} and of {sizes[-1]} tokens can't be replayed together; "
            "replay each alone"
        )
    offsets = np.zeros(sum(trace.num_requests for trace in traces) + 1, np.int64)
    np.cumsum(np.concatenate([trace.lengths for trace in traces]), out=offsets[1:])
    notes = dict.fromkeys(note for trace in traces for note in trace.notes)
    whole = Trace(
        np.concatenate([trace.times for trace in traces]),
        offsets,
        np.concatenate([trace.keys for trace in traces]),
        np.concatenate([trace.input_tokens for trace in traces]),
        np.concatenate([trace.output_tokens for trace in traces]),
        sizes[0],
        tuple(notes),
        has_contents=all(trace.has_contents for trace in traces),
    )
    return in_order(whole)
