"""A journal that is compacted in slices: no record is lost, whatever happens between two slices."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.types import Slot
from kvtier.tiers import Outcome
from kvtier.tiers.disk import slab as slabs
from kvtier.tiers.disk.format import compaction, journal
from kvtier.tiers.disk.format.records import RECORD, RECORD_BYTES, RecordKind, Records
from kvtier.tiers.disk.format.rows import SlotRows
from kvtier.tiers.disk.inspect.report import report_slab
from tests.tiers.disk.crashing_disk import CrashingDisk, crashes
from tests.tiers.disk.faulty_disk import FaultyDisk
from tests.tiers.disk.harness import Harness, flip, harness, key, records_of
from tests.tiers.disk.lossy_disk import LossyDisk
from tests.tiers.disk.test_crash import churn, claim_all

OK, CORRUPT = Outcome.THERE, Outcome.DAMAGED
NUM_SLOTS = 8


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compact three records at a time, and five with each batch."""
    make_small(monkeypatch)


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (compaction, slabs):
        monkeypatch.setattr(module, "SLICE_RECORDS", 3)
    monkeypatch.setattr(slabs, "STEP_RECORDS", 5)
    monkeypatch.setattr(slabs, "PACE", 2)


def decided(here: Harness) -> Records:
    """Return the journal's record of each slot; zeros for an empty slot."""
    records = records_of(here.options.path, NUM_SLOTS)
    is_live = (records["kind"] == RecordKind.PUT) | (records["kind"] == RecordKind.BAD)
    return np.where(is_live, records, np.zeros(1, RECORD))


def generation(here: Harness) -> int:
    return here.tier.parts[0].slab.superblock.generation


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["process", "power"])
def test_crash_at_every_step_of_a_compaction_that_others_append_to(
    tmp_path: Path, durability: str, small_slices: None
) -> None:
    known: dict[int, Slot] = {}

    def life(here: Harness) -> None:
        here.tier.parts[0].slab.compact_floor = 4
        churn(here, random.Random(3), 9, known)
        assert generation(here) >= 1, "no compaction has ended"

    at, has_crashed = 0, True
    while has_crashed:
        at += 1
        known.clear()
        folder = tmp_path / str(at)
        has_crashed = crashes(folder, NUM_SLOTS, CrashingDisk(at), life, durability=durability)
        with harness(folder, NUM_SLOTS, durability=durability) as here:
            claim_all(here, known)
    assert at > 40, "the life was too short to be interesting"


