"""A set of slabs is opened only if none is missing, foreign or from another time."""

from __future__ import annotations

import dataclasses
import random
import shutil
from pathlib import Path

import pytest

from kvtier.core.errors import ConfigError
from kvtier.core.types import Slot
from kvtier.tiers import Outcome
from kvtier.tiers.disk import DiskOptions
from kvtier.tiers.disk.format.superblock import Superblock, decode_both
from kvtier.tiers.disk.inspect.check import check_slab
from tests.kit.effort import EFFORT
from tests.tiers.disk.crashing_disk import Crash, CrashingDisk, crashes
from tests.tiers.disk.harness import Harness, flip, harness, open_blocks
from tests.tiers.disk.test_crash import churn, claim_all

OK, CORRUPT = Outcome.THERE, Outcome.DAMAGED


def snapshot(folder: Path, to: Path) -> None:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)


def content_of(folder: Path) -> dict[str, bytes]:
    return {
        str(each.relative_to(folder)): each.read_bytes()
        for each in folder.rglob("*")
        if each.is_file() and each.name != "flock"
    }


def refused(tmp_path: Path, options: DiskOptions) -> str:
    """Return the message that refuses a set; check that no file was made, changed or left open."""
    before, paths = content_of(tmp_path), set(tmp_path.rglob("*"))
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            open_blocks(options)
    assert content_of(tmp_path) == before
    assert {each for each in set(tmp_path.rglob("*")) - paths if each.name != "flock"} == set()
    return str(caught.value)


def superblock(folder: Path) -> Superblock:
    found, _ = decode_both((folder / "superblock").read_bytes())
    assert found is not None
    return found


# -- missing, foreign ------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("is_there", [True, False], ids=["empty directory", "no directory"])
def test_a_disk_that_is_not_mounted_is_named_and_the_others_keep_their_blocks(
    tmp_path: Path, part: int, is_there: bool
) -> None:
    with harness(tmp_path, 16, 2) as here:
        here.put(*range(6))
        here.tier.close()
        path = (here.options.path, *here.options.more_paths)[part]
        path.rename(tmp_path / "elsewhere")
        if is_there:
            path.mkdir(0o700)
        message = refused(tmp_path, here.options)
        assert str(path) in message
        assert "mount the missing disk" in message
        if is_there:
            path.rmdir()
        (tmp_path / "elsewhere").rename(path)
        here.open()
        assert here.get(*range(6)) == [OK] * 6


def test_to_start_empty_all_directories_are_deleted(tmp_path: Path) -> None:
    with harness(tmp_path, 16, 2) as here:
        here.put(1)
        here.tier.close()
        for path in (here.options.path, *here.options.more_paths):
            shutil.rmtree(path)
        here.open()
        assert here.tier.slots.num_unclaimed == 0
        here.put(2)


def test_a_slab_of_another_set_is_refused_with_both_named(tmp_path: Path) -> None:
    with harness(tmp_path / "one", 16, 2) as one, harness(tmp_path / "two", 16, 2) as two:
        one.put(1, 2)
        two.put(3, 2)
    snapshot(tmp_path / "two" / "slab 1", tmp_path / "one" / "slab 1")
    message = refused(tmp_path, one.options)
    for path in (tmp_path / "one" / "slab 1", tmp_path / "one" / "slab"):
        assert str(path) in message
        assert superblock(path).member.set_id.hex() in message


# -- left behind -----------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("closes_before", [True, False])
@pytest.mark.parametrize("closes_after", [True, False])
def test_a_disk_that_was_restored_is_refused(
    tmp_path: Path, part: int, closes_before: bool, closes_after: bool
) -> None:
    """Otherwise halves of two writes could be in one slot under one key."""
    with harness(tmp_path, 1, 2) as here:
        here.tier.free(here.put(1))
        here.tier.close() if closes_before else here.crash()
        path = (here.options.path, *here.options.more_paths)[part]
        snapshot(path, tmp_path / "old")
        here.open()
        assert here.get(1) == [OK]
        here.tier.free([Slot(0)])
        here.put(1)
        here.tier.close() if closes_after else here.crash()
        snapshot(path, tmp_path / "new")
        snapshot(tmp_path / "old", path)
        message = refused(tmp_path, here.options)
        assert str(path) in message
        assert "at another step of its set" in message
        snapshot(tmp_path / "new", path)
        here.open()
        assert here.get(1) == [OK]


def test_a_disk_that_was_restored_from_a_running_owner_is_refused(tmp_path: Path) -> None:
    with harness(tmp_path, 8, 2) as here:
        here.put(1)
        path = here.options.more_paths[0]
        snapshot(path, tmp_path / "old")
        here.put(2)
        here.tier.close()
        snapshot(tmp_path / "old", path)
        assert "at another step of its set" in refused(tmp_path, here.options)


