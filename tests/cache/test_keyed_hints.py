"""Hints that act, in the cache for engines that bring keys."""

from __future__ import annotations

import pytest

from kvtier.core.hints import END, Action, BlockHint, HintKind, HintOutcome, HintResult
from kvtier.core.types import DISK, HOST

from .keyed_harness import KEYS, Engine, name, names

PREFETCH = BlockHint(HintKind.PREFETCH, 0, 0, END, 0.0)
BEGUN = HintResult(Action.PREFETCH, HintOutcome.BEGUN, 4)


@pytest.fixture
def engine() -> Engine:
    """An engine with four blocks on disk only, all of which may be prefetched."""
    made = Engine(num_host=16, clock=lambda: 0.0)
    put_on_disk(made)
    return made


def put_on_disk(engine: Engine) -> None:
    engine.fill(KEYS[:4])
    engine.ladder.evict_blocks(engine.index.find_all(KEYS[:4]).known, HOST)
    assert not engine.in_tier(HOST)


def test_a_block_that_is_being_deleted_is_not_read(engine: Engine) -> None:
    known = engine.index.find_all(KEYS[:1]).known
    engine.index.lease(known, DISK)  # as a read does that began before
    engine.cache.delete(KEYS[:1])
    assert engine.cache.apply_hint(KEYS[:4], PREFETCH) == BEGUN._replace(num_blocks=3)
    read = {key for order in engine.carry_out() for key in names(order)}
    assert read == {name(key) for key in KEYS[1:4]}
    engine.index.release(known, DISK)
    engine.ladder.drop_lost()
    engine.check()


def test_a_block_that_is_named_twice_is_moved_once(engine: Engine) -> None:
    twice = [*KEYS[:4], *KEYS[:4]]
    assert engine.cache.apply_hint(twice, PREFETCH) == BEGUN
    engine.carry_out()
    engine.check()
    demote = PREFETCH._replace(word=HintKind.DEMOTE)
    assert engine.cache.apply_hint(twice, demote) == HintResult(Action.DEMOTE, HintOutcome.DONE, 4)
    engine.check()


def test_nothing_is_left_of_a_prefetch_after_clear(engine: Engine) -> None:
    for _ in range(2):
        assert engine.cache.apply_hint(KEYS[:4], PREFETCH) == BEGUN
        engine.carry_out()
        assert engine.cache.has_prefetches
        engine.cache.clear()
        engine.carry_out()
        assert not engine.cache.has_prefetches
        put_on_disk(engine)
