"""Parts of a pack: which ones to ask for, and where their bytes go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtier._hot import copy_batch
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.remote.packs import PackShape

Range = tuple[int, int]

GAP_BYTES: Final = 1 << 20
"""So much is read in vain rather than asking twice: a request costs as much as some MB."""
PART_BYTES: Final = 16 << 20
"""The most that is asked for in one request: several connections are faster than one."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Some blocks of a pack. num_blocks: of the pack. at: their numbers there, ascending."""

    shape: PackShape
    num_blocks: int
    at: Sequence[int]

    def ranges(self, with_header: bool) -> list[Range]:
        """What to ask for: start and end of each part, ascending. The header is the first one, or
        the beginning of the first one."""
        wanted = [(0, self.shape.header_bytes(self.num_blocks))] if with_header else []
        wanted += [self._range(at) for at in self.at]
        joined = wanted[:1]
        for start, end in wanted[1:]:
            if start - joined[-1][1] <= GAP_BYTES:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((start, end))
        return [
            (begin, min(begin + PART_BYTES, end))
            for start, end in joined
            for begin in range(start, end, PART_BYTES)
        ]

    def _range(self, at: int) -> Range:
        return self.shape.offset(self.num_blocks, at), self.shape.offset(self.num_blocks, at + 1)

    def scatter(self, starts: Sequence[int], parts: Sequence[memoryview], blocks: Pieces) -> None:
        """Copy the blocks where they belong. starts: where each part begins, in the pack; the parts
        are whole. blocks: one for each of ``at``."""
        block_bytes = self.shape.block_bytes
        begins = np.array([self._range(at)[0] for at in self.at], np.int64)
        for start, part in zip(starts, parts, strict=True):
            address = np.frombuffer(part, np.uint8).ctypes.data
            low = np.maximum(begins, start)
            high = np.minimum(begins + block_bytes, start + len(part))
            is_whole = high - low == block_bytes
            whole = np.flatnonzero(is_whole)
            _copy(blocks.pick(whole), address - start + begins[whole])
            for each in np.flatnonzero((high > low) & ~is_whole).tolist():
                first, size = int(low[each] - begins[each]), int(high[each] - low[each])
                from_address = np.array([address - start + low[each]], np.int64)
                _copy(blocks.pick([each]).part(first, size), from_address)


def _copy(blocks: Pieces, begins: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    """begins: the address that each block's bytes come from, which lie side by side there."""
    if not len(blocks):
        return
    shifts = np.cumsum(blocks.sizes) - blocks.sizes
    src = (begins[:, None] + shifts).astype(np.uint64).ravel()
    sizes = np.tile(blocks.sizes.astype(np.uint64), len(blocks))
    copy_batch(np.ascontiguousarray(blocks.addresses).ravel(), src, sizes)
