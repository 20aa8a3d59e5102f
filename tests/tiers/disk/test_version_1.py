"""Slabs that format version 1 wrote: they open, and become slabs of this version on the way.

``version_1.zip`` holds directories that it wrote, each after the same life: block 100 was
overwritten, blocks 0 to 5 are there, block 6, of another namespace, was forgotten.
"""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.tiers import Outcome
from kvtier.tiers.disk import DiskSystem
from kvtier.tiers.disk.format.superblock import decode_both
from kvtier.tiers.disk.inspect.check import check_slab
from tests.tiers.disk.crashing_disk import Crash, CrashingDisk
from tests.tiers.disk.world import NAMESPACE, World, world

OK, CORRUPT = Outcome.THERE, Outcome.DAMAGED
CASES = [("closed", 1), ("killed", 1), ("two parts", 2)]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with zipfile.ZipFile(Path(__file__).with_name("version_1.zip")) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def versions(folder: Path) -> list[int]:
    found = [decode_both(path.read_bytes())[0] for path in sorted(folder.glob("*/superblock"))]
    return [each.version for each in found if each is not None]


def everything_is_there(here: World) -> None:
    assert here.tier.slots.num_unclaimed == 6
    assert here.get(*range(6), 6, 100) == [OK] * 6 + [CORRUPT] * 2
    here.tier.check_invariants()


@pytest.mark.parametrize(("case", "num_parts"), CASES)
def test_its_blocks_are_found_and_right(old: Path, case: str, num_parts: int) -> None:
    assert versions(old / case) == [1] * num_parts
    with world(old / case, 8, num_parts) as here:
        everything_is_there(here)
        assert NAMESPACE in here.tier.parts[0].slab._log._names
        here.put(7)
        assert versions(old / case) == [2] * num_parts
        here.reopen()
        assert here.get(*range(8)) == [OK] * 6 + [CORRUPT, OK]


@pytest.mark.parametrize("verify", ["off", "sampled"])
def test_its_word_that_all_is_well_is_not_taken(old: Path, verify: str) -> None:
    """It called a slab clean of which nobody had read a block since the last crash."""
    data = old / "closed" / "slab" / "data.slab"
    data.write_bytes(bytes(data.stat().st_size))
    with world(old / "closed", 8, verify=verify) as here:
        here.reopen()
        assert here.get(*range(6)) == [CORRUPT] * 6


@pytest.mark.parametrize(("case", "num_parts"), CASES)
def test_a_crash_at_any_step_of_its_first_opening_loses_nothing(
    old: Path, case: str, num_parts: int
) -> None:
    at, is_open = 0, False
    while not is_open:
        at += 1
        folder = old / f"{case} {at}"
        shutil.copytree(old / case, folder)
        is_open = not _crashes(folder, num_parts, CrashingDisk(at))
        with world(folder, 8, num_parts) as here:
            everything_is_there(here)
    assert at >= 4


def _crashes(folder: Path, num_parts: int, system: DiskSystem) -> bool:
    try:
        with world(folder, 8, num_parts, system=system) as here:
            here.crash()
    except Crash:
        return True
    return False


def test_a_disk_that_is_missing_is_noticed_in_its_sets_too(old: Path) -> None:
    path = old / "two parts" / "slab 1"
    path.rename(old / "elsewhere")
    with pytest.raises(ConfigError, match="mount the missing disk"), world(old / "two parts", 8, 2):
        pass
    (old / "elsewhere").rename(path)
    with world(old / "two parts", 8, 2) as here:
        everything_is_there(here)


def test_it_can_be_repaired_first(old: Path) -> None:
    for path in sorted((old / "two parts").iterdir()):
        assert check_slab(path, repair=True).is_right
    with world(old / "two parts", 8, 2) as here:
        everything_is_there(here)


def test_one_part_is_not_used_with_one_of_a_set_that_went_on(old: Path) -> None:
    shutil.copytree(old / "two parts" / "slab 1", old / "kept")
    with world(old / "two parts", 8, 2) as here:
        here.put(7)
    shutil.rmtree(old / "two parts" / "slab 1")
    shutil.copytree(old / "kept", old / "two parts" / "slab 1")
    with (
        pytest.raises(ConfigError, match="at another step of its set"),
        world(old / "two parts", 8, 2),
    ):
        pass
