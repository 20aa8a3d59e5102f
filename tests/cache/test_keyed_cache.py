"""The cache for engines that bring keys. Its ranks get orders, and report their outcomes."""

from __future__ import annotations

from kvtier.cache.block_cache import BlockState
from kvtier.cache.transfer.ranks import Done, Verb
from kvtier.core.types import DISK, HOST, Slot

from .keyed_harness import BLOCK_BYTES, KEYS, NS, Engine, name, names


def test_stored_block_goes_on_to_storage_and_comes_back() -> None:
    engine = Engine(num_host=2)
    engine.store(KEYS[:2])
    written = engine.carry_out()
    assert {order.verb for order in written} == {Verb.WRITE}
    assert [key for order in written for key in names(order)] == [name(key) for key in KEYS[:2]]
    assert not engine.mover.is_busy
    engine.store(KEYS[2:4])
    assert engine.places(KEYS[:2]) == [BlockState.STORAGE] * 2
    engine.carry_out()
    assert engine.cache.promote(KEYS[:2]) == 2
    assert engine.find(KEYS[0]) is BlockState.ARRIVING
    (order,) = engine.carry_out()
    assert (order.verb, set(order.slots)) == (Verb.READ, {0, 1})
    assert engine.places(KEYS[:2]) == [BlockState.MEMORY] * 2
    assert engine.cache.origins([KEYS[0]]) == [DISK]
    engine.cache.hold(KEYS[:1])
    engine.cache.release(KEYS[:1])
    assert engine.cache.origins([KEYS[0]]) == [HOST], "it came from storage once"


def test_block_that_is_named_twice_is_read_once() -> None:
    engine = Engine(num_host=4)
    engine.fill(KEYS[:4])
    engine.ladder.evict_blocks(engine.index.find_all(KEYS[:2]).known, HOST)
    engine.cache.promote([KEYS[0], KEYS[0]])
    (order,) = engine.carry_out()
    assert names(order) == (name(KEYS[0]),)
    engine.check()


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
    engine.fill(KEYS[:2])
    engine.cache.promote(KEYS[:1])
    (read,) = engine.mover.take_orders()
    engine.finish(read, Done(frozenset({0}), frozenset({0}), num_damaged=1))
    assert engine.find(KEYS[0]) is BlockState.NOWHERE
    (erase,) = engine.mover.take_orders()
    assert (erase.verb, names(erase)) == (Verb.ERASE, (name(KEYS[0]),))
    engine.store(KEYS[2:3])
    assert engine.find(KEYS[2]) is BlockState.MEMORY, "its slot is free again"


def test_block_whose_read_failed_stays_in_storage() -> None:
    engine = Engine(num_host=1)
    engine.fill(KEYS[:2])
    engine.cache.promote(KEYS[:1])
    engine.carry_out(failed=[0])
    assert engine.find(KEYS[0]) is BlockState.STORAGE
    assert engine.mover.take_orders() == []
    engine.cache.promote(KEYS[:1])
    engine.carry_out()
    assert engine.find(KEYS[0]) is BlockState.MEMORY, "another time it may be there"
    engine.check()


def test_copies_that_failed_say_nothing_about_how_long_they_take() -> None:
    engine = Engine(num_host=1)
    engine.fill(KEYS[:2])
    engine.cache.promote(KEYS[:1])
    (read,) = engine.mover.take_orders()
    engine.finish(read, Done(frozenset({0}), num_bytes=BLOCK_BYTES, seconds=1e-9))
    assert (DISK, HOST) not in engine.ladder.cost_snapshot().seconds_per_byte


def test_only_what_all_ranks_found_is_there_after_a_restart() -> None:
    engine = Engine(num_host=2, num_disk=3, num_ranks=2, says_hello=False)
    found = [name(key) for key in KEYS]
    engine.hello(0, *found[:4])
    assert engine.find(KEYS[1]) is BlockState.UNKNOWN
    engine.hello(1, found[5], found[2], found[1], num_open=1)
    there = [
        BlockState.NOWHERE,
        BlockState.STORAGE,
        BlockState.STORAGE,
        BlockState.NOWHERE,
    ]
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
    assert engine.places(KEYS[:5]) == [BlockState.NOWHERE] * 5
    assert engine.cache.reserve(KEYS[:3]) is None
    engine.cache.touch(KEYS)
    engine.cache.commit(KEYS[:1], [0])
    engine.cache.abort(KEYS[:1])
    engine.cache.release(KEYS[:1])
    assert engine.cache.promote(KEYS[:1]) == 1
    assert len(engine.index) == 0


def test_full_storage_drops_what_was_used_least_recently_before_the_next_write() -> None:
    engine = Engine(num_host=2, num_disk=2)
    engine.fill(KEYS[:2])
    engine.cache.touch(KEYS[:1])
    engine.cache.take_changes()
    engine.store(KEYS[2:3])
    drop, write = engine.carry_out()
    assert (drop.verb, names(drop)) == (Verb.DROP, (name(KEYS[1]),))
    assert (write.verb, names(write)) == (Verb.WRITE, (name(KEYS[2]),))
    in_storage = [change for change in engine.cache.take_changes() if change.tier == DISK]
    assert [(each.keys, each.is_removed) for each in in_storage] == [
        ([KEYS[1]], True),
        ([KEYS[2]], False),
    ]


