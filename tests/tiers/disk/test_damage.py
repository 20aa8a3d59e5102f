"""Slab files that are changed, cut, mixed up or in use: reported or survived, never believed."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.core.errors import ConfigError, TierError
from kvtier.layout import DType, KVGroup, full_attention
from kvtier.tiers import Outcome
from kvtier.tiers.breaker import BreakerState
from kvtier.tiers.disk import DiskOptions, DiskSystem
from kvtier.tiers.disk.format.superblock import HALF_BYTES, decode
from tests.tiers.disk.harness import (
    ALIGNED,
    SLOT_BYTES,
    SMALL,
    Harness,
    flip,
    harness,
    key,
    open_blocks,
)

OK, CORRUPT = Outcome.THERE, Outcome.DAMAGED
NUM_BLOCKS = 6
RECORD_BYTES = 64


@pytest.fixture
def slab(tmp_path: Path) -> Path:
    """Return a closed slab in the directory of ``harness``: six blocks, one slot overwritten."""
    with harness(tmp_path, 8) as here:
        here.tier.free(here.put(100))
        here.put(*range(NUM_BLOCKS))
    return tmp_path / "slab"


def found_after(folder: Path, damage: Callable[..., object], **settings: Any) -> set[int]:
    """Return the blocks that a copy of the slab has after ``damage``; compare every byte."""
    copy = folder.parent / "copy" / "slab"
    shutil.rmtree(copy.parent, ignore_errors=True)
    shutil.copytree(folder, copy)
    damage(copy)
    with harness(copy.parent, 8, **settings) as here:
        assert here.get(100) == [CORRUPT]
        results = here.get(*range(NUM_BLOCKS))
        here.tier.check_invariants()
        # And it can be used.
        slots = here.put(200)
        assert here.load([key(200)], slots) == [OK]
    return {number for number, result in enumerate(results) if result is OK}


ALL = set(range(NUM_BLOCKS))


# -- single bytes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [0, 1])
def test_any_byte_of_one_superblock_may_be_wrong(slab: Path, half: int) -> None:
    rng = random.Random(half)
    for offset in [*range(0, 136, 4), *rng.sample(range(136, HALF_BYTES), 12)]:
        at = half * HALF_BYTES + offset
        assert found_after(slab, lambda copy, at=at: flip(copy / "superblock", at, 0xFF)) == ALL


@pytest.mark.parametrize("verify", ["always", "off"])
def test_any_byte_of_a_record_costs_at_most_its_block(slab: Path, verify: str) -> None:
    num_records = (slab / "journal").stat().st_size // RECORD_BYTES
    for record in range(num_records):
        for offset in range(record % 5, RECORD_BYTES, 5):
            at = record * RECORD_BYTES + offset
            found = found_after(
                slab, lambda copy, at=at: flip(copy / "journal", at, 0xFF), verify=verify
            )
            assert len(found) >= NUM_BLOCKS - 1


def test_any_byte_of_a_block_costs_that_block(slab: Path) -> None:
    lost = []
    for slot in range(8):
        for offset in range(slot, SMALL.bytes_per_block, 17):
            at = slot * SLOT_BYTES + offset
            found = found_after(slab, lambda copy, at=at: flip(copy / "data.slab", at, 1))
            lost.append(ALL - found)
    assert {len(each) for each in lost} == {0, 1}
    assert set.union(*lost) == ALL


def test_bytes_behind_a_block_do_not_matter(slab: Path) -> None:
    at = SLOT_BYTES + SMALL.bytes_per_block + 3
    assert found_after(slab, lambda copy: flip(copy / "data.slab", at)) == ALL


# -- sizes -----------------------------------------------------------------------------------------


def cut(name: str, num_bytes: int) -> Callable[[Path], None]:
    return lambda copy: os.truncate(copy / name, num_bytes)


def remove(name: str) -> Callable[[Path], None]:
    return lambda copy: (copy / name).unlink()


@pytest.mark.parametrize("verify", ["always", "off"])
def test_shorter_journal_gives_the_blocks_it_still_names(slab: Path, verify: str) -> None:
    size = (slab / "journal").stat().st_size
    for num_bytes in range(size - 1, -1, -23):
        found = found_after(slab, cut("journal", num_bytes), verify=verify)
        missing = size // RECORD_BYTES - num_bytes // RECORD_BYTES
        assert len(found) == max(0, NUM_BLOCKS - missing)


def test_missing_journal_is_an_empty_slab(slab: Path) -> None:
    assert found_after(slab, remove("journal")) == set()


@pytest.mark.parametrize("verify", ["always", "off"])
def test_shorter_data_costs_the_blocks_that_were_cut_off(slab: Path, verify: str) -> None:
    assert found_after(slab, cut("data.slab", 0), verify=verify) == set()
    assert found_after(slab, remove("data.slab"), verify=verify) == set()
    some = found_after(slab, cut("data.slab", 3 * SLOT_BYTES + 100), verify=verify)
    assert 1 <= len(some) <= 4


def test_half_a_superblock_file_is_enough(slab: Path) -> None:
    for num_bytes in (HALF_BYTES, HALF_BYTES + 100):
        newest = (slab / "superblock").read_bytes()
        first, second = decode(newest[:HALF_BYTES]), decode(newest[HALF_BYTES:])
        assert first is not None
        assert second is not None
        assert found_after(slab, cut("superblock", num_bytes)) == ALL


@pytest.mark.parametrize("name", ["journal", "data.slab"])
def test_longer_files_do_not_matter(slab: Path, name: str) -> None:
    def grow(copy: Path) -> None:
        with (copy / name).open("ab") as file:
            file.write(b"x" * 1000)

    assert found_after(slab, grow) == ALL


def test_new_journal_left_by_a_crash_is_removed(slab: Path) -> None:
    assert found_after(slab, lambda copy: (copy / "journal.new").write_bytes(b"y" * 640)) == ALL


# -- refused ---------------------------------------------------------------------------------------


def refused(folder: Path, group: KVGroup = SMALL, **settings: object) -> str:
    made: dict[str, object] = {"path": folder, "capacity_bytes": 8 * SLOT_BYTES, **settings}
    before = {each.name: each.read_bytes() for each in folder.iterdir() if each.name != "flock"}
    with pytest.raises(ConfigError) as caught:
        open_blocks(DiskOptions(**made), group=group)  # type: ignore[arg-type]
    after = {each.name: each.read_bytes() for each in folder.iterdir() if each.name != "flock"}
    assert before == after, "a refused slab was changed"
    return str(caught.value)


def test_both_superblocks_gone_is_refused(slab: Path) -> None:
    for half in (0, 1):
        flip(slab / "superblock", half * HALF_BYTES + 30)
    assert "both superblocks" in refused(slab)
    (slab / "superblock").unlink()
    message = refused(slab)
    assert "superblock is missing" in message
    assert "empty directory" in message


def test_directory_with_other_things_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("chapter 1")
    assert "superblock is missing" in refused(tmp_path)


def test_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="choose another path"):
        open_blocks(tmp_path / "file")


def test_links_are_not_followed(slab: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"1" * 100)
    (slab / "journal").unlink()
    (slab / "journal").symlink_to(tmp_path / "precious")
    with pytest.raises(TierError):
        open_blocks(slab)
    assert (tmp_path / "precious").read_bytes() == b"1" * 100


def test_slab_of_another_model_is_refused_with_both_named(slab: Path) -> None:
    message = refused(slab, ALIGNED)
    for part in (
        SMALL.fingerprint,
        ALIGNED.fingerprint,
        "4096",
        '"dim":4',
        "--block-size",
        "delete",
    ):
        assert part in message
    same_size = full_attention(1, 4, 4, DType.FLOAT16, 2)
    message = refused(slab, same_size)
    assert SMALL.fingerprint in message
    assert same_size.fingerprint in message


def test_slab_of_another_rank_is_refused_with_both_named(slab: Path) -> None:
    assert "rank is 0 of 1, expected 1 of 2" in refused(slab, rank=1, num_ranks=2)
    assert "rank is 0 of 1, expected 0 of 2" in refused(slab, num_ranks=2)


def test_slab_of_another_format_version_is_refused_with_both_named(slab: Path) -> None:
    content = (slab / "superblock").read_bytes()
    halves = [decode(content[:HALF_BYTES]), decode(content[HALF_BYTES:])]
    (slab / "superblock").write_bytes(
        b"".join(dataclasses.replace(half, version=7).encode() for half in halves if half)
    )
    message = refused(slab)
    assert "version 7" in message
    assert "reads 2;" in message


def test_journal_of_another_slab_is_refused(slab: Path, tmp_path: Path) -> None:
    with harness(tmp_path / "other", 8) as other:
        other.put(1, 2)
    shutil.copy(tmp_path / "other" / "slab" / "journal", slab / "journal")
    assert "journal" in refused(slab)


def test_second_owner_is_refused_and_told_who_is_first(tmp_path: Path) -> None:
    with harness(tmp_path, 8) as here:
        slots = here.put(1)
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} "):
            open_blocks(here.options)
        other = (
            "import sys; from tests.tiers.disk.harness import *\n"
            "try: open_blocks(Path(sys.argv[1]))\n"
            "except ValueError as error: print(error)\n"
        )
        said = subprocess.run(
            [sys.executable, "-c", other, str(here.options.path)],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[3],
        ).stdout
        assert f"in use by process {os.getpid()} " in said
        assert here.load([key(1)], slots) == [OK]
    Harness(here.options).tier.close()


# -- no room ---------------------------------------------------------------------------------------


class FullDisk(DiskSystem):
    """Disk that has no space for a slab."""

    def reserve(self, fd: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_device_is_a_clear_error_and_leaves_nothing_behind(tmp_path: Path) -> None:
    options = DiskOptions(tmp_path / "slab", 1 << 30)
    with pytest.raises(
        ConfigError, match=r"1.00 GiB does not fit.*No space left.*lower disk_capacity"
    ):
        open_blocks(options, FullDisk())
    assert [each.name for each in (tmp_path / "slab").iterdir()] == ["flock"]
    with harness(tmp_path, 4) as here:
        here.put(1)


def test_file_size_limit_is_a_clear_error(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(ConfigError, match="File too large"):
            open_blocks(DiskOptions(tmp_path / "slab", 2 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_device_too_full_to_grow_keeps_the_slab_as_it_is(slab: Path) -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        open_blocks(DiskOptions(slab, 1 << 30), FullDisk())
    assert found_after(slab, lambda copy: None) == ALL


def test_a_slab_that_is_cut_short_while_in_use_is_said_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log reports the missing bytes and the remedy, besides the damaged blocks."""
    numbers, file = range(NUM_BLOCKS), tmp_path / "slab" / "data.slab"
    with harness(tmp_path, 8) as here, caplog.at_level("INFO"):
        slots = here.put(*numbers)
        os.truncate(file, 2 * SLOT_BYTES)
        for number, slot in zip(numbers, slots, strict=True):
            assert here.load([key(number)], [slot]) == [OK if slot < 2 else CORRUPT]
        (said,) = [record.message for record in caplog.records if "is shorter" in record.message]
        assert f"missing_bytes={6 * SLOT_BYTES}" in said
        assert "then restart" in said
        assert here.load([key(0)], slots[:1]) == [OK]
        assert here.tier.breaker is BreakerState.CUT_SHORT, "the mark stays while others are read"
        os.truncate(file, 8 * SLOT_BYTES)
        assert here.tier.breaker is BreakerState.CLOSED
        assert sum("has its length again" in record.message for record in caplog.records) == 1
