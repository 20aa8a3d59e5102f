"""A disk that fails: misses and refusals, never a wrong byte, never an exception, no slot lost."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from kvtier.core.types import BlockName
from kvtier.tiers import Outcome, Pieces
from tests.tiers.disk.faulty_disk import FaultyDisk
from tests.tiers.disk.harness import ALIGNED, SLOT_BYTES, Harness, harness, key, zero

OK, CORRUPT, FAILED = Outcome.THERE, Outcome.DAMAGED, Outcome.FAILED


def all_slots_accounted_for(here: Harness, num_in_use: int) -> None:
    tier = here.tier
    tier.check_invariants()
    assert tier.num_free + num_in_use + tier.slots.num_quarantined == tier.num_slots


# -- reads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", range(1, 6))
def test_read_error_is_a_failed_load_and_its_slot_is_not_used_again(
    tmp_path: Path, nth: int
) -> None:
    system = FaultyDisk()
    with harness(tmp_path, 8, system=system) as here:
        slots = here.put(*range(5))
        keys = [key(number) for number in range(5)]
        system.fail("read", nth)
        assert here.load(keys, slots) == [FAILED if at == nth - 1 else OK for at in range(5)]
        here.tier.free(slots)
        assert here.tier.slots.num_quarantined == 1
        all_slots_accounted_for(here, 0)
        rest = here.allocate(7)
        assert slots[nth - 1] not in rest
        assert here.tier.allocate(1) is None
        here.tier.free(rest)
        here.reopen()
        assert here.tier.slots.num_quarantined == 1
        assert here.tier.num_free == 7
        assert key(nth - 1) not in {name for name in keys if here.claim([name])}


def test_late_read_fails_and_leaves_its_slot_in_use(tmp_path: Path) -> None:
    system = FaultyDisk()
    with harness(tmp_path, system=system, errors_until_off=1) as here:
        slots = here.put(1)
        system.fail("read", code=errno.ETIMEDOUT)
        assert here.load([key(1)], slots) == [FAILED]
        assert here.tier.slots.num_quarantined == 0
        assert here.tier.can_load
        assert here.load([key(1)], slots) == [OK]


@pytest.mark.parametrize("num_bytes", [0, 512, SLOT_BYTES - 512])
def test_short_read_is_a_miss(tmp_path: Path, num_bytes: int) -> None:
    system = FaultyDisk()
    with harness(tmp_path, system=system, verify="off") as here:
        slots = here.put(1, 2)
        system.cut_short("read", 1, num_bytes)
        assert here.load([key(1), key(2)], slots) == [CORRUPT, OK]
        assert here.load([key(1)], slots[:1]) == [CORRUPT]
        here.tier.free(slots)
        all_slots_accounted_for(here, 0)


@pytest.mark.parametrize("operation", ["read", "write"])
def test_flipped_byte_is_a_miss(tmp_path: Path, operation: str) -> None:
    system = FaultyDisk()
    with harness(tmp_path, system=system) as here:
        system.flip(operation, 2)
        slots = here.put(1, 2, 3)
        assert here.load([key(1), key(2), key(3)], slots) == [OK, CORRUPT, OK]


# -- writes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", range(1, 6))
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ETIMEDOUT])
def test_failed_write_is_not_acknowledged_and_not_found(
    tmp_path: Path, nth: int, code: int
) -> None:
    system = FaultyDisk()
    with harness(tmp_path, 8, system=system) as here:
        slots = here.allocate(5)
        system.fail("write", nth, code)
        keys = [key(number) for number in range(5)]
        right = [at != nth - 1 for at in range(5)]
        assert here.store(keys, slots) == right
        assert here.load(keys, slots) == [OK if ok else CORRUPT for ok in right]
        here.tier.free(slots)
        assert here.tier.slots.num_quarantined == (code == errno.EIO)
        all_slots_accounted_for(here, 0)
        here.crash()
        here.open()
        assert here.get(*range(5)) == [OK if ok else CORRUPT for ok in right]


def test_short_write_is_not_acknowledged_and_not_found(tmp_path: Path) -> None:
    system = FaultyDisk()
    with harness(tmp_path, system=system, group=ALIGNED) as here:
        slots = here.allocate(2)
        system.cut_short("write", 1)
        assert here.store([key(1), key(2)], slots) == [False, True]
        here.crash()
        here.open()
        assert here.get(1, 2) == [CORRUPT, OK]


def test_block_that_was_overwritten_half_way_does_not_come_back(tmp_path: Path) -> None:
    system = FaultyDisk()
    with harness(tmp_path, 1, system=system) as here:
        here.tier.free(here.put(1))
        slots = here.allocate(1)
        system.cut_short("write")
        assert here.store([key(2)], slots) == [False]
        here.reopen(verify="off")
        assert here.get(1, 2) == [CORRUPT, CORRUPT]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("nth", [1, 2])
def test_journal_that_can_not_grow_refuses_the_batch(tmp_path: Path, code: int, nth: int) -> None:
    """The first append names the overwritten slots, the second one the written blocks."""
    system = FaultyDisk()
    with harness(tmp_path, 2, system=system) as here:
        here.tier.free(here.put(1, 2))
        slots = here.allocate(2)
        system.fail("journal", nth, code)
        assert here.store([key(3), key(4)], slots) == [False, False]
        here.tier.free(slots)
        here.put(5, 6)
        all_slots_accounted_for(here, 2)
        here.crash()
        here.open()
        assert here.get(3, 4, 5, 6) == [CORRUPT, CORRUPT, OK, OK]


def refuse(*_: object) -> None:
    raise OSError(errno.EROFS, "read-only file system")


def test_journal_that_can_not_be_cut_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No record is appended behind the remains of a failed append."""
    system = FaultyDisk()
    with harness(tmp_path, 8, system=system) as here:
        here.put(1)
        before = (here.options.path / "journal").stat().st_ino
        with monkeypatch.context() as patch:
            patch.setattr(system, "truncate", refuse)
            system.fail("journal")
            slots = here.allocate(1)
            assert here.store([key(2)], slots) == [False]
        assert here.store([key(3)], slots) == [True]
        assert (here.options.path / "journal").stat().st_ino != before
        here.crash()
        here.open()
        assert here.get(1, 2, 3) == [OK, CORRUPT, OK]


