"""Locations of pages in SGLang's host pools, in any layout.

A pool's ``get_page_buffer_meta`` locates the pieces of a page: one piece for MLA, K and V for the
page_first layouts, one or two per layer for layer_first. In every layout piece i of page p begins
at ``first[i] + p * step[i]``. So three calls suffice, and the rest is arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvtier.core.errors import LayoutError
from kvtier.devices.base import Memory
from kvtier.tiers import Pieces

Int64s = npt.NDArray[np.int64]


class HostPool(Protocol):
    """The part of SGLang's ``HostKVCache`` that kvtier uses."""

    page_size: int
    page_num: int
    layer_num: int
    layout: str
    dtype: torch.dtype

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[Sequence[int], Sequence[int]]:
        """Return addresses and sizes of the pages' pieces, page after page.

        indices: the pages' tokens.
        """


class Pages:
    """Locations of the pages of one pool.

    The constructor raises ``LayoutError`` for a pool that does not locate its pages, or whose pages
    are not equally spaced.

    Attributes:
        page_size: tokens per page.
        sizes: int64 [num_pieces], bytes of each piece. Pieces are in the order of the pool's
            ``get_data_page``, so that both kinds of access agree.
        memory: memory of all pages; None if it has gaps.
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
        """Bytes per page."""
        return int(self.sizes.sum())

    def at(self, indices: torch.Tensor) -> Pieces:
        """Return the pieces of the pages of these tokens, page after page.

        indices: whole pages of tokens.
        """
        starts = indices.cpu().numpy()[:: self.page_size].astype(np.int64)
        pages = starts // self.page_size
        if (starts % self.page_size).any():
            raise ValueError(f"host indices begin pages of {self.page_size} at {starts.tolist()}")
        addresses = self._first + pages[:, None] * self._step
        return Pieces(addresses.astype(np.uint64), self.sizes)

    def in_tensors(self, tensors: Sequence[torch.Tensor]) -> Pieces:
        """Return the pieces of pages that are in tensors of their own, each contiguous.

        Raises ``ValueError`` for a tensor of another size.
        """
        ends = np.cumsum(self.sizes)
        for tensor in tensors:
            if (
                tensor.nbytes != ends[-1]
                or not tensor.is_contiguous()
                or tensor.device.type != "cpu"
            ):
                raise ValueError(
                    f"a tensor of {tensor.nbytes} bytes on {tensor.device} is no page of "
                    f"{ends[-1]} bytes; give contiguous ones in host memory"
                )
        begins = np.array([tensor.data_ptr() for tensor in tensors], np.int64).reshape(-1, 1)
        return Pieces((begins + ends - self.sizes).astype(np.uint64), self.sizes)


def _page(pool: HostPool, page: int) -> tuple[Int64s, Int64s]:
    """Return addresses and sizes of one page's pieces: int64 [num_pieces] each."""
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
    """Return the order of the pieces in a flat page.

    It is the order of addresses if all pieces are in one buffer, else the pool's order.
    """
    buffer = getattr(pool, "kv_buffer", None)
    if isinstance(buffer, torch.Tensor):
        start = buffer.data_ptr()
        if ((first >= start) & (first < start + buffer.nbytes)).all():
            return np.argsort(first)
    return np.arange(len(first))
