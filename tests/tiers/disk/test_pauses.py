"""A disk that fails repeatedly gets no calls for a while; reads and writes pause separately."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from kvtier.tiers import Outcome
from kvtier.tiers.disk.health import DiskHealth
from tests.tiers.disk.faulty_disk import FaultyDisk
from tests.tiers.disk.harness import Clock, Harness, finding, harness, key
from tests.tiers.disk.test_faults import all_slots_accounted_for

OK, FAILED = Outcome.THERE, Outcome.FAILED


def told(here: Harness) -> tuple[str, str]:
    line = finding(here.tier, "disk tier")
    return line.found, line.note


@pytest.mark.parametrize(
    ("operation", "code"),
    [("read", errno.EIO), ("write", errno.EIO), ("write", errno.ENOSPC), ("journal", errno.EDQUOT)],
)
def test_errors_in_a_row_stop_what_fails_and_nothing_else(
    tmp_path: Path, operation: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    system = FaultyDisk()
    with harness(tmp_path, 24, system=system, errors_until_off=4) as here:
        kept = here.put(*range(8))
        slots = here.allocate(8)
        system.fail(operation, 1, code, count=4)
        with caplog.at_level(logging.ERROR):
            for number in range(8):
                is_on = number < 4
                if operation == "read":
                    assert (here.tier.can_load, here.tier.can_store) == (is_on, True)
                    assert here.load([key(number)], kept[number : number + 1]) == [FAILED]
                else:
                    assert (here.tier.can_load, here.tier.can_store) == (True, is_on)
                    assert here.store([key(100)], slots[number : number + 1]) == [False]
        stopped = [record for record in caplog.records if "disk tier suspended" in record.message]
        assert len(stopped) == 1
        found, note = told(here)
        assert ("not read" in found) == (operation == "read")
        assert ("not written" in found) == (operation != "read")
        assert errno.errorcode[code] in note
        assert "retry in 1 s" in note
        if operation == "read":
            assert here.claim([key(0)]) == []
            here.tier.free(here.put(200))
        else:
            assert not here.tier.can_store
            assert here.load([key(7)], kept[7:]) == [OK]
        here.monotonic.now += 1
        assert "retry with the next call" in told(here)[1]
        if operation == "read":
            assert here.load([key(7)], kept[7:]) == [OK]
        else:
            assert here.store([key(100)], slots[7:]) == [True]
        assert told(here) == ("24 blocks, 0.00 GiB", "")
        here.tier.free([*kept, *slots])
        all_slots_accounted_for(here, 0)
        here.reopen()
        assert here.get(7) == [OK]


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_disk_that_hangs_is_waited_for_a_few_times(tmp_path: Path, operation: str) -> None:
    """Each of its batches takes until the deadline; one of many blocks waits once."""
    system = FaultyDisk()
    with harness(tmp_path, 24, system=system, errors_until_off=1000) as here:
        kept = here.put(*range(8))
        slots = here.allocate(8)
        system.fail(operation, 1, errno.ECANCELED, count=8 * 4)

        def use() -> bool:
            before = system.num_done[operation]
            if operation == "read":
                here.load([key(number) for number in range(8)], kept)
            else:
                here.store([key(number) for number in range(8, 16)], slots)
            return system.num_done[operation] > before

        assert [use() for _ in range(5)] == [True] * 3 + [False] * 2
        assert f"3 {operation}s in a row missed their deadline" in told(here)[1]
        pauses = []
        for _ in range(2):
            began = here.monotonic.now
            while not use():
                here.monotonic.now += 0.5
            pauses.append(here.monotonic.now - began)
        assert pauses == [1, 2]
        assert here.tier.can_load
        assert here.tier.can_store
        assert here.tier.slots.num_quarantined == 0


def test_call_has_succeeded_when_the_last_of_its_kinds_has() -> None:
    clock = Clock()
    health = DiskHealth("here", ["write", "journal"], 2, clock)
    full = OSError(errno.ENOSPC, "No space left")
    for _ in range(2):
        assert health.state() == ""
        health.failed("journal", full)
    assert "2 journal errors in a row, the last: ENOSPC; retry in 1 s" in health.state()
    for pause_s in (1, 2):
        clock.now += pause_s
        assert "retry with the next call" in health.state()
        assert health.breaker.enter()
        assert "retry in progress" in health.state()
        health.succeeded("write")  # the data can be written, its record can't
        assert health.breaker.is_open
        health.failed("journal", full)
        assert f"retry in {2 * pause_s} s" in health.state()
    clock.now += 4
    assert health.breaker.enter()
    health.succeeded("journal")
    assert health.state() == ""
    health.failed("journal", full)
    assert health.breaker.is_passable, "one error may be chance"


def test_errors_that_are_not_in_a_row_do_not_stop_reads(tmp_path: Path) -> None:
    system = FaultyDisk()
    with harness(tmp_path, system=system, errors_until_off=2) as here:
        slots = here.put(*range(10))
        for number in range(0, 10, 2):
            system.fail("read")
            assert here.load([key(number)], slots[number : number + 1]) == [FAILED]
            assert here.load([key(number + 1)], slots[number + 1 : number + 2]) == [OK]
        assert here.tier.can_load


def test_reads_do_not_hide_that_nothing_can_be_written(tmp_path: Path) -> None:
    system = FaultyDisk()
    with harness(tmp_path, system=system, errors_until_off=3) as here:
        slots = here.put(1)
        system.fail("write", 1, errno.ENOSPC, count=3)
        more = here.allocate(1)
        for _ in range(3):
            assert here.load([key(1)], slots) == [OK]
            assert here.store([key(2)], more) == [False]
        assert not here.tier.can_store
        assert here.tier.can_load
