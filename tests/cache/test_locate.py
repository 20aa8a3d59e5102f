"""Queries for the location of blocks change no state."""

from __future__ import annotations

from kvtier.cache.block_cache import BlockState
from kvtier.core.types import DISK
from tests.kit.snapshot import snapshot

from .keyed_harness import KEYS, Engine, name

NOWHERE, ARRIVING, MEMORY, STORAGE, UNKNOWN = BlockState


def harness(num_ranks: int = 1) -> Engine:
    """Return a cache with blocks in each state: stored, reserved, on disk, recovered only."""
    engine = Engine(num_host=3, num_ranks=num_ranks, says_hello=False)
    engine.hello(0, *map(name, KEYS[4:7]))
    if num_ranks == 1:
        engine.store(KEYS[:1])
        engine.carry_out()
        engine.store(KEYS[1:3])
        assert engine.cache.reserve(KEYS[3:4]) is not None
    return engine


def locate_twice(engine: Engine) -> list[BlockState]:
    """Return the locations of all blocks. Every query runs twice, and the state is compared."""
    before = snapshot(engine)
    for _ in range(2):
        places = engine.cache.locate_all(KEYS)
        assert [engine.cache.locate(key) for key in KEYS] == places
        engine.cache.lookup_private(KEYS)
        engine.cache.sources(KEYS)
        assert snapshot(engine) == before
    return places


def test_locating_blocks_changes_nothing() -> None:
    engine = harness()
    assert locate_twice(engine) == [STORAGE, MEMORY, MEMORY, ARRIVING, *[NOWHERE] * 6]
    engine.cache.promote(KEYS[:1])
    engine.cache.distrust(engine.cache.hold(KEYS[1:2]).slots)
    locate_twice(engine)
    assert engine.in_tier(DISK).isdisjoint(KEYS[4:7]), "a look adopted what storage recovered"


def test_blocks_are_adopted_when_somebody_says_so() -> None:
    engine = harness()
    assert engine.cache.adopt(KEYS) == KEYS[4:7]
    assert locate_twice(engine)[4:8] == [STORAGE, STORAGE, STORAGE, NOWHERE]
    before = snapshot(engine)
    assert engine.cache.adopt(KEYS) == []
    assert snapshot(engine) == before


def test_a_lookup_adopts_and_uses_what_it_finds() -> None:
    engine = harness()
    places, pending = engine.cache.lookup(KEYS)
    assert (places[4:8], pending) == ([STORAGE, STORAGE, STORAGE, NOWHERE], [])
    order = engine.index.keys(engine.index.order(DISK))
    assert order[-3:] == KEYS[6:3:-1], "the beginning of a prompt leaves last"
    assert engine.cache.lookup_private(KEYS) == [
        NOWHERE,
        MEMORY,
        MEMORY,
        ARRIVING,
        *[NOWHERE] * 6,
    ]


def test_blocks_are_unknown_until_storage_has_said_all_that_it_has() -> None:
    engine = harness(num_ranks=2)
    assert locate_twice(engine) == [UNKNOWN] * len(KEYS)
    engine.hello(1, *map(name, KEYS[4:6]))
    assert locate_twice(engine) == [NOWHERE] * len(KEYS), "nobody has adopted them"
    assert engine.cache.adopt(KEYS) == KEYS[4:6]
    assert locate_twice(engine)[4:7] == [STORAGE, STORAGE, NOWHERE]
