"""Copies of blocks between an engine's pages, spread over many tensors, and slots of host memory.

A *share* is the part of a page in one tensor. A block of n pages is stored in its slot share by
share:

    slot(s) + n * (bytes of the shares before p) + j * bytes(p)      share p of page j of the block

So neighbouring pages of one tensor are neighbours in the slot, and need one copy. The shares of a
layer follow each other, so that compute can start layer by layer. Storage keeps a block's bytes in
the same order, and may read them directly into the pages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.cache.transfer import Steps
from kvtier.cache.transfer.staging import NO_SEAMS, coalesce
from kvtier.core.grouping import runs_of
from kvtier.core.types import Slot
from kvtier.devices import CopyBatch, Device, Direction, Memory
from kvtier.tiers import Pieces
from kvtier.tiers.disk.direct import Pool
from kvtier.tiers.pieces import HOST_KINDS

Int64s = npt.NDArray[np.int64]
ALL = slice(None)


@dataclass(frozen=True, slots=True)
class PoolShare:
    """The part of every page that one tensor keeps.

    address: address of page 0. stride: bytes to the next page. nbytes: bytes of the part.
    """

    address: int
    stride: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GroupPages:
    """Pages of one group, and the blocks that they belong to.

    Attributes:
        pages: page ids on the device, in prompt order.
        slots: slot of each block that the pages touch; None for a block that does not pass through
            host memory.
        first: position of the first page within its block.
    """

    pages: Sequence[int]
    slots: Sequence[Slot | None]
    first: int

    def blocks(self, start: int, end: int, pages_per_block: int) -> GroupPages:
        """Return the blocks ``start`` to ``end`` with their pages."""
        begin = max(0, start * pages_per_block - self.first)
        pages = self.pages[begin : max(0, end * pages_per_block - self.first)]
        return GroupPages(pages, self.slots[start:end], 0 if start else self.first)

    def by_block(self, pages_per_block: int) -> Int64s:
        """Return the page at each position of each block: int64 [num_blocks, pages_per_block].

        It is -1 at positions without a page, in blocks that are touched in part.
        """
        places = np.full(len(self.slots) * pages_per_block, -1, np.int64)
        places[self.first : self.first + len(self.pages)] = self.pages
        return places.reshape(-1, pages_per_block)


NO_PAGES = GroupPages([], [], 0)


def split(
    groups: Sequence[GroupPages], positions: Collection[int], pages_per_block: int
) -> tuple[list[list[GroupPages]], list[list[GroupPages]]]:
    """Split a copy in the blocks at some positions, one by one, and the runs of all others.

    positions: among the blocks of all groups, group after group.
    """
    singles: list[list[GroupPages]] = []
    others: list[list[GroupPages]] = []
    at = 0
    for number, group in enumerate(groups):
        end = at + len(group.slots)
        for is_single, run in runs_of([place in positions for place in range(at, end)]):
            bounds = [(block, block + 1) for block in run] if is_single else [(run[0], run[-1] + 1)]
            for begin, stop in bounds:
                some = [NO_PAGES] * len(groups)
                some[number] = group.blocks(begin, stop, pages_per_block)
                (singles if is_single else others).append(some)
        at = end
    return singles, others


class PagedPool:
    """An engine's tensors as shares, by group, and the copies of their blocks.

    Args:
        groups: the shares of each KV group.
        num_pages: pages of the pool.
        pages_per_block: n above.
        slot_bytes: bytes from one slot of host memory to the next, at least those of the largest
            group's block.
        kind: kind of the tensors' memory.
        owner: kept alive as long as the pool.
        allocations: see ``Pool``.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[PoolShare]],
        num_pages: int,
        pages_per_block: int,
        slot_bytes: int,
        kind: str,
        owner: object,
        allocations: Sequence[Memory] = (),
    ) -> None:
        shares = [share for group in groups for share in group]
        begin = min(share.address for share in shares)
        end = max(share.address + (num_pages - 1) * share.stride + share.nbytes for share in shares)
        self.memory = Memory(begin, end - begin, kind, owner)
        self._allocations = allocations
        # Offsets at which one allocation ends and another begins: no copy may cross them.
        ends = {allocation.address + allocation.nbytes for allocation in allocations}
        seams = sorted(
            allocation.address - begin for allocation in allocations if allocation.address in ends
        )
        self._seams = np.array(seams, np.int64)
        self._groups = [_Columns.of(group, begin) for group in groups]
        self.num_pages = num_pages
        self.pages_per_block = pages_per_block
        self.slot_bytes = slot_bytes
        largest = max(int(group.nbytes.sum()) for group in self._groups) * pages_per_block
        assert largest <= slot_bytes, f"a block of {largest} bytes in slots of {slot_bytes}"

    def stage(
        self,
        groups: Sequence[GroupPages],
        host: Memory,
        direction: Direction,
        seams: Int64s = NO_SEAMS,
        some: slice = ALL,
    ) -> CopyBatch:
        """Return the copies of some blocks as one batch.

        Args:
            groups: the pages of each group; empty for a group without pages.
            host: host memory of the slots.
            direction: from or to the device.
            seams: offsets of ``host`` that no copy may cross.
            some: the shares of each group to copy.
        """
        at_device: list[Int64s] = []
        at_host: list[Int64s] = []
        sizes: list[Int64s] = []
        for columns, group in zip(self._groups, groups, strict=True):
            if not len(group.pages):
                continue
            shares = columns.pick(some)
            place = group.first + np.arange(len(group.pages))
            block, within = np.divmod(place, self.pages_per_block)
            slots = np.asarray(group.slots, np.int64)[block] * self.slot_bytes
            pages = np.asarray(group.pages, np.int64)
            # Share after share, and a share's pages in order, so that neighbours can be merged.
            at_device.append((shares.offset[:, None] + np.outer(shares.stride, pages)).ravel())
            base = shares.before[:, None] * self.pages_per_block
            at_host.append((slots + base + np.outer(shares.nbytes, within)).ravel())
            sizes.append(np.repeat(shares.nbytes, len(pages)))
        device, inside, size = (
            np.concatenate([np.zeros(0, np.int64), *each]) for each in (at_device, at_host, sizes)
        )
        if direction is Direction.LOAD:
            batch = CopyBatch(host, self.memory, inside, device, size)
            return coalesce(batch, src_seams=seams, dst_seams=self._seams)
        batch = CopyBatch(self.memory, host, device, inside, size)
        return coalesce(batch, src_seams=self._seams, dst_seams=seams)

    def places(self, group: int, addresses: Int64s) -> Int64s | None:
        """Return the offsets in a block of some bytes of each page; None if they are no page's.

        addresses: of the bytes in page 0, int64 [...]. Returns int64 [pages_per_block, ...].
        """
        shares, at, num = self._groups[group], addresses - self.memory.address, self.pages_per_block
        order = np.argsort(shares.offset)
        share = order[np.searchsorted(shares.offset[order], at, "right") - 1]
        within = at - shares.offset[share]
        if ((within < 0) | (within >= shares.nbytes[share])).any():
            return None
        page = np.arange(num).reshape(num, *[1] * at.ndim)
        places: Int64s = shares.before[share] * num + shares.nbytes[share] * page + within
        return places

    # -- direct reads ------------------------------------------------------------------------------

    @property
    def why_not_direct(self) -> str:
        """Reason why storage can't read blocks directly into these pages; "" if it can.

        One read may have blocks of all groups. So a group's pieces must have the sizes of the
        largest group's first pieces.
        """
        sizes = self._largest.nbytes
        for number, group in enumerate(self._groups):
            if not np.array_equal(group.nbytes, sizes[: len(group.nbytes)]):
                return (
                    f"the pieces of a page are of {_in_words(group.nbytes)} bytes in KV group "
                    f"{number}, and of {_in_words(sizes)} in another"
                )
        return ""

    def direct_pool(self, device: Device) -> Pool:
        """Return the description of this memory that storage needs to read into it."""
        first_two = np.arange(min(2, self.num_pages))
        pages = np.repeat(first_two[:, None], self.pages_per_block, axis=1)
        far = None if self.memory.kind in HOST_KINDS else device
        blocks = self.pieces([pages] * len(self._groups))
        return Pool(self.memory, blocks, far, self._allocations)

    def pieces(self, groups: Sequence[Int64s]) -> Pieces:
        """Return the destinations of whole blocks' bytes, group after group.

        Pieces that a block of a small group lacks have address 0: they are not requested.

        groups: pages of each block, int64 [num_blocks, n] per group; -1 for pages that must not be
        written.
        """
        sizes = np.repeat(self._largest.nbytes, self.pages_per_block)
        found = [np.zeros((0, len(sizes)), np.uint64)]
        for shares, pages in zip(self._groups, groups, strict=True):
            lies_at = shares.offset[:, None] + shares.stride[:, None] * pages[:, None, :]
            addresses = self.memory.address + lies_at  # [num_blocks, num_shares, n]
            addresses *= pages[:, None, :] >= 0
            here = np.zeros((len(pages), len(sizes)), np.uint64)
            num_pieces = len(shares.nbytes) * self.pages_per_block
            here[:, :num_pieces] = addresses.reshape(len(pages), num_pieces)
            found.append(here)
        return Pieces(np.concatenate(found), sizes, self.memory.kind)

    @property
    def _largest(self) -> _Columns:
        """The group whose blocks have the most pieces."""
        return max(self._groups, key=lambda group: len(group.nbytes))


