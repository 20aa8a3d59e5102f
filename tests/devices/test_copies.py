"""Copies by address: without empty ones, in pieces, cut at edges, as rectangles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.devices.base import CopyBatch, Memory
from kvtier.devices.copies import Copies, CopyRows, rectangles
from kvtier.layout import DType, KVGroup, fragments, full_attention, latent_attention, named_layout

Triple = tuple[int, int, int]


def _copies(triples: list[Triple]) -> Copies:
    table = np.array(triples, np.uint64).reshape(-1, 3)
    return Copies(*(np.ascontiguousarray(column) for column in table.T))


def _triples(copies: Copies) -> list[Triple]:
    return list(zip(copies.dst.tolist(), copies.src.tolist(), copies.size.tolist(), strict=True))


def _bytes(triples: list[Triple]) -> set[tuple[int, int]]:
    """(destination, source) of every byte."""
    return {(dst + at, src + at) for dst, src, size in triples for at in range(size)}


def _rows(rows: CopyRows) -> list[Triple]:
    """Every row of every rectangle."""
    return [
        (dst + row * dst_pitch, src + row * src_pitch, width)
        for dst, src, dst_pitch, src_pitch, width, height in rows.each()
        for row in range(height)
    ]


def test_copies_of_a_batch_are_addresses_without_the_empty_ones() -> None:
    src, dst = Memory(1000, 64, "host", None), Memory(5000, 64, "cuda", None)
    offsets = np.array([0, 8, 16], np.int64)
    batch = CopyBatch(src, dst, offsets, offsets[::-1].copy(), np.array([4, 0, 8], np.int64))
    assert _triples(Copies.of(batch)) == [(5016, 1000, 4), (5000, 1016, 8)]


@given(st.integers(0, 20), st.integers(1, 7))
def test_pieces_are_the_same_copies_in_order(count: int, max_copies: int) -> None:
    copies = _copies([(at * 10, 1000 + at * 7, 5) for at in range(count)])
    pieces = copies.pieces(max_copies)
    assert [triple for piece in pieces for triple in _triples(piece)] == _triples(copies)
    assert all(len(piece) <= max_copies for piece in pieces)


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(1, 20)), max_size=6),
    st.lists(st.integers(0, 90), max_size=5),
    st.booleans(),
)
def test_cut_copies_move_the_same_bytes_and_cross_no_edge(
    triples: list[Triple], edges: list[int], at_source: bool
) -> None:
    copies = _copies(triples)
    side = copies.src if at_source else copies.dst
    cut = copies.cut(side, np.array(sorted(set(edges)), np.uint64))
    assert sorted(_bytes(_triples(cut))) == sorted(_bytes(triples))
    for dst, src, size in _triples(cut):
        begin = src if at_source else dst
        assert not any(begin < edge < begin + size for edge in edges)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 40), st.integers(0, 40), st.integers(1, 4), st.integers(1, 5),
            st.integers(0, 6), st.integers(0, 6),
        ),
        min_size=1,
        max_size=6,
    )
)  # fmt: skip
def test_rectangles_move_the_same_bytes(runs: list[tuple[int, int, int, int, int, int]]) -> None:
    triples = [
        (to + row * (width + to_gap), at + row * (width + at_gap), width)
        for to, at, width, height, to_gap, at_gap in runs
        for row in range(height)
    ]
    rows = rectangles(_copies(triples))
    if rows is not None:
        assert sorted(_rows(rows)) == sorted(triples)
        assert len(rows) * 2 <= len(triples)
        assert (rows.dst_pitch >= rows.width).all()
        assert (rows.src_pitch >= rows.width).all()


GQA = full_attention(28, 8, 128, DType.BFLOAT16, 16)
MLA = latent_attention(61, 512, 64, DType.BFLOAT16, 16)


@pytest.mark.parametrize(
    ("group", "device", "num_rectangles", "height"),
    [
        (GQA, "layer_first", 1, 56),  # K and V of all layers at equal distances
        (GQA, "part_first", 2, 28),
        (MLA, "layer_first", 2, 61),
        (MLA, "part_first", 2, 61),
    ],
)
@pytest.mark.parametrize("is_load", [True, False])
def test_a_block_is_a_rectangle_or_two_with_a_row_per_layer(
    group: KVGroup, device: str, num_rectangles: int, height: int, is_load: bool
) -> None:
    pool, host = (named_layout(name, group, 64) for name in (device, "block_first"))
    pieces = fragments(host, pool) if is_load else fragments(pool, host)
    slots = np.array([3, 9, 4, 60, 22], np.int64)
    size = np.broadcast_to(pieces.size, (len(slots), len(pieces.size))).ravel()
    copies = Copies(
        pieces.dst(slots).ravel().view(np.uint64),
        pieces.src(slots).ravel().view(np.uint64),
        size.copy().view(np.uint64),
    )
    rows = rectangles(copies)
    assert rows is not None
    assert len(rows) == num_rectangles * len(slots)
    assert set(rows.height.tolist()) == {height}
    assert sorted(_rows(rows)) == sorted(_triples(copies))


def test_scattered_copies_are_no_rectangles() -> None:
    rng = np.random.default_rng(3)
    starts = rng.permutation(1000)[:100] * 64
    assert rectangles(_copies([(int(at), int(at) * 3 % 7919, 16) for at in starts])) is None


def test_steps_backward_are_no_rectangles() -> None:
    assert rectangles(_copies([(100 - at * 10, at * 10, 8) for at in range(9)])) is None
