"""What is where and what moves, against ranks that are a dictionary each."""

from __future__ import annotations

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

from kvtier.connectors.vllm.orders import Done, Hello, Move, Order
from kvtier.connectors.vllm.placement import Place, Placement
from kvtier.types import DISK, HOST, BlockKey

KEYS = [bytes([number]) * 3 for number in range(10)]


def name(key: bytes) -> BlockKey:
    return BlockKey(b"on disk " + key)


def _placement(num_host: int = 4, num_disk: int = 8, num_ranks: int = 1) -> Placement:
    placement = Placement(num_host, num_disk, name, num_ranks, num_ranks, num_moving=4)
    for rank in range(num_ranks):
        placement.meet(rank, Hello(num_host, ()))
    return placement


def _store(placement: Placement, keys: list[bytes]) -> None:
    room = placement.reserve(keys)
    assert room is not None
    placement.commit(room.keys, range(len(room.keys)))


def _carry_out(placement: Placement, *failed: int) -> list[Order]:
    orders = placement.take_orders()
    for order in orders:
        placement.finish(order.order_id, Done(frozenset(failed), placement._num_ranks))
    return orders


def test_disk_is_left_alone_until_chunks_have_names() -> None:
    def nameless(key: bytes) -> BlockKey:
        assert placement.namespace is not None, "nobody knows what it is called"
        return name(key)

    placement = Placement(2, 8, nameless, num_moving=4)
    placement.namespace = None
    placement.meet(0, Hello(2, (name(KEYS[5]),)))
    _store(placement, KEYS[:2])
    placement.touch(KEYS[:2])
    assert placement.find(KEYS[0]) is Place.HOST
    assert placement.find(KEYS[5]) is Place.NOWHERE, "computed, and not waited for"
    assert not placement.take_orders()
    assert not placement.is_moving, "an engine without requests may sleep"
    placement.namespace = b"n" * 32
    assert placement.find(KEYS[5]) is Place.DISK
    assert placement.is_moving
    (order,) = placement.take_orders()
    assert (order.move, order.namespace) == (Move.DEMOTE, b"n" * 32)
    assert order.keys == (name(KEYS[0]), name(KEYS[1])), "what was stored meanwhile"


def test_stored_chunk_goes_on_to_the_disk_and_comes_back() -> None:
    placement = _placement(num_host=2)
    _store(placement, KEYS[:2])
    (order,) = _carry_out(placement)
    assert (order.move, order.keys) == (Move.DEMOTE, (name(KEYS[0]), name(KEYS[1])))
    assert not placement.is_moving
    _store(placement, KEYS[2:4])
    assert [placement.find(key) for key in KEYS[:2]] == [Place.DISK] * 2
    _carry_out(placement)
    assert placement.promote(KEYS[:2], [0, 1]) == 2
    assert placement.find(KEYS[0]) is Place.ARRIVING
    (order,) = _carry_out(placement)
    assert (order.move, order.slots) == (Move.PROMOTE, (0, 1))
    assert [placement.find(key) for key in KEYS[:2]] == [Place.HOST] * 2
    assert placement.origin(KEYS[0]) == DISK
    placement.hold(KEYS[:1])
    placement.release(KEYS[:1])
    assert placement.origin(KEYS[0]) == HOST, "it came from the disk once"


def test_chunk_that_one_rank_could_not_write_is_on_no_disk() -> None:
    placement = _placement(num_ranks=2)
    _store(placement, KEYS[:2])
    (order,) = placement.take_orders()
    assert placement.finish(order.order_id, Done()) is None, "the other one has not said so"
    assert placement.finish(order.order_id, Done(frozenset({1}))) is not None
    (forget,) = placement.take_orders()
    assert (forget.move, forget.keys) == (Move.FORGET, (name(KEYS[1]),))
    _store(placement, KEYS[2:6])
    assert [placement.find(key) for key in KEYS[:2]] == [Place.DISK, Place.NOWHERE]


def test_damaged_chunk_is_nowhere_and_is_forgotten() -> None:
    placement = _placement(num_host=1)
    _store(placement, KEYS[:1])
    _carry_out(placement)
    _store(placement, KEYS[1:2])
    _carry_out(placement)
    placement.promote(KEYS[:1], [0])
    _carry_out(placement, 0)
    assert placement.find(KEYS[0]) is Place.NOWHERE
    (forget,) = placement.take_orders()
    assert (forget.move, forget.keys) == (Move.FORGET, (name(KEYS[0]),))
    _store(placement, KEYS[2:3])
    assert placement.find(KEYS[2]) is Place.HOST, "its slot is free again"


def test_only_what_all_ranks_found_is_there_after_a_restart() -> None:
    placement = Placement(2, 3, name, 2, 2)
    found = [name(key) for key in KEYS]
    placement.meet(0, Hello(2, tuple(found[:4])))
    assert placement.find(KEYS[1]) is Place.UNKNOWN
    placement.meet(1, Hello(1, (found[5], found[2], found[1])))
    assert [placement.find(key) for key in KEYS[:4]] == [
        Place.NOWHERE,
        Place.DISK,
        Place.DISK,
        Place.NOWHERE,
    ]
    (forget,) = placement.take_orders()
    assert set(forget.keys) == {found[0], found[3], found[5]}
    assert placement.host.capacity == 1, "what the last rank has ready"


def test_full_disk_drops_what_was_used_least_recently() -> None:
    placement = _placement(num_host=2, num_disk=2)
    for key in KEYS[:2]:
        _store(placement, [key])
        _carry_out(placement)
    placement.touch(KEYS[:1])
    _store(placement, KEYS[2:3])
    (order,) = _carry_out(placement)
    assert order.evicted == (name(KEYS[1]),)
    changes = placement.take_changes()
    assert changes[-2].is_removed
    assert (changes[-2].keys, changes[-2].tier) == ([KEYS[1]], DISK)
    assert (changes[-1].keys, changes[-1].tier) == ([KEYS[2]], DISK)


