"""crc32c: one suite for the native core, its tables and its Python twin."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.reference import crc as reference

Bytes = npt.NDArray[np.uint8]


class Crc(NamedTuple):
    """The three functions of one implementation."""

    one: Callable[..., int]
    many: Callable[..., npt.NDArray[np.uint32]]
    rows: Callable[..., npt.NDArray[np.uint32]]


def native() -> ModuleType:
    module: ModuleType = pytest.importorskip("kvtier._native", reason="the core is not built")
    return module


@pytest.fixture(params=["native", "table", "reference"], scope="module")
def crc(request: pytest.FixtureRequest) -> Crc:
    if request.param == "reference":
        return Crc(reference.crc32c, reference.crc32c_many, reference.crc32c_rows)
    core = native()
    one = core.crc32c if request.param == "native" else core.crc32c_table
    return Crc(one, core.crc32c_many, core.crc32c_rows)


def slow_crc32c(data: bytes, seed: int = 0) -> int:
    """A bit at a time, from the definition."""
    state = seed ^ 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def random_bytes(num_bytes: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def of(crc: Crc, data: Bytes, seed: int = 0) -> int:
    return crc.one(data.ctypes.data, data.size, seed)


@pytest.mark.parametrize(
    ("data", "checksum"),
    [
        pytest.param(b"123456789", 0xE3069283, id="check value"),
        pytest.param(bytes(32), 0x8A9136AA, id="zeros, RFC 3720"),
        pytest.param(b"\xff" * 32, 0x62A8AB43, id="ones, RFC 3720"),
        pytest.param(bytes(range(32)), 0x46DD794E, id="ascending, RFC 3720"),
        pytest.param(bytes(range(31, -1, -1)), 0x113FDB5C, id="descending, RFC 3720"),
    ],
)
def test_published_values_are_found(crc: Crc, data: bytes, checksum: int) -> None:
    assert of(crc, np.frombuffer(data, np.uint8)) == checksum


def test_no_bytes_leave_the_checksum_as_it_was(crc: Crc) -> None:
    assert crc.one(0, 0) == 0
    assert crc.one(0, 0, 12345) == 12345


@given(
    start=st.integers(0, 16),
    num_bytes=st.one_of(st.integers(0, 100), st.integers(0, 3000)),
    seed=st.integers(0, 2**32 - 1),
)
def test_checksums_are_those_of_the_definition(
    crc: Crc, start: int, num_bytes: int, seed: int
) -> None:
    data = random_bytes(start + num_bytes, seed)[start:]
    assert of(crc, data, seed) == slow_crc32c(data.tobytes(), seed)


@given(
    num_bytes=st.one_of(st.integers(0, 70_000), st.sampled_from([6143, 6144, 12288, 1 << 20])),
    cut=st.integers(0, 1 << 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_checksum_continues_where_another_ended(
    crc: Crc, num_bytes: int, cut: int, seed: int
) -> None:
    data = random_bytes(num_bytes, seed)
    cut = min(cut, num_bytes)
    whole = of(crc, data)
    assert of(crc, data[cut:], of(crc, data[:cut])) == whole
    assert reference.crc32c(data.ctypes.data, num_bytes) == whole


@pytest.mark.parametrize("num_bytes", [1, 64, 512, 4096, 100_000, 9_000_001])
def test_every_flipped_bit_is_noticed(crc: Crc, num_bytes: int) -> None:
    data = random_bytes(num_bytes, num_bytes)
    right = of(crc, data)
    for at in {0, num_bytes // 3, num_bytes - 1}:
        data[at] ^= 1 << at % 8
        assert of(crc, data) != right
        data[at] ^= 1 << at % 8
    assert of(crc, data) == right


@given(sizes=st.lists(st.integers(0, 9000), max_size=30), threads=st.integers(1, 5))
def test_many_checksums_are_those_of_each(crc: Crc, sizes: list[int], threads: int) -> None:
    data = random_bytes(sum(sizes) + 1, len(sizes))
    starts = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))[: len(sizes)]
    addresses = (starts + data.ctypes.data).astype(np.uint64)
    found = crc.many(addresses, np.array(sizes, np.uint64), threads)
    assert found.dtype == np.uint32
    expected = [
        of(crc, data[at : at + size]) for at, size in zip(starts.tolist(), sizes, strict=True)
    ]
    assert found.tolist() == expected


@given(
    num=st.integers(0, 50), width=st.integers(0, 80), left=st.integers(0, 9), step=st.integers(1, 3)
)
def test_rows_may_lie_apart(crc: Crc, num: int, width: int, left: int, step: int) -> None:
    shape = (num * step, left + width + 3)
    table = random_bytes(shape[0] * shape[1], width).reshape(shape)
    rows = table[::step, left : left + width]
    expected = [slow_crc32c(row.tobytes()) for row in rows]
    assert crc.rows(rows).tolist() == expected
    assert crc.rows(rows[::-1]).tolist() == expected[::-1]


def test_a_hundred_thousand_records_are_checked_at_once(crc: Crc) -> None:
    records = random_bytes(100_000 * 64, 1).reshape(-1, 64)
    found = crc.rows(records[:, 4:])
    for at in (0, 1, 16383, 16384, 99_999):
        assert found[at] == slow_crc32c(records[at, 4:].tobytes())


def test_wrong_lists_are_refused_by_name(crc: Crc) -> None:
    one = np.ones(1, np.uint64)
    with pytest.raises(TypeError, match="addresses must be an array of uint64, not list"):
        crc.many([1], one)
    with pytest.raises(TypeError, match="sizes must be an array of uint64; .* format 'l'"):
        crc.many(one, one.astype(np.int64))
    with pytest.raises(ValueError, match="equal lengths, not 1 and 2"):
        crc.many(one, np.ones(2, np.uint64))
    with pytest.raises(ValueError, match=r"addresses\[0\]: 1 bytes at address 0 "):
        crc.many(np.zeros(1, np.uint64), one)
    with pytest.raises(ValueError, match="between 1 and 256, not 0"):
        crc.many(one, np.zeros(1, np.uint64), 0)


def test_wrong_rows_are_refused(crc: Crc) -> None:
    rows = np.zeros((4, 8), np.uint8)
    with pytest.raises(TypeError, match="rows must be an array of uint8, not NoneType"):
        crc.rows(None)
    with pytest.raises(TypeError, match="format 'I'"):
        crc.rows(rows.view(np.uint32))
    with pytest.raises(ValueError, match="two dimensions, not 1"):
        crc.rows(rows.ravel())
    with pytest.raises(ValueError, match="in one piece each, not with 2 bytes"):
        crc.rows(rows[:, ::2])


def test_memory_that_cannot_be_is_refused(crc: Crc) -> None:
    with pytest.raises(ValueError, match="8 bytes at address 0 do not lie in memory"):
        crc.one(0, 8)
    with pytest.raises(TypeError):
        crc.one(4096, -1)
    with pytest.raises(TypeError):
        crc.one(4096, 0, 1 << 32)


def test_the_core_says_what_it_computes_with() -> None:
    assert native().CRC32C_KIND in ("sse4.2", "armv8", "table")
