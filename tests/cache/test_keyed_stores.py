"""Stores that ranks look up: hits, requests that wait for a look-up, and deadlines."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest

from kvtier.cache.block_cache import BlockState
from kvtier.cache.ladder import PendingLookup
from kvtier.cache.transfer.ranks import Done, RankOrder, Report, Verb
from kvtier.cache.transfer.ranks.digests import keys_in
from kvtier.core.types import DISK, HOST, BlockKey
from tests.cache.keyed_harness import BLOCK_BYTES, KEYS, Engine, name, names

STORE = "store"
NOWHERE, MEMORY, STORAGE, UNKNOWN = (
    BlockState.NOWHERE,
    BlockState.MEMORY,
    BlockState.STORAGE,
    BlockState.UNKNOWN,
)
LONG = [b"%03d" % number for number in range(200)]
LATE = Done(num_ranks=0, is_late=True)


class Sharing(Engine):
    """An engine whose ranks share a store with other engines.

    stored: shards in the store, by rank.
    now_s: current time.
    fails: whether look-ups fail.
    """

    def __init__(self, num_ranks: int = 1, num_host: int = 8) -> None:
        self.now_s = 0.0
        self.fails = False
        self.stored: list[set[BlockKey]] = [set() for _ in range(num_ranks)]
        super().__init__(num_host, 100, num_ranks, stores=[STORE], clock=lambda: self.now_s)

    def give(self, keys: Sequence[bytes], ranks: Sequence[int] | None = None) -> None:
        """Store blocks as another engine would. ``ranks``: store the shards of these only."""
        for rank in range(self.num_ranks) if ranks is None else ranks:
            self.stored[rank].update(map(name, keys))

    def look(self, keys: Sequence[bytes], has_gaps: bool = False) -> list[BlockState]:
        places, self.asked = self.cache.lookup(keys, has_gaps)
        return places

    def step(self) -> list[RankOrder]:
        """Let every rank carry out its orders and report. Return the orders."""
        orders, report = self.mover.take_orders(), Report()
        for order in orders:
            for rank in range(self.num_ranks):
                report = report.and_also(Report({order.order_id: self._do(rank, order)}))
        self.hear(report)
        return orders

    def _do(self, rank: int, order: RankOrder) -> Done:
        if order.verb is Verb.WRITE and order.tier == STORE:
            self.stored[rank].update(names(order))
        if order.verb is not Verb.FIND:
            return Done()
        keys = keys_in(order.keys)
        if self.fails:
            return Done(frozenset(range(len(keys))))
        missing = frozenset(at for at, key in enumerate(keys) if key not in self.stored[rank])
        return Done(missing, missing)

    asked: Sequence[PendingLookup] = ()


def finds(orders: Sequence[RankOrder]) -> list[int]:
    """Return the number of keys of each look-up."""
    return [len(keys_in(order.keys)) for order in orders if order.verb is Verb.FIND]


@pytest.fixture
def engine() -> Sharing:
    return Sharing()


def test_block_is_there_where_every_rank_has_found_it() -> None:
    engine = Sharing(num_ranks=2)
    engine.give(KEYS[:3], ranks=[0])
    engine.give(KEYS[:2], ranks=[1])
    assert engine.look(KEYS[:4]) == [UNKNOWN] * 4
    (asked,) = engine.asked
    assert finds(engine.step()) == [4]
    assert asked.is_over
    assert engine.look(KEYS[:4]) == [STORAGE, STORAGE, NOWHERE, NOWHERE]
    assert not engine.asked
    engine.check()


def test_answer_counts_when_all_ranks_have_given_it() -> None:
    engine = Sharing(num_ranks=2)
    engine.give(KEYS[:1])
    engine.look(KEYS[:1])
    (order,) = engine.mover.take_orders()
    engine.finish(order, Done())
    assert engine.look(KEYS[:1]) == [UNKNOWN]
    assert engine.mover.is_busy, "a step has to bring the other answer"
    engine.finish(order, Done())
    assert engine.look(KEYS[:1]) == [STORAGE]
    assert not engine.mover.is_busy


def test_found_block_comes_from_the_store_on_all_ranks(engine: Sharing) -> None:
    engine.give(KEYS[:2])
    engine.look(KEYS[:2])
    engine.step()
    assert engine.cache.sources(KEYS[:3]) == [STORE, STORE, HOST]
    assert engine.cache.promote(KEYS[:2]) == 2
    (read,) = engine.step()
    assert (read.verb, read.tier, list(names(read))) == (
        Verb.READ,
        STORE,
        [name(key) for key in KEYS[:2]],
    )
    assert engine.look(KEYS[:2]) == [MEMORY] * 2
    assert engine.cache.origins(KEYS[:2]) == [STORE] * 2
    engine.check()


def test_what_is_computed_goes_to_the_disk_and_to_the_store(engine: Sharing) -> None:
    engine.store(KEYS[:2])
    written = {order.tier: list(names(order)) for order in engine.step()}
    both = [name(key) for key in KEYS[:2]]
    assert written == {DISK: both, STORE: both}
    assert engine.stored == [set(map(name, KEYS[:2]))]


def test_disk_is_read_before_the_store(engine: Sharing) -> None:
    engine.store(KEYS[:1])
    engine.step()
    engine.give(KEYS[1:2])
    engine.store(LONG[:8])  # as many as host memory has slots
    engine.step()
    assert engine.look(KEYS[:2]) == [STORAGE, UNKNOWN]
    engine.step()
    assert engine.cache.sources(KEYS[:2]) == [DISK, STORE]


def test_what_the_store_had_not_is_not_asked_for_again_for_a_while(engine: Sharing) -> None:
    engine.look(KEYS[:2])
    assert finds(engine.step()) == [2]
    assert engine.look(KEYS[:2]) == [NOWHERE] * 2
    assert not engine.asked
    assert engine.step() == []
    engine.give(KEYS[:1])
    engine.now_s += 5.1
    assert engine.look(KEYS[:2]) == [UNKNOWN] * 2
    engine.step()
    assert engine.look(KEYS[:2]) == [STORAGE, NOWHERE]


def test_long_prompt_is_asked_for_in_pieces_and_read_meanwhile(engine: Sharing) -> None:
    engine.give(LONG)
    assert engine.look(LONG) == [UNKNOWN] * 200
    (first,) = engine.asked
    assert finds(engine.step()) == [64]
    assert first.is_over, "what was found is not waited with"
    assert engine.look(LONG) == [STORAGE] * 64 + [UNKNOWN] * 136
    assert finds(engine.step()) == [136]
    assert engine.look(LONG) == [STORAGE] * 200
    engine.check()


def test_prompt_is_asked_for_once_however_many_want_it(engine: Sharing) -> None:
    asked: list[PendingLookup] = []
    for _ in range(3):
        engine.look(KEYS[:4])
        asked += engine.asked
    assert len({id(each) for each in asked}) == 1
    assert finds(engine.step()) == [4]


@pytest.mark.parametrize("has_gaps", [False, True])
def test_what_lies_behind_a_gap_is_asked_for_where_it_may_be_of_use(
    engine: Sharing, has_gaps: bool
) -> None:
    engine.give(LONG[190:])
    while UNKNOWN in engine.look(LONG, has_gaps):
        assert engine.step(), "it waits for nothing"
    there = [at for at, place in enumerate(engine.look(LONG, has_gaps)) if place is STORAGE]
    assert there == (list(range(190, 200)) if has_gaps else [])
    assert not engine.asked


def test_rank_that_is_late_is_not_waited_for_until_it_answers_in_time(engine: Sharing) -> None:
    engine.give(KEYS)
    engine.look(KEYS[:1])
    (asked,) = engine.asked
    (order,) = engine.mover.take_orders()
    assert order.patience_s == pytest.approx(0.1)
    engine.finish(order, LATE)
    assert asked.is_over
    assert engine.look(KEYS[:1]) == [NOWHERE], "a request waited for a store that is late"
    assert engine.look(KEYS[1:2]) == [NOWHERE]
    assert finds(engine.mover.take_orders()) == [1], "the next request may have the answer"
    engine.finish(order, Done(seconds=0.5))
    assert engine.look(KEYS[:1]) == [STORAGE], "an answer that was late is an answer"
    assert engine.look(KEYS[2:3]) == [NOWHERE]
    engine.step()
    assert engine.look(KEYS[3:4]) == [UNKNOWN], "it answers in time again"


def test_steps_are_not_taken_for_an_answer_that_is_late(engine: Sharing) -> None:
    engine.look(KEYS[:1])
    (order,) = engine.mover.take_orders()
    assert engine.mover.is_busy
    engine.finish(order, LATE)
    assert not engine.mover.is_busy
    engine.finish(order, Done(frozenset({0}), frozenset({0})))
    assert not engine.mover.is_busy


def test_store_that_fails_again_and_again_is_left_alone(engine: Sharing) -> None:
    engine.fails = True
    num_asked = 0
    while engine.look(KEYS[:2]) == [UNKNOWN] * 2:
        num_asked += len(finds(engine.step()))
    assert num_asked == 3
    assert engine.look(KEYS[5:6]) == [NOWHERE]
    assert engine.step() == []
    engine.fails, engine.now_s = False, engine.now_s + 1.1
    engine.give(KEYS[:2])
    assert engine.look(KEYS[:2]) == [UNKNOWN] * 2
    engine.step()
    assert engine.look(KEYS[:2]) == [STORAGE] * 2


def test_store_whose_reads_fail_again_and_again_is_not_read_for_a_while(engine: Sharing) -> None:
    engine.give(KEYS)
    engine.look(KEYS)
    engine.step()
    for key in KEYS[:3]:
        engine.cache.promote([key])
        (read,) = engine.mover.take_orders()
        engine.finish(read, Done(frozenset({0})))
    assert engine.look(KEYS[:3]) == [STORAGE] * 3, "a read that fails is no verdict on the block"
    assert engine.ladder.cost_snapshot().load_s({STORE: BLOCK_BYTES}) == inf
    engine.cache.promote(KEYS[:1])
    assert engine.mover.take_orders() == []
    engine.cache.poll()
    assert engine.look(KEYS[:1]) == [STORAGE]
    engine.now_s += 1.1
    engine.cache.promote(KEYS[:1])
    assert [order.verb for order in engine.step()] == [Verb.READ]
    assert engine.look(KEYS[:1]) == [MEMORY]
    engine.check()


def test_answer_to_what_was_asked_before_a_clear_is_not_heard(engine: Sharing) -> None:
    engine.give(KEYS[:2])
    engine.look(KEYS[:2])
    (asked,) = engine.asked
    engine.cache.clear()
    assert asked.is_over
    engine.step()
    assert not engine.in_tier(STORE)
    engine.check()


def test_block_that_the_store_has_lost_is_computed(engine: Sharing) -> None:
    """The store had the block at the look-up, and has lost it before the read."""
    engine.give(KEYS[:1])
    engine.look(KEYS[:1])
    engine.step()
    engine.cache.promote(KEYS[:1])
    (read,) = engine.mover.take_orders()
    engine.stored = [set()]
    engine.finish(read, Done(frozenset({0}), frozenset({0})))
    assert engine.look(KEYS[:1]) == [UNKNOWN]
    engine.step()
    assert engine.look(KEYS[:1]) == [NOWHERE]
    engine.check()
