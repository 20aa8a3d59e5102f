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

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.layout import DType, KVGroup
from kvtier.tiers.codecs.codec import Codec, Uint8s

Float32s = npt.NDArray[np.float32]
Bits: TypeAlias = "npt.NDArray[np.uint16] | npt.NDArray[np.uint32]"
"""Elements of KV as unsigned integers of their width."""
T = TypeVar("T", bound=np.generic)

SCALE_BYTES: Final = 2
STEP_ELEMENTS: Final = 32 << 10
"""Elements that are worked on at a time: they stay in the second-level cache."""
LARGEST: Final = {
    DType.FLOAT32: np.finfo(np.float32).max,
    DType.FLOAT16: np.float32(65504),
    DType.BFLOAT16: np.uint32(0x7F7F0000).view(np.float32),
}
"""Types that are encoded, and their largest finite numbers."""
E4M3_BIAS: Final = 120 << 3
"""Difference of the exponents' biases of float32 and e4m3, where e4m3 has its exponent."""
E4M3_NAN: Final = 0x7F


class Quantized(Codec):
    """Lossy codec with a byte per element. A block with an infinity or a NaN is not encoded.

    group: shape of the blocks; None if it is not known. Then nothing is encoded or decoded.

    Raises ``ConfigError`` for a shape or a type that it can't encode.
    """

    name: ClassVar[str]
    """Its name among ``kvtier.codecs``."""
    largest_code: ClassVar[float]
    """Largest number that a code stands for."""
    is_lossy = True

    def __init__(self, group: KVGroup | None = None) -> None:
        self._group = group
        if group is None:
            return
        if group.dtype not in LARGEST:
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

    @abstractmethod
    def to_codes(self, values: Float32s) -> Uint8s:
        """Return the codes of numbers that are already divided by their scale."""

    @abstractmethod
    def from_codes(self, codes: Uint8s) -> Float32s | None:
        """Return the numbers of codes; None if one of them is never written."""

    def encode(self, block: Uint8s, into: Uint8s) -> int | None:
        if self._group is None or len(block) != self._group.bytes_per_block:
            return None
        num_stored = stored_bytes(self._group)
        if len(into) < num_stored:
            return None
        for elements, scales, codes in _steps(self._group, block, into[:num_stored]):
            values = _to_float32(elements, self._group.dtype)
            largest = np.abs(values).max(axis=1)
            if not np.isfinite(largest).all():
                return None
            scale_bits = _rounded_up(largest / np.float32(self.largest_code))
            scale_bits = np.maximum(scale_bits, largest > 0)  # of numbers below the smallest scale
            scales[...] = scale_bits
            divisors = _widened(scale_bits)
            divisors[divisors == 0] = 1
            codes[...] = self.to_codes(values / divisors[:, None])
        return num_stored

    def decode(self, stored: Uint8s, into: Uint8s) -> bool:
        group = self._group
        if (
            group is None
            or len(into) != group.bytes_per_block
            or len(stored) != stored_bytes(group)
        ):
            return False
        for elements, scales, codes in _steps(group, into, stored):
            values = self.from_codes(codes)
            factors = _widened(scales)
            if values is None or not np.isfinite(factors).all():
                return False
            with np.errstate(over="ignore"):
                values *= factors[:, None]
            np.clip(values, -LARGEST[group.dtype], LARGEST[group.dtype], out=values)
            elements[...] = _from_float32(values, group.dtype)
        return True


class Fp8(Quantized):
    """A byte per element, e4m3, with a scale per channel."""

    name = "fp8"
    number = 2
    largest_code = 448.0

    def to_codes(self, values: Float32s) -> Uint8s:
        bits = values.view(np.uint32)
        signs = (bits >> 24).astype(np.uint8) & 0x80
        magnitudes = bits & 0x7FFFFFFF
        # Round to nearest, ties to even, at the third bit of the mantissa.
        normal = ((magnitudes + (0x7FFFF + ((magnitudes >> 20) & 1))) >> 20) - E4M3_BIAS
        # Below the smallest normal number, 2^-6, codes are multiples of 2^-9. The eighth is 2^-6.
        small = np.rint(np.abs(values) * np.float32(512)).astype(np.uint32)
        codes = np.where(magnitudes < 0x3C800000, small, normal).astype(np.uint8)
        return np.asarray(codes | signs)

    def from_codes(self, codes: Uint8s) -> Float32s | None:
        if ((codes & E4M3_NAN) == E4M3_NAN).any():
            return None
        return np.asarray(E4M3[codes])


