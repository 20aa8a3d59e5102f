"""Stored blocks are loaded unchanged; capacity; recovery by a restart."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path
from typing import Any

import pytest

from kvtier.core.errors import ConfigError
from kvtier.core.types import BlockKey, Slot
from kvtier.layout import KVGroup
from kvtier.testing import AllocatorSuite
from kvtier.tiers import Outcome
from kvtier.tiers.disk import DiskBlocks, DiskOptions, Verify
from tests.tiers.disk.harness import (
    ALIGNED,
    SLOT_BYTES,
    SMALL,
    Arena,
    Clock,
    harness,
    key,
    open_blocks,
    spoil,
)

OK, CORRUPT, FAILED = Outcome.THERE, Outcome.DAMAGED, Outcome.FAILED


class TestDiskBlocks(AllocatorSuite):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def make_tier(self, num_slots: int) -> DiskBlocks:
        return open_blocks(DiskOptions(self.path / "slab", num_slots * SLOT_BYTES))


@pytest.mark.parametrize("group", [SMALL, ALIGNED], ids=["padded", "whole pages"])
@pytest.mark.parametrize("shift", [0, 64], ids=["aligned", "anywhere"])
@pytest.mark.parametrize("bounce_bytes", [0, 3 * SLOT_BYTES])
@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_blocks_come_back_as_they_were(
    tmp_path: Path, group: KVGroup, shift: int, bounce_bytes: int, num_parts: int
) -> None:
    settings: Any = {"group": group, "arena": Arena(shift=shift), "bounce_bytes": bounce_bytes}
    with harness(tmp_path, 40, num_parts, **settings) as here:
        slots = here.put(*range(25))
        keys = [key(number) for number in range(25)]
        assert here.load(keys, slots) == [OK] * 25
        here.reopen()
        assert here.tier.slots.num_unclaimed == 25
        assert here.claim(keys) == slots
        assert here.load(keys, slots) == [OK] * 25
        here.tier.check_invariants()


def test_files_are_for_this_user_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with harness(tmp_path) as here:
            here.put(1)
            assert stat.S_IMODE(here.options.path.stat().st_mode) == 0o700
            modes = {
                each.name: stat.S_IMODE(each.stat().st_mode) for each in here.options.path.iterdir()
            }
    finally:
        os.umask(before)
    names = ("data.slab", "journal", "journal.new", "superblock", "trust", "flock")
    assert modes == dict.fromkeys(names, 0o600)


def test_capacity_is_reserved_when_the_slab_is_opened(tmp_path: Path) -> None:
    with harness(tmp_path, 32) as here:
        data = (here.options.path / "data.slab").stat()
        assert data.st_size == 32 * SLOT_BYTES
        assert data.st_blocks * 512 >= 32 * SLOT_BYTES
        for name in ("journal", "journal.new"):
            assert (here.options.path / name).stat().st_blocks * 512 >= 64 * (32 + 4096)


def test_capacity_below_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"4095 bytes.*4096.*raise disk_capacity"):
        open_blocks(DiskOptions(tmp_path / "s", 4095))


@pytest.mark.parametrize(
    ("field", "value"),
    [("capacity_bytes", 0), ("rank", 1), ("rank", -1), ("queue_depth", 0), ("verify", "often"),
     ("io", "pigeon"), ("durability", "god"), ("read_deadline_s", 0.0), ("sample_every", 0)],
)  # fmt: skip
def test_bad_options_name_field_and_value(tmp_path: Path, field: str, value: object) -> None:
    settings: dict[str, object] = {"path": tmp_path, "capacity_bytes": 1 << 20, field: value}
    with pytest.raises(ConfigError, match=f"{field}: .*{value}"):
        DiskOptions(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("slot", [-1, 8, 2**40])
def test_slot_that_the_tier_does_not_have_is_refused(tmp_path: Path, slot: int) -> None:
    with harness(tmp_path, 8) as here:
        here.put(*range(8))
        wrong = [Slot(slot)]
        for work in (
            lambda: here.load([key(7)], wrong),
            lambda: here.store([key(7)], wrong),
            lambda: here.tier.forget(wrong),
        ):
            with pytest.raises(ValueError, match=f"slot {slot} is none of the tier's 8"):
                work()
        here.reopen()
        assert here.get(*range(8)) == [OK] * 8


# -- verification ----------------------------------------------------------------------------------


def test_another_blocks_slot_is_a_miss_and_keeps_its_block(tmp_path: Path) -> None:
    with harness(tmp_path) as here:
        first, second = here.put(1, 2)
        assert here.load([key(1), key(1)], [first, second]) == [OK, CORRUPT]
        assert here.load([key(2)], [second]) == [OK]


@pytest.mark.parametrize("name", [key(1), BlockKey(bytes(32))])
def test_slot_without_a_block_is_a_miss(tmp_path: Path, name: BlockKey) -> None:
    with harness(tmp_path) as here:
        slots = here.allocate(1)
        assert here.tier.load([name], slots, here.pieces(1)) == [CORRUPT]


@pytest.mark.parametrize("verify", Verify)
def test_after_a_crash_every_block_is_verified_at_least_once(
    tmp_path: Path, verify: Verify
) -> None:
    with harness(tmp_path, verify=verify) as here:
        slots = here.put(*range(8))
        here.crash()
        spoil(here.options.path, slots[3])
        here.open()
        assert here.get(*range(8)) == [OK] * 3 + [CORRUPT] + [OK] * 4


def test_sampled_verification_looks_at_one_in_so_many(tmp_path: Path) -> None:
    with harness(tmp_path, verify="sampled", sample_every=4) as here:
        slots = here.put(*range(8))
        for slot in slots:
            spoil(here.options.path, slot)
        results = here.tier.load([key(number) for number in range(8)], slots, here.pieces(8))
        assert results == [CORRUPT, OK, OK, OK] * 2


# -- restarts --------------------------------------------------------------------------------------


def test_claim_takes_the_longest_leading_run_once(tmp_path: Path) -> None:
    with harness(tmp_path) as here:
        slots = here.put(0, 1, 2, 3)
        assert here.tier.slots.num_unclaimed == 0
        here.reopen()
        keys = [key(number) for number in range(4)]
        assert here.tier.slots.num_unclaimed == 4
        assert here.claim([key(9), *keys]) == []
        assert here.claim([*keys[:2], key(9), *keys[2:]]) == slots[:2]
        assert here.claim(keys) == []
        assert here.claim(keys[2:]) == slots[2:]
        assert here.tier.slots.num_unclaimed == 0
        assert here.tier.num_free == 12
        assert here.claim([]) == []


def test_unclaimed_blocks_make_room_oldest_first_deepest_first(tmp_path: Path) -> None:
    clock = Clock()
    with harness(tmp_path, 6, clock=clock) as here:
        old = here.put(0, 1, 2)
        clock.now += 3600
        young = here.put(3, 4, 5)
        here.reopen()
        assert here.tier.num_free == 6
        dropped = []
        for _ in range(6):
            slots = here.allocate(1)
            dropped += slots
        assert dropped == [*reversed(old), *reversed(young)]
        assert here.tier.allocate(1) is None


def test_free_slots_go_before_unclaimed_blocks(tmp_path: Path) -> None:
    with harness(tmp_path, 6) as here:
        slots = here.put(0, 1, 2)
        here.reopen()
        fresh = here.allocate(3)
        assert set(fresh).isdisjoint(slots)
        assert here.tier.slots.num_unclaimed == 3
        assert here.claim([key(0)]) == slots[:1]
        assert here.tier.allocate(3) is None
        last = here.allocate(2)
        assert set(last) == set(slots[1:])
        here.tier.check_invariants()


def test_freed_and_not_overwritten_block_is_found_after_a_restart(tmp_path: Path) -> None:
    with harness(tmp_path) as here:
        slots = here.put(1, 2)
        here.tier.free(slots)
        here.reopen()
        assert here.get(1, 2) == [OK, OK]


def test_forgotten_block_is_not_found_after_a_restart(tmp_path: Path) -> None:
    with harness(tmp_path) as here:
        slots = here.put(1, 2)
        here.tier.forget(slots[:1])
        here.tier.free(slots)
        here.crash()
        here.open()
        assert here.get(1, 2) == [CORRUPT, OK]


def test_overwritten_block_is_not_found_after_a_restart(tmp_path: Path) -> None:
    with harness(tmp_path, 1) as here:
        here.tier.free(here.put(1))
        here.put(2)
        here.crash()
        here.open()
        assert here.get(1, 2) == [CORRUPT, OK]


def test_of_two_slots_with_one_key_the_later_one_counts(tmp_path: Path) -> None:
    with harness(tmp_path, 4) as here:
        first = here.put(1)
        second = here.put(1)
        here.tier.free(first)
        here.reopen()
        assert here.tier.slots.num_unclaimed == 1
        assert here.claim([key(1)]) == second
        assert here.load([key(1)], second) == [OK]
        rest = here.allocate(3)
        assert first[0] in rest
        here.tier.check_invariants()


@pytest.mark.parametrize("slots_after", [3, 40])
def test_slab_grows_and_shrinks_with_its_capacity(tmp_path: Path, slots_after: int) -> None:
    with harness(tmp_path, 8) as here:
        slots = here.put(*range(8))
        here.reopen(capacity_bytes=slots_after * SLOT_BYTES)
        assert here.tier.num_slots == here.tier.num_free == slots_after
        kept = min(slots_after, 8)
        assert (here.options.path / "data.slab").stat().st_size == slots_after * SLOT_BYTES
        here.reopen(capacity_bytes=8 * SLOT_BYTES)  # what was cut off does not come back
        assert here.tier.slots.num_unclaimed == kept
        there = [number for number, slot in enumerate(slots) if slot < kept]
        assert here.get(*there) == [OK] * kept


def test_used_slab_keeps_its_namespaces_and_journal_short(tmp_path: Path) -> None:
    """After any number of writes, the journal has about as many records as there are slots."""
    with harness(tmp_path, 8) as here:
        here.tier.parts[0].slab.compact_floor = 32
        rng = random.Random(3)
        in_use: dict[int, Slot] = {}
        for number in range(400):
            if len(in_use) == 8:
                here.tier.free([in_use.pop(rng.choice(sorted(in_use)))])
            slots = here.allocate(1)
            assert here.store([key(number)], slots, namespace=bytes([number % 50]) * 32) == [True]
            in_use[number] = slots[0]
            assert (here.options.path / "journal").stat().st_size < 64 * 150
        here.crash()
        here.open()
        assert here.get(*sorted(in_use)) == [OK] * 8


# -- scrub -----------------------------------------------------------------------------------------


def test_scrub_finds_damage_round_robin(tmp_path: Path) -> None:
    with harness(tmp_path) as here:
        slots = here.put(*range(6))
        spoil(here.options.path, slots[4])
        reports = [here.tier.scrub(2 * SLOT_BYTES) for _ in range(4)]
        assert [report.num_checked for report in reports] == [2, 2, 2, 2]
        assert [report.num_damaged for report in reports] == [0, 0, 1, 0]
        assert here.load([key(4)], slots[4:5]) == [CORRUPT]
        assert here.tier.scrub(1 << 30).num_checked == 5
        here.tier.forget(slots)
        assert here.tier.scrub(1 << 30).num_checked == 0


def test_new_file_system_with_lost_found_is_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    open_blocks(tmp_path).close()
    assert (tmp_path / "superblock").exists()
