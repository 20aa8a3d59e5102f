"""Numbers as codes of one byte, with a scale per channel, as ``native/quantize/quantize.hpp``."""

from __future__ import annotations

import ctypes
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtier.core.reference.arguments import check_memory

Uint8s = npt.NDArray[np.uint8]
Uint16s = npt.NDArray[np.uint16]
Float32s = npt.NDArray[np.float32]
Bits: TypeAlias = "npt.NDArray[np.uint16] | npt.NDArray[np.uint32]"
"""Numbers as unsigned integers of their width."""

SCALE_BYTES: Final = 2
LARGEST: Final = {
    "float32": np.finfo(np.float32).max,
    "float16": np.float32(65504),
    "bfloat16": np.uint32(0x7F7F0000).view(np.float32),
}
"""Types, and their largest finite numbers."""
LARGEST_CODE: Final = {"fp8": np.float32(448), "int8": np.float32(127)}
E4M3_BIAS: Final = 120 << 3
"""Difference of the exponents' biases of float32 and e4m3, where e4m3 has its exponent."""
E4M3_NAN: Final = 0x7F


def quantize_channels(
    address: int, num_tokens: int, num_channels: int, type: str, code: str, scales: int, codes: int
) -> bool:
    """Write scales [num_channels] and codes [num_tokens, num_channels] of numbers.

    Returns whether all were finite. The caller guarantees that the memory exists.

    type: float32, float16 or bfloat16. code: fp8 or int8.
    """
    numbers, to_scales, to_codes = _places(
        address, num_tokens, num_channels, type, code, scales, codes
    )
    values = _to_float32(numbers, type)
    largest = np.abs(values).max(axis=0, initial=0)
    if not np.isfinite(largest).all():
        return False
    scale_bits = _rounded_up(largest / LARGEST_CODE[code])
    scale_bits = np.maximum(scale_bits, largest > 0)  # of numbers below the smallest scale
    to_scales[:] = scale_bits
    divisors = _widened(scale_bits)
    divisors[divisors == 0] = 1
    divided = values / divisors
    to_codes[:] = e4m3_codes(divided) if code == "fp8" else int8_codes(divided)
    return True


def restore_channels(
    address: int, num_tokens: int, num_channels: int, type: str, code: str, scales: int, codes: int
) -> bool:
    """Write the numbers of codes to an address; see ``quantize_channels``.

    Returns whether all codes and scales are ones that are written.
    """
    numbers, its_scales, its_codes = _places(
        address, num_tokens, num_channels, type, code, scales, codes
    )
    factors = _widened(its_scales)
    never = (its_codes & E4M3_NAN) == E4M3_NAN if code == "fp8" else its_codes == 0x80  # -128
    if never.any() or not np.isfinite(factors).all():
        return False
    values = E4M3[its_codes] if code == "fp8" else its_codes.view(np.int8).astype(np.float32)
    with np.errstate(over="ignore"):
        values *= factors
    numbers[:] = _from_float32(np.clip(values, -LARGEST[type], LARGEST[type]), type)
    return True


def e4m3_codes(values: Float32s) -> Uint8s:
    """Return the e4m3 codes of numbers of at most 448: to nearest, ties to even."""
    bits = values.view(np.uint32)
    signs = (bits >> 24).astype(np.uint8) & 0x80
    magnitudes = bits & 0x7FFFFFFF
    # At the third bit of the mantissa.
    normal = ((magnitudes + (0x7FFFF + ((magnitudes >> 20) & 1))) >> 20) - E4M3_BIAS
    # Below the smallest normal number, 2^-6, codes are multiples of 2^-9. The eighth is 2^-6.
    small = np.rint(np.abs(values) * np.float32(512)).astype(np.uint32)
    return np.asarray(np.where(magnitudes < 0x3C800000, small, normal).astype(np.uint8) | signs)


def int8_codes(values: Float32s) -> Uint8s:
    """Return the codes of numbers of at most 127: to nearest, ties to even."""
    return np.rint(values).astype(np.int8).view(np.uint8)


def _places(
    address: int, num_tokens: int, num_channels: int, type: str, code: str, scales: int, codes: int
) -> tuple[Bits, Uint16s, Uint8s]:
    """Return numbers, scales and codes; raise ValueError for arguments that are out of range."""
    if type not in LARGEST:
        raise ValueError("type must be float32, float16 or bfloat16")
    if code not in LARGEST_CODE:
        raise ValueError("code must be fp8 or int8")
    num = num_tokens * num_channels
    width = 4 if type == "float32" else 2
    sizes = {"address": num * width, "scales": SCALE_BYTES * num_channels, "codes": num}
    for (name, num_bytes), at in zip(sizes.items(), (address, scales, codes), strict=True):
        check_memory(f"{name}: ", at, num_bytes)
    shape = num_tokens, num_channels
    whole = _bytes(address, sizes["address"])
    numbers: Bits = (
        whole.view(np.uint32).reshape(shape) if width == 4 else whole.view(np.uint16).reshape(shape)
    )
    return (
        numbers,
        _bytes(scales, sizes["scales"]).view(np.uint16),
        _bytes(codes, num).reshape(shape),
    )


def _bytes(address: int, num_bytes: int) -> Uint8s:
    if not num_bytes:
        return np.zeros(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def _to_float32(numbers: Bits, type: str) -> Float32s:
    if type == "bfloat16":
        return _widened(numbers)
    kind = np.float32 if type == "float32" else np.float16
    return np.asarray(numbers.view(kind).astype(np.float32))


def _from_float32(values: Float32s, type: str) -> Bits:
    """Return the bits of finite numbers in a type, rounded to nearest, ties to even."""
    if type == "float32":
        return values.view(np.uint32)
    if type == "float16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def _widened(bits: Bits) -> Float32s:
    """Return bfloat16 numbers as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _rounded_up(values: Float32s) -> Uint16s:
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
"""Number of each e4m3 code: float32 [256]."""
