"""Blocks in a few large pieces are transferred directly between slots and memory.

The bytes and the checksum are the same as by any other path.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.hot import crc32c
from kvtier.core.types import BlockKey, BlockName, Verify
from kvtier.layout import opaque
from kvtier.testing import host_memory, memory_bytes
from kvtier.tiers import Outcome, Pieces
from kvtier.tiers.crc_join import joined_crcs
from kvtier.tiers.disk import DiskOptions, DiskTier
from kvtier.tiers.disk.bounce import ALIGNMENT, LEAST_PIECE_BYTES, Bounce

PIECES = (LEAST_PIECE_BYTES, LEAST_PIECE_BYTES)
UNEQUAL = (LEAST_PIECE_BYTES, 3 * LEAST_PIECE_BYTES)
NUM_BLOCKS = 5


@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    num_blocks=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_checksum_of_pieces_is_that_of_the_whole(
    sizes: list[int], num_blocks: int, seed: int
) -> None:
    content = np.random.default_rng(seed).integers(0, 256, (num_blocks, sum(sizes)), np.uint8)
    ends = np.cumsum(sizes)

    def crc(block: np.ndarray) -> int:
        return crc32c(block.ctypes.data, len(block))

    of_pieces = np.array(
        [
            [crc(block[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
            for block in content
        ],
        np.uint32,
    )
    found = joined_crcs(of_pieces, np.array(sizes, np.int64))
    assert found.tolist() == [crc(block) for block in content]


class Memory:
    """Blocks whose pieces lie apart, ``shift`` bytes behind where they can be reached directly."""

    def __init__(self, sizes: tuple[int, ...], shift: int) -> None:
        strides = [size + ALIGNMENT for size in sizes]
        room = host_memory(sum(strides) * NUM_BLOCKS + 2 * ALIGNMENT)
        self._room = room
        begin = -(-room.address // ALIGNMENT) * ALIGNMENT + shift
        first = np.cumsum([0, *(stride * NUM_BLOCKS for stride in strides)])[:-1] + begin
        at = first + np.outer(np.arange(NUM_BLOCKS), strides)
        self.pieces = Pieces(at.astype(np.uint64), np.array(sizes, np.int64))

    def fill(self, content: np.ndarray) -> None:
        for number, block in enumerate(content):
            self.pieces.write(number, block.tobytes())

    def content(self) -> list[bytes]:
        return [self.pieces.read(number) for number in range(NUM_BLOCKS)]

    def clear(self) -> None:
        memory_bytes(self._room)[:] = 0


def names(num: int = NUM_BLOCKS) -> list[BlockName]:
    return [
        BlockName(namespace=b"n" * 32, depth=at, key=BlockKey(b"%032d" % at)) for at in range(num)
    ]


def keys() -> list[BlockKey]:
    return [name.key for name in names()]


@pytest.mark.parametrize("verify", [Verify.ALWAYS, Verify.OFF])
@pytest.mark.parametrize("sizes", [PIECES, UNEQUAL])
@pytest.mark.parametrize(("stored", "loaded"), [(0, 0), (0, 64), (64, 0)])
def test_ways_agree(
    tmp_path: Path,
    sizes: tuple[int, ...],
    stored: int,
    loaded: int,
    verify: Verify,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for way, shift in (("copy_in", stored), ("copy_out", loaded)):
        if not shift:
            monkeypatch.delattr(Bounce, way)  # the buffer is not needed
    num_bytes = sum(sizes)
    options = DiskOptions(tmp_path, NUM_BLOCKS * num_bytes, verify=verify)
    tier = DiskTier(options, opaque(num_bytes))
    content = np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS, num_bytes), np.uint8)
    here, there = Memory(sizes, stored), Memory(sizes, loaded)
    here.fill(content)
    assert tier.put(names(), here.pieces, 10) == [Outcome.THERE] * NUM_BLOCKS
    there.clear()
    assert tier.get(keys(), there.pieces, 10) == [Outcome.THERE] * NUM_BLOCKS
    assert there.content() == [block.tobytes() for block in content]
    tier.close()


@pytest.mark.parametrize("sizes", [PIECES, UNEQUAL])
def test_bit_that_flipped_in_any_piece_is_noticed(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    num_bytes = sum(sizes)
    tier = DiskTier(DiskOptions(tmp_path, NUM_BLOCKS * num_bytes), opaque(num_bytes))
    memory = Memory(sizes, 0)
    memory.fill(np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS, num_bytes), np.uint8))
    assert tier.put(names(), memory.pieces, 10) == [Outcome.THERE] * NUM_BLOCKS
    with (tmp_path / "data.slab").open("r+b") as file:
        for at in (100, sizes[0] + 100):  # of two blocks, in the first and in the second piece
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 4]))
            file.flush()
            memory.clear()
            (first, *rest) = tier.get(keys(), memory.pieces, 10)
            assert first is not Outcome.THERE
            assert rest == [Outcome.THERE] * (NUM_BLOCKS - 1)
            memory.fill(
                np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS, num_bytes), np.uint8)
            )
            tier.put(names(1), memory.pieces.pick([0]), 10)
    tier.close()
