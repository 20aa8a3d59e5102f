"""Blocks that are cut over several slabs are found only with all of their parts."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.core.errors import ConfigError
from kvtier.tiers import Outcome
from kvtier.tiers.disk import DiskOptions, DiskSystem
from kvtier.tiers.disk.blocks import on_all
from kvtier.tiers.disk.format.superblock import HALF_BYTES
from tests.tiers.disk.faulty_disk import FaultyDisk
from tests.tiers.disk.harness import SMALL, finding, harness, key, open_blocks, spoil

OK, CORRUPT, FAILED = Outcome.THERE, Outcome.DAMAGED, Outcome.FAILED


class OneFaulty(DiskSystem):
    """The second disk has planned faults; the others have none."""

    def __init__(self) -> None:
        self.faults = FaultyDisk()
        self._num_opened = 0

    def open_engine(self, *args: Any) -> Any:
        self._num_opened += 1
        if self._num_opened == 2:
            return self.faults.open_engine(*args)
        return super().open_engine(*args)


def test_each_slab_has_its_own_share_of_every_block(tmp_path: Path) -> None:
    with harness(tmp_path, 16, 2) as here:
        here.put(1)
        size = SMALL.bytes_per_block // 2
        for rank, part in enumerate(here.tier.parts):
            found = part.slab.superblock
            assert (found.rank, found.num_ranks, found.block_bytes) == (rank, 2, size)
        assert here.tier.num_slots == 16


def test_a_block_with_a_part_missing_is_not_there(tmp_path: Path) -> None:
    """The end of one journal is lost: the block is not found, and its slot is free."""
    with harness(tmp_path, 16, 2) as here:
        here.put(1)
        here.put(2)
        here.crash()
        journal = here.options.more_paths[0] / "journal"
        os.truncate(journal, journal.stat().st_size - 64)
        here.open()
        assert here.tier.slots.num_unclaimed == 1
        assert here.tier.num_free == 16
        assert here.get(1, 2) == [OK, CORRUPT]
        here.tier.check_invariants()
        here.put(2)
        here.reopen()
        assert here.get(1, 2) == [OK, OK]


def test_halves_of_two_writes_under_one_key_are_no_block(tmp_path: Path) -> None:
    """One disk has lost the second write of slot 0, which had the same key."""
    with harness(tmp_path, 1, 2) as here:
        here.tier.free(here.put(1))
        journal = here.options.more_paths[0] / "journal"
        kept = journal.stat().st_size
        here.put(1)
        here.crash()
        os.truncate(journal, kept)
        here.open()
        assert here.tier.slots.num_unclaimed == 0
        assert here.get(1) == [CORRUPT]
        here.tier.check_invariants()


def test_numbers_of_writes_that_were_lost_are_not_given_out_again(tmp_path: Path) -> None:
    """Otherwise one number could stand for two writes: a lost one and a new one."""
    with harness(tmp_path, 4, 2) as here:
        here.put(1, 2)
        last = [int(part.slab.table["seq"].max()) for part in here.tier.parts]
        here.crash()
        for path in (here.options.path, *here.options.more_paths):
            os.truncate(path / "journal", 64)
        here.open()
        here.put(3)
        for part, number in zip(here.tier.parts, last, strict=True):
            assert int(part.slab.table["seq"].max()) > number


def test_what_can_not_be_dropped_is_not_found_either(tmp_path: Path) -> None:
    """A half of a block is found while the journal is full: it stays on disk, unused."""
    with harness(tmp_path, 1, 2) as here:
        here.put(1)
        here.crash()
        journal = here.options.more_paths[0] / "journal"
        os.truncate(journal, 64)
        here.system = FullJournal()
        here.open()
        assert here.tier.slots.num_unclaimed == 0
        assert here.get(1) == [CORRUPT]
        here.tier.check_invariants()


class FullJournal(DiskSystem):
    """Writes to a superblock succeed, writes of records fail."""

    def write_at(self, fd: int, data: bytes, offset: int) -> None:
        if len(data) % HALF_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write_at(fd, data, offset)


@pytest.mark.parametrize("part", [0, 1])
def test_damage_in_one_part_loses_the_block(tmp_path: Path, part: int) -> None:
    with harness(tmp_path, 16, 2) as here:
        slots = here.put(1, 2)
        spoil(here.tier.parts[part].options.path, slots[0])
        assert here.load([key(1), key(2)], slots) == [CORRUPT, OK]
        here.tier.free(slots)
        here.reopen()
        assert here.tier.slots.num_unclaimed == 1
        assert here.get(1, 2) == [CORRUPT, OK]


@pytest.mark.parametrize("part", [0, 1])
def test_scrub_sees_damage_in_every_part(tmp_path: Path, part: int) -> None:
    with harness(tmp_path, 16, 2) as here:
        slots = here.put(1, 2)
        here.reopen()
        spoil(here.tier.parts[part].options.path, slots[1])
        report = here.tier.scrub(1 << 20)
        assert report.num_damaged == 1
        assert report.num_checked == 4
        assert here.tier.slots.num_unclaimed == 1
        assert here.get(1, 2) == [OK, CORRUPT]


def test_a_store_that_fails_on_one_disk_leaves_nothing_on_the_others(tmp_path: Path) -> None:
    system = OneFaulty()
    with harness(tmp_path, 16, 2, system=system) as here:
        slots = here.tier.allocate(3)
        system.faults.fail("write", nth=2)
        assert here.store([key(n) for n in (1, 2, 3)], slots) == [True, False, True]
        assert here.tier.slots.num_quarantined == 1
        here.crash()
        here.open()
        assert here.tier.slots.num_unclaimed == 2
        assert here.get(1, 2, 3) == [OK, CORRUPT, OK]


def test_a_read_that_fails_on_one_disk_fails(tmp_path: Path) -> None:
    system = OneFaulty()
    with harness(tmp_path, 16, 2, system=system) as here:
        slots = here.put(1, 2)
        system.faults.fail("read", nth=1)
        assert here.load([key(1), key(2)], slots) == [FAILED, OK]


def test_a_slot_that_is_bad_in_one_part_is_not_given_out_after_a_restart(tmp_path: Path) -> None:
    system = OneFaulty()
    with harness(tmp_path, 4, 2, system=system) as here:
        slots = here.tier.allocate(4)
        system.faults.fail("write", nth=3)
        assert here.store([key(n) for n in range(4)], slots) == [True, True, False, True]
        here.system = None
        here.reopen()
        assert here.tier.slots.num_quarantined == 1
        assert here.tier.num_free == 3
        assert slots[2] not in here.tier.allocate(3)


def test_one_disk_that_fails_again_and_again_stops_the_reads_of_all(tmp_path: Path) -> None:
    system = OneFaulty()
    with harness(tmp_path, 16, 2, system=system, errors_until_off=2) as here:
        slots = here.put(1, 2)
        system.faults.fail("read", nth=1, count=2)
        assert here.load([key(1), key(2)], slots) == [FAILED, FAILED]
        assert not here.tier.can_load
        assert here.load([key(1)], slots[:1]) == [FAILED]
        found = finding(here.tier, "disk tier")
        assert "not read" in found.found
        assert f"{here.options.more_paths[0]} is not read: 2 read errors" in found.note
        here.monotonic.now += 1
        assert here.load([key(1)], slots[:1]) == [OK]
        assert here.tier.can_load


def _twice(path: Path) -> DiskOptions:
    return DiskOptions(path, 1 << 20, (path,))


def _ranks_of_ranks(path: Path) -> DiskOptions:
    return DiskOptions(path, 1 << 20, (path / "other",), rank=1, num_ranks=2)


@pytest.mark.parametrize(
    ("make", "message"), [(_twice, "named twice"), (_ranks_of_ranks, "num_ranks: 2")]
)
def test_paths_that_make_no_sense_are_refused(
    tmp_path: Path, make: Callable[[Path], DiskOptions], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path)


def test_a_block_that_can_not_be_cut_is_refused(tmp_path: Path) -> None:
    options = DiskOptions(tmp_path / "a", 1 << 20, (tmp_path / "b", tmp_path / "c"))
    with pytest.raises(ConfigError, match=f"{SMALL.bytes_per_block} bytes can't be cut into 3"):
        open_blocks(options)
    assert not (tmp_path / "a").exists()


def test_disks_are_given_back_when_another_can_not_be_opened(tmp_path: Path) -> None:
    (tmp_path / "slab 1").touch()
    for message in ("slab 1 can't be created", "slab 1 can't be created"):  # not: is in use
        with pytest.raises(ConfigError, match=message), harness(tmp_path, 16, 2):
            pass
    (tmp_path / "slab 1").unlink()
    with harness(tmp_path, 16, 2) as here:
        here.put(1)


def test_work_on_all_parts_raises_what_one_of_them_raises() -> None:
    def work(rank: int, part: str) -> str:
        if part == "bad":
            raise KeyError(rank)
        return part.upper()

    assert on_all(["a", "b"], work) == ["A", "B"]
    with pytest.raises(KeyError):
        on_all(["a", "bad", "c"], work)
    assert np.array_equal(on_all(["a"], work), ["A"])
