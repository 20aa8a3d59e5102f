"""Locations of pages in SGLang's host pools, in any layout.

A pool says where the pieces of a page are (``get_page_buffer_meta``): one for MLA, K and V for the
page_first layouts, as many as there are layers, or twice as many, for layer_first. In every layout
piece i of page p begins at ``first[i] + p * step[i]``: so the pool is asked three times, and the
rest is arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvtier.devices.base import Memory
from kvtier.errors import LayoutError
from kvtier.tiers import Pieces

Int64s = npt.NDArray[np.int64]


class HostPool(Protocol):
    """The part of SGLang's ``HostKVCache`` that kvtier uses."""

    page_size: int
    page_num: int
    layout: str
    dtype: torch.dtype

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[Sequence[int], Sequence[int]]:
        """Return addresses and sizes of the pages' pieces, page after page.

        indices: of the pages' tokens.
        """


class Pages:
    """Locations of the pages of one pool.

    Raises ``LayoutError`` for a pool that does not say where its pages are, or whose pages lie
    elsewhere.

    page_size: tokens. sizes: int64 [num_pieces], bytes of each. The bytes of a page are in the
    order in which its own ``get_data_page`` has them, so that both ways to reach it agree. memory:
    of all pages, None where other things lie between them.
    """

    def __init__(self, pool: HostPool) -> None:
        self.page_size = pool.page_size
        first, sizes = _page(pool, 0)
        step = _page(pool, 1)[0] - first if pool.page_num > 1 else np.zeros_like(first)
        last = pool.page_num - 1
        addresses, last_sizes = _page(pool, last)
        is_linear = (addresses == first + last * step).all() and (last_sizes == sizes).all()
        if not is_linear or (sizes <= 0).any():
            raise LayoutError(
                f"{type(pool).__name__}: pages in {pool.layout!r} do not lie in equal steps; use "
                "another --hicache-mem-layout, or no storage"
            )
        order = _order_in_page(pool, first)
        self.sizes, self._first, self._step = sizes[order], first[order], step[order]
        begin, end = int(first.min()), int((addresses + sizes).max())
        is_whole = end - begin == pool.page_num * self.num_bytes
        self.memory = Memory(begin, end - begin, "host", pool) if is_whole else None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of a page."""
        return int(self.sizes.sum())

    def at(self, indices: torch.Tensor) -> Pieces:
        """The pages of these tokens, a multiple of ``page_size`` of them, page after page."""
        starts = indices.cpu().numpy()[:: self.page_size].astype(np.int64)
        pages = starts // self.page_size
        if (starts % self.page_size).any():
            raise ValueError(f"host indices begin pages of {self.page_size} at {starts.tolist()}")
        addresses = self._first + pages[:, None] * self._step
        return Pieces(addresses.astype(np.uint64), self.sizes)

    def in_tensors(self, tensors: Sequence[torch.Tensor]) -> Pieces:
        """Pages that lie in tensors of their own, each in one piece.

        ``ValueError`` for one of another size.
        """
        ends = np.cumsum(self.sizes)
        for each in tensors:
            if each.nbytes != ends[-1] or not each.is_contiguous() or each.device.type != "cpu":
                raise ValueError(
                    f"a tensor of {each.nbytes} bytes on {each.device} is no page of {ends[-1]} "
                    "bytes; give contiguous ones in host memory"
                )
        begins = np.array([each.data_ptr() for each in tensors], np.int64).reshape(-1, 1)
        return Pieces((begins + ends - self.sizes).astype(np.uint64), self.sizes)


def _page(pool: HostPool, page: int) -> tuple[Int64s, Int64s]:
    """int64 [num_pieces] each: where the pieces of one page begin, and their sizes."""
    start = page * pool.page_size
    try:
        found = pool.get_page_buffer_meta(torch.arange(start, start + pool.page_size))
    except (AttributeError, NotImplementedError, ValueError) as error:
        raise LayoutError(
            f"{type(pool).__name__}: does not say where its pages are in {pool.layout!r} "
            f"({error}); use another --hicache-mem-layout, or no storage"
        ) from error
    addresses, sizes = found
    return np.array(addresses, np.int64), np.array(sizes, np.int64)


def _order_in_page(pool: HostPool, first: Int64s) -> Int64s:
    """In which a flat page has the pieces.

    That of their addresses where all are in one buffer, and as they are told where they are in
    several.
    """
    buffer = getattr(pool, "kv_buffer", None)
    if isinstance(buffer, torch.Tensor):
        start = buffer.data_ptr()
        if ((first >= start) & (first < start + buffer.nbytes)).all():
            return np.argsort(first)
    return np.arange(len(first))