def test_copies_of_a_set_that_went_different_ways_are_not_mixed(tmp_path: Path) -> None:
    """Both copies were opened and closed as often, and wrote the same key to the same slot."""
    with harness(tmp_path / "one", 1, 2) as here:
        here.tier.free(here.put(1))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for name in ("one", "two"):
        with harness(tmp_path / name, 1, 2) as here:
            here.put(1)
    snapshot(tmp_path / "two" / "slab 1", tmp_path / "one" / "slab 1")
    options = DiskOptions(
        tmp_path / "one" / "slab", here.options.capacity_bytes, (tmp_path / "one" / "slab 1",)
    )
    assert "at another step of its set" in refused(tmp_path, options)


def test_a_whole_set_that_was_restored_is_as_it_was(tmp_path: Path) -> None:
    with harness(tmp_path / "set", 8, 2) as here:
        here.put(1)
        here.tier.close()
        snapshot(tmp_path / "set", tmp_path / "old")
        here.open()
        here.put(2)
        here.tier.close()
        snapshot(tmp_path / "old", tmp_path / "set")
        here.open()
        assert here.get(1, 2) == [OK, CORRUPT]


def test_a_repair_of_one_part_does_not_part_it_from_its_set(tmp_path: Path) -> None:
    with harness(tmp_path, 8, 2) as here:
        here.put(1, 2)
        here.tier.close()
        for path in (here.options.path, *here.options.more_paths):
            check_slab(path, repair=True)
            here.open()
            here.tier.close()
        here.open()
        assert here.get(1, 2) == [OK, OK]


# -- crashes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_parts", [2, 4])
def test_a_crash_at_any_step_is_never_taken_for_a_disk_that_was_restored(
    tmp_path: Path, num_parts: int
) -> None:
    """Crash at a step of a set's life, and once more during its recovery."""
    stride = 1 if EFFORT == 1 else 7
    known: dict[int, Slot] = {}

    def life(here: Harness) -> None:
        for part in here.tier.parts:
            part.slab.compact_floor = 4
        churn(here, random.Random(1), 4, known)
        here.reopen()
        claim_all(here, known)
        churn(here, random.Random(2), 2, known)
        here.tier.close()

    def reopen_for_ever(here: Harness) -> None:
        while True:
            here.reopen()

    at, has_crashed = 0, True
    while has_crashed:
        at += random.randint(1, 2 * stride - 1)
        known.clear()
        folder = tmp_path / str(at)
        has_crashed = crashes(folder, 8, CrashingDisk(at), life, num_parts)
        assert crashes(folder, 8, CrashingDisk(at % 37 + 1), reopen_for_ever, num_parts)
        with harness(folder, 8, num_parts) as here:
            claim_all(here, known)
        shutil.rmtree(folder)
    assert at > 60, "the life was too short to be interesting"


def test_a_set_of_which_only_some_slabs_were_made_is_made_to_the_end(tmp_path: Path) -> None:
    system = CrashingDisk(10**9)
    with harness(tmp_path, 8, system=system):
        steps_of_one = 10**9 - system.left
    shutil.rmtree(tmp_path / "slab")
    with pytest.raises(Crash), harness(tmp_path, 8, 2, system=CrashingDisk(steps_of_one)):
        pass
    made = [path.name for path in tmp_path.glob("*/superblock")]
    assert len(made) == 1
    with harness(tmp_path, 8, 2) as here:
        here.put(1)
        here.reopen()
        assert here.get(1) == [OK]
        members = {part.slab.superblock.member for part in here.tier.parts}
        assert len(members) == 1


def test_one_damaged_superblock_does_not_part_a_slab_from_its_set(tmp_path: Path) -> None:
    with harness(tmp_path, 8, 2) as here:
        here.put(1)
        here.tier.close()
        path = here.options.more_paths[0] / "superblock"
        newest = superblock(path.parent)
        at = newest.epoch % 2 * 4096 + 30
        flip(path, at)
        assert superblock(path.parent) != newest
        here.open()
        assert here.get(1) == [OK]


def test_every_opening_and_closing_is_two_steps_of_a_set(tmp_path: Path) -> None:
    with harness(tmp_path, 8, 2) as here:
        paths = (here.options.path, *here.options.more_paths)
        steps = [[superblock(path).member.step for path in paths]]
        here.tier.close()
        steps += [[superblock(path).member.step for path in paths]]
        before = superblock(paths[0]).member
        here.open()
        after = superblock(paths[0]).member
        steps += [[superblock(path).member.step for path in paths]]
    assert steps == [[2, 2], [4, 4], [6, 6]]
    assert after.previous == before.session != after.session
    assert dataclasses.replace(after, step=0).set_id == before.set_id