def _in_words(nbytes: Int64s) -> str:
    return " and ".join(map(str, np.unique(nbytes).tolist()))


@dataclass(frozen=True, eq=False)
class LayerSteps(Steps):
    """A load into a pool of one group, in steps of some layers each.

    Attributes:
        pool: the pool.
        pages: pages of its group.
        host: host memory of the slots.
        seams: see ``PagedPool.stage``.
        ends: per step, the number of shares loaded by its end.
        step_layers: layers per step.
        num_bytes: bytes of the whole load.
    """

    pool: PagedPool
    pages: GroupPages
    host: Memory
    seams: Int64s
    ends: Sequence[int]
    step_layers: int
    num_bytes: int

    @property
    def layers_per_step(self) -> int:
        return self.step_layers

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[CopyBatch]:
        begin = 0
        for end in self.ends:
            some = slice(begin, end)
            yield self.pool.stage([self.pages], self.host, Direction.LOAD, self.seams, some)
            begin = end


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """Shares as arrays: int64 [num_shares]. before: bytes of a page in earlier shares."""

    offset: Int64s
    stride: Int64s
    nbytes: Int64s
    before: Int64s

    @classmethod
    def of(cls, shares: Sequence[PoolShare], begin: int) -> _Columns:
        table = np.array(
            [(share.address - begin, share.stride, share.nbytes) for share in shares], np.int64
        )
        nbytes = table[:, 2].copy()
        return cls(table[:, 0].copy(), table[:, 1].copy(), nbytes, np.cumsum(nbytes) - nbytes)

    def pick(self, some: slice) -> _Columns:
        """Return some of the shares, with unchanged positions in a slot."""
        if some == ALL:
            return self
        return _Columns(self.offset[some], self.stride[some], self.nbytes[some], self.before[some])
