"""Lossy codecs ``fp8`` and ``int8``: a byte per element, with a scale per channel.

A channel is one (layer, part, head, dim); its elements are those of the block's tokens. A block is
stored layer by layer, and a layer part by part (K, V):

    scales   2 bytes per channel   bfloat16
    codes    1 byte per element    in the order of the block: [num_tokens, num_heads, dim]

An element is ``code * scale``, rounded to the type of the KV. ``fp8`` codes are e4m3 (OCP 8-bit
floating point, revision 1.0: four bits of exponent, three of mantissa, no infinities); ``int8``
codes are -127 to 127. The scale is the channel's largest magnitude by the largest code, rounded up
to bfloat16, so that no code is clipped.

The error of an element x, before it is rounded to the type of the KV, is at most ``scale / 2`` for
``int8``, and the larger of ``|x| / 16`` and ``scale / 1024`` for ``fp8``. Rounding adds half a unit
in the last place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final

from kvtier.core.errors import ConfigError
from kvtier.core.hot import quantize_channels, restore_channels
from kvtier.layout import DType, KVGroup
from kvtier.tiers.codecs.codec import Codec, Uint8s

SCALE_BYTES: Final = 2
TYPES: Final = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
"""Types that are encoded."""

Convert = Callable[[int, int, int, str, str, int, int], bool]


class Quantized(Codec):
    """Lossy codec with a byte per element. A block with an infinity or a NaN is not encoded.

    group: shape of the blocks; None if it is not known. Then nothing is encoded or decoded.

    Raises ``ConfigError`` for a shape or a type that it can't encode.
    """

    name: ClassVar[str]
    """Its name among ``kvtier.codecs``, and that of its codes."""
    is_lossy = True

    def __init__(self, group: KVGroup | None = None) -> None:
        self._group = group
        if group is None:
            return
        if group.dtype not in TYPES:
            raise ConfigError(
                f"codec: {self.name} needs KV in bfloat16, float16 or float32 whose layers and "
                f"heads are known, and here it is {group.dtype.value}; use codec=lossless"
            )
        if not all(part.per_token for part in group.parts):
            raise ConfigError(
                f"codec: {self.name} needs KV per token, and {group.attention.value} layers have a "
                "state per block; use codec=lossless"
            )

    def fit(self, group: KVGroup) -> Codec:
        return type(self)(group)

    def encode(self, block: Uint8s, into: Uint8s) -> int | None:
        group = self._group
        if group is None or len(block) != group.bytes_per_block:
            return None
        num_stored = stored_bytes(group)
        if len(into) < num_stored:
            return None
        return num_stored if self._convert(group, block, into, quantize_channels) else None

    def decode(self, stored: Uint8s, into: Uint8s) -> bool:
        group = self._group
        if group is None or len(into) != group.bytes_per_block:
            return False
        if len(stored) != stored_bytes(group):
            return False
        return self._convert(group, into, stored, restore_channels)

    def _convert(self, group: KVGroup, block: Uint8s, stored: Uint8s, convert: Convert) -> bool:
        """Convert each part of each layer; return whether all could be."""
        plain, scales = block.ctypes.data, stored.ctypes.data
        for _ in range(group.num_layers):
            for part in group.parts:
                channels = part.num_heads * part.dim
                codes = scales + SCALE_BYTES * channels
                shape = group.block_size, channels, group.dtype.value, self.name
                if not convert(plain, *shape, scales, codes):
                    return False
                num_elements = group.block_size * channels
                plain += num_elements * group.dtype.itemsize
                scales = codes + num_elements
        return True


class Fp8(Quantized):
    """A byte per element, e4m3, with a scale per channel."""

    name = "fp8"
    number = 2


class Int8(Quantized):
    """A byte per element, -127 to 127, with a scale per channel."""

    name = "int8"
    number = 3


def stored_bytes(group: KVGroup) -> int:
    """Return the bytes of an encoded block."""
    channels = sum(part.num_heads * part.dim for part in group.parts)
    return group.num_layers * channels * (SCALE_BYTES + group.block_size)
