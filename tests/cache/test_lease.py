"""Leases, against a model of the blocks that each must hold in every tier."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier.cache.lease import Lease
from kvtier.cache.transfer import Transfer
from kvtier.core import hot
from kvtier.core.types import DEVICE, HOST, BlockId, Slot
from kvtier.index import State
from tests.index.indexes import Both, make
from tests.index.test_index_machine import STEPS

TIERS = (DEVICE, HOST)
NS = b"namespace"

paths = st.lists(st.sampled_from([b"a", b"b"]), min_size=1, max_size=6).map(tuple)


@dataclass
class Held:
    """Blocks that a lease must hold, with the tier of each position."""

    lease: Lease
    path: tuple[bytes, ...]
    tiers: list[str]


class LeaseMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index: Any = Both(TIERS) if hot.NATIVE else make("python", TIERS)
        self.held: list[Held] = []
        self.now = 0.0
        self.next_slot = 0

    def _slots(self, num: int) -> list[Slot]:
        self.next_slot += num
        return [Slot(self.next_slot - num + at) for at in range(num)]

    @rule(path=paths, tier=st.sampled_from(TIERS))
    def fill(self, path: tuple[bytes, ...], tier: str) -> None:
        self.now += 1
        self.index.insert(NS, path, tier, self._slots(len(path)), self.now)

    @rule(path=paths)
    def lease(self, path: tuple[bytes, ...]) -> None:
        """Lease all blocks that are found."""
        match = self.index.match(NS, path)
        lease = Lease(self.index, NS, path, match, self.now)
        self.held.append(Held(lease, path, list(match.tiers)))
        assert lease.num_shared == match.num_blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        cut = data.draw(st.integers(0, len(held.tiers)))
        held.lease.cut(cut)
        del held.tiers[cut:]
        assert held.lease.num_shared == cut

    @precondition(lambda self: any(HOST in held.tiers for held in self.held))
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        """A transfer to the device completes. From then on the lease holds the blocks there."""
        held = data.draw(st.sampled_from([held for held in self.held if HOST in held.tiers]))
        places = [at for at, tier in enumerate(held.tiers) if tier == HOST]
        if data.draw(st.booleans(), label="with blocks that it holds on the device"):
            places = list(range(len(held.tiers)))
        blocks = [held.lease.blocks[at] for at in places]
        for block in blocks:
            if self.index.state(block, DEVICE) is State.ABSENT:
                self.index.begin_write([block], DEVICE, self._slots(1))
                self.index.commit([block], DEVICE, self.now)
        transfer = Transfer(HOST, DEVICE, tuple(blocks))
        held.lease.wait_for(transfer, *(range(at, at + 1) for at in places))
        held.lease.arrived(transfer, self.now)
        held.tiers = [DEVICE if at in places else tier for at, tier in enumerate(held.tiers)]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """Commit the rest of the prompt, which the engine has computed."""
        held = data.draw(st.sampled_from(self.held))
        lease, first = held.lease, held.lease.num_shared
        labels, above = held.path[first:], lease.blocks[-1] if lease.blocks else None
        slots = self._slots(len(labels))
        made = self.index.insert(NS, labels, DEVICE, slots, self.now, above, hold=True)
        assert len(made.blocks) == len(labels)
        lease.append(made.blocks, DEVICE)
        held.tiers += [DEVICE] * len(labels)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        self.held.remove(held)
        held.lease.cut(0)
        assert not held.lease.blocks
        assert not held.lease.held

    @rule(tier=st.sampled_from(TIERS), num_blocks=st.integers(1, 8))
    def evict(self, tier: str, num_blocks: int) -> None:
        leased = {block for block, place in self._leases() if place == tier}
        chosen = self.index.evict(tier, num_blocks)
        assert leased.isdisjoint(chosen)
        self.index.forget(chosen, tier)

    def _leases(self) -> Counter[tuple[BlockId, str]]:
        """Return how often each block has to be held in each tier."""
        return Counter(
            (block, tier)
            for held in self.held
            for block, tier in zip(held.lease.blocks, held.tiers, strict=True)
        )

    @invariant()
    def every_tier_holds_what_the_leases_need_and_no_more(self) -> None:
        nodes = self.index.native.nodes() if hot.NATIVE else self.index.nodes()
        found: Counter[tuple[BlockId, str]] = Counter()
        for node in nodes:
            for tier, residency in zip(TIERS, node.residencies, strict=True):
                if residency.leases:
                    found[node.block, tier] = residency.leases
        assert found == self._leases()

    @invariant()
    def leases_report_what_they_hold(self) -> None:
        assert [held.lease.held for held in self.held] == [held.tiers for held in self.held]
        assert [held.lease.hit_blocks for held in self.held] == [
            Counter(held.tiers) for held in self.held
        ]

    @invariant()
    def counts_add_up(self) -> None:
        self.index.check_invariants()

    def teardown(self) -> None:
        for held in self.held:
            held.lease.cut(0)
        if self.held:
            self.held.clear()
            self.every_tier_holds_what_the_leases_need_and_no_more()


def test_leases_hold_what_their_cuts_need() -> None:
    run_state_machine_as_test(LeaseMachine, settings=STEPS)


def test_a_lease_is_not_cut_behind_its_end() -> None:
    index, labels = make("python", TIERS), [b"a", b"b"]
    index.insert(NS, labels, DEVICE, [Slot(0), Slot(1)], 1.0)
    lease = Lease(index, NS, labels, index.match(NS, labels), 2.0)
    with pytest.raises(AssertionError, match="a prefix of 2 blocks"):
        lease.cut(3)
    lease.cut(0)
