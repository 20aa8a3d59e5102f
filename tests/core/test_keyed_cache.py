"""The cache for engines that bring keys, over ranks that are a dictionary each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier.index import State
from kvtier.index.policies import LruPolicy
from kvtier.keyed_cache import ROOT, KeyedCache, Place, rising
from kvtier.keys import next_key
from kvtier.ladder import Ladder, LadderOptions
from kvtier.tiers import DistantRoom, Quota, StorageFacts
from kvtier.transfer.ranks import Done, Hello, Order, RankMover, Report, Verb
from kvtier.types import DISK, HOST, BlockKey

KEYS = [bytes([number]) * 3 for number in range(10)]
NS = b"n" * 32
BLOCK_BYTES = 64


def name(key: bytes) -> BlockKey:
    """What the block is called in storage."""
    return next_key(NS, key)


def names(order: Order) -> tuple[BlockKey, ...]:
    return tuple(each.key for each in order.names)


class Engine:
    """A cache, and what its ranks are told."""

    def __init__(
        self,
        num_host: int = 4,
        num_disk: int = 8,
        num_ranks: int = 1,
        says_hello: bool = True,
        bytes_per_day: int = 0,
    ) -> None:
        facts = StorageFacts(finds_at_once=True)
        self.num_ranks = num_ranks
        self.mover = RankMover({DISK: facts}, BLOCK_BYTES, num_ranks, num_ranks)
        self.host = DistantRoom(num_host)
        ticks = count()
        clock = rising(lambda: float(next(ticks)))
        self.ladder = Ladder(
            {HOST: self.host, DISK: Quota(lambda: num_disk)},
            self.mover,
            make_policy=LruPolicy,
            options=LadderOptions(BLOCK_BYTES, bytes_per_day={DISK: bytes_per_day}),
            clock=clock,
        )
        self.cache = KeyedCache(self.ladder, lambda: NS, clock, lambda: self.mover.is_complete)
        for rank in range(num_ranks if says_hello else 0):
            self.hello(rank)

    def hello(self, rank: int, *found: BlockKey, num_open: int | None = None) -> None:
        num_open = self.host.num_slots if num_open is None else num_open
        self.hear(Report(hellos={rank: Hello(num_open, {DISK: found})}))

    def hear(self, report: Report) -> None:
        self.mover.hear(report)
        self.host.open(self.mover.num_open)
        self.cache.poll()

    def finish(self, order: Order, done: Done) -> None:
        self.hear(Report(done={order.order_id: done}))

    def store(self, keys: Sequence[bytes]) -> None:
        room = self.cache.reserve(keys)
        assert room is not None
        self.cache.commit(room.keys, range(len(room.keys)))

    def carry_out(self, failed: Sequence[int] = (), gone: Sequence[int] = ()) -> list[Order]:
        """Everything that is ordered, and what follows from it; every rank does the same."""
        carried = []
        while orders := self.mover.take_orders():
            for order in orders:
                done = Done(frozenset([*failed, *gone]), frozenset(gone), num_ranks=self.num_ranks)
                self.finish(order, done)
            carried += orders
        return carried

    def places(self, keys: Sequence[bytes]) -> list[Place]:
        return [self.cache.find(key) for key in keys]

    def in_tier(self, tier: str) -> set[bytes]:
        position = self.ladder.index.tiers.index(tier)
        nodes = self.ladder.index.nodes()
        return {each.label for each in nodes if each.residencies[position].state is State.READY}

    def check(self) -> None:
        self.ladder.check_invariants(0)


def test_stored_block_goes_on_to_storage_and_comes_back() -> None:
    engine = Engine(num_host=2)
    engine.store(KEYS[:2])
    written = engine.carry_out()
    assert {order.verb for order in written} == {Verb.WRITE}
    assert [key for order in written for key in names(order)] == [name(key) for key in KEYS[:2]]
    assert not engine.mover.is_busy
    engine.store(KEYS[2:4])
    assert engine.places(KEYS[:2]) == [Place.STORAGE] * 2
    engine.carry_out()
    assert engine.cache.promote(KEYS[:2]) == 2
    assert engine.cache.find(KEYS[0]) is Place.ARRIVING
    (order,) = engine.carry_out()
    assert (order.verb, set(order.slots)) == (Verb.READ, {0, 1})
    assert engine.places(KEYS[:2]) == [Place.MEMORY] * 2
    assert engine.cache.origin(KEYS[0]) == DISK
    engine.cache.hold(KEYS[:1])
    engine.cache.release(KEYS[:1])
    assert engine.cache.origin(KEYS[0]) == HOST, "it came from storage once"


def test_names_in_storage_have_the_place_in_the_prompt() -> None:
    engine = Engine()
    assert engine.cache.reserve(KEYS[:2]) is not None
    engine.cache.commit(KEYS[:2], [5, 6])
    named = [each for order in engine.carry_out() for each in order.names]
    assert named == [(NS, 5, name(KEYS[0])), (NS, 6, name(KEYS[1]))]


def test_block_that_one_rank_could_not_write_is_not_in_storage() -> None:
    engine = Engine(num_host=8, num_ranks=2)
    engine.store(KEYS[:2])
    (order,) = engine.mover.take_orders()
    engine.finish(order, Done())
    assert engine.ladder.is_busy, "the other one has not said so"
    engine.finish(order, Done(frozenset({1})))
    (erase,) = engine.mover.take_orders()
    assert (erase.verb, names(erase)) == (Verb.ERASE, (name(KEYS[1]),))
    assert engine.in_tier(DISK) == {KEYS[0]}


def test_damaged_block_is_nowhere_and_is_erased() -> None:
    engine = Engine(num_host=1)
    for key in KEYS[:2]:
        engine.store([key])
        engine.carry_out()
    engine.cache.promote(KEYS[:1])
    (read,) = engine.mover.take_orders()
    engine.finish(read, Done(frozenset({0}), frozenset({0}), num_damaged=1))
    assert engine.cache.find(KEYS[0]) is Place.NOWHERE
    (erase,) = engine.mover.take_orders()
    assert (erase.verb, names(erase)) == (Verb.ERASE, (name(KEYS[0]),))
    engine.store(KEYS[2:3])
    assert engine.cache.find(KEYS[2]) is Place.MEMORY, "its slot is free again"


def test_block_whose_read_failed_stays_in_storage() -> None:
    engine = Engine(num_host=1)
    for key in KEYS[:2]:
        engine.store([key])
        engine.carry_out()
    engine.cache.promote(KEYS[:1])
    engine.carry_out(failed=[0])
    assert engine.cache.find(KEYS[0]) is Place.STORAGE
    assert engine.mover.take_orders() == []
    engine.cache.promote(KEYS[:1])
    engine.carry_out()
    assert engine.cache.find(KEYS[0]) is Place.MEMORY, "another time it may be there"
    engine.check()


def test_copies_that_failed_say_nothing_about_how_long_they_take() -> None:
    engine = Engine(num_host=1)
    for key in KEYS[:2]:
        engine.store([key])
        engine.carry_out()
    engine.cache.promote(KEYS[:1])
    (read,) = engine.mover.take_orders()
    engine.finish(read, Done(frozenset({0}), num_bytes=BLOCK_BYTES, seconds=1e-9))
    assert not engine.ladder.traffic.costs.has_seen((DISK, HOST))


def test_only_what_all_ranks_found_is_there_after_a_restart() -> None:
    engine = Engine(num_host=2, num_disk=3, num_ranks=2, says_hello=False)
    found = [name(key) for key in KEYS]
    engine.hello(0, *found[:4])
    assert engine.cache.find(KEYS[1]) is Place.UNKNOWN
    engine.hello(1, found[5], found[2], found[1], num_open=1)
    there = [Place.NOWHERE, Place.STORAGE, Place.STORAGE, Place.NOWHERE]
    assert engine.places(KEYS[:4]) == there
    assert engine.places(KEYS[:4]) == there, "as often as somebody asks"
    (erase,) = engine.mover.take_orders()
    assert erase.verb is Verb.ERASE
    assert set(names(erase)) == {found[0], found[3], found[5]}
    assert engine.host.num_open == 1, "what the last rank has ready"
    engine.check()


def test_what_a_restart_found_is_not_written_again() -> None:
    engine = Engine(says_hello=False)
    engine.hello(0, name(KEYS[0]))
    engine.store(KEYS[:2])
    assert [key for order in engine.carry_out() for key in names(order)] == [name(KEYS[1])]
    assert engine.in_tier(DISK) == set(KEYS[:2])


def test_looking_for_what_is_nowhere_leaves_nothing_behind() -> None:
    engine = Engine(num_host=1, says_hello=False)
    engine.hello(0, name(KEYS[9]))
    assert engine.places(KEYS[:5]) == [Place.NOWHERE] * 5
    assert engine.cache.reserve(KEYS[:3]) is None
    engine.cache.touch(KEYS)
    engine.cache.commit(KEYS[:1], [0])
    engine.cache.abort(KEYS[:1])
    engine.cache.release(KEYS[:1])
    assert engine.cache.promote(KEYS[:1]) == 1
    assert len(engine.ladder.index) == 0


def test_full_storage_drops_what_was_used_least_recently_before_the_next_write() -> None:
    engine = Engine(num_host=2, num_disk=2)
    for key in KEYS[:2]:
        engine.store([key])
        engine.carry_out()
    engine.cache.touch(KEYS[:1])
    engine.cache.take_changes()
    engine.store(KEYS[2:3])
    drop, write = engine.carry_out()
    assert (drop.verb, names(drop)) == (Verb.DROP, (name(KEYS[1]),))
    assert (write.verb, names(write)) == (Verb.WRITE, (name(KEYS[2]),))
    in_storage = [each for each in engine.cache.take_changes() if each.tier == DISK]
    assert [(each.keys, each.is_removed) for each in in_storage] == [
        ([KEYS[1]], True),
        ([KEYS[2]], False),
    ]


def test_end_of_a_prompt_leaves_before_its_beginning() -> None:
    """In memory and in storage, whether it was stored, brought back or used again."""
    engine = Engine(num_host=16)
    engine.store(KEYS[:4])
    engine.carry_out()
    assert engine.ladder.index.labels(engine.ladder.index.evict(HOST, 1)) == [KEYS[3]]
    assert engine.ladder.index.labels(engine.ladder.index.evict(DISK, 1)) == [KEYS[3]]
    engine.cache.touch([KEYS[2], KEYS[1], KEYS[0]])
    assert engine.ladder.index.labels(engine.ladder.index.evict(HOST, 1)) == [KEYS[0]]
    other = Engine(num_host=4)
    other.store(KEYS[:4])
    other.carry_out()
    other.store(KEYS[4:8])
    other.carry_out()
    other.cache.promote(KEYS[:3])
    other.carry_out()
    order = other.ladder.index.labels(other.ladder.index.evict(HOST, 4))
    assert order == [KEYS[4], KEYS[2], KEYS[1], KEYS[0]]


def test_no_more_is_promoted_than_memory_has_room_for() -> None:
    engine = Engine(num_host=2)
    for key in KEYS[:4]:
        engine.store([key])
        engine.carry_out()
    engine.cache.hold([KEYS[3]])
    assert engine.cache.promote(KEYS[:2]) == 1
    assert engine.cache.find(KEYS[1]) is Place.STORAGE


def test_two_who_want_the_same_share_a_read() -> None:
    engine = Engine(num_host=2)
    for key in KEYS[:4]:
        engine.store([key])
        engine.carry_out()
    assert engine.cache.promote(KEYS[:2]) == 2
    engine.cache.promote(KEYS[:2])
    assert [order.verb for order in engine.mover.take_orders()] == [Verb.READ]


def test_block_of_a_copy_that_failed_is_not_believed() -> None:
    engine = Engine()
    engine.store(KEYS[:1])
    engine.carry_out()
    (slot,) = engine.cache.hold(KEYS[:1])
    engine.cache.distrust([slot])
    assert engine.cache.find(KEYS[0]) is Place.STORAGE, "what was written before is good"
    engine.cache.promote(KEYS[:1])
    assert engine.mover.take_orders() == [], "it is in the way while it is held"
    engine.cache.release(KEYS[:1])
    assert KEYS[0] not in engine.in_tier(HOST)
    room = engine.cache.reserve(KEYS[1:2])
    assert room is not None
    engine.cache.distrust(room.slots)
    assert engine.cache.find(KEYS[1]) is Place.NOWHERE
    engine.cache.commit(KEYS[1:2], [0])
    assert engine.cache.find(KEYS[1]) is Place.NOWHERE
    assert engine.mover.take_orders() == []
    engine.check()


def test_slot_that_has_another_block_by_now_is_not_distrusted() -> None:
    engine = Engine(num_host=1)
    for key in KEYS[:2]:
        engine.store([key])
        engine.carry_out()
    engine.cache.promote(KEYS[:1])
    engine.carry_out()
    engine.cache.distrust([0])
    assert engine.cache.find(KEYS[0]) is Place.MEMORY, "it was the other one that was copied"


def test_block_that_is_to_stay_in_memory_is_not_written() -> None:
    engine = Engine()
    assert engine.cache.reserve(KEYS[:1]) is not None
    engine.cache.commit(KEYS[:1], [0], to_storage=False)
    assert engine.cache.find(KEYS[0]) is Place.MEMORY
    assert engine.mover.take_orders() == []
    assert not engine.ladder.is_busy


def test_a_block_over_the_budget_of_the_day_is_not_written() -> None:
    engine = Engine(bytes_per_day=1)
    engine.store(KEYS[:1])
    assert len(engine.carry_out()) == 1, "one is let through while anything is left"
    engine.store(KEYS[1:2])
    assert engine.carry_out() == []
    assert engine.cache.find(KEYS[1]) is Place.MEMORY


def test_emptied_cache_has_nothing_of_an_earlier_life_either() -> None:
    engine = Engine(num_ranks=2, says_hello=False)
    engine.hello(0, name(KEYS[0]), name(KEYS[1]))
    engine.hello(1, name(KEYS[0]), name(KEYS[1]))
    assert engine.cache.find(KEYS[0]) is Place.STORAGE
    engine.cache.clear()
    assert engine.places(KEYS) == [Place.NOWHERE] * len(KEYS)
    erased = {key for order in engine.carry_out() for key in names(order)}
    assert erased == {name(KEYS[0]), name(KEYS[1])}


def test_what_ranks_tell_of_after_the_cache_was_emptied_is_erased() -> None:
    engine = Engine(num_ranks=2, says_hello=False)
    engine.hello(0, name(KEYS[0]))
    engine.cache.clear()
    engine.hello(1, name(KEYS[0]))
    assert engine.cache.find(KEYS[0]) is Place.NOWHERE
    assert [names(order) for order in engine.carry_out()] == [(name(KEYS[0]),)]


def test_nothing_is_ordered_before_all_ranks_have_said_hello() -> None:
    engine = Engine(num_ranks=2, says_hello=False)
    engine.hello(0, name(KEYS[0]))
    assert engine.mover.take_orders() == []
    engine.hello(1)
    assert len(engine.mover.take_orders()) == 1


class Rank:
    """Carries out orders on dictionaries: what its slots hold, and its storage."""

    def __init__(self) -> None:
        self.slots: dict[int, bytes] = {}
        self.disk: dict[bytes, bytes] = {}

    def carry_out(self, order: Order, failing: set[int]) -> Done:
        failed, gone = set(), set()
        for at, key in enumerate(names(order)):
            match order.verb:
                case Verb.DROP:
                    del self.disk[key]  # it is there, or the order is wrong
                case Verb.ERASE:
                    self.disk.pop(key, None)
                case Verb.WRITE:
                    assert key not in self.disk, "written twice"
                    if at in failing:
                        failed.add(at)
                    else:
                        self.disk[key] = self.slots[order.slots[at]]
                case Verb.READ if key not in self.disk:
                    gone.add(at)
                case Verb.READ if at in failing:
                    failed.add(at)
                case Verb.READ:
                    self.slots[order.slots[at]] = self.disk[key]
        return Done(frozenset(failed | gone), frozenset(gone))


class KeyedMachine(RuleBasedStateMachine):
    """Two ranks that fail now and then. Whatever is found in memory is the right block."""

    @initialize(num_host=st.integers(1, 5), num_disk=st.integers(1, 6))
    def make(self, num_host: int, num_disk: int) -> None:
        self.engine = Engine(num_host, num_disk, num_ranks=2)
        self.cache = self.engine.cache
        self.ranks = [Rank(), Rank()]
        self.num_disk = num_disk
        self.under_way: list[tuple[Order, int]] = []
        self.holding: list[bytes] = []
        self.storing: list[tuple[bytes, int]] = []

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True))
    def store(self, keys: list[bytes]) -> None:
        room = self.cache.reserve(keys)
        for key, slot in zip(room.keys, room.slots, strict=True) if room else ():
            for rank in self.ranks:
                rank.slots[slot] = key
            self.storing.append((key, slot))

    @precondition(lambda self: self.storing)
    @rule(success=st.booleans(), is_doubted=st.booleans())
    def stored(self, success: bool, is_doubted: bool) -> None:
        key, slot = self.storing.pop(0)
        if is_doubted:
            for rank in self.ranks:
                rank.slots[slot] = b"wrong"
            self.cache.distrust([slot])
        if success:
            self.cache.commit([key], [0])
        else:
            self.cache.abort([key])
        if is_doubted or not success:
            assert self.cache.find(key) is not Place.MEMORY

    @rule()
    def take_orders(self) -> None:
        for order in self.engine.mover.take_orders():
            if order.verb in (Verb.DROP, Verb.ERASE):
                for rank in self.ranks:
                    rank.carry_out(order, set())
            elif order.verb in (Verb.READ, Verb.WRITE):
                self.under_way += [(order, 0), (order, 1)]

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def rank_ends(self, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, 1))
        mine = [each for each in self.under_way if each[1] == rank]
        if mine:
            self.under_way.remove(mine[0])
            failing = data.draw(st.sets(st.integers(0, 3), max_size=1))
            order = mine[0][0]
            self.engine.finish(order, self.ranks[rank].carry_out(order, failing))

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True))
    def promote(self, keys: list[bytes]) -> None:
        lost = [key for key in keys if self.is_lost(key)]
        keys = [key for key in keys if self.cache.find(key) is Place.STORAGE and key not in lost]
        num = self.cache.promote(keys)
        assert all(self.cache.find(key) is Place.ARRIVING for key in keys[:num])

    def is_lost(self, key: bytes) -> bool:
        """Held in memory, and not to be used."""
        found = self.engine.ladder.index.find(ROOT, key)
        return found is not None and (found[0], HOST) in self.engine.ladder.traffic.lost

    @rule(key=st.sampled_from(KEYS))
    def load(self, key: bytes) -> None:
        if self.cache.find(key) is Place.MEMORY:
            (slot,) = self.cache.hold([key])
            assert all(rank.slots[slot] == key for rank in self.ranks), "another block's bytes"
            self.holding.append(key)

    @precondition(lambda self: self.holding)
    @rule(is_doubted=st.booleans())
    def loaded(self, is_doubted: bool) -> None:
        key = self.holding.pop(0)
        if is_doubted:
            found = self.engine.ladder.index.find(ROOT, key)
            assert found is not None
            self.cache.distrust(self.engine.ladder.index.slots([found[0]], HOST))
            assert self.cache.find(key) is not Place.MEMORY
        self.cache.release([key])

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4, unique=True))
    def touch(self, keys: list[bytes]) -> None:
        self.cache.touch(keys)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.holding, self.storing = [], []  # nobody hears of their end
        assert all(self.cache.find(key) is Place.NOWHERE for key in KEYS)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()
            for rank in self.ranks:
                assert len(rank.disk) <= self.num_disk, "more than storage holds"

    def teardown(self) -> None:
        """When everything has ended, ranks and cache agree about storage."""
        if not hasattr(self, "engine"):
            return
        while self.storing:
            self.stored(success=True, is_doubted=False)
        self.cache.release(self.holding)
        while self.engine.ladder.is_busy or self.engine.mover.is_busy or self.under_way:
            self.take_orders()
            while self.under_way:
                order, rank = self.under_way.pop(0)
                self.engine.finish(order, self.ranks[rank].carry_out(order, set()))
        for rank in self.ranks:
            assert set(rank.disk.values()) == self.engine.in_tier(DISK), "a rank knows of others"
            assert all(name(key) == at for at, key in rank.disk.items())


def test_what_is_found_is_the_right_block_whatever_fails() -> None:
    run_state_machine_as_test(KeyedMachine, settings=settings(stateful_step_count=60))
