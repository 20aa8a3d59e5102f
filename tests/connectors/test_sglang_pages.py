"""Locations of a pool's pages, derived from three calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the engine extra")

import torch

from kvtier.connectors.sglang.shared.pages import Pages
from kvtier.core.errors import LayoutError

PAGE, NUM_PAGES, PIECE = 4, 6, 32


class Pool:
    """Two pieces per page, the second pieces behind all first ones, or at the offsets of ``at``."""

    page_size, page_num, layer_num = PAGE, NUM_PAGES, 1
    layout, dtype = "test", torch.uint8

    def __init__(self, at: Callable[[int, int], int] | None = None) -> None:
        self.kv_buffer = torch.arange(2 * NUM_PAGES * PIECE, dtype=torch.int64).to(torch.uint8)
        self.num_asked = 0
        self.keep: Any = None
        self._at = at or (lambda page, piece: (piece * NUM_PAGES + page) * PIECE)

    def get_page_buffer_meta(self, indices):
        self.num_asked += 1
        pages = [int(index) // PAGE for index in indices[::PAGE]]
        base = self.kv_buffer.data_ptr()
        found = [base + self._at(page, piece) for page in pages for piece in range(2)]
        return found, [PIECE] * len(found)


def _tokens(*pages: int):  # type: ignore[no-untyped-def]
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def test_every_page_is_where_the_pool_says_and_the_pool_is_asked_three_times() -> None:
    pool = Pool()
    pages = Pages(pool)
    found = pages.at(_tokens(5, 0, 3))
    assert pool.num_asked == 3
    told, _ = pool.get_page_buffer_meta(_tokens(5, 0, 3))
    assert found.addresses.ravel().tolist() == told
    assert (pages.num_bytes, pages.page_size) == (2 * PIECE, PAGE)


def test_bytes_are_in_the_order_of_one_buffer_whatever_order_is_told() -> None:
    forward = Pages(Pool())
    pool = Pool(lambda page, piece: ((1 - piece) * NUM_PAGES + page) * PIECE)
    backward = Pages(pool)
    tensor = torch.empty(2 * PIECE, dtype=torch.uint8)
    for pages in (forward, backward):
        assert np.diff(pages.at(_tokens(2)).addresses.astype(np.int64)[0]).tolist() == [
            NUM_PAGES * PIECE
        ]
        (addresses,) = pages.in_tensors([tensor]).addresses.tolist()
        assert addresses == [tensor.data_ptr(), tensor.data_ptr() + PIECE]


def test_order_of_several_buffers_is_as_it_is_told() -> None:
    pool = Pool(lambda page, piece: ((1 - piece) * NUM_PAGES + page) * PIECE)
    base = pool.kv_buffer.data_ptr()
    pool.keep, pool.kv_buffer = pool.kv_buffer, torch.empty(1)
    pool.get_page_buffer_meta = lambda indices: (  # type: ignore[method-assign]
        [base + pool._at(int(indices[0]) // PAGE, piece) for piece in range(2)],
        [PIECE] * 2,
    )
    assert np.diff(Pages(pool).at(_tokens(2)).addresses.astype(np.int64)[0]).tolist() == [
        -NUM_PAGES * PIECE
    ]


def test_pages_that_lie_anywhere_are_refused() -> None:
    with pytest.raises(LayoutError, match="do not lie in equal steps; use another"):
        Pages(Pool(lambda page, piece: (page * page + piece) * PIECE))


def test_pool_that_does_not_say_is_refused() -> None:
    def refuse(page: int, piece: int) -> int:
        raise NotImplementedError("scales lie elsewhere")

    with pytest.raises(LayoutError, match=r"Pool: .* \(scales lie elsewhere\); use another"):
        Pages(Pool(refuse))


def test_indices_that_are_no_pages_are_refused() -> None:
    pages = Pages(Pool())
    with pytest.raises(ValueError, match="begin pages of 4"):
        pages.at(torch.arange(2, 6))
    with pytest.raises(ValueError, match="is no page of 64 bytes"):
        pages.in_tensors([torch.empty(3)])
    with pytest.raises(ValueError, match="is no page of 64 bytes"):
        pages.in_tensors([torch.empty(64, 2, dtype=torch.uint8)[:, 0]])
