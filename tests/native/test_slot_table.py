"""Slots by key, with the keys in rows: one suite for the native table and its twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.reference.slot_table import SlotTable as ReferenceTable
from tests.native.twins import both

Keys = npt.NDArray[np.void]
Make = Callable[[Keys, npt.NDArray[np.int64]], Any]
NUM_SLOTS = 60


make = both(ReferenceTable, "SlotTable")


def rows_of(*numbers: int) -> Keys:
    """Keys in rows of 48 bytes, that differ in their last bytes only."""
    rows = np.zeros(len(numbers), [("key", "V32"), ("more", "V16")])
    rows["key"] = numbered(*numbers)
    keys: Keys = rows["key"]
    return keys


def numbered(*numbers: int) -> Keys:
    return np.frombuffer(b"".join(number.to_bytes(32, "big") for number in numbers), "V32")


def at(*slots: int) -> npt.NDArray[np.int64]:
    return np.array(slots, np.int64)


calls = st.lists(
    st.tuples(st.sampled_from(["put", "remove"]), st.lists(st.integers(0, NUM_SLOTS - 1))),
    max_size=30,
)


@given(keys=st.lists(st.integers(0, 30), min_size=NUM_SLOTS, max_size=NUM_SLOTS), calls=calls)
def test_table_agrees_with_a_dictionary(
    make: Make, keys: list[int], calls: list[tuple[str, list[int]]]
) -> None:
    """Several slots may have one key: the slot that was listed last counts."""
    table, model = make(rows_of(*keys), at(0)), {keys[0]: 0}
    for name, slots in calls:
        getattr(table, name)(at(*slots))
        for slot in slots:
            if name == "put":
                model[keys[slot]] = slot
            elif model.get(keys[slot]) == slot:
                del model[keys[slot]]
        assert len(table) == len(model)
        found = table.find(numbered(*range(32))).tolist()
        assert found == [model.get(key, -1) for key in range(32)]


def test_key_of_a_slot_that_is_not_listed_may_change(make: Make) -> None:
    keys = rows_of(1, 2, 3)
    table = make(keys, at(0, 1, 2))
    table.remove(at(1))
    keys[1] = numbered(9)[0]
    assert table.find(numbered(2, 9)).tolist() == [-1, -1]
    table.put(at(1))
    assert table.find(numbered(2, 9)).tolist() == [-1, 1]


def test_many_slots_come_and_go(make: Make) -> None:
    rng = np.random.default_rng(7)
    rows = np.zeros(60_000, [("key", "V32"), ("more", "V16")])
    rows["key"] = keys = np.frombuffer(rng.bytes(32 * 60_000), "V32")
    table, slots = make(rows["key"], at()), rng.permutation(60_000)
    for begin in range(0, 60_000, 7_000):
        table.put(np.ascontiguousarray(slots[begin : begin + 7_000]))
    assert (table.find(keys) == np.arange(60_000)).all()
    gone = rng.random(60_000) < 0.6
    table.remove(np.flatnonzero(gone))
    assert (table.find(keys) == np.where(gone, -1, np.arange(60_000))).all()
    table.put(np.flatnonzero(gone))
    assert (table.find(keys) == np.arange(60_000)).all()
    assert len(table) == 60_000


@pytest.mark.parametrize("grows", [False, True])
def test_native_table_needs_8_bytes_per_slot_at_most(grows: bool) -> None:
    module = pytest.importorskip("kvtier._native", reason="the core is not built")
    keys = np.frombuffer(np.random.default_rng(1).bytes(32 * 1_000_000), "V32")
    slots = np.arange(len(keys))
    table = module.SlotTable(keys, slots[:0] if grows else slots)
    table.put(slots)
    assert table.num_bytes() / len(keys) <= 8


@pytest.mark.parametrize(
    ("keys", "slots", "error", "message"),
    [
        (None, at(0), TypeError, "keys must be an array of V32, not NoneType"),
        (np.zeros(3, "V31"), at(0), TypeError, "keys must be an array of V32"),
        (np.zeros((3, 1), "V32"), at(0), ValueError, "one dimension, not 2"),
        (np.zeros(3, "V32"), at(3), ValueError, r"slots\[0\]: 3 is not in 0 .. 2"),
        (np.zeros(3, "V32"), at(0, -1), ValueError, r"slots\[1\]: -1 is not in 0 .. 2"),
        (np.zeros(3, "V32"), [0], TypeError, "slots must be an array of int64, not list"),
        (np.zeros(3, "V32"), np.zeros(1, "i4"), TypeError, "slots must be an array of int64"),
    ],
)
def test_what_is_no_table_is_refused(
    make: Make, keys: Any, slots: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(keys, slots)
    table = make(np.zeros(3, "V32"), at(0))
    if isinstance(keys, np.ndarray) and keys.dtype == "V32" and keys.ndim == 1:
        for call in (table.put, table.remove):
            with pytest.raises(error, match=message):
                call(slots)
    assert len(table) == 1
