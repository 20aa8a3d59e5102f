"""Numbers and keys side by side: one suite for native classes and their twins, which are lists."""

from __future__ import annotations

import gc
import pickle
from io import BytesIO
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.reference import packed as reference


@pytest.fixture(params=["native", "reference"], scope="module")
def core(request: pytest.FixtureRequest) -> Any:
    return reference if request.param == "reference" else native()


def native() -> ModuleType:
    return pytest.importorskip("kvtier._native", reason="the core is not built")


NUMBERS = st.lists(st.integers(0, 2**63 - 1), max_size=8)
BOUND = st.none() | st.integers(-10, 10) | st.sampled_from([2**63 - 1, -(2**63), 2**70])
SLICES = st.builds(slice, BOUND, BOUND, BOUND.filter(lambda step: step != 0))


@given(NUMBERS, SLICES, NUMBERS)
def test_numbers_are_a_list_to_whoever_reads_them(
    items: list[int], part: slice, others: list[int]
) -> None:
    for core in (reference, native()):
        numbers = core.Numbers(items)
        assert numbers == items
        assert items == numbers
        assert (numbers == others) == (items == others)
        assert (numbers != others) == (items != others)
        assert list(numbers) == items
        assert (len(numbers), bool(numbers)) == (len(items), bool(items))
        assert numbers[part] == items[part]
        assert numbers[part][::-1] == items[part][::-1]
        assert core.Numbers.joined(numbers, others, iter(items)) == items + others + items
        assert [numbers[at] for at in range(-len(items), len(items))] == items * 2
        for item in items[:2]:
            assert (numbers.index(item), numbers.count(item)) == (
                items.index(item),
                items.count(item),
            )
            assert item in numbers
        assert pickle.loads(pickle.dumps(numbers)) == items


@pytest.mark.parametrize("at", [2, -3, 2**70])
def test_there_is_nothing_behind_the_last_number(core: Any, at: int) -> None:
    with pytest.raises(IndexError):
        core.Numbers([1, 2])[at]


@pytest.mark.parametrize("wrong", [-1, 2**63, 2**64, 2**70])
def test_what_is_no_number_of_a_block_is_refused(core: Any, wrong: int) -> None:
    with pytest.raises(ValueError, match="is not in 0"):
        core.Numbers([0, wrong])


@pytest.mark.parametrize("wrong", ["1", None, 1.5, b"1"])
def test_what_is_no_number_at_all_is_refused(core: Any, wrong: object) -> None:
    with pytest.raises(TypeError):
        core.Numbers([0, wrong])


def test_numbers_can_be_counted(core: Any) -> None:
    assert core.Numbers.counted(3, 7) == [3, 4, 5, 6]
    assert core.Numbers.counted(3, 3) == []
    with pytest.raises(ValueError, match="before the first"):
        core.Numbers.counted(3, 2)


def test_nobody_hashes_what_equals_a_list(core: Any) -> None:
    with pytest.raises(TypeError):
        hash(core.Numbers([1]))


def test_keys_have_32_bytes(core: Any) -> None:
    keys = [bytes([at]) * 32 for at in range(4)]
    packed = core.Keys(keys)
    assert packed == keys
    assert packed[1:3] == keys[1:3]
    assert packed[-1] == keys[-1]
    assert core.Keys.joined(packed, keys) == keys * 2
    with pytest.raises(ValueError, match="32 bytes"):
        core.Keys([b"short"])
    with pytest.raises(TypeError):
        core.Keys(["k" * 32])


# -- of the native classes alone -------------------------------------------------------------------


def test_numpy_reads_numbers_where_they_lie() -> None:
    numbers = native().Numbers(range(10))
    array = np.asarray(numbers[2:])
    assert (array.dtype, array.tolist()) == (np.int64, list(range(2, 10)))
    assert not array.flags.writeable
    assert np.shares_memory(array, np.asarray(numbers)), "a part is a view"
    with pytest.raises((BufferError, TypeError)):
        BytesIO(bytes(80)).readinto(numbers)


def test_a_view_outlives_the_numbers() -> None:
    array = np.asarray(native().Numbers(range(1000))[500:])
    gc.collect()
    assert array.tolist() == list(range(500, 1000))


def test_the_collector_passes_over_packed_numbers() -> None:
    assert not gc.is_tracked(native().Numbers(range(3)))
    assert not gc.is_tracked(native().Keys([bytes(32)]))


def test_numbers_that_were_never_made_are_none() -> None:
    for kind in (native().Numbers, native().Keys):
        bare = kind.__new__(kind)
        assert len(bare) == 0
        assert list(bare[:]) == []
        with pytest.raises(IndexError):
            bare[0]
        assert memoryview(bare).nbytes == 0