def test_no_more_is_promoted_than_host_memory_has_room_for() -> None:
    placement = _placement(num_host=2)
    for key in KEYS[:4]:
        _store(placement, [key])
        _carry_out(placement)
    placement.hold([KEYS[3]])
    assert placement.promote(KEYS[:2], [0, 1]) == 1
    assert placement.find(KEYS[1]) is Place.DISK


def test_chunk_of_a_copy_that_failed_is_not_believed() -> None:
    placement = _placement()
    _store(placement, KEYS[:1])
    (slot,) = placement.hold(KEYS[:1])
    placement.distrust([slot])
    assert placement.find(KEYS[0]) is Place.NOWHERE
    placement.release(KEYS[:1])
    room = placement.reserve(KEYS[1:2])
    assert room is not None
    placement.distrust(placement.host.slots(KEYS[1:2]))
    placement.commit(KEYS[1:2], [0])
    assert placement.find(KEYS[1]) is Place.NOWHERE
    assert placement.take_orders() == []


def test_chunk_that_is_to_stay_in_memory_is_not_demoted() -> None:
    placement = _placement()
    assert placement.reserve(KEYS[:1]) is not None
    placement.commit(KEYS[:1], [0], to_disk=False)
    assert placement.find(KEYS[0]) is Place.HOST
    assert placement.take_orders() == []
    assert not placement.is_moving


class Rank:
    """Carries out orders on dictionaries: what its slots hold, and its disk."""

    def __init__(self) -> None:
        self.slots: dict[int, bytes] = {}
        self.disk: dict[bytes, bytes] = {}

    def carry_out(self, order: Order, failing: set[int]) -> Done:
        for key in order.evicted:
            del self.disk[key]  # it is there, or the order is wrong
        failed = set()
        for at, key in enumerate(order.keys):
            if order.move is Move.FORGET:
                self.disk.pop(key, None)
            elif order.move is Move.DEMOTE:
                assert key not in self.disk, "written twice"
                if at in failing:
                    failed.add(at)
                else:
                    self.disk[key] = self.slots[order.slots[at]]
            elif at in failing or key not in self.disk:
                failed.add(at)
            else:
                self.slots[order.slots[at]] = self.disk[key]
        return Done(frozenset(failed))


class PlacementMachine(RuleBasedStateMachine):
    """Two ranks that fail now and then. Whatever is found in host memory is the right chunk."""

    @initialize(num_host=st.integers(1, 5), num_disk=st.integers(1, 6))
    def make(self, num_host: int, num_disk: int) -> None:
        self.placement = _placement(num_host, num_disk, num_ranks=2)
        self.ranks = [Rank(), Rank()]
        self.num_disk = num_disk
        self.under_way: list[tuple[Order, int]] = []
        self.holding: list[bytes] = []
        self.storing: list[bytes] = []

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True))
    def store(self, keys: list[bytes]) -> None:
        room = self.placement.reserve(keys)
        for key in room.keys if room else ():
            for rank in self.ranks:
                rank.slots[self.placement.host.slots([key])[0]] = key
            self.storing.append(key)

    @precondition(lambda self: self.storing)
    @rule(success=st.booleans())
    def stored(self, success: bool) -> None:
        key = self.storing.pop(0)
        if success:
            self.placement.commit([key], [0])
        else:
            self.placement.abort([key])

    @rule()
    def take_orders(self) -> None:
        for order in self.placement.take_orders():
            if order.move is Move.FORGET:
                for rank in self.ranks:
                    rank.carry_out(order, set())
            else:
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
            self.placement.finish(order.order_id, self.ranks[rank].carry_out(order, failing))

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True))
    def promote(self, keys: list[bytes]) -> None:
        keys = [key for key in keys if self.placement.find(key) is Place.DISK]
        num = self.placement.promote(keys, range(len(keys)))
        assert all(self.placement.find(key) is Place.ARRIVING for key in keys[:num])

    @rule(key=st.sampled_from(KEYS))
    def load(self, key: bytes) -> None:
        if self.placement.find(key) is Place.HOST:
            (slot,) = self.placement.hold([key])
            assert all(rank.slots[slot] == key for rank in self.ranks), "another chunk's bytes"
            self.holding.append(key)

    @precondition(lambda self: self.holding)
    @rule()
    def loaded(self) -> None:
        self.placement.release([self.holding.pop(0)])

    @rule()
    def clear(self) -> None:
        self.placement.clear()
        self.holding, self.storing = [], []  # nobody hears of their end
        assert all(self.placement.find(key) is Place.NOWHERE for key in KEYS)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "placement"):
            self.placement.check_invariants()
            for rank in self.ranks:
                assert len(rank.disk) <= self.num_disk, "more than the disk holds"

    def teardown(self) -> None:
        """When everything has ended, ranks and placement agree about the disk."""
        if not hasattr(self, "placement"):
            return
        while self.storing:
            self.stored(True)
        while self.placement.is_moving or self.under_way:
            self.take_orders()
            while self.under_way:
                order, rank = self.under_way.pop(0)
                done = self.ranks[rank].carry_out(order, set())
                self.placement.finish(order.order_id, done)
        for rank in self.ranks:
            assert set(rank.disk) == set(self.placement.disk), "a rank knows of others"
            assert all(name(key) == at for at, key in rank.disk.items())


def test_what_is_found_is_the_right_chunk_whatever_fails() -> None:
    run_state_machine_as_test(PlacementMachine, settings=settings(stateful_step_count=60))
