"""The copy that returns checksums: one suite for the native core and its Python twin."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core import hot
from kvtier.core.reference.copy import copy_checked as reference_copy_checked
from tests.native.test_copy import MIB, Arena, arenas, make_arena, words
from tests.native.twins import both

CopyChecked = Callable[..., npt.NDArray[np.uint32]]


copy_checked = both(reference_copy_checked, "copy_checked")


def crcs(arena: Arena, pieces: int) -> list[int]:
    """Return the checksum of each block at its destination."""
    found = []
    for first in range(0, len(arena.sizes), pieces):
        begins = arena.starts[0, first : first + pieces].tolist()
        sizes = arena.sizes[first : first + pieces]
        some = [arena.dst[at : at + size] for at, size in zip(begins, sizes, strict=True)]
        block = np.concatenate([*some, np.empty(0, np.uint8)])
        found.append(hot.crc32c(block.ctypes.data, block.size))
    return found


@given(arena=arenas(), pieces=st.integers(1, 6))
def test_named_bytes_are_copied_and_each_block_has_its_checksum(
    copy_checked: CopyChecked, arena: Arena, pieces: int
) -> None:
    whole = len(arena.sizes) // pieces * pieces
    arena = Arena(arena.dst, arena.src, arena.starts[:, :whole], arena.sizes[:whole])
    src, expected = arena.src.copy(), arena.expected()
    found = copy_checked(*arena.batch, pieces)
    np.testing.assert_array_equal(arena.dst, expected)
    np.testing.assert_array_equal(arena.src, src)
    assert found.dtype == np.uint32
    assert found.tolist() == crcs(arena, pieces)


@pytest.mark.skipif(not hot.NATIVE, reason=f"no native core: {hot.NATIVE_REASON}")
@pytest.mark.parametrize("fragment", [2048, 65536, 3 * MIB])
def test_large_batches_arrive_on_every_path(fragment: int) -> None:
    # Enough for the core to time both of its ways to store, and then to use the faster one.
    num_fragments = 24 * MIB // fragment
    arena = make_arena([fragment] * num_fragments, [3] * num_fragments, seed=7)
    for pieces in (1, 4):
        arena.dst[:] = 0
        expected = arena.expected()
        found = hot.copy_checked(*arena.batch, pieces)
        assert np.array_equal(arena.dst, expected)
        assert found.tolist() == crcs(arena, pieces)


def test_checksum_is_that_of_what_arrived_whoever_writes_to_the_source(
    copy_checked: CopyChecked,
) -> None:
    arena = make_arena([MIB] * 2, [0] * 2, seed=3)
    is_over = threading.Event()

    def write() -> None:
        for turn in count():
            if is_over.is_set():
                return
            arena.src[:] = turn % 256

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(10):
            found = copy_checked(*arena.batch)
            assert found.tolist() == crcs(arena, 1)
    finally:
        is_over.set()
        writer.join()


def test_no_blocks_have_no_checksums(copy_checked: CopyChecked) -> None:
    assert copy_checked(words(), words(), words(), 7).tolist() == []


@pytest.mark.parametrize("pieces", [0, -1, 2, 4, 2**63 - 1])
def test_blocks_that_are_not_whole_are_refused(copy_checked: CopyChecked, pieces: int) -> None:
    arena = make_arena([100] * 3, [0] * 3, seed=5)
    before = arena.dst.copy()
    text = f"3 fragments are no whole number of blocks of {pieces} pieces"
    with pytest.raises(ValueError, match=text):
        copy_checked(*arena.batch, pieces)
    np.testing.assert_array_equal(arena.dst, before)


def test_what_no_copy_takes_is_refused(copy_checked: CopyChecked) -> None:
    one = words(4096)
    with pytest.raises(ValueError, match="equal lengths, not 1, 2 and 1"):
        copy_checked(one, words(1, 2), one)
    with pytest.raises(TypeError, match="src must be an array of uint64, not NoneType"):
        copy_checked(one, None, one)
    with pytest.raises(ValueError, match=r"dst\[0\]: 8 bytes at address 0 do not lie in memory"):
        copy_checked(words(0), one, words(8))
