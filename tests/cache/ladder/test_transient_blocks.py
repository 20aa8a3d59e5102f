"""Transient blocks: in host memory only on their way to storage."""

from __future__ import annotations

import pytest

from kvtier.cache.block_cache import BlockState
from tests.cache.keyed_harness import KEYS, Engine


class Picky(Engine):
    """An engine with two blocks of host memory, whose policy admits no block of ``unwanted``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(num_host=2)
        self.unwanted: set[bytes] = set()
        admit_keys = type(self.index).admit_keys

        def picky(index: object, keys: list[bytes], tier: str, *rest: float) -> list[bytes]:
            if tier != "host":
                return keys
            return [key for key in keys if key not in self.unwanted]

        monkeypatch.setattr(type(self.index), admit_keys.__name__, picky)

    def put(self, key: bytes) -> None:
        """Store a block in host memory and on disk."""
        self.store([key])
        self.carry_out()

    def place(self, key: bytes) -> BlockState:
        (place,) = self.places([key])
        return place


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Picky:
    made = Picky(monkeypatch)
    for key in KEYS[:2]:  # there is room, so the policy is not queried
        made.put(key)
    return made


def test_what_has_passed_leaves_before_all_others(engine: Picky) -> None:
    engine.unwanted = set(KEYS[2:])
    engine.put(KEYS[2])  # takes the slot of the first block
    assert engine.places(KEYS[:3]) == [
        BlockState.STORAGE,
        BlockState.MEMORY,
        BlockState.MEMORY,
    ]
    for key in KEYS[3:6]:
        engine.put(key)
        assert engine.place(KEYS[1]) is BlockState.MEMORY, "though it was used longer ago"
    assert engine.places(KEYS[2:6]) == [BlockState.STORAGE] * 3 + [BlockState.MEMORY]


def test_what_is_read_and_not_worth_its_room_leaves_when_it_was_used(engine: Picky) -> None:
    engine.put(KEYS[2])
    engine.put(KEYS[3])
    engine.unwanted = set(KEYS[:2])
    for key in KEYS[:2]:
        assert engine.cache.promote([key], KEYS[3:4]) == 1
        engine.carry_out()
        engine.cache.hold([key])
        engine.cache.release([key])
    assert engine.places(KEYS[:4]) == [
        BlockState.STORAGE,
        BlockState.MEMORY,
        BlockState.STORAGE,
        BlockState.MEMORY,
    ]


def test_what_has_passed_and_is_held_stays(engine: Picky) -> None:
    engine.unwanted = set(KEYS[2:])
    engine.put(KEYS[2])
    engine.cache.hold(KEYS[2:3])
    engine.put(KEYS[3])
    assert engine.place(KEYS[2]) is BlockState.MEMORY
    engine.cache.release(KEYS[2:3])


def test_blocks_of_a_prompt_do_not_leave_for_those_that_are_read_for_it(engine: Picky) -> None:
    engine.put(KEYS[2])
    engine.put(KEYS[3])
    assert engine.cache.promote(KEYS[:2], KEYS[2:3]) == 1, "one may not leave"
    assert engine.place(KEYS[2]) is BlockState.MEMORY
