"""The cache for engines that bring keys, over two ranks that are dictionaries and that fail."""

from __future__ import annotations

import pytest
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

from kvtier.cache.block_cache import BlockState
from kvtier.cache.transfer.ranks import Done, RankOrder, Verb
from kvtier.core.types import DISK, HOST, Direct, Slot
from kvtier.index.policies.replayed import LRU, RUNS
from tests.kit.snapshot import snapshot

from .keyed_harness import KEYS, Engine, name, names

PAGES = 1000
"""Slot numbers from here on are pages of the engine."""


class Rank:
    """Carries out orders on two dictionaries: the content of its slots, and of its storage."""

    def __init__(self) -> None:
        self.slots: dict[int, bytes] = {}
        self.disk: dict[bytes, bytes] = {}

    def carry_out(self, order: RankOrder, failing: set[int]) -> Done:
        failed, gone = set(), set()
        for at, key in enumerate(names(order)):
            match order.verb:
                case Verb.DROP:
                    del self.disk[key]  # KeyError if the order is wrong
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
    """Two ranks that fail now and then. A block found in memory is always the right one."""

    policy, group_bytes = LRU, 0

    @initialize(num_host=st.integers(1, 5), num_disk=st.integers(1, 6))
    def make(self, num_host: int, num_disk: int) -> None:
        self.engine = Engine(
            num_host,
            num_disk,
            num_ranks=2,
            direct=Direct.ON,
            policy=self.policy,
            group_bytes=self.group_bytes,
        )
        self.cache = self.engine.cache
        self.ranks = [Rank(), Rank()]
        self.num_disk = num_disk
        self.under_way: list[tuple[RankOrder, int]] = []
        self.holding: list[bytes] = []
        self.storing: list[tuple[bytes, int]] = []
        self.deleted: set[bytes] = set()  # and not stored again since

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, unique=True).map(sorted))
    def begin_request(self, keys: list[bytes]) -> None:
        self.cache.on_request(keys)

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True))
    def store(self, keys: list[bytes]) -> None:
        room = self.cache.reserve(keys)
        for key, slot in zip(room.keys, room.slots, strict=True) if room else ():
            for rank in self.ranks:
                rank.slots[slot] = key
            self.storing.append((key, slot))
            self.deleted.discard(key)

    @precondition(lambda self: self.storing)
    @rule(success=st.booleans(), is_doubted=st.booleans())
    def stored(self, success: bool, is_doubted: bool) -> None:
        key, slot = self.storing.pop(0)
        if is_doubted:
            for rank in self.ranks:
                rank.slots[slot] = b"wrong"
            self.cache.distrust([Slot(slot)])
        if success:
            self.cache.commit([key], [Slot(0)])
        else:
            self.cache.abort([key])
        if is_doubted or not success:
            assert self.engine.find(key) is not BlockState.MEMORY

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
            done = self.ranks[rank].carry_out(order, failing)
            assert not (order.slots[:1] >= (PAGES,) and done.gone), "it left while it was read"
            self.engine.finish(order, done)

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True))
    def promote(self, keys: list[bytes]) -> None:
        lost = [key for key in keys if self.is_lost(key)]
        keys = [
            key for key in keys if self.engine.find(key) is BlockState.STORAGE and key not in lost
        ]
        num = self.cache.promote(keys)
        assert all(self.engine.find(key) is BlockState.ARRIVING for key in keys[:num])

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True))
    def read_direct(self, keys: list[bytes]) -> None:
        keys = [key for key in keys if self.engine.find(key) is BlockState.STORAGE]
        self.cache.direct_reads.read(keys, range(PAGES, PAGES + len(keys)))
        for order in self.engine.mover.take_reads():
            self.under_way += [(order, 0), (order, 1)]

    def is_lost(self, key: bytes) -> bool:
        """Whether the block is in memory, but marked as lost."""
        found = self.engine.index.find(key)
        return found is not None and (found[0], HOST) in self.engine.ladder.lost

    @rule(key=st.sampled_from(KEYS))
    def load(self, key: bytes) -> None:
        if self.engine.find(key) is BlockState.MEMORY:
            (slot,) = self.cache.hold([key]).slots
            assert all(rank.slots[slot] == key for rank in self.ranks), "another block's bytes"
            self.holding.append(key)

    @precondition(lambda self: self.holding)
    @rule(is_doubted=st.booleans())
    def loaded(self, is_doubted: bool) -> None:
        key = self.holding.pop(0)
        if is_doubted:
            found = self.engine.index.find(key)
            assert found is not None
            self.cache.distrust(self.engine.index.slots([found[0]], HOST))
            assert self.engine.find(key) is not BlockState.MEMORY
        self.cache.release([key])

    @rule()
    def locate(self) -> None:
        before = snapshot(self.cache)
        places = self.cache.locate_all(KEYS)
        assert [self.cache.locate(key) for key in KEYS] == places
        assert snapshot(self.cache) == before, "a query changed something"

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4, unique=True))
    def touch(self, keys: list[bytes]) -> None:
        self.cache.touch(keys)

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True))
    def delete(self, keys: list[bytes]) -> None:
        self.cache.delete(keys)
        self.deleted.update(keys)
        assert all(self.engine.find(key) is BlockState.NOWHERE for key in keys)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.holding, self.storing = [], []  # clearing forgets both
        assert all(self.engine.find(key) is BlockState.NOWHERE for key in KEYS)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()
            for rank in self.ranks:
                assert len(rank.disk) <= self.num_disk, "more than storage holds"
            for key in self.deleted:
                assert self.engine.find(key) is BlockState.NOWHERE, "a deleted block is found"

    def teardown(self) -> None:
        """When all orders have ended, ranks and cache agree about storage."""
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
        for each in self.ranks:
            assert not self.deleted & set(each.disk.values()), "a deleted block came back"
            assert set(each.disk.values()) == self.engine.in_tier(DISK), "a rank knows of others"
            assert all(name(key) == at for at, key in each.disk.items())


class GroupsMachine(KeyedMachine):
    """Two KV groups, whose blocks for the same tokens leave together."""

    policy, group_bytes = RUNS, 1


@pytest.mark.parametrize("machine", [KeyedMachine, GroupsMachine])
def test_what_is_found_is_the_right_block_whatever_fails(machine: type[KeyedMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=60))
