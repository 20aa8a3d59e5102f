"""A disk that fails: misses and refusals, never a wrong byte, never an exception, no slot lost."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from kvtier.testing import FaultyDisk
from kvtier.tiers import Outcome, Pieces
from kvtier.types import BlockName
from tests.disk.world import ALIGNED, SLOT_BYTES, World, key, world

OK, DAMAGED, FAILED = Outcome.THERE, Outcome.DAMAGED, Outcome.FAILED


def all_slots_accounted_for(here: World, num_in_use: int) -> None:
    tier = here.tier
    tier.check_invariants()
    if not tier.is_off:
        assert tier.num_free + num_in_use + tier.num_quarantined == tier.num_slots


# -- reads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", range(1, 6))
def test_read_error_is_a_failed_load_and_its_slot_is_not_used_again(
    tmp_path: Path, nth: int
) -> None:
    system = FaultyDisk()
    with world(tmp_path, 8, system=system) as here:
        slots = here.put(*range(5))
        keys = [key(number) for number in range(5)]
        system.fail("read", nth)
        assert here.load(keys, slots) == [FAILED if at == nth - 1 else OK for at in range(5)]
        here.tier.free(slots)
        assert here.tier.num_quarantined == 1
        all_slots_accounted_for(here, 0)
        rest = here.tier.allocate(7)
        assert rest is not None
        assert slots[nth - 1] not in rest
        assert here.tier.allocate(1) is None
        here.tier.free(rest)
        here.reopen()
        assert here.tier.num_quarantined == 1
        assert here.tier.num_free == 7
        assert key(nth - 1) not in {name for name in keys if here.tier.claim([name])}


def test_late_read_fails_and_leaves_its_slot_in_use(tmp_path: Path) -> None:
    system = FaultyDisk()
    with world(tmp_path, system=system, errors_until_off=1) as here:
        slots = here.put(1)
        system.fail("read", code=errno.ETIMEDOUT)
        assert here.load([key(1)], slots) == [FAILED]
        assert here.tier.num_quarantined == 0
        assert not here.tier.is_off
        assert here.load([key(1)], slots) == [OK]


@pytest.mark.parametrize("num_bytes", [0, 512, SLOT_BYTES - 512])
def test_short_read_is_a_miss(tmp_path: Path, num_bytes: int) -> None:
    system = FaultyDisk()
    with world(tmp_path, system=system, verify="off") as here:
        slots = here.put(1, 2)
        system.cut_short("read", 1, num_bytes)
        assert here.load([key(1), key(2)], slots) == [DAMAGED, OK]
        assert here.load([key(1)], slots[:1]) == [DAMAGED]
        here.tier.free(slots)
        all_slots_accounted_for(here, 0)


@pytest.mark.parametrize("operation", ["read", "write"])
def test_flipped_byte_is_a_miss(tmp_path: Path, operation: str) -> None:
    system = FaultyDisk()
    with world(tmp_path, system=system) as here:
        system.flip(operation, 2)
        slots = here.put(1, 2, 3)
        assert here.load([key(1), key(2), key(3)], slots) == [OK, DAMAGED, OK]


# -- writes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", range(1, 6))
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ETIMEDOUT])
def test_failed_write_is_not_acknowledged_and_not_found(
    tmp_path: Path, nth: int, code: int
) -> None:
    system = FaultyDisk()
    with world(tmp_path, 8, system=system) as here:
        slots = here.tier.allocate(5)
        assert slots is not None
        system.fail("write", nth, code)
        keys = [key(number) for number in range(5)]
        right = [at != nth - 1 for at in range(5)]
        assert here.store(keys, slots) == right
        assert here.load(keys, slots) == [OK if ok else DAMAGED for ok in right]
        here.tier.free(slots)
        assert here.tier.num_quarantined == (code == errno.EIO)
        all_slots_accounted_for(here, 0)
        here.crash()
        here.open()
        assert here.get(*range(5)) == [OK if ok else DAMAGED for ok in right]


def test_short_write_is_not_acknowledged_and_not_found(tmp_path: Path) -> None:
    system = FaultyDisk()
    with world(tmp_path, system=system, group=ALIGNED) as here:
        slots = here.tier.allocate(2)
        assert slots is not None
        system.cut_short("write", 1)
        assert here.store([key(1), key(2)], slots) == [False, True]
        here.crash()
        here.open()
        assert here.get(1, 2) == [DAMAGED, OK]


def test_block_that_was_overwritten_half_way_does_not_come_back(tmp_path: Path) -> None:
    system = FaultyDisk()
    with world(tmp_path, 1, system=system) as here:
        here.tier.free(here.put(1))
        slots = here.tier.allocate(1)
        assert slots is not None
        system.cut_short("write")
        assert here.store([key(2)], slots) == [False]
        here.reopen(verify="off")
        assert here.get(1, 2) == [DAMAGED, DAMAGED]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("nth", [1, 2])
def test_journal_that_can_not_grow_refuses_the_batch(tmp_path: Path, code: int, nth: int) -> None:
    """The first append says what is overwritten, the second what was written."""
    system = FaultyDisk()
    with world(tmp_path, 2, system=system) as here:
        here.tier.free(here.put(1, 2))
        slots = here.tier.allocate(2)
        assert slots is not None
        system.fail("journal", nth, code)
        assert here.store([key(3), key(4)], slots) == [False, False]
        here.tier.free(slots)
        here.put(5, 6)
        all_slots_accounted_for(here, 2)
        here.crash()
        here.open()
        assert here.get(3, 4, 5, 6) == [DAMAGED, DAMAGED, OK, OK]


def test_journal_that_can_not_be_mended_is_not_written_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = FaultyDisk()

    def refuse(fd: int, num_bytes: int) -> None:
        raise OSError(errno.EROFS, "read-only file system")

    with world(tmp_path, 8, system=system, errors_until_off=3) as here:
        here.put(1)
        monkeypatch.setattr(system, "truncate", refuse)
        system.fail("journal")
        slots = here.tier.allocate(3)
        assert slots is not None
        for number, slot in enumerate(slots):
            assert not here.tier.is_off
            assert here.store([key(number)], [slot]) == [False]
        assert here.tier.is_off
        monkeypatch.undo()
        here.reopen()
        assert here.get(1) == [OK]


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_failed_sync_is_not_acknowledged(tmp_path: Path, nth: int) -> None:
    """After a failed sync nobody knows what is on the medium: no later one is believed."""
    system = FaultyDisk()
    with world(tmp_path, 2, system=system, durability="power", errors_until_off=2) as here:
        here.tier.free(here.put(1, 2))
        slots = here.tier.allocate(2)
        assert slots is not None
        system.fail("sync", nth)
        assert here.store([key(3), key(4)], slots) == [False, False]
        assert here.store([key(3), key(4)], slots) == [False, False]
        assert here.tier.is_off


# -- off -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "code"), [("read", errno.EIO), ("write", errno.EIO), ("write", errno.ENOSPC)]
)
def test_errors_in_a_row_switch_the_tier_off_and_it_says_so_once(
    tmp_path: Path, operation: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    system = FaultyDisk()
    with world(tmp_path, 16, system=system, errors_until_off=4) as here:
        kept = here.put(*range(8))
        slots = here.tier.allocate(8)
        assert slots is not None
        system.fail(operation, 1, code, count=4)
        with caplog.at_level(logging.ERROR):
            for number in range(8):
                assert here.tier.is_off == (number >= 4)
                if operation == "read":
                    assert here.load([key(number)], kept[number : number + 1]) == [FAILED]
                else:
                    assert here.store([key(100)], slots[number : number + 1]) == [False]
        assert [each.message for each in caplog.records if "switched off" in each.message] == [
            caplog.records[0].message
        ]
        assert any(errno.errorcode[code] in line.note for line in here.tier.findings())
        assert here.tier.num_free == 0
        assert here.tier.allocate(1) is None
        assert here.load([key(7)], kept[7:]) == [FAILED]
        here.tier.free([*kept, *slots])
        here.tier.check_invariants()
        here.reopen()
        assert not here.tier.is_off
        assert here.get(7) == [OK]


def test_errors_that_are_not_in_a_row_do_not_switch_the_tier_off(tmp_path: Path) -> None:
    system = FaultyDisk()
    with world(tmp_path, system=system, errors_until_off=2) as here:
        slots = here.put(*range(10))
        for number in range(0, 10, 2):
            system.fail("read")
            assert here.load([key(number)], slots[number : number + 1]) == [FAILED]
            assert here.load([key(number + 1)], slots[number + 1 : number + 2]) == [OK]
        assert not here.tier.is_off


def test_reads_do_not_hide_that_nothing_can_be_written(tmp_path: Path) -> None:
    system = FaultyDisk()
    with world(tmp_path, system=system, errors_until_off=3) as here:
        slots = here.put(1)
        system.fail("write", 1, errno.ENOSPC, count=3)
        more = here.tier.allocate(1)
        assert more is not None
        for _ in range(3):
            assert here.load([key(1)], slots) == [OK]
            assert here.store([key(2)], more) == [False]
        assert here.tier.is_off


# -- at the same time ------------------------------------------------------------------------------


def test_load_does_not_wait_for_a_store(tmp_path: Path) -> None:
    system = FaultyDisk()
    with world(tmp_path, system=system) as here:
        slots = here.put(1)
        more = here.tier.allocate(1)
        assert more is not None
        system.hold("write")
        name, to = (
            BlockName(b"n" * 32, 0, key(1)),
            Pieces.whole([here.arena.address(10)], here.num_bytes),
        )
        writer = Thread(target=here.tier.store, args=([name], more, to))
        writer.start()
        try:
            assert here.load([key(1)], slots) == [OK]
            assert here.tier.allocate(3) is not None
        finally:
            system.let_go("write")
            writer.join()


def test_scrub_does_not_judge_a_slot_that_is_rewritten_meanwhile(tmp_path: Path) -> None:
    """It looked up the old block, and reads the bytes of the new one."""
    system = RewritingDisk()
    with world(tmp_path, 2, system=system) as here:
        slots = here.put(1)
        system.before_read = lambda: here.store([key(2)], slots)
        assert here.tier.scrub(1 << 20).num_damaged == 0
        assert here.load([key(2)], slots) == [OK]
        here.crash()
        here.open()
        assert here.get(2) == [OK]


class RewritingDisk(FaultyDisk):
    """Does something before the first read."""

    before_read: Callable[[], object] = staticmethod(lambda: None)

    def wait(self, operation: str) -> None:
        if operation == "read":
            first, self.before_read = self.before_read, lambda: None
            first()
        super().wait(operation)
