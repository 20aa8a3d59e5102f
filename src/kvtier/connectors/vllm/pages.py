"""From an engine's pages to bytes: chunks of blocks between many tensors and slots of host memory.

A *page* is what one tensor keeps of a block. A chunk of n blocks lies in its slot page by page:

    slot(s) + n * (bytes of the pages before p) + j * bytes(p)        page p of block j of the chunk

so that neighbouring blocks of one tensor are neighbours in the slot, and one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.devices import CopyBatch, Direction, Memory
from kvtier.transfer.batching import NO_SEAMS, coalesce
from kvtier.types import Slot

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Page:
    """A tensor's share of every block. address: of block 0. stride: to the next. nbytes: of it."""

    address: int
    stride: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Blocks of one group, and the chunks that they belong to.

    blocks: ids on the device, in the order of the prompt. slots: one per chunk that they touch.
    first: place of the first block within its chunk.
    """

    blocks: Sequence[int]
    slots: Sequence[Slot]
    first: int


class PagedPool:
    """An engine's tensors as pages, by group; and the slots of host memory for their chunks.

    groups: the pages of each KV group. blocks_per_chunk: n above. slot_bytes: from one slot to the
    next, at least a chunk of the largest group.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Page]],
        num_blocks: int,
        blocks_per_chunk: int,
        slot_bytes: int,
        kind: str,
        owner: object,
    ) -> None:
        pages = [page for group in groups for page in group]
        begin = min(page.address for page in pages)
        end = max(page.address + (num_blocks - 1) * page.stride + page.nbytes for page in pages)
        self.memory = Memory(begin, end - begin, kind, owner)
        self._groups = [_Columns.of(group, begin) for group in groups]
        self._blocks_per_chunk = blocks_per_chunk
        self._slot_bytes = slot_bytes
        largest = max(int(group.nbytes.sum()) for group in self._groups) * blocks_per_chunk
        assert largest <= slot_bytes, f"a chunk of {largest} bytes in slots of {slot_bytes}"

    def stage(
        self,
        parts: Sequence[ChunkPart],
        host: Memory,
        direction: Direction,
        seams: Int64s = NO_SEAMS,
    ) -> CopyBatch:
        """All copies of some chunks; parts: one per group, empty where a group has none. seams:
        offsets of ``host`` that no copy may run across."""
        at_device: list[Int64s] = []
        at_host: list[Int64s] = []
        sizes: list[Int64s] = []
        for group, part in zip(self._groups, parts, strict=True):
            if not len(part.blocks):
                continue
            place = part.first + np.arange(len(part.blocks))
            chunk, within = np.divmod(place, self._blocks_per_chunk)
            slots = np.asarray(part.slots, np.int64)[chunk] * self._slot_bytes
            blocks = np.asarray(part.blocks, np.int64)
            # Page after page, blocks within a page in order: neighbours follow each other.
            at_device.append((group.offset[:, None] + np.outer(group.stride, blocks)).ravel())
            base = group.before[:, None] * self._blocks_per_chunk
            at_host.append((slots + base + np.outer(group.nbytes, within)).ravel())
            sizes.append(np.repeat(group.nbytes, len(blocks)))
        device, inside, size = (
            np.concatenate([np.zeros(0, np.int64), *each]) for each in (at_device, at_host, sizes)
        )
        if direction is Direction.LOAD:
            batch = CopyBatch(host, self.memory, inside, device, size)
            return coalesce(batch, src_seams=seams)
        batch = CopyBatch(self.memory, host, device, inside, size)
        return coalesce(batch, dst_seams=seams)


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """Pages as arrays: int64 [num_pages]. before: bytes of the pages before each, of one block."""

    offset: Int64s
    stride: Int64s
    nbytes: Int64s
    before: Int64s

    @classmethod
    def of(cls, pages: Sequence[Page], begin: int) -> _Columns:
        table = np.array(
            [(page.address - begin, page.stride, page.nbytes) for page in pages], np.int64
        )
        nbytes = table[:, 2].copy()
        return cls(table[:, 0].copy(), table[:, 1].copy(), nbytes, np.cumsum(nbytes) - nbytes)
