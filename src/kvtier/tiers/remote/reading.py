"""Parts of a pack: which ones to ask for, and where their bytes go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier._hot import copy_batch
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.remote.packs import PackShape

Range = tuple[int, int]
Int64s = npt.NDArray[np.int64]

GAP_BYTES: Final = 1 << 20
"""So much is read in vain rather than asking twice: a request costs as much as some MB."""
PART_BYTES: Final = 32 << 20
"""The most that is asked for in one request: several connections are faster than one. A pack of the
usual size is one part, with its header; a header alone is always much less."""


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

    def addresses(self, starts: Sequence[int], parts: Sequence[memoryview]) -> Int64s:
        """int64 [num_wanted]: where each block begins in memory, as it was read; 0 for one that is
        in several parts. starts: where each part begins, in the pack; the parts are whole."""
        begins = self._begins
        found = np.zeros(len(begins), np.int64)
        for start, part in zip(starts, parts, strict=True):
            is_whole = (begins >= start) & (begins + self.shape.block_bytes <= start + len(part))
            found[is_whole] = _address(part) - start + begins[is_whole]
        return found

    def gather(
        self, at: int, starts: Sequence[int], parts: Sequence[memoryview], blocks: Pieces
    ) -> None:
        """Copy a wanted block, the ``at``-th, from several parts. blocks: one, where it belongs."""
        begin = int(self._begins[at])
        for start, part in zip(starts, parts, strict=True):
            low = max(begin, start)
            high = min(begin + self.shape.block_bytes, start + len(part))
            if low < high:
                address = np.array([_address(part) - start + low], np.int64)
                copy_blocks(blocks.part(low - begin, high - low), address)

    @property
    def _begins(self) -> Int64s:
        return np.array([self._range(at)[0] for at in self.at], np.int64)


def _address(part: memoryview) -> int:
    return int(np.frombuffer(part, np.uint8).ctypes.data)


def copy_blocks(blocks: Pieces, begins: Int64s) -> None:
    """Copy blocks where they belong. begins: int64 [num_blocks], the address that each one's bytes
    come from, which lie side by side there."""
    if not len(blocks):
        return
    shifts = np.cumsum(blocks.sizes) - blocks.sizes
    src = (begins[:, None] + shifts).astype(np.uint64).ravel()
    sizes = np.tile(blocks.sizes.astype(np.uint64), len(blocks))
    copy_batch(np.ascontiguousarray(blocks.addresses).ravel(), src, sizes)
