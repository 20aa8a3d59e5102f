"""Leases over groups of layers, against a model that says what each must hold of every column."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier import _hot
from kvtier.index import ALL, ReuseRule, State
from kvtier.prompts.lease import Lease
from kvtier.transfer import Transfer
from kvtier.types import DEVICE, HOST, BlockId, Column, Slot, column_of
from tests.index.indexes import Both, make, needed, rules_of_models
from tests.index.test_index_machine import STEPS

TIERS = (DEVICE, HOST)
NS = b"namespace"

paths = st.lists(st.sampled_from([b"a", b"b"]), min_size=1, max_size=6).map(tuple)


@dataclass
class Held:
    """Blocks that a lease must hold: of each group, the tier of each position."""

    lease: Lease
    path: tuple[bytes, ...]
    tiers: list[dict[int, str]]
    is_cut: bool = False


class LeaseMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.held: list[Held] = []
        self.now = 0.0
        self.next_slot = 0

    @initialize(rules=rules_of_models)
    def begin(self, rules: list[ReuseRule]) -> None:
        self.reuse_rules = rules
        self.index: Any = Both(TIERS, rules) if _hot.NATIVE else make("python", TIERS, rules)

    def _slots(self, num: int) -> list[Slot]:
        self.next_slot += num
        return [Slot(self.next_slot - num + at) for at in range(num)]

    @rule(path=paths, tier=st.sampled_from(TIERS), data=st.data())
    def fill(self, path: tuple[bytes, ...], tier: str, data: st.DataObject) -> None:
        """A tier gets the path, of a group perhaps its end only."""
        self.now += 1
        for group in range(len(self.reuse_rules)):
            first = data.draw(st.integers(0, len(path)))
            if first < len(path):
                above = self.index.extend(NS, path[:first])
                after = above[-1] if above else None
                slots = self._slots(len(path) - first)
                column = column_of(tier, group)
                self.index.insert(NS, path[first:], column, slots, self.now, after)

    @rule(path=paths)
    def lease(self, path: tuple[bytes, ...]) -> None:
        """All that was found is held until the cut is chosen."""
        match = self.index.match_groups(NS, path)
        lease = Lease(self.index, NS, path, match, self.now)
        tiers = [
            {at: tier for at, tier in enumerate(row) if tier is not None} for row in match.tiers
        ]
        self.held.append(Held(lease, path, tiers))
        assert lease.num_shared == match.num_blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        each = data.draw(st.sampled_from(self.held))
        cuts = [cut for cut in range(len(each.lease.blocks) + 1) if self._is_possible(each, cut)]
        cut = data.draw(st.sampled_from(cuts))
        each.lease.cut(cut)
        each.tiers = [
            {at: tier for at, tier in row.items() if at in needed(rule, cut)}
            for rule, row in zip(self.reuse_rules, each.tiers, strict=True)
        ]
        each.is_cut = True
        assert each.lease.num_shared == cut

    def _is_possible(self, each: Held, cut: int) -> bool:
        """Whether the lease has all that the cut needs."""
        groups = zip(self.reuse_rules, each.tiers, strict=True)
        return all(at in row for rule, row in groups for at in needed(rule, cut))

    @precondition(lambda self: any(self._elsewhere(each) for each in self.held))
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        """Blocks come to the device.

        Who waits for them holds there what it held elsewhere, and nothing of those that it did not
        hold.
        """
        each = data.draw(st.sampled_from([each for each in self.held if self._elsewhere(each)]))
        group = data.draw(st.sampled_from(sorted({group for group, _ in self._elsewhere(each)})))
        column = column_of(DEVICE, group)
        blocks = [each.lease.blocks[at] for g, at in self._elsewhere(each) if g == group]
        if data.draw(st.booleans(), label="with those that it does not hold"):
            blocks = list(each.lease.blocks)
        for block in blocks:
            if self.index.state(block, column) is State.ABSENT:
                self.index.begin_write(block, column, *self._slots(1))
                self.index.commit(block, column, self.now)
        transfer = Transfer(HOST, DEVICE, tuple(blocks), group=group)
        places = sorted(each.lease.blocks.index(block) for block in blocks)
        each.lease.wait_for(transfer, *(range(at, at + 1) for at in places))
        each.lease.arrived(transfer, self.now)
        each.tiers[group].update(
            (at, DEVICE) for at, block in enumerate(each.lease.blocks)
            if block in blocks and at in each.tiers[group]
        )  # fmt: skip

    def _elsewhere(self, each: Held) -> list[tuple[int, int]]:
        """Group and position of what the lease holds below the device."""
        return [
            (group, at)
            for group, row in enumerate(each.tiers)
            for at, tier in sorted(row.items())
            if tier != DEVICE
        ]

    @precondition(lambda self: any(each.is_cut for each in self.held))
    @rule(data=st.data(), slides=st.booleans())
    def commit(self, data: st.DataObject, slides: bool) -> None:
        """The engine computed more of the prompt; what moved out of a window may go."""
        each = data.draw(st.sampled_from([each for each in self.held if each.is_cut]))
        lease, first = each.lease, each.lease.num_shared
        end = data.draw(st.integers(first, len(each.path)))
        labels, above = each.path[first:end], lease.blocks[-1] if lease.blocks else None
        for group in range(len(self.reuse_rules)):
            slots = self._slots(len(labels))
            column = column_of(DEVICE, group)
            made = self.index.insert(NS, labels, column, slots, self.now, above, hold=True)
            assert len(made.blocks) == len(labels)
            lease.adopt(made.blocks, DEVICE, group, first)
            each.tiers[group].update((at, DEVICE) for at in range(first, end))
        if slides and self._is_possible(each, end):
            lease.cut(end)
            each.tiers = [
                {at: tier for at, tier in row.items() if at in needed(rule, end)}
                for rule, row in zip(self.reuse_rules, each.tiers, strict=True)
            ]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        each = data.draw(st.sampled_from(self.held))
        self.held.remove(each)
        each.lease.cut(0)
        assert not each.lease.blocks
        assert not any(each.lease.held)

    @rule(data=st.data(), num_blocks=st.integers(1, 8))
    def evict(self, data: st.DataObject, num_blocks: int) -> None:
        """Nothing that somebody holds leaves."""
        group = data.draw(st.integers(0, len(self.reuse_rules) - 1))
        tier = data.draw(st.sampled_from(TIERS))
        leased = {block for block, column in self._leases() if column == Column(tier, group)}
        column = column_of(tier, group)
        chosen = self.index.evict(column, num_blocks)
        assert leased.isdisjoint(chosen)
        self.index.forget_all(chosen, column)

    def _leases(self) -> Counter[tuple[BlockId, Column]]:
        """Return how often each block has to be held in each column."""
        return Counter(
            (each.lease.blocks[at], Column(tier, group))
            for each in self.held
            for group, row in enumerate(each.tiers)
            for at, tier in row.items()
        )

    @invariant()
    def every_column_holds_what_the_leases_need_and_no_more(self) -> None:
        expected = self._leases()
        nodes = self.index.native.nodes() if _hot.NATIVE else self.index.nodes()
        found: Counter[tuple[BlockId, Column]] = Counter()
        for node in nodes:
            for at, residency in enumerate(node.residencies):
                group, tier = divmod(at, len(TIERS))
                if residency.leases:
                    found[node.block, Column(TIERS[tier], group)] = residency.leases
        assert found == expected

    @invariant()
    def leases_say_what_they_hold(self) -> None:
        for each in self.held:
            for row, held in zip(each.tiers, each.lease.held, strict=True):
                assert {at: tier for at, tier in enumerate(held) if tier is not None} == row

    @invariant()
    def counts_add_up(self) -> None:
        self.index.check_invariants()

    def teardown(self) -> None:
        for each in self.held:
            each.lease.cut(0)
        if self.held:
            self.held.clear()
            self.every_column_holds_what_the_leases_need_and_no_more()


def test_leases_over_groups_hold_what_their_cuts_need() -> None:
    run_state_machine_as_test(LeaseMachine, settings=STEPS)


@pytest.fixture
def lease() -> Lease:
    """Return a lease of four blocks on the device: full attention, and a window of two blocks."""
    index = make("python", TIERS, (ALL, ReuseRule(2)))
    for group in (0, 1):
        slots = [Slot(at) for at in range(4)]
        index.insert(NS, [b"a", b"b", b"c", b"d"], column_of(DEVICE, group), slots, 1.0)
    labels = [b"a", b"b", b"c", b"d"]
    return Lease(index, NS, labels, index.match_groups(NS, labels), 2.0)


def test_a_lease_is_cut_to_what_it_has_only(lease: Lease) -> None:
    lease.cut(4)
    assert lease.held == [[DEVICE] * 4, [None, None, DEVICE, DEVICE]]
    with pytest.raises(AssertionError, match="group 1: no cut after 3 blocks"):
        lease.cut(3)
    with pytest.raises(AssertionError, match="group 0: no cut after 5 blocks"):
        lease.cut(5)
    lease.cut(0)


def test_a_lease_adopts_blocks_of_its_own_prompt_in_order(lease: Lease) -> None:
    blocks = list(lease.blocks)
    lease.cut(2)
    lease.adopt(blocks[2:], DEVICE)
    with pytest.raises(AssertionError, match="adopted twice"):
        lease.adopt(blocks[2:], DEVICE, group=0, first=2)
    with pytest.raises(AssertionError, match="of another prompt"):
        lease.adopt(blocks[:1], DEVICE, group=1, first=2)
    lease.adopt(blocks[3:], DEVICE, group=1, first=3)
    assert lease.held[1] == [DEVICE, DEVICE, None, DEVICE]


def test_a_transfer_brings_a_lease_what_it_held_elsewhere_and_no_more() -> None:
    labels, slots = [b"a", b"b", b"c", b"d"], [Slot(at) for at in range(4)]
    index = make("python", TIERS, (ALL, ReuseRule(2)))
    window = Column(DEVICE, 1)
    for column in (DEVICE, Column(HOST, 1)):
        index.insert(NS, labels, column, slots, 1.0)
    lease = Lease(index, NS, labels, index.match_groups(NS, labels), 2.0)
    lease.cut(4)
    index.insert(NS, labels, window, slots, 3.0)
    transfer = Transfer(HOST, DEVICE, tuple(lease.blocks), group=1)
    lease.wait_for(transfer, range(4))
    lease.arrived(transfer, 4.0)
    assert lease.held == [[DEVICE] * 4, [None, None, DEVICE, DEVICE]]
    assert [index.num_leases(block, window) for block in lease.blocks] == [0, 0, 1, 1]
    assert not any(index.num_leases(block, Column(HOST, 1)) for block in lease.blocks)
