"""Codes of one byte: one suite for the native core and its Python twin, which agree bit for bit."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.reference import quantize as reference
from kvtier.core.reference.quantize import E4M3, LARGEST, e4m3_codes
from tests.native.twins import both

Uint8s = npt.NDArray[np.uint8]
WORDS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
each_type = pytest.mark.parametrize("kind", LARGEST)
each_code = pytest.mark.parametrize("code", ["fp8", "int8"])


core = both(reference)


def bits_of(values: npt.NDArray[np.float64], kind: str) -> npt.NDArray[np.unsignedinteger]:
    """Return numbers in a type, as unsigned integers; bfloat16 cut off."""
    if kind == "float16":
        return np.clip(values, -65504, 65504).astype(np.float16).view(np.uint16)
    bits = np.clip(values, -3e38, 3e38).astype(np.float32).view(np.uint32)
    return bits if kind == "float32" else (bits >> 16).astype(np.uint16)


def quantized(
    core: ModuleType, numbers: npt.NDArray[np.unsignedinteger], kind: str, code: str
) -> tuple[npt.NDArray[np.uint16], Uint8s] | None:
    scales, codes = np.zeros(numbers.shape[1], np.uint16), np.zeros(numbers.shape, np.uint8)
    are_finite = core.quantize_channels(
        numbers.ctypes.data, *numbers.shape, kind, code, scales.ctypes.data, codes.ctypes.data
    )
    return (scales, codes) if are_finite else None


def restored(
    core: ModuleType, scales: npt.NDArray[np.uint16], codes: Uint8s, kind: str, code: str
) -> npt.NDArray[np.unsignedinteger] | None:
    numbers = np.zeros(codes.shape, WORDS[kind])
    are_right = core.restore_channels(
        numbers.ctypes.data, *codes.shape, kind, code, scales.ctypes.data, codes.ctypes.data
    )
    return numbers if are_right else None


@each_code
@each_type
@given(
    num_tokens=st.integers(1, 40),
    num_channels=st.integers(1, 70),
    spread=st.sampled_from([0.0, 3.0, 60.0]),
    seed=st.integers(0, 99),
)
def test_both_write_the_same_codes_and_numbers(
    core: ModuleType,
    kind: str,
    code: str,
    num_tokens: int,
    num_channels: int,
    spread: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    shape = num_tokens, num_channels
    values = rng.standard_normal(shape) * np.exp2(spread * rng.standard_normal(shape))
    values[rng.random(shape) < 0.1] = 0
    numbers = bits_of(values, kind)
    found, expected = (
        quantized(core, numbers, kind, code),
        quantized(reference, numbers, kind, code),
    )
    assert found is not None
    assert expected is not None
    assert (found[0] == expected[0]).all()
    assert (found[1] == expected[1]).all()
    again = restored(core, *found, kind, code)
    other = restored(reference, *found, kind, code)
    assert again is not None
    assert other is not None
    assert (again == other).all()


@each_code
@each_type
def test_every_pattern_of_bits_is_converted_alike(core: ModuleType, kind: str, code: str) -> None:
    """Each number in a channel of its own; and each code by scales of all sizes."""
    words = np.arange(1 << 16, dtype=np.uint32)
    numbers = (words << 16 if kind == "float32" else words).astype(WORDS[kind])
    values = reference._to_float32(numbers, kind)
    numbers = np.ascontiguousarray(numbers[np.isfinite(values)][None])
    found, expected = (
        quantized(core, numbers, kind, code),
        quantized(reference, numbers, kind, code),
    )
    assert found is not None
    assert expected is not None
    assert (found[0] == expected[0]).all()
    assert (found[1] == expected[1]).all()
    wanted = [
        each for each in range(256) if (each & 0x7F != 0x7F if code == "fp8" else each != 128)
    ]
    codes = np.tile(np.array(wanted, np.uint8)[:, None], (1, 512))
    scales = np.arange(0, 0x7F80, 0x40, dtype=np.uint16)[:512]
    codes = np.ascontiguousarray(codes[:, : len(scales)])
    one, other = (restored(each, scales, codes, kind, code) for each in (core, reference))
    assert one is not None
    assert other is not None
    assert (one == other).all()


@each_code
@each_type
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_not_encoded(
    core: ModuleType, kind: str, code: str, bad: float
) -> None:
    values = np.ones((3, 40), np.float32)
    values[2, 37] = bad
    wide = values.view(np.uint32)
    numbers = {
        "float32": wide,
        "bfloat16": (wide >> 16).astype(np.uint16),
        "float16": values.astype(np.float16).view(np.uint16),
    }[kind]
    assert quantized(core, np.ascontiguousarray(numbers), kind, code) is None


@each_code
def test_codes_and_scales_that_are_never_written_are_refused(core: ModuleType, code: str) -> None:
    scales, codes = np.full(40, 0x3F80, np.uint16), np.ones((3, 40), np.uint8)
    assert restored(core, scales, codes, "bfloat16", code) is not None
    for never in (0x7F, 0xFF) if code == "fp8" else (0x80,):
        changed = codes.copy()
        changed[2, 39] = never
        assert restored(core, scales, changed, "bfloat16", code) is None
    for never in 0x7F80, 0x7FC0, 0xFF80:
        wrong = scales.copy()
        wrong[39] = never
        assert restored(core, wrong, codes, "bfloat16", code) is None


def test_impossible_arguments_are_refused(core: ModuleType) -> None:
    memory = np.zeros(64, np.uint8).ctypes.data
    with pytest.raises(ValueError, match="type must be"):
        core.quantize_channels(memory, 1, 1, "int4", "fp8", memory, memory)
    with pytest.raises(ValueError, match="code must be"):
        core.restore_channels(memory, 1, 1, "float32", "fp4", memory, memory)
    for places in (0, memory, memory), (memory, 0, memory), (memory, memory, 0):
        with pytest.raises(ValueError, match="do not lie in memory"):
            core.quantize_channels(places[0], 1, 1, "float32", "fp8", *places[1:])
    assert core.quantize_channels(0, 0, 0, "float32", "fp8", 0, 0)


def test_e4m3_codes_are_those_of_the_standard() -> None:
    """Every finite code is the code of its own number, and ties go to the even one."""
    finite = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    assert E4M3[[0x01, 0x07, 0x08, 0x38, 0x7E, 0xFE]].tolist() == [
        2**-9, 7 * 2**-9, 2**-6, 1, 448, -448,
    ]  # fmt: skip
    assert (e4m3_codes(E4M3[finite]) == finite).all()
    low, high = E4M3[:0x7E], E4M3[1:0x7F]
    middle = ((low + high) / 2).astype(np.float32)
    assert (e4m3_codes(middle) % 2 == 0).all()
    assert (e4m3_codes(np.nextafter(middle, low)) == np.arange(0x7E)).all()
    assert (e4m3_codes(np.nextafter(middle, high)) == np.arange(1, 0x7F)).all()
