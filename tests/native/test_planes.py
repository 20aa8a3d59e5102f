"""Byte planes: one suite for the native core and its Python twin, which agree byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.reference import planes as reference
from kvtier.core.reference.planes import ESCAPE, MAX_BASE, WHOLE
from tests.native.twins import both

Uint8s = npt.NDArray[np.uint8]
PLANS = [(1, 0), *((width, base) for width in (2, 4) for base in (WHOLE, 0, 110, MAX_BASE))]
each_plan = pytest.mark.parametrize(("width", "base"), PLANS)


planes = both(reference)


def split(planes: ModuleType, block: Uint8s, width: int, base: int) -> tuple[bytes, bytes, bytes]:
    """Return the planes and escapes of a block."""
    num = len(block) // width
    high = np.zeros(num if base == WHOLE else num // 2, np.uint8)
    low = np.zeros(len(block) // 2 if width == 1 else len(block) - num, np.uint8)
    escapes = np.zeros(num, np.uint8)
    places = [each.ctypes.data for each in (high, low, escapes)]
    found = planes.split_planes(block.ctypes.data, len(block), width, base, *places, len(escapes))
    assert found >= 0
    return high.tobytes(), low.tobytes(), escapes[:found].tobytes()


def join(
    planes: ModuleType, num_bytes: int, width: int, base: int, parts: tuple[bytes, bytes, bytes]
) -> Uint8s | None:
    made = np.zeros(num_bytes, np.uint8)
    arrays = [np.frombuffer(part or b"\0", np.uint8) for part in parts]
    places = [array.ctypes.data for array in arrays]
    is_whole = planes.join_planes(made.ctypes.data, num_bytes, width, base, *places, len(parts[2]))
    return made if is_whole else None


def block_of(num: int, width: int, spread: float, seed: int) -> Uint8s:
    """Return ``num`` elements whose exponents are spread over about so many values."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(num) * np.exp2(spread * rng.standard_normal(num))
    bits = np.clip(values, -1e38, 1e38).astype(np.float32).view(np.uint32)
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[width]
    return (bits >> (32 - 8 * width)).astype(kind).view(np.uint8)


@each_plan
@given(num=st.integers(0, 5000), spread=st.sampled_from([0.0, 2.0, 30.0]), seed=st.integers(0, 9))
def test_block_comes_back(
    planes: ModuleType, width: int, base: int, num: int, spread: float, seed: int
) -> None:
    block = block_of(2 * num, width, spread, seed)
    parts = split(planes, block, width, base)
    assert parts == split(reference, block, width, base)
    again = join(planes, len(block), width, base, parts)
    assert again is not None
    assert (again == block).all()


@each_plan
def test_every_pattern_of_bits_comes_back(planes: ModuleType, width: int, base: int) -> None:
    block = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    again = join(planes, len(block), width, base, split(planes, block, width, base))
    assert again is not None
    assert (again == block).all()


def test_missing_and_extra_escapes_are_noticed(planes: ModuleType) -> None:
    block = block_of(20_000, 2, 30.0, 1)
    high, low, escapes = split(planes, block, 2, 110)
    assert len(escapes) > 100
    for other in (escapes[:-1], escapes + b"x", b""):
        assert join(planes, len(block), 2, 110, (high, low, other)) is None
    full = bytes([ESCAPE * 17]) * len(high)
    assert join(planes, len(block), 2, 110, (full, low, escapes)) is None


def test_too_many_escapes_are_told(planes: ModuleType) -> None:
    block = np.full(40_000, 255, np.uint8)
    memory = np.full(3 * len(block), 0xAB, np.uint8)
    begin = memory.ctypes.data
    places = (begin, begin + len(block), begin + 2 * len(block))
    assert planes.split_planes(block.ctypes.data, len(block), 2, 0, *places, 10) == -1
    assert (memory[2 * len(block) + 10 :] == 0xAB).all(), "written beyond the room"
    assert planes.split_planes(block.ctypes.data, len(block), 2, 0, *places, 20_000) == 20_000


@pytest.mark.parametrize(
    ("width", "spread", "expected"),
    [(1, 0.0, 1), (2, 0.0, 2), (4, 0.0, 4)],
)
def test_type_of_numbers_is_found(
    planes: ModuleType, width: int, spread: float, expected: int
) -> None:
    block = block_of(50_000, width, spread, 3)
    found, base = planes.choose_planes(block.ctypes.data, len(block))
    assert found == expected
    assert (found, base) == reference.choose_planes(block.ctypes.data, len(block))
    assert width == 1 or 110 <= base <= 116


def test_random_bytes_are_not_split(planes: ModuleType) -> None:
    block = np.random.default_rng(1).integers(0, 256, 1 << 18, np.uint8)
    assert planes.choose_planes(block.ctypes.data, len(block)) == (0, 0)
    for size in range(20):
        width, _ = planes.choose_planes(block.ctypes.data, size)
        assert width in (0, 1, 2, 4)


@pytest.mark.parametrize(
    ("num_bytes", "width", "base"),
    [(8, 3, 0), (6, 2, 0), (8, 2, -2), (8, 2, 242), (8, 1, -1), (8, 1, 1), (2**63, 2, 0)],
)
def test_arguments_out_of_range_are_refused(
    planes: ModuleType, num_bytes: int, width: int, base: int
) -> None:
    memory = np.zeros(64, np.uint8)
    at = memory.ctypes.data
    calls: list[Callable[..., object]] = [planes.split_planes, planes.join_planes]
    for call in calls:
        with pytest.raises(ValueError):
            call(at, num_bytes, width, base, at + 16, at + 32, at + 48, 1)
    with pytest.raises(ValueError):
        planes.split_planes(0, 8, 2, 0, at, at, at, 1)
