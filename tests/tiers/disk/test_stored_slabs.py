"""Slabs that an earlier kvtier wrote still open: ``slabs.zip`` has the bytes of their files.

Each had the same life: blocks 0 to 5 are stored, block 100 and block 6, of another namespace, were
stored and forgotten. One was closed, one is a copy made while its owner had it open, and one set of
two was closed.
"""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

from kvtier.core.errors import ConfigError
from kvtier.tiers import Outcome
from kvtier.tiers.disk.inspect.check import check_slab
from tests.tiers.disk.crashing_disk import CrashingDisk, crashes
from tests.tiers.disk.harness import NAMESPACE, Harness, harness

OK, CORRUPT = Outcome.THERE, Outcome.DAMAGED
CASES = [("closed", 1), ("killed", 1), ("two parts", 2)]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    with zipfile.ZipFile(Path(__file__).with_name("slabs.zip")) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def everything_is_there(here: Harness) -> None:
    assert here.tier.slots.num_unclaimed == 6
    assert here.get(*range(6), 6, 100) == [OK] * 6 + [CORRUPT] * 2
    here.tier.check_invariants()


@pytest.mark.parametrize(("case", "num_parts"), CASES)
def test_blocks_of_an_earlier_kvtier_are_found_and_right(
    stored: Path, case: str, num_parts: int
) -> None:
    with harness(stored / case, 8, num_parts) as here:
        everything_is_there(here)
        assert NAMESPACE in here.tier.parts[0].slab._names
        here.put(7)
        here.reopen()
        assert here.get(*range(8)) == [OK] * 6 + [CORRUPT, OK]


@pytest.mark.parametrize(("case", "num_parts"), CASES)
def test_a_crash_at_any_step_of_the_next_opening_loses_nothing(
    stored: Path, case: str, num_parts: int
) -> None:
    at, has_crashed = 0, True
    while has_crashed:
        at += 1
        folder = stored / f"{case} {at}"
        shutil.copytree(stored / case, folder)
        has_crashed = crashes(folder, 8, CrashingDisk(at), Harness.crash, num_parts)
        with harness(folder, 8, num_parts) as here:
            everything_is_there(here)
    assert at >= 4


def test_a_disk_that_is_missing_is_noticed_in_stored_sets_too(stored: Path) -> None:
    path = stored / "two parts" / "slab 1"
    path.rename(stored / "elsewhere")
    with (
        pytest.raises(ConfigError, match="mount the missing disk"),
        harness(stored / "two parts", 8, 2),
    ):
        pass
    (stored / "elsewhere").rename(path)
    with harness(stored / "two parts", 8, 2) as here:
        everything_is_there(here)


def test_a_stored_set_can_be_repaired_first(stored: Path) -> None:
    for path in sorted((stored / "two parts").iterdir()):
        assert check_slab(path, repair=True).is_right
    with harness(stored / "two parts", 8, 2) as here:
        everything_is_there(here)


def test_one_part_is_not_used_with_one_of_a_set_that_went_on(stored: Path) -> None:
    shutil.copytree(stored / "two parts" / "slab 1", stored / "kept")
    with harness(stored / "two parts", 8, 2) as here:
        here.put(7)
    shutil.rmtree(stored / "two parts" / "slab 1")
    shutil.copytree(stored / "kept", stored / "two parts" / "slab 1")
    with (
        pytest.raises(ConfigError, match="at another step of its set"),
        harness(stored / "two parts", 8, 2),
    ):
        pass
