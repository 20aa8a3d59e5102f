"""Conformance suite of memory tiers."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import pytest

from kvtier.core.types import Slot
from kvtier.devices.base import CopyBatch, Device, Direction, Finding
from kvtier.testing.memory import host_memory, memory_bytes
from kvtier.tiers.base import MemoryTier, SlotAllocator


def _allocate(tier: SlotAllocator, num_slots: int) -> Sequence[Slot]:
    """Allocate slots, of which there are enough."""
    slots = tier.allocate(num_slots)
    assert slots is not None
    return slots


class AllocatorSuite(ABC):
    """Conformance suite of ``SlotAllocator``: allocate and free slots. Implement ``make_tier``."""

    @abstractmethod
    def make_tier(self, num_slots: int) -> SlotAllocator:
        """Make a tier with exactly ``num_slots`` free slots."""

    def test_new_tier_is_empty(self) -> None:
        tier = self.make_tier(5)
        assert tier.num_slots == tier.num_free == 5
        tier.close()

    def test_capacity_is_a_hard_bound(self) -> None:
        tier = self.make_tier(4)
        slots = _allocate(tier, 4)
        assert sorted(slots) == [0, 1, 2, 3]
        assert tier.num_free == 0
        assert tier.allocate(1) is None
        tier.free(slots)
        tier.close()

    def test_refusal_takes_nothing(self) -> None:
        tier = self.make_tier(4)
        assert tier.allocate(5) is None
        assert tier.num_free == 4
        taken = _allocate(tier, 3)
        assert tier.allocate(2) is None
        assert tier.num_free == 1
        tier.free(taken)
        tier.close()

    def test_nothing_can_be_asked_for(self) -> None:
        tier = self.make_tier(1)
        assert tier.allocate(0) == []
        tier.free([])
        assert tier.num_free == 1
        tier.close()

    def test_fewer_slots_than_none_are_refused(self) -> None:
        tier = self.make_tier(3)
        with pytest.raises(ValueError, match="-2"):
            tier.allocate(-2)
        assert tier.num_free == 3
        slots = _allocate(tier, 3)
        tier.free(slots)
        tier.close()

    def test_neighbours_are_preferred(self) -> None:
        """An empty tier has a run of any length."""
        tier = self.make_tier(16)
        slots = _allocate(tier, 7)
        assert slots == list(range(slots[0], slots[0] + 7))
        tier.free(slots)
        tier.close()

    @pytest.mark.parametrize("slot", [-1, 3, 2**40])
    def test_freeing_what_the_tier_does_not_have_is_noticed(self, slot: int) -> None:
        tier = self.make_tier(3)
        slots = _allocate(tier, 3)
        with pytest.raises(ValueError, match=str(slot)):
            tier.free([Slot(slot)])
        assert tier.num_free == 0
        tier.free(slots)
        tier.close()

    def test_freeing_twice_is_noticed(self) -> None:
        tier = self.make_tier(3)
        slots = _allocate(tier, 2)
        tier.free(slots)
        with pytest.raises(AssertionError):
            tier.free(slots)
        assert tier.num_free == 3
        tier.close()

    def test_freeing_twice_in_one_call_is_noticed(self) -> None:
        tier = self.make_tier(3)
        slots = _allocate(tier, 1)
        with pytest.raises(AssertionError):
            tier.free([*slots, *slots])
        assert tier.num_free == 2
        tier.free(slots)
        tier.close()

    @pytest.mark.parametrize("seed", range(10))
    def test_no_slot_is_given_out_twice_or_lost(self, seed: int) -> None:
        rng = random.Random(seed)
        tier = self.make_tier(12)
        in_use: set[Slot] = set()
        for _ in range(200):
            if rng.random() < 0.5:
                wanted = rng.randrange(8)
                slots = tier.allocate(wanted)
                assert (slots is None) == (wanted > 12 - len(in_use))
                if slots is not None:
                    assert len(slots) == wanted
                    assert in_use.isdisjoint(slots)
                    assert all(0 <= slot < 12 for slot in slots)
                    in_use.update(slots)
            else:
                back = rng.sample(sorted(in_use), rng.randrange(len(in_use) + 1))
                tier.free(back)
                in_use.difference_update(back)
            assert tier.num_free == 12 - len(in_use)
        tier.free(sorted(in_use))
        tier.close()


class MemoryTierSuite(AllocatorSuite):
    """Conformance suite of memory tiers, with the device that copies to and from them."""

    @abstractmethod
    def make_tier(self, num_slots: int) -> MemoryTier:
        """Make a tier with exactly ``num_slots`` free slots."""

    @abstractmethod
    def make_device(self) -> Device:
        """Make the device that can copy to and from the tier's memory."""

    def test_tier_has_a_name_and_findings(self) -> None:
        tier = self.make_tier(2)
        assert tier.name
        findings = tier.findings()
        assert findings
        assert all(isinstance(line, Finding) for line in findings)
        tier.close()

    def test_layout_fits_the_memory(self) -> None:
        tier = self.make_tier(6)
        assert tier.layout.num_blocks == tier.num_slots
        assert tier.layout.nbytes <= tier.memory.nbytes
        assert tier.layout.nbytes == 6 * tier.layout.group.bytes_per_block
        tier.close()

    @pytest.mark.parametrize("slot", [-1, 6, 2**40])
    def test_memory_that_the_tier_does_not_have_has_no_address(self, slot: int) -> None:
        tier = self.make_tier(6)
        with pytest.raises(ValueError, match=str(slot)):
            tier.pieces([Slot(0), Slot(slot)])
        tier.close()

    def test_memory_holds_what_was_copied_into_it(self) -> None:
        tier, device = self.make_tier(6), self.make_device()
        nbytes = tier.layout.nbytes
        sent, received = host_memory(nbytes), host_memory(nbytes)
        memory_bytes(sent)[:] = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
        start, size = np.zeros(1, np.int64), np.array([nbytes], np.int64)
        device.copy(CopyBatch(sent, tier.memory, start, start, size), Direction.LOAD)
        device.copy(CopyBatch(tier.memory, received, start, start, size), Direction.STORE)
        np.testing.assert_array_equal(memory_bytes(received), memory_bytes(sent))
        tier.close()
