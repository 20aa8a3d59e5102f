"""The codec ``lossless``: conformance, ratios, and malicious blocks."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from kvtier.testing import CodecSuite
from kvtier.testing.codec_suite import KINDS
from kvtier.tiers.codecs import Codec
from kvtier.tiers.codecs.lossless import HEADER, Lossless
from tests.kit.effort import effort

zstandard = pytest.importorskip("zstandard")

LEAST_RATIOS = {"bfloat16": 1.35, "float16": 1.08, "float32": 1.15, "float8": 1.2, "zeros": 1.9}


class TestLossless(CodecSuite):
    num_damaged = effort(20_000)

    def make_codec(self) -> Codec:
        return Lossless()


@pytest.mark.parametrize("kind", list(LEAST_RATIOS))
def test_numbers_like_kv_shrink(kind: str) -> None:
    block = KINDS[kind]
    num = Lossless().encode(block, np.empty_like(block))
    assert num is not None
    assert len(block) / num >= LEAST_RATIOS[kind]


def test_random_bytes_grow_by_a_header_per_chunk_only() -> None:
    block = KINDS["random"]
    into = np.empty(len(block) + 1000, np.uint8)
    assert Lossless().encode(block, into) == len(block) + 4 * HEADER.size
    assert Lossless().encode(block, into[: len(block)]) is None


@pytest.mark.parametrize("says_size", [True, False])
def test_bomb_takes_no_memory(says_size: bool) -> None:
    """A frame of a few bytes that would become 64 MiB."""
    num_bytes = 8 << 10
    made = zstandard.ZstdCompressor(write_content_size=says_size).compress(bytes(64 << 20))
    stored = HEADER.pack(2, -1, 0, 0, len(made)) + bytes(num_bytes // 2) + made
    tracemalloc.start()
    assert not Lossless().decode(np.frombuffer(stored, np.uint8), np.empty(num_bytes, np.uint8))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_frame_with_a_giant_window_is_refused() -> None:
    """A window is allocated before the bytes are decoded."""
    num_bytes = 8 << 10
    # magic, no checksum and one of 4 bytes for the size, a window of 2^31, the right size
    made = b"\x28\xb5\x2f\xfd" + b"\x80" + bytes([21 << 3]) + (num_bytes // 2).to_bytes(4, "little")
    made += bytes((1, 0, 0))  # an empty last block
    stored = HEADER.pack(2, -1, 0, 0, len(made)) + bytes(num_bytes // 2) + made
    assert not Lossless().decode(np.frombuffer(stored, np.uint8), np.empty(num_bytes, np.uint8))


@pytest.mark.parametrize(
    "header",
    [
        (3, 0, 0, 0, 0),
        (2, 242, 0, 0, 0),
        (2, -2, 0, 0, 0),
        (1, 1, 0, 0, 0),
        (0, 1, 0, 0, 0),
        (2, 0, 0, 2**32 - 1, 0),
        (2, 0, 0, 0, 2**32 - 1),
        (2, 0, 1, 0, 0),
    ],
)
def test_numbers_out_of_range_are_refused(header: tuple[int, int, int, int, int]) -> None:
    stored = np.frombuffer(HEADER.pack(*header) + bytes(4096), np.uint8)
    assert not Lossless().decode(stored, np.empty(4096, np.uint8))