@given(seed=st.integers(0, 2**32), num_batches=st.integers(1, 30))
def test_new_journal_says_what_the_old_one_said(
    tmp_path_factory: pytest.TempPathFactory, seed: int, num_batches: int
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_small(monkeypatch)
        rng, known = random.Random(seed), dict[int, Slot]()
        with harness(tmp_path_factory.mktemp("slab"), NUM_SLOTS) as here:
            slab = here.tier.parts[0].slab
            slab.compact_floor = 4
            churn(here, rng, num_batches, known)
            before = decided(here)
            slab.compact()
            assert (decided(here) == before).all()
            assert slab.num_dead == 0
            here.crash()
            here.open()
            claim_all(here, known)


@given(seed=st.integers(0, 2**32))
def test_power_cut_during_a_compaction_loses_nothing_in_power_mode(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_small(monkeypatch)
        rng, system, known = random.Random(seed), LossyDisk(), dict[int, Slot]()
        folder = tmp_path_factory.mktemp("slab")
        with harness(folder, NUM_SLOTS, system=system, durability="power") as here:
            for _ in range(3):
                here.tier.parts[0].slab.compact_floor = 4
                churn(here, rng, rng.randint(1, 12), known)
                here.crash()
                system.power_cut(rng)
                here.open()
                claim_all(here, known)


def test_look_up_waits_for_nothing_that_a_compaction_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is free while records are compared with it, and while anything is read or written.

    And what is compared at once is bounded.
    """
    monkeypatch.setattr(compaction, "SLICE_RECORDS", 16)
    num_held: list[int] = []
    decide = SlotRows.decide

    def counted(self: SlotRows, records: Records) -> np.ndarray:
        num_held.append(len(records))
        here.tier.parts[0].slab.look_up(np.arange(3))  # would wait for ever
        return decide(self, records)

    monkeypatch.setattr(SlotRows, "decide", counted)
    system = FaultyDisk()
    with harness(tmp_path, 200, system=system) as here:
        for first in range(0, 150, 50):
            here.put(*range(first, first + 50))
        slab = here.tier.parts[0].slab
        monkeypatch.setattr(system, "write_at", _unlocked(here, system.write_at))
        monkeypatch.setattr(system, "sync", _unlocked(here, system.sync))
        slab.compact()
        assert max(num_held) <= 16
        assert sum(num_held) == 150


def _unlocked(here: Harness, call):  # type: ignore[no-untyped-def]
    def checked(*arguments: object) -> None:
        here.tier.parts[0].slab.look_up(np.arange(3))  # would wait for ever
        call(*arguments)

    return checked


def test_batch_pays_for_a_part_of_a_compaction(tmp_path: Path, small_slices: None) -> None:
    with harness(tmp_path, 32) as here:
        slab = here.tier.parts[0].slab
        slots = here.put(*range(24))
        here.tier.forget(slots[2:])
        here.tier.free(slots[2:])
        slab.compact_floor = 4
        num_steps = 0
        while generation(here) == 0:
            here.tier.free(here.put(100 + num_steps))
            num_steps += 1
        assert num_steps > 5, "it was done in one go"
        here.crash()
        here.open()
        assert here.get(0, 1, 100 + num_steps - 1) == [OK, OK, OK]


def test_compaction_ends_before_the_reserved_room_does() -> None:
    """The constants guarantee it for slabs of any size: see ``journal.PACE``."""
    for num_slots in (10**4, 10**6, 10**8):
        when_due = (1 + journal.DUE_SHARE) * num_slots
        appended = when_due / (journal.PACE - 1)
        assert RECORD_BYTES * (when_due + appended) < journal.max_journal_bytes(num_slots)


def test_records_that_can_not_be_read_back_are_written_from_memory(tmp_path: Path) -> None:
    """They lose their depth, their time and their namespace, but no block is lost."""
    with harness(tmp_path, NUM_SLOTS) as here:
        slots = here.put(1, 2, 3)
        with (here.options.path / "journal").open("r+b") as file:
            file.seek(3 * RECORD_BYTES + 40)
            file.write(b"damage")
        here.tier.parts[0].slab.compact()
        records = decided(here)
        assert (records["kind"][slots] == RecordKind.PUT).all()
        assert (records["namespace"][slots] == 0).sum() == 1
        here.reopen()
        assert here.tier.parts[0].slab.superblock.is_clean is False
        assert here.get(1, 2, 3) == [OK, OK, OK]


def test_what_was_appended_meanwhile_must_be_read_back(tmp_path: Path, small_slices: None) -> None:
    """A damaged appended record ends the compaction, and the old journal stays in use.

    Otherwise the new journal could describe slots by records that are out of date.
    """
    with harness(tmp_path, 32) as here:
        slab = here.tier.parts[0].slab
        slots = here.put(*range(24))
        here.tier.forget(slots[2:20])
        slab.compact_floor = 4
        here.put(50)
        size = slab.journal_bytes
        here.put(51)
        assert slab._compaction is not None, "it was over at once"
        flip(here.options.path / "journal", size)
        while slab._compaction is not None:
            slab.compact_if_due()
        assert generation(here) == 0
        assert (here.options.path / "journal.new").stat().st_size == 0


def test_namespaces_that_are_new_meanwhile_are_in_the_new_journal(
    tmp_path: Path, small_slices: None
) -> None:
    """Also the one of the very last block before the journals change places."""
    with harness(tmp_path, 64) as here:
        slots = here.put(*range(24))
        here.tier.forget(slots[2:20])
        here.tier.parts[0].slab.compact_floor = 4
        names: list[bytes] = []
        while generation(here) == 0:
            names.append(bytes([len(names) + 1]) * 32)
            here.store([key(100 + len(names))], here.allocate(1), namespace=names[-1])
        assert len(names) > 1, "it was done in one go"
        here.tier.close()
        found = {namespace.digest for namespace in report_slab(here.options.path, 0.0).namespaces}
        assert {name.hex() for name in names} <= found


@pytest.mark.parametrize("is_clean", [True, False])
def test_end_in_the_middle_of_a_compaction_leaves_the_old_journal(
    tmp_path: Path, small_slices: None, is_clean: bool
) -> None:
    with harness(tmp_path, 32) as here:
        slots = here.put(*range(24))
        here.tier.forget(slots[2:20])
        here.tier.parts[0].slab.compact_floor = 4
        here.put(50)
        assert os.path.getsize(here.options.path / "journal.new") > 0
        here.tier.close() if is_clean else here.crash()
        here.open()
        assert os.path.getsize(here.options.path / "journal.new") == 0
        assert here.tier.parts[0].slab.superblock.generation == 0
        assert here.get(0, 1, 20, 50, 2) == [OK, OK, OK, OK, CORRUPT]
