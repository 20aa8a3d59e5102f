"""A file system without room: a real one, of a few megabytes, that others fill."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvtier.core.errors import ConfigError
from kvtier.core.types import Slot
from kvtier.tiers import Outcome
from kvtier.tiers.disk import DiskOptions
from kvtier.tiers.disk.format.journal import max_journal_bytes
from kvtier.tiers.disk.opening import check_folders
from kvtier.tiers.disk.system import DiskSystem, spare_bytes
from tests.tiers.disk.harness import Harness, finding, harness, key, open_blocks

OK, CORRUPT = Outcome.THERE, Outcome.DAMAGED
NUM_SLOTS = 32


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 4 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "none", str(path)],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("may not mount here")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@contextmanager
def full(mount: Path) -> Iterator[None]:
    """Fill the file system meanwhile."""
    filler = mount / "filler"
    with filler.open("ab", 0) as file, suppress(OSError):
        while True:
            file.write(b"f" * 4096)
    assert shutil.disk_usage(mount).free == 0
    try:
        yield
    finally:
        filler.unlink()


def churn(here: Harness, first: int, num: int) -> dict[int, Slot]:
    """Store ``num`` blocks one by one; return the ones that are stored at the end."""
    last: dict[Slot, int] = {}
    for number in range(first, first + num):
        slots = here.allocate(1)
        last.pop(slots[0], None)
        assert here.store([key(number)], slots) == [True], f"block {number} found no room"
        last[slots[0]] = number
        here.tier.free(slots)
    return {number: slot for slot, number in last.items()}


def test_a_capacity_that_does_not_fit_is_a_clear_error(mount: Path) -> None:
    with pytest.raises(ConfigError, match=r"No space left.*may be taken\); lower disk_capacity"):
        open_blocks(DiskOptions(mount / "slab", 8 << 20))
    assert [each.name for each in (mount / "slab").iterdir()] == ["flock"]
    with harness(mount, NUM_SLOTS) as here:
        here.put(1)


def test_what_does_not_fit_is_not_taken_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr("os.posix_fallocate", lambda fd, start, num: taken.append(num))
    with pytest.raises(ConfigError, match=r"capacity of 10240\.00 GiB does not fit") as caught:
        open_blocks(DiskOptions(tmp_path / "slab", 10 << 40))
    assert taken == []
    free = shutil.disk_usage(tmp_path).free
    shown = re.search(r"\(([0-9.]+) GiB are free", str(caught.value))
    assert shown is not None
    assert abs(float(shown[1]) * 2**30 - free) < free / 10 + (1 << 30)


def test_a_new_slab_leaves_a_part_of_the_disk_free(mount: Path) -> None:
    """The disk has space for the capacity, but for nothing else."""
    found = os.statvfs(mount)
    free = found.f_bavail * found.f_frsize
    assert 0 < free - spare_bytes(found) <= found.f_blocks * found.f_frsize // 100
    fitting = spare_bytes(found) // 4096 * 4096
    fd = os.open(mount / "data", os.O_RDWR | os.O_CREAT)
    try:
        with pytest.raises(OSError, match="No space left"):
            DiskSystem().reserve(fd, free)
        assert os.fstat(fd).st_blocks == 0
        DiskSystem().reserve(fd, fitting)
        DiskSystem().reserve(fd, fitting)  # what it has already is not missing
    finally:
        os.close(fd)


@pytest.mark.slow
def test_a_slab_has_all_the_room_that_it_ever_needs(mount: Path) -> None:
    """Blocks, journal, two compactions and a clean close fit after all other space is taken."""
    with harness(mount, NUM_SLOTS, verify="off") as here, full(mount):
        slab = here.tier.parts[0].slab
        generation = slab.superblock.generation
        there = churn(here, 0, 5000)
        assert slab.superblock.generation >= generation + 2, "compacted too rarely to be a test"
        assert slab.journal_bytes <= max_journal_bytes(NUM_SLOTS)
        here.reopen()
        assert slab.superblock.is_clean
        assert here.get(*there) == [OK] * len(there)


@pytest.mark.parametrize("is_clean", [True, False])
def test_a_slab_opens_on_a_full_file_system(mount: Path, is_clean: bool) -> None:
    with harness(mount, NUM_SLOTS) as here:
        here.put(1, 2)
        here.tier.close() if is_clean else here.crash()
        with full(mount):
            here.open()
            assert here.get(1, 2) == [OK, OK]
            here.put(3)
            here.reopen()
            assert here.get(3) == [OK]


@pytest.mark.parametrize("name", ["flock", "trust", "journal.new"])
def test_a_slab_without_one_of_its_smaller_files_opens_on_a_full_file_system(
    mount: Path, name: str
) -> None:
    with harness(mount, NUM_SLOTS) as here:
        here.put(1)
        here.tier.close()
        (here.options.path / name).unlink()
        with full(mount):
            here.open()
            assert here.get(1) == [OK]
            here.put(2)
            with pytest.raises(ConfigError, match="in use by"):
                open_blocks(here.options)
        here.reopen()
        assert here.get(1, 2) == [OK, OK]


@pytest.mark.slow
def test_a_journal_without_room_stops_writes_until_there_is_some(mount: Path) -> None:
    """Compaction is impossible for so long that the reserved space is used up."""
    with harness(mount, NUM_SLOTS, errors_until_off=3) as here:
        slab = here.tier.parts[0].slab
        slab.compact_floor = 1 << 30
        slots = here.allocate(1)
        with full(mount):
            while here.tier.can_store:
                here.store([key(1)], slots)
            assert slab.journal_bytes >= max_journal_bytes(NUM_SLOTS) - 64
            assert here.tier.can_load
            assert "ENOSPC; retry in 1 s" in finding(here.tier, "disk tier").note
        assert here.store([key(1)], slots) == [False]
        here.monotonic.now += 1
        there = churn(here, 100, 50)
        assert finding(here.tier, "disk tier").note == ""
        here.crash()
        here.open()
        assert here.get(*there) == [OK] * len(there)


@pytest.mark.slow
def test_blocks_are_read_while_nothing_can_be_written(mount: Path) -> None:
    with harness(mount, NUM_SLOTS, errors_until_off=2) as here:
        slots = here.put(*range(8))
        slab = here.tier.parts[0].slab
        slab.compact_floor = 1 << 30
        with full(mount):
            fresh = here.allocate(1)
            number = 100
            while here.tier.can_store:
                number += 1
                here.store([key(number)], fresh)
            for _ in range(3):
                assert here.load([key(n) for n in range(8)], slots) == [OK] * 8
            here.tier.close()
            here.open()
            assert here.get(*range(8)) == [OK] * 8


def test_a_capacity_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No space left"):
        check_folders(DiskOptions(tmp_path / "kv", 1 << 60))
    assert not (tmp_path / "kv").exists()
    (tmp_path / "kv").mkdir()
    with pytest.raises(ConfigError, match="No space left"):
        check_folders(DiskOptions(tmp_path / "kv", 1 << 60))
    assert (tmp_path / "kv").exists(), "it was there before"
