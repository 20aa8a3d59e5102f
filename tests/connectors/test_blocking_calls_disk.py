"""Calls over a real disk tier whose disk fails or corrupts, or whose process ends."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvtier.connectors.common.blocking_calls import SlabReads
from kvtier.tiers.disk import DiskOptions, DiskReader, DiskTier
from tests.connectors.storage_harness import BLOCK_BYTES, DIGEST, GROUP
from tests.connectors.test_blocking_calls import Caller, key_of
from tests.tiers.disk.faulty_disk import FaultyDisk

NUM_BLOCKS = 8


def _options(path: Path) -> DiskOptions:
    return DiskOptions(path / "slab", NUM_BLOCKS * BLOCK_BYTES)


def _caller(path: Path, disk: FaultyDisk | None = None) -> Caller:
    return Caller(DiskTier(_options(path), GROUP, system=disk))  # type: ignore[arg-type]


def test_killed_process_leaves_what_it_acknowledged(tmp_path: Path) -> None:
    before = _caller(tmp_path)
    assert before.store(1, 2, 3) == [True] * 3
    before.tier.abandon()  # type: ignore[attr-defined]
    after = _caller(tmp_path)
    assert after.num_found(1, 2, 3, 4) == 3
    assert after.load(1, 2, 3) == [True] * 3
    after.calls.close()


def test_flipped_byte_is_noticed_and_its_page_stored_again(tmp_path: Path) -> None:
    disk = FaultyDisk()
    caller = _caller(tmp_path, disk)
    caller.store(1, 2)
    disk.flip("read", 2)
    assert caller.load(1, 2) == [True, False]
    assert caller.num_found(1, 2) == 1
    assert caller.store(1, 2) == [True, True]
    assert caller.load(1, 2) == [True, True]
    caller.calls.close()


@pytest.mark.parametrize("operation", ["write", "journal"])
def test_full_disk_stores_nothing_and_what_it_has_is_read(tmp_path: Path, operation: str) -> None:
    disk = FaultyDisk()
    caller = _caller(tmp_path, disk)
    assert caller.store(1, 2) == [True, True]
    disk.fail(operation, 1, errno.ENOSPC, 1000)
    assert caller.store(3, 4) == [False, False]
    assert caller.num_found(1, 2) == 2
    assert caller.load(1, 2) == [True, True]
    assert caller.num_found(3) == 0
    caller.calls.close()


def test_disk_that_can_not_be_read_finds_nothing_until_it_is_well(tmp_path: Path) -> None:
    disk = FaultyDisk()
    caller = _caller(tmp_path, disk)
    caller.store(1, 2)
    disk.fail("read", 1, errno.EIO, 6)
    for _ in range(3):
        assert caller.load(1, 2) == [False, False]
    assert caller.num_found(1, 2) == 0  # left alone
    caller.calls.close()


def test_readers_see_what_the_owner_calls_say(tmp_path: Path) -> None:
    caller = _caller(tmp_path)
    digest = DIGEST
    reads = SlabReads(DiskReader(_options(tmp_path), GROUP), lambda: digest)
    assert caller.store(1, 2) == [True, True]
    assert reads.num_found([key_of(1), key_of(2), key_of(3)]) == 2
    assert reads.find([key_of(3), key_of(2)]) == [False, True]
    assert reads.store([key_of(9)], caller._pieces.pick(slice(1))) == [False]
    caller._bytes[:] = 0
    assert reads.load([key_of(2)], caller._pieces.pick(slice(1))) == [True]
    caller.calls.clear()
    assert reads.num_found([key_of(1)]) == 0
    digest = b""
    assert reads.num_found([key_of(1)]) == 0
    reads.close()
    caller.calls.close()