def test_end_of_a_prompt_leaves_before_its_beginning() -> None:
    """In memory and in storage: after a store, a promotion and a reuse."""
    engine = Engine(num_host=16)
    engine.store(KEYS[:4])
    engine.carry_out()
    assert engine.index.keys(engine.index.evict(HOST, 1)) == [KEYS[3]]
    assert engine.index.keys(engine.index.evict(DISK, 1)) == [KEYS[3]]
    engine.cache.touch([KEYS[2], KEYS[1], KEYS[0]])
    assert engine.index.keys(engine.index.evict(HOST, 1)) == [KEYS[0]]
    other = Engine(num_host=4)
    other.store(KEYS[:4])
    other.carry_out()
    other.store(KEYS[4:8])
    other.carry_out()
    other.cache.promote(KEYS[:3])
    other.carry_out()
    order = other.index.keys(other.index.evict(HOST, 4))
    assert order == [KEYS[4], KEYS[2], KEYS[1], KEYS[0]]


def test_no_more_is_promoted_than_memory_has_room_for() -> None:
    engine = Engine(num_host=2)
    engine.fill(KEYS[:4])
    engine.cache.hold([KEYS[3]])
    assert engine.cache.promote(KEYS[:2]) == 1
    assert engine.find(KEYS[1]) is BlockState.STORAGE


def test_two_who_want_the_same_share_a_read() -> None:
    engine = Engine(num_host=2)
    engine.fill(KEYS[:4])
    assert engine.cache.promote(KEYS[:2]) == 2
    engine.cache.promote(KEYS[:2])
    assert [order.verb for order in engine.mover.take_orders()] == [Verb.READ]


def test_block_of_a_copy_that_failed_is_not_believed() -> None:
    engine = Engine()
    engine.store(KEYS[:1])
    engine.carry_out()
    (slot,) = engine.cache.hold(KEYS[:1]).slots
    engine.cache.distrust([slot])
    assert engine.find(KEYS[0]) is BlockState.STORAGE, "what was written before is good"
    engine.cache.promote(KEYS[:1])
    assert engine.mover.take_orders() == [], "it is in the way while it is held"
    engine.cache.release(KEYS[:1])
    assert KEYS[0] not in engine.in_tier(HOST)
    room = engine.cache.reserve(KEYS[1:2])
    assert room is not None
    engine.cache.distrust(room.slots)
    assert engine.find(KEYS[1]) is BlockState.NOWHERE
    engine.cache.commit(KEYS[1:2], [0])
    assert engine.find(KEYS[1]) is BlockState.NOWHERE
    assert engine.mover.take_orders() == []
    engine.check()


def test_slot_that_has_another_block_by_now_is_not_distrusted() -> None:
    engine = Engine(num_host=1)
    engine.fill(KEYS[:2])
    engine.cache.promote(KEYS[:1])
    engine.carry_out()
    engine.cache.distrust([Slot(0)])
    assert engine.find(KEYS[0]) is BlockState.MEMORY, "it was the other one that was copied"


def test_block_that_is_to_stay_in_memory_is_not_written() -> None:
    engine = Engine()
    assert engine.cache.reserve(KEYS[:1]) is not None
    engine.cache.commit(KEYS[:1], [0], to_storage=False)
    assert engine.find(KEYS[0]) is BlockState.MEMORY
    assert engine.mover.take_orders() == []
    assert not engine.ladder.is_busy


def test_a_block_over_the_budget_of_the_day_is_not_written() -> None:
    engine = Engine(bytes_per_day=1)
    engine.store(KEYS[:1])
    assert len(engine.carry_out()) == 1, "one is let through while anything is left"
    engine.store(KEYS[1:2])
    assert engine.carry_out() == []
    assert engine.find(KEYS[1]) is BlockState.MEMORY


def test_emptied_cache_has_nothing_of_an_earlier_life_either() -> None:
    engine = Engine(num_ranks=2, says_hello=False)
    engine.hello(0, name(KEYS[0]), name(KEYS[1]))
    engine.hello(1, name(KEYS[0]), name(KEYS[1]))
    assert engine.find(KEYS[0]) is BlockState.STORAGE
    engine.cache.clear()
    assert engine.places(KEYS) == [BlockState.NOWHERE] * len(KEYS)
    told = [(order.verb, names(order)) for order in engine.carry_out()]
    assert told == [(Verb.ERASE, (name(KEYS[0]),)), (Verb.CLEAR, ())], "what nobody asked for, too"


def test_what_ranks_tell_of_after_the_cache_was_emptied_is_erased() -> None:
    engine = Engine(num_ranks=2, says_hello=False)
    engine.hello(0, name(KEYS[0]))
    engine.cache.clear()
    engine.hello(1, name(KEYS[0]))
    assert engine.find(KEYS[0]) is BlockState.NOWHERE
    assert [order.verb for order in engine.carry_out()] == [Verb.CLEAR]


def test_nothing_is_ordered_before_all_ranks_have_said_hello() -> None:
    engine = Engine(num_ranks=2, says_hello=False)
    engine.hello(0, name(KEYS[0]))
    assert engine.mover.take_orders() == []
    engine.hello(1)
    assert len(engine.mover.take_orders()) == 1


def test_deleted_block_that_is_being_read_is_not_written_later() -> None:
    """Its write was queued before it was deleted."""
    engine = Engine(4, 8)
    keys = KEYS[:3]
    engine.store(keys)
    assert engine.ladder.are_queued(engine.index.find_all(keys[2:]).blocks) == [True]
    engine.cache.hold(keys[2:])
    engine.cache.delete(keys[2:])
    for _ in keys:
        engine.carry_out()
    assert engine.find(keys[2]) is BlockState.NOWHERE
    assert engine.in_tier(DISK) == set(keys[:2])
    engine.cache.release(keys[2:])
    assert engine.in_tier(HOST) == set(keys[:2])
    engine.check()