class Int8(Quantized):
    """A byte per element, -127 to 127, with a scale per channel."""

    name = "int8"
    number = 3
    largest_code = 127.0

    def to_codes(self, values: Float32s) -> Uint8s:
        return np.rint(values).astype(np.int8).view(np.uint8)

    def from_codes(self, codes: Uint8s) -> Float32s | None:
        if (codes == 0x80).any():  # -128
            return None
        return codes.view(np.int8).astype(np.float32)


def stored_bytes(group: KVGroup) -> int:
    """Return the bytes of an encoded block."""
    channels = sum(part.num_heads * part.dim for part in group.parts)
    return group.num_layers * channels * (SCALE_BYTES + group.block_size)


def _steps(
    group: KVGroup, block: Uint8s, stored: Uint8s
) -> Iterator[tuple[Bits, npt.NDArray[np.uint16], Uint8s]]:
    """Yield views of a block and of its stored form, some layers of one part at a time.

    Yields elements [num_layers, num_tokens, num_channels], scales [num_layers, num_channels] and
    codes [num_layers, num_tokens, num_channels].
    """
    width = group.dtype.itemsize
    layers = block.reshape(group.num_layers, -1)
    stored_layers = stored.reshape(group.num_layers, -1)
    begin = stored_begin = 0
    for part in group.parts:
        channels = part.num_heads * part.dim
        num = channels * group.block_size
        shape = (-1, group.block_size, channels)
        end, codes_begin = begin + num * width, stored_begin + SCALE_BYTES * channels
        stored_end = codes_begin + num
        step = max(1, STEP_ELEMENTS // num)
        for first in range(0, group.num_layers, step):
            at = slice(first, first + step)
            raw = layers[at, begin:end]
            scales = stored_layers[at, stored_begin:codes_begin].view(np.uint16)
            codes = stored_layers[at, codes_begin:stored_end]
            plain: Bits = (
                _split(raw.view(np.uint32), shape)
                if width == 4
                else _split(raw.view(np.uint16), shape)
            )
            yield plain, scales, _split(codes, shape)
        begin, stored_begin = end, stored_end


def _split(array: npt.NDArray[T], shape: tuple[int, int, int]) -> npt.NDArray[T]:
    """Return a view [num_layers, num_tokens, num_channels] of rows that each are contiguous."""
    rows, width = array.strides[0], array.itemsize
    return np.lib.stride_tricks.as_strided(
        array, (len(array), *shape[1:]), (rows, shape[2] * width, width)
    )


def _to_float32(elements: Bits, dtype: DType) -> Float32s:
    if dtype is DType.BFLOAT16:
        return _widened(elements)
    kind = np.float32 if dtype is DType.FLOAT32 else np.float16
    return np.ascontiguousarray(elements).view(kind).astype(np.float32)


def _from_float32(values: Float32s, dtype: DType) -> Bits:
    """Return the bits of finite numbers in a type, rounded to nearest, ties to even."""
    if dtype is DType.FLOAT32:
        return values.view(np.uint32)
    if dtype is DType.FLOAT16:
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def _widened(bits: Bits) -> Float32s:
    """Return bfloat16 numbers as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _rounded_up(values: Float32s) -> npt.NDArray[np.uint16]:
    """Return the bits of the smallest bfloat16 that is not below each of some positive numbers."""
    return ((values.view(np.uint32) + 0xFFFF) >> 16).astype(np.uint16)


def _e4m3_numbers() -> Float32s:
    """Return the number of each code: float32 [256]."""
    codes = np.arange(256)
    exponents, mantissas = (codes >> 3) & 15, codes & 7
    normal = np.ldexp(1 + mantissas / 8, exponents - 7)
    magnitudes = np.where(exponents == 0, mantissas / 512, normal)
    return np.where(codes & 0x80, -magnitudes, magnitudes).astype(np.float32)


E4M3: Final = _e4m3_numbers()
