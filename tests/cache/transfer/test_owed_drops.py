"""Pending drops reach storage in order, once, and of the kind that was ordered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cache.transfer import drops
from kvtier.cache.transfer.drops import OwedDrops
from kvtier.core.types import BlockKey
from kvtier.layout import opaque
from kvtier.testing import MemoryStorage, StoredBlocks

GROUP = opaque(4096)
KEYS = [BlockKey(bytes([number]) * 32) for number in range(9)]


class Noted(MemoryStorage):
    """Storage that records drops, and fails ``num_failures`` times."""

    def __init__(self) -> None:
        super().__init__(GROUP, 1, StoredBlocks())
        self.dropped: list[tuple[list[BlockKey], bool]] = []
        self.num_failures = 0
        self.meanwhile: Callable[[], None] = lambda: None

    def drop(self, keys: list[BlockKey], for_good: bool = False) -> None:  # type: ignore[override]
        self.meanwhile()
        if self.num_failures:
            self.num_failures -= 1
            raise OSError("not now")
        self.dropped.append((list(keys), for_good))


def test_drops_go_in_order_and_a_key_once() -> None:
    storage = Noted()
    owed = OwedDrops(storage)
    owed.add(KEYS[:3], False)
    owed.add(KEYS[3:5], True)
    owed.add(KEYS[2:4], True)
    owed.add(KEYS[4:5], False)
    assert len(owed) == 5
    owed.send()
    assert storage.dropped == [(KEYS[:2], False), (KEYS[2:5], True)]
    assert len(owed) == 0
    owed.send()
    assert len(storage.dropped) == 2


def test_drop_for_good_of_what_is_just_being_dropped_is_a_drop_of_its_own() -> None:
    storage = Noted()
    owed = OwedDrops(storage)
    owed.add(KEYS[:2], False)

    def meanwhile() -> None:
        storage.meanwhile = lambda: None
        assert owed.places(KEYS[:3]) == {0, 1}
        owed.add(KEYS[1:2], True)

    storage.meanwhile = meanwhile
    owed.send()
    assert storage.dropped == [(KEYS[:2], False), (KEYS[1:2], True)]


def test_drop_for_good_is_for_good_though_the_one_before_fails() -> None:
    storage = Noted()
    owed = OwedDrops(storage)
    owed.add(KEYS[:2], False)
    storage.num_failures = 1
    storage.meanwhile = lambda: owed.add(KEYS[:1], True)
    with pytest.raises(OSError, match="not now"):
        owed.send()
    storage.meanwhile = lambda: None
    owed.send()
    assert sorted(storage.dropped) == [(KEYS[:1], True), (KEYS[1:2], False)]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.lists(st.integers(0, 8), max_size=4, unique=True), st.booleans()),
            st.integers(0, 3),
        ),
        max_size=30,
    ),
    st.integers(1, 4),
)
def test_every_key_is_dropped_as_it_was_asked_for_whatever_fails(
    steps: list[tuple[list[int], bool] | int], piece: int
) -> None:
    storage = Noted()
    owed = OwedDrops(storage)
    expected: dict[BlockKey, bool] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drops, "PIECE_KEYS", piece)
        for step in [*steps, 0]:
            if isinstance(step, tuple):
                keys = [KEYS[number] for number in step[0]]
                owed.add(keys, step[1])
                for key in keys:
                    expected[key] = step[1] or expected.get(key, False)
            else:
                storage.num_failures, storage.dropped = step, []
                with contextlib.suppress(OSError):
                    owed.send()
                for keys, for_good in storage.dropped:
                    assert 0 < len(keys) <= piece
                    for key in keys:
                        assert expected.pop(key) == for_good
            assert owed.places(KEYS) == {KEYS.index(key) for key in expected}
            assert len(owed) == len(expected)
            storage.num_failures = 0
    assert not expected
