"""Reads from storage to an engine's own memory: the ladder orders them, the engine reads."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.cache.block_cache import BlockState
from kvtier.cache.transfer.ranks import Done, RankOrder, Verb
from kvtier.core.types import DEVICE, DISK, HOST, Direct

from .keyed_harness import BLOCK_BYTES, KEYS, Engine, name, names

SOME = KEYS[:3]


def on_disk(direct: Direct = Direct.ON, **settings: Any) -> Engine:
    """Return an engine that has ``SOME`` of the keys on disk and not in memory."""
    engine = Engine(num_host=4, direct=direct, **settings)
    engine.fill(SOME)
    engine.store(KEYS[4:8])
    engine.carry_out()
    assert engine.places(SOME) == [BlockState.STORAGE] * 3
    return engine


def read(engine: Engine, *numbers: int) -> RankOrder:
    keys = [KEYS[number] for number in numbers]
    assert engine.cache.direct_reads.read(keys, range(10, 10 + len(keys))) == [DISK] * len(keys)
    (order,) = engine.mover.take_reads()
    assert order.verb is Verb.READ
    assert names(order) == tuple(map(name, keys))
    return order


def test_a_read_goes_with_the_engines_load_and_memory_hears_nothing_of_it() -> None:
    engine = on_disk()
    before = engine.in_tier(HOST)
    order = read(engine, 0, 2)
    assert order.slots == (10, 11), "their places, as the engine has them"
    assert engine.mover.take_orders() == []
    assert engine.mover.take_reads() == []
    assert engine.ladder.is_busy
    engine.finish(order, Done(num_bytes=2 * BLOCK_BYTES, seconds=0.5))
    assert not engine.ladder.is_busy
    assert engine.in_tier(HOST) == before
    assert engine.places(SOME) == [BlockState.STORAGE] * 3
    costs = engine.ladder.cost_snapshot()
    assert costs.ways[DISK] == ((DISK, DEVICE),)
    assert costs.copy_s((DISK, DEVICE), 2 * BLOCK_BYTES) == pytest.approx(0.5)
    engine.check()


@pytest.mark.parametrize("is_read", [True, False])
def test_a_block_stays_on_disk_until_it_was_read(is_read: bool) -> None:
    engine = on_disk(num_disk=7)
    order = read(engine, 0) if is_read else None
    engine.fill(KEYS[8:10])
    assert (KEYS[0] in engine.in_tier(DISK)) == is_read
    if order is not None:
        engine.finish(order, Done())
    engine.check()


def test_what_disk_has_not_is_not_asked_for_again() -> None:
    engine = on_disk()
    order = read(engine, 0, 1)
    engine.finish(order, Done(frozenset({0, 1}), frozenset({1}), num_damaged=1))
    assert engine.places(SOME) == [
        BlockState.STORAGE,
        BlockState.NOWHERE,
        BlockState.STORAGE,
    ]
    engine.carry_out()
    engine.check()


def test_a_cache_that_is_emptied_meanwhile_is_empty() -> None:
    engine = on_disk()
    order = read(engine, 0, 1)
    engine.cache.clear()
    engine.finish(order, Done())
    engine.carry_out()
    assert engine.places(SOME) == [BlockState.NOWHERE] * 3
    assert engine.in_tier(DISK) == set()
    engine.check()


def test_nothing_goes_directly_while_a_read_hangs() -> None:
    engine = on_disk()
    order = read(engine, 0)
    assert engine.cache.direct_reads.how(KEYS[1]) is Direct.ON
    engine.finish(order, Done(num_ranks=0, is_late=True))
    assert engine.cache.direct_reads.how(KEYS[1]) is Direct.OFF
    assert not engine.ladder.is_busy, "nobody waits for it"
    engine.finish(order, Done())
    assert engine.cache.direct_reads.how(KEYS[1]) is Direct.ON
    engine.check()


def test_what_one_rank_can_not_none_does() -> None:
    engine = Engine(num_ranks=2, says_hello=False, direct=Direct.AUTO)
    engine.hello(0, name(KEYS[0]))
    assert engine.cache.direct_reads.is_for_all
    engine.hello(1, name(KEYS[0]), direct=frozenset())
    assert engine.find(KEYS[0]) is BlockState.STORAGE
    assert engine.cache.direct_reads.how(KEYS[0]) is Direct.OFF
    assert not engine.cache.direct_reads.is_for_all


def test_all_ranks_have_to_read_it() -> None:
    engine = on_disk(num_ranks=2)
    order = read(engine, 0)
    engine.finish(order, Done())
    assert engine.ladder.is_busy
    engine.finish(order, Done(frozenset({0}), frozenset({0})))
    assert not engine.ladder.is_busy
    assert engine.places(KEYS[:1]) == [BlockState.NOWHERE], "one rank has lost its part"
