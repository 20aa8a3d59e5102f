"""Conformance suite of lossy codecs: every element comes back within a bound that the codec states.

Elements are compared channel by channel: a channel is one (layer, part, head, dim), and its
elements are those of the block's tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.core.errors import ConfigError
from kvtier.layout import DType, KVGroup, opaque
from kvtier.layout.group import full_attention, latent_attention, sliding_attention
from kvtier.testing.codec_suite import KINDS, CodecRules
from kvtier.testing.storage_user import together
from kvtier.tiers.codecs.codec import Uint8s

Float64s = npt.NDArray[np.float64]

DTYPES = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32)
HALF_UNITS = {DType.BFLOAT16: 2.0**-8, DType.FLOAT16: 2.0**-11, DType.FLOAT32: 2.0**-24}
"""Half a unit in the last place, at most, relative to the number."""
LEAST = {DType.BFLOAT16: 2.0**-133, DType.FLOAT16: 2.0**-24, DType.FLOAT32: 2.0**-149}
"""Smallest positive numbers."""
LARGEST = {DType.BFLOAT16: 0x7F7F, DType.FLOAT16: 0x7BFF, DType.FLOAT32: 0x7F7FFFFF}
"""Bits of the largest finite numbers."""
INFINITE = {DType.BFLOAT16: 0x7F80, DType.FLOAT16: 0x7C00, DType.FLOAT32: 0x7F800000}


def shapes(dtype: DType) -> dict[str, KVGroup]:
    """Return shapes of blocks by name."""
    return {
        "grouped heads": full_attention(3, 2, 32, dtype, 16),
        "wide": full_attention(2, 8, 128, dtype, 64),
        "latent": latent_attention(3, 96, 16, dtype, 8),
        "window": sliding_attention(5, 1, 16, 64, dtype, 16),
        "one token": full_attention(1, 1, 8, dtype, 1),
    }


each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_shape = pytest.mark.parametrize("shape", list(shapes(DType.BFLOAT16)))


def numbers_of(block: Uint8s, dtype: DType) -> Float64s:
    """Return a block's elements: float64 [num_elements]."""
    if dtype is DType.BFLOAT16:
        bits = block.view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)
    return block.view(np.float16 if dtype is DType.FLOAT16 else np.float32).astype(np.float64)


def channels_of(block: Uint8s, group: KVGroup) -> Iterator[Float64s]:
    """Yield the elements of each layer and part: float64 [num_tokens, num_channels]."""
    elements, at = numbers_of(block, group.dtype), 0
    for _ in range(group.num_layers):
        for part in group.parts:
            num = group.tokens_of(part) * part.num_heads * part.dim
            yield elements[at : at + num].reshape(group.tokens_of(part), -1)
            at += num


