"""Free slots: one suite for the native class and its twin, and both step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.reference import free_slots as reference
from kvtier.core.reference.free_slots import FreeSlots as Reference
from tests.native.twins import both

Make = Callable[[int], Any]


make = both(Reference, "FreeSlots")


def all_open(make: Make, num_slots: int) -> Any:
    free = make(num_slots)
    free.open(0, num_slots)
    return free


@pytest.mark.parametrize("num_slots", [0, 1, 63, 64, 65, 127, 128, 129, 64 * 64, 5000])
def test_all_slots_are_given_out_once(make: Make, num_slots: int) -> None:
    free = make(num_slots)
    assert (free.num_free(), free.longest_run()) == (0, 0)
    free.open(0, num_slots)
    assert (free.num_free(), free.longest_run()) == (num_slots, num_slots)
    assert free.take(num_slots) == list(range(num_slots))
    assert (free.num_free(), free.longest_run()) == (0, 0)
    free.free(range(num_slots))
    assert free.longest_run() == num_slots


@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 130, 200])
@pytest.mark.parametrize("start", [0, 1, 60, 64, 100, 127, 128, 511, 700])
def test_a_run_is_found_wherever_it_begins(make: Make, length: int, start: int) -> None:
    """Shorter runs stand in front of it, and a longer one behind."""
    free = all_open(make, 2000)
    free.take(2000)
    free.free(range(start, start + length))
    free.free(range(1000, 1999))
    assert free.longest_run() == 999
    assert free.take(length) == list(range(start, start + length))
    assert free.take(length) == list(range(1000, 1000 + length))


def test_without_a_run_the_lowest_slots_are_taken(make: Make) -> None:
    free = all_open(make, 300)
    free.take(300)
    free.free(range(0, 300, 2))
    assert free.longest_run() == 1
    assert free.take(70) == list(range(0, 140, 2))
    assert free.num_free() == 80


def test_what_is_wrong_changes_nothing(make: Make) -> None:
    free = make(100)
    free.open(0, 80)
    free.take(70)
    for call, error, text in (
        (lambda: free.free([1, 2, 75]), AssertionError, "slot 75 was freed twice"),
        (lambda: free.free([3, 4, 3]), AssertionError, "slot 3 was freed twice"),
        (lambda: free.free([5, 80]), ValueError, "slot 80 is none of the 80"),
        (lambda: free.free([-1]), ValueError, "slot -1 is not in"),
        (lambda: free.take(11), ValueError, "11 is not in 0 .. 10"),
        (lambda: free.take(-1), ValueError, "-1 is not in 0 .. 10"),
        (lambda: free.open(80, 101), ValueError, "101 is not in 0 .. 100"),
        (lambda: free.open(79, 90), ValueError, "79; the slots up to 80 are open"),
        (lambda: free.open(91, 90), ValueError, "91 is not in 0 .. 90"),
        (lambda: make(-1), ValueError, "-1 is not in"),
        (lambda: make(1 << 32), ValueError, "4294967296 is not in"),
    ):
        with pytest.raises(error, match=text):
            call()
        assert (free.num_free(), free.longest_run()) == (10, 10)
    assert free.take(10) == list(range(70, 80))


def test_slots_may_be_numbered_from_another_one(make: Make) -> None:
    free = all_open(make, 10)
    free.take(10)
    free.free([105, 107], 100)
    assert free.take(2) == [5, 7]
    for wrong in 99, 110:
        with pytest.raises(ValueError, match=f"slot {wrong} is none of the 10"):
            free.free([wrong], 100)


core = both(reference)


def test_rows_of_freed_slots_have_even_generations_and_no_users(core: Any) -> None:
    generations, users = np.array([0, 1, 2, 3, 2**63 - 1]), np.full(5, 7, np.uint64)
    assert core.free_rows([3, 1, 2], generations, users) == (1, 3)
    assert generations.tolist() == [0, 2, 4, 4, 2**63 - 1]
    assert users.tolist() == [7, 0, 0, 0, 7]
    with pytest.raises(ValueError, match="slot 5 has no row"):
        core.free_rows([0, 5], generations, users)
    with pytest.raises(ValueError, match="there is none"):
        core.free_rows([], generations, users)
    assert generations[0] == 0


steps = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 10_000)), max_size=40)


@given(steps, st.sampled_from([1, 64, 100, 640, 1000]))
def test_both_give_the_same(steps: list[tuple[int, int]], num_slots: int) -> None:
    native = pytest.importorskip("kvtier._native", reason="the core is not built")
    ours, twin = native.FreeSlots(num_slots), Reference(num_slots)
    held: list[int] = []
    num_open = 0
    for wanted, dice in steps:
        if num_open < num_slots and dice % 3 == 0:
            num_more = min(wanted, num_slots - num_open)
            for each in (ours, twin):
                each.open(num_open, num_open + num_more)
            num_open += num_more
        elif dice % 3 == 1:
            num = min(wanted, twin.num_free())
            taken = ours.take(num)
            assert taken == twin.take(num)
            held += taken
        else:
            back = held[dice % 7 :: 1 + dice % 5]
            held = [slot for slot in held if slot not in set(back)]
            for each in (ours, twin):
                each.free(back[::-1])
        assert (ours.num_free(), ours.longest_run()) == (twin.num_free(), twin.longest_run())
