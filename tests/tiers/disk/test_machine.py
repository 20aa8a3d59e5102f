"""The tier against a dictionary: stores, loads, restarts and crashes in any order."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.core.types import Slot, Verify
from kvtier.tiers import Outcome
from kvtier.tiers.disk import DiskOptions
from kvtier.tiers.disk.format.records import as_keys
from tests.tiers.disk.harness import ALIGNED, SLOT_BYTES, SMALL, Harness, key, zero

NUM_SLOTS = 6
numbers = st.integers(0, 11)


class DiskMachine(RuleBasedStateMachine):
    """Model of a disk tier across stores, restarts and crashes.

    in_use: slots that the test holds, with the number of the stored block, if any.

    durable: blocks that a restart has to find, without forgotten and overwritten slots.

    lost: slots whose data a crash lost, and whose loss is not detected yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.in_use: dict[Slot, int | None] = {}
        self.on_disk: dict[Slot, int] = {}
        self.order: dict[Slot, int] = {}
        self.lost: set[Slot] = set()
        self.now = 0
        options = DiskOptions(self.folder / "slab", NUM_SLOTS * SLOT_BYTES, bounce_bytes=SLOT_BYTES)
        self.harness = self.open(options)
        self.harness.tier.parts[0].slab.compact_floor = 6

    def open(self, options: DiskOptions) -> Harness:
        return Harness(options, SMALL)

    def teardown(self) -> None:
        self.harness.tier.close()
        shutil.rmtree(self.folder)

    def _newest(self) -> dict[int, Slot]:
        """Return the slot of each block that a restart finds now."""
        newest: dict[int, Slot] = {}
        for slot in sorted(self.on_disk, key=lambda each: self.order[each]):
            newest[self.on_disk[slot]] = slot
        return newest

    @rule(wanted=st.lists(numbers, min_size=1, max_size=4, unique=True))
    def store(self, wanted: list[int]) -> None:
        slots = self.harness.tier.allocate(len(wanted))
        if slots is None:
            assert len(self.in_use) + len(wanted) > NUM_SLOTS
            return
        assert set(slots).isdisjoint(self.in_use)
        assert self.harness.store([key(number) for number in wanted], slots) == [True] * len(wanted)
        for slot, number in zip(slots, wanted, strict=True):
            self.now += 1
            self.in_use[slot], self.on_disk[slot], self.order[slot] = number, number, self.now
            self.lost.discard(slot)

    @precondition(lambda self: self.in_use)
    @rule(data=st.data(), name=numbers)
    def load(self, data: st.DataObject, name: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.in_use)))
        (result,) = self.harness.load([key(name)], [slot])
        is_there = self.in_use[slot] == name
        is_right = is_there and slot not in self.lost
        assert result is (Outcome.THERE if is_right else Outcome.DAMAGED)
        if is_there and not is_right:
            self._dropped(slot)

    def _dropped(self, slot: Slot) -> None:
        """Note that the tier has detected the loss of the block in ``slot``."""
        self.lost.remove(slot)
        del self.on_disk[slot]
        if slot in self.in_use:
            self.in_use[slot] = None

    @precondition(lambda self: self.in_use)
    @rule(data=st.data(), forget=st.booleans())
    def free(self, data: st.DataObject, forget: bool) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.in_use)), unique=True))
        if forget:
            self.harness.tier.forget(slots)
            for slot in slots:
                self.on_disk.pop(slot, None)
        self.harness.tier.free(slots)
        for slot in slots:
            del self.in_use[slot]

    @rule(wanted=st.lists(numbers, max_size=4, unique=True))
    def claim(self, wanted: list[int]) -> None:
        slots = self.harness.claim([key(number) for number in wanted])
        for number, slot in zip(wanted, slots, strict=False):
            assert slot not in self.in_use
            assert self.on_disk[slot] == number
            self.in_use[slot] = number

    @rule(max_bytes=st.integers(0, 3 * SLOT_BYTES))
    def scrub(self, max_bytes: int) -> None:
        tier = self.harness.tier
        slots = list(self.on_disk)
        keys = as_keys([key(number) for number in self.on_disk.values()])
        report = tier.scrub(max_bytes)
        assert report.num_failed == 0
        is_there, _ = tier.fit(keys, np.array(slots, np.int64))
        dropped = [slot for slot, there in zip(slots, is_there.tolist(), strict=True) if not there]
        assert bool(dropped) == bool(report.num_damaged)
        for slot in dropped:
            self._dropped(slot)

    @rule(crash=st.booleans())
    def restart(self, crash: bool) -> None:
        if crash:
            self.harness.crash()
        else:
            self.harness.tier.close()
        self._open()
        for number, slot in self._newest().items():
            assert self.harness.claim([key(number)]) == [slot]
            self.in_use[slot] = number
            is_right = self.harness.load([key(number)], [slot]) == [Outcome.THERE]
            assert is_right == (slot not in self.lost)
            if not is_right:
                self._dropped(slot)

    @rule(data=st.data())
    def crash_that_loses_data(self, data: st.DataObject) -> None:
        """The times of the file are those of a write that never arrived."""
        self.harness.crash()
        slots = st.lists(st.sampled_from(sorted(self.on_disk)), unique=True)
        lost = data.draw(slots) if self.on_disk else []
        zero(self.harness.options.path, lost)
        self.lost.update(lost)
        self._open()

    def _open(self) -> None:
        self.harness.open()
        self.harness.tier.parts[0].slab.compact_floor = 6
        self.in_use.clear()
        newest = self._newest()
        assert self.harness.tier.slots.num_unclaimed == len(newest)
        self.on_disk = {slot: number for number, slot in newest.items()}  # older copies are dropped
        self.lost &= self.on_disk.keys()

    @rule()
    def restart_without_claims(self) -> None:
        self.harness.tier.close()
        self._open()
        assert self.harness.tier.num_free == NUM_SLOTS

    @invariant()
    def counts_agree(self) -> None:
        self.harness.tier.check_invariants()
        assert self.harness.tier.num_free == NUM_SLOTS - len(self.in_use)


class AlignedDiskMachine(DiskMachine):
    """Blocks are transferred directly between disk and memory, and are trusted where possible."""

    def open(self, options: DiskOptions) -> Harness:
        return Harness(replace(options, verify=Verify.OFF), ALIGNED)


class TwoPartMachine(DiskMachine):
    """Blocks cut over two slabs."""

    def open(self, options: DiskOptions) -> Harness:
        paths = options.path, (self.folder / "other",)
        size = 2 * NUM_SLOTS * SLOT_BYTES
        return Harness(DiskOptions(paths[0], size, paths[1], verify=Verify.SAMPLED), SMALL)


TestDiskMachine = DiskMachine.TestCase
TestAlignedDiskMachine = AlignedDiskMachine.TestCase
FEW = settings(stateful_step_count=20, max_examples=min(15, settings.default.max_examples))
TestDiskMachine.settings = settings(
    stateful_step_count=30, max_examples=max(3, settings.default.max_examples // 2)
)
TestAlignedDiskMachine.settings = FEW
TestTwoPartMachine = TwoPartMachine.TestCase
TestTwoPartMachine.settings = FEW