class LossyCodecSuite(CodecRules):
    """Conformance suite of lossy codecs. Implement ``make_codec`` and ``most_error``."""

    @abstractmethod
    def most_error(self, values: Float64s) -> Float64s:
        """Return the bound of each element's error, before it is rounded to the KV's type.

        values: float64 [num_tokens, num_channels] of one layer and part.
        Returns the same shape.
        """

    def block(self, group: KVGroup, kind: str = "") -> Uint8s:
        """Return a block of numbers like KV. kind: see ``block_kinds``; "" for the type's own."""
        return np.resize(KINDS[kind or group.dtype.value], group.bytes_per_block)

    def check_bound(self, block: Uint8s, again: Uint8s, group: KVGroup) -> None:
        """Check each element of a decoded block."""
        pairs = zip(channels_of(block, group), channels_of(again, group), strict=True)
        for before, after in pairs:
            rounding = np.abs(after) * HALF_UNITS[group.dtype] + LEAST[group.dtype]
            # Dividing and multiplying in float32 moves ties a little.
            most = (self.most_error(before) + rounding) * (1 + 2**-15)
            assert (np.abs(before - after) <= most).all()

    def test_codec_says_that_it_is_lossy(self) -> None:
        assert self.make_codec().is_lossy

    @each_dtype
    @each_shape
    def test_error_is_bounded(self, dtype: DType, shape: str) -> None:
        group = shapes(dtype)[shape]
        codec, block = self.make_codec().fit(group), self.block(group)
        before = block.copy()
        stored = self.encoded(codec, block)
        assert (block == before).all(), "the block was changed"
        again = np.empty_like(block)
        assert codec.decode(stored, again)
        self.check_bound(block, again, group)

    @each_dtype
    def test_extreme_numbers_keep_the_bound(self, dtype: DType) -> None:
        """Zeros, the largest and the smallest numbers, alone and side by side."""
        group = full_attention(2, 2, 8, dtype, 16)
        codec, width = self.make_codec().fit(group), np.uint32 if dtype.itemsize == 4 else np.uint16
        rng = np.random.default_rng(3)
        sign = 1 << (8 * dtype.itemsize - 1)
        for choices in ([0], [1], [0, 1, 3], [LARGEST[dtype]], [0, 1, LARGEST[dtype] // 2],
                        [0, sign, 1 | sign, LARGEST[dtype], LARGEST[dtype] | sign]):  # fmt: skip
            num = group.bytes_per_block // dtype.itemsize
            block = rng.choice(np.array(choices, width), num).view(np.uint8)
            again = np.empty_like(block)
            assert codec.decode(self.encoded(codec, block), again)
            self.check_bound(block, again, group)

    @each_dtype
    def test_what_is_not_finite_is_not_encoded(self, dtype: DType) -> None:
        group = full_attention(2, 2, 8, dtype, 16)
        codec, width = self.make_codec().fit(group), np.uint32 if dtype.itemsize == 4 else np.uint16
        for bits in (INFINITE[dtype], INFINITE[dtype] + 1):
            block = self.block(group).copy()
            block.view(width)[-3] = bits
            assert codec.encode(block, np.empty(2 * len(block), np.uint8)) is None

    @each_dtype
    def test_every_instance_decodes_the_same(self, dtype: DType) -> None:
        group = shapes(dtype)["wide"]
        block = self.block(group)
        stored = self.encoded(self.make_codec().fit(group), block)
        one, other = np.zeros_like(block), np.ones_like(block)
        assert self.make_codec().fit(group).decode(stored, one)
        assert self.make_codec().fit(group).decode(stored, other)
        assert (one == other).all()

    def test_memory_need_not_be_aligned(self) -> None:
        group = shapes(DType.BFLOAT16)["grouped heads"]
        codec, block = self.make_codec().fit(group), self.block(group)
        stored = self.encoded(codec, block)
        shifted, again = (np.empty(len(block) + 1, np.uint8)[1:] for _ in range(2))
        shifted[:] = block
        assert (self.encoded(codec, shifted) == stored).all()
        room = np.empty(len(stored) + 1, np.uint8)[1:]
        room[:] = stored
        assert codec.decode(room, again)
        self.check_bound(block, again, group)

    def test_unknown_shape_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="lossless"):
            self.make_codec().fit(opaque(4096))
        block = KINDS["bfloat16"][:4096]
        assert self.make_codec().encode(block, np.empty_like(block)) is None
        assert not self.make_codec().decode(block, np.empty_like(block))

    def test_nothing_is_written_beyond_the_room(self) -> None:
        group = shapes(DType.BFLOAT16)["latent"]
        codec, block = self.make_codec().fit(group), self.block(group)
        whole = len(self.encoded(codec, block))
        for room, num in self.check_room(codec, block).items():
            assert num == (whole if room >= whole else None)

    @each_dtype
    def test_damage_is_an_outcome(self, dtype: DType) -> None:
        group = shapes(dtype)["grouped heads"]
        codec, num = self.make_codec().fit(group), self.num_damaged // len(DTYPES)
        for is_whole, decoded in self.damaged(codec, self.block(group), num):
            assert not is_whole or np.isfinite(numbers_of(decoded, dtype)).all()

    def test_block_of_another_size_is_none(self) -> None:
        group = shapes(DType.BFLOAT16)["grouped heads"]
        codec, block = self.make_codec().fit(group), self.block(group)
        self.check_sizes(codec, block)
        into = np.empty(2 * len(block), np.uint8)
        for size in (0, 8, len(block) - 8, len(block) + 8, 2 * len(block)):
            assert codec.encode(np.zeros(size, np.uint8), into) is None

    def test_threads_share_a_codec(self) -> None:
        group = shapes(DType.BFLOAT16)["wide"]
        codec, block = self.make_codec().fit(group), self.block(group, "bfloat16")
        blocks = [block, block & np.uint8(0x3F)]
        expected = [self.encoded(codec, each) for each in blocks]

        def work(at: int) -> None:
            into = np.empty_like(block)
            num = codec.encode(blocks[at], into)
            assert num is not None
            assert (into[:num] == expected[at]).all()

        together([(work, at) for at in (0, 1, 0, 1)], rounds=5)
