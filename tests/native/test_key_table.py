"""Slots by key: one suite for the native table and its twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.reference.key_table import KeyTable as ReferenceTable
from tests.native.twins import both

Keys = npt.NDArray[np.void]
Make = Callable[[Keys, npt.NDArray[np.int64]], Any]


make = both(ReferenceTable, "KeyTable")


def of(*keys: bytes) -> Keys:
    return np.frombuffer(b"".join(keys), "V32")


def numbered(*numbers: int) -> Keys:
    """Keys that differ in their last bytes only."""
    return of(*(number.to_bytes(32, "big") for number in numbers))


def at(*slots: int) -> npt.NDArray[np.int64]:
    return np.array(slots, np.int64)


def empty(make: Make) -> Any:
    return make(numbered(), at())


def test_empty_table_has_nothing(make: Make) -> None:
    table = empty(make)
    assert len(table) == 0
    assert table.find(numbered(1, 2)).tolist() == [-1, -1]
    found = table.find(numbered())
    assert (found.dtype, found.shape) == (np.dtype(np.int64), (0,))
    table.remove(numbered(1), at(0))


def test_key_is_in_the_slot_where_it_was_put_last(make: Make) -> None:
    table = make(numbered(1, 2, 1), at(10, 20, 30))
    assert len(table) == 2
    assert table.find(numbered(2, 1, 3)).tolist() == [20, 30, -1]
    table.put(numbered(2), at(40))
    assert table.find(numbered(2)).tolist() == [40]
    assert len(table) == 2


def test_key_that_is_elsewhere_by_now_stays_there(make: Make) -> None:
    table = make(numbered(1, 2), at(10, 20))
    table.put(numbered(1), at(11))
    table.remove(numbered(1, 2), at(10, 20))
    assert table.find(numbered(1, 2)).tolist() == [11, -1]
    assert len(table) == 1


@pytest.mark.parametrize("slot", [0, 2**31, 2**32 - 1])
def test_slots_may_be_as_large_as_slabs_have_them(make: Make, slot: int) -> None:
    table = make(numbered(1), at(slot))
    assert table.find(numbered(1)).tolist() == [slot]


def test_every_byte_of_a_key_counts(make: Make) -> None:
    keys = of(*(bytes(32)[:each] + b"\x80" + bytes(32)[each + 1 :] for each in range(32)))
    table = make(keys, np.arange(32))
    assert table.find(keys).tolist() == list(range(32))
    assert table.find(of(bytes(32))).tolist() == [-1]


calls = st.lists(
    st.tuples(
        st.sampled_from(["put", "remove"]),
        st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=30),
    ),
    max_size=30,
)


@given(calls)
def test_table_agrees_with_a_dictionary(
    make: Make, calls: list[tuple[str, list[tuple[int, int]]]]
) -> None:
    table, model = empty(make), dict[int, int]()
    for name, pairs in calls:
        getattr(table, name)(numbered(*(key for key, _ in pairs)), at(*(slot for _, slot in pairs)))
        for key, slot in pairs:
            if name == "put":
                model[key] = slot
            elif model.get(key) == slot:
                del model[key]
        assert len(table) == len(model)
        found = table.find(numbered(*range(41))).tolist()
        assert found == [model.get(key, -1) for key in range(41)]


def test_many_keys_come_and_go(make: Make) -> None:
    """Every part grows several times, and freed space is used again."""
    rng = np.random.default_rng(7)
    keys = np.frombuffer(rng.bytes(32 * 60_000), "V32")
    slots = rng.permutation(60_000)
    table = empty(make)
    for begin in range(0, 60_000, 7_000):
        part = slice(begin, begin + 7_000)
        table.put(keys[part], slots[part])
    assert (table.find(keys) == slots).all()
    gone = rng.random(60_000) < 0.6
    table.remove(np.ascontiguousarray(keys[gone]), slots[gone])
    assert (table.find(keys) == np.where(gone, -1, slots)).all()
    before = table.num_bytes()
    table.put(np.ascontiguousarray(keys[gone]), slots[gone] + 1)
    assert (table.find(keys) == np.where(gone, slots + 1, slots)).all()
    assert len(table) == 60_000
    if make is not ReferenceTable:
        assert table.num_bytes() == before, "entries are used again"


@pytest.mark.parametrize("num_keys", [900_000, 1_000_000])
def test_native_table_needs_57_bytes_per_key_at_most(num_keys: int) -> None:
    module = pytest.importorskip("kvtier._native", reason="the core is not built")
    keys = np.frombuffer(np.random.default_rng(1).bytes(32 * num_keys), "V32")
    table = module.KeyTable(keys, np.arange(num_keys))
    assert table.num_bytes() / num_keys <= 57


GOOD = numbered(1, 2), at(1, 2)


@pytest.mark.parametrize("call", ["init", "put", "remove", "find"])
@pytest.mark.parametrize(
    ("keys", "error", "says"),
    [
        (None, TypeError, "keys must be an array of V32, not NoneType"),
        ([bytes(32)], TypeError, "keys must be an array of V32, not list"),
        (np.zeros(2, "V31"), TypeError, "keys must be an array of V32"),
        (np.zeros(2, "S32"), TypeError, "keys must be an array of V32"),
        (np.zeros((2, 32), np.uint8), TypeError, "keys must be an array of V32"),
        (np.zeros((1, 2), "V32"), ValueError, "keys must have one dimension, not 2"),
        (np.zeros((), "V32"), ValueError, "keys must have one dimension, not 0"),
        (np.zeros(4, "V32")[::2], ValueError, "keys must be C-contiguous"),
    ],
)
def test_keys_are_checked(
    make: Make, call: str, keys: Any, error: type[Exception], says: str
) -> None:
    table = make(*GOOD)
    slots = () if call == "find" else (at(1, 2),)
    with pytest.raises(error, match=says):
        (make if call == "init" else getattr(table, call))(keys, *slots)
    assert table.find(GOOD[0]).tolist() == [1, 2]


@pytest.mark.parametrize("call", ["init", "put", "remove"])
@pytest.mark.parametrize(
    ("slots", "error", "says"),
    [
        (None, TypeError, "slots must be an array of int64, not NoneType"),
        ([1, 2], TypeError, "slots must be an array of int64, not list"),
        (np.zeros(2, np.int32), TypeError, "slots must be an array of int64"),
        (np.zeros(2, np.uint64), TypeError, "slots must be an array of int64"),
        (np.zeros(2), TypeError, "slots must be an array of int64"),
        (np.zeros((2, 1), np.int64), ValueError, "slots must have one dimension, not 2"),
        (np.zeros(4, np.int64)[::2], ValueError, "slots must be C-contiguous"),
        (at(1), ValueError, "keys and slots must have equal lengths, not 2 and 1"),
        (at(5, -1), ValueError, r"slots\[1\]: -1 is not in 0"),
        (at(2**32, 0), ValueError, r"slots\[0\]: 4294967296 is not in 0"),
        (at(0, -(2**63)), ValueError, r"slots\[1\]: -9223372036854775808 is not in 0"),
    ],
)
def test_slots_are_checked_before_anything_is_changed(
    make: Make, call: str, slots: Any, error: type[Exception], says: str
) -> None:
    table = make(*GOOD)
    with pytest.raises(error, match=says):
        (make if call == "init" else getattr(table, call))(numbered(1, 3), slots)
    assert len(table) == 2
    assert table.find(GOOD[0]).tolist() == [1, 2]