def test_journal_that_can_not_be_begun_anew_stops_the_writes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = FaultyDisk()
    with harness(tmp_path, 8, system=system, errors_until_off=3) as here:
        kept = here.put(1)
        slots = here.allocate(3)
        with monkeypatch.context() as patch:
            patch.setattr(system, "truncate", refuse)
            patch.setattr(system, "replace", refuse)
            system.fail("journal")
            for number, slot in enumerate(slots):
                assert here.tier.can_store
                assert here.store([key(number)], [slot]) == [False]
        assert not here.tier.can_store
        assert here.load([key(1)], kept) == [OK]
        here.monotonic.now += 1
        assert here.store([key(5)], slots[:1]) == [True]
        assert here.tier.can_store
        here.reopen()
        assert here.get(1, 5) == [OK, OK]


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_failed_sync_is_not_acknowledged_and_no_later_close_is_believed(
    tmp_path: Path, nth: int
) -> None:
    """The kernel reports a lost write once, and does not name the block."""
    system = FaultyDisk()
    settings: Any = {"durability": "power", "verify": "off", "errors_until_off": 2}
    with harness(tmp_path, 4, system=system, **settings) as here:
        here.tier.free(here.put(1, 2, 3, 4)[:2])
        slots = here.allocate(2)
        system.fail("sync", nth)
        assert here.store([key(5), key(6)], slots) == [False, False]
        here.monotonic.now += 1
        assert here.store([key(5), key(6)], slots) == [True, True]
        assert here.load([key(5), key(6)], slots) == [OK, OK]
        here.tier.close()
        zero(here.options.path, range(4))
        here.open()
        assert here.get(3, 4, 5, 6) == [CORRUPT] * 4


# -- at the same time ------------------------------------------------------------------------------


def test_load_does_not_wait_for_a_store(tmp_path: Path) -> None:
    system = FaultyDisk()
    with harness(tmp_path, system=system) as here:
        slots = here.put(1)
        more = here.allocate(1)
        system.hold("write")
        name = BlockName(b"n" * 32, 0, key(1))
        to = Pieces.whole([here.arena.address(10)], here.num_bytes)
        writer = Thread(target=here.tier.store, args=([name], more, to))
        writer.start()
        try:
            assert here.load([key(1)], slots) == [OK]
            assert here.tier.allocate(3) is not None
        finally:
            system.release("write")
            writer.join()


def test_scrub_does_not_judge_a_slot_that_is_rewritten_meanwhile(tmp_path: Path) -> None:
    """The scrub looked up the old block, and reads the bytes of the new one."""
    system = RewritingDisk()
    with harness(tmp_path, 2, system=system) as here:
        slots = here.put(1)
        system.before_read = lambda: here.store([key(2)], slots)
        assert here.tier.scrub(1 << 20).num_damaged == 0
        assert here.load([key(2)], slots) == [OK]
        here.crash()
        here.open()
        assert here.get(2) == [OK]


def test_a_slot_that_is_found_bad_while_it_is_written_stays_so(tmp_path: Path) -> None:
    """A finding made after the block's number was taken is newer than the block."""
    system = RewritingDisk()
    with harness(tmp_path, 4, system=system) as here:
        slots = here.allocate(2)
        slab = here.tier.parts[0].slab
        system.before_write = lambda: slab.mark_bad(np.array(slots[:1], np.int64))
        assert here.store([key(1), key(2)], slots) == [False, True]
        assert here.load([key(1), key(2)], slots) == [CORRUPT, OK]
        here.crash()
        here.open()
        assert here.tier.slots.num_quarantined == 1
        assert here.get(1, 2) == [CORRUPT, OK]


class RewritingDisk(FaultyDisk):
    """Calls a function before the first read, and another one before the first write."""

    before_read: Callable[[], object] = staticmethod(lambda: None)
    before_write: Callable[[], object] = staticmethod(lambda: None)

    def wait(self, operation: str) -> None:
        if operation == "read":
            first, self.before_read = self.before_read, lambda: None
            first()
        elif operation == "write":
            first, self.before_write = self.before_write, lambda: None
            first()
        super().wait(operation)
