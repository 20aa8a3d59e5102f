"""A block that is dropped permanently stays away, or the caller gets an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.core.errors import TierError
from kvtier.testing.storage_user import User, stored_key
from kvtier.tiers import Outcome
from kvtier.tiers.disk import DiskOptions, DiskTier
from tests.tiers.disk.faulty_disk import FaultyDisk
from tests.tiers.disk.harness import SLOT_BYTES, SMALL

THERE, ABSENT, _, FAILED = Outcome


class Place:
    """Location of a tier for four blocks, in one part or two."""

    def __init__(self, folder: Path, num_parts: int) -> None:
        first, *others = (folder / f"part {part}" for part in range(num_parts))
        self.options = DiskOptions(first, 4 * num_parts * SLOT_BYTES, tuple(others))
        self.system = FaultyDisk()

    def open(self) -> DiskTier:
        return DiskTier(self.options, SMALL, system=self.system)


@pytest.fixture(params=[1, 2])
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    return Place(tmp_path, request.param)


@pytest.mark.parametrize("is_in_use", [True, False])
def test_drop_for_good_that_could_not_be_written_is_told_and_can_be_repeated(
    place: Place, is_in_use: bool
) -> None:
    tier = place.open()
    User(tier).put(0, 1)
    if not is_in_use:
        tier.drop([stored_key(0)])
    place.system.fail("journal")
    with pytest.raises(TierError, match="journal"):
        tier.drop([stored_key(0), stored_key(1)], for_good=True)
    tier.check_invariants()
    User(tier).put(2)  # the next write begins a new journal
    tier.drop([stored_key(0), stored_key(1)], for_good=True)
    assert User(tier).find(0) == User(tier).find(1) == [ABSENT]
    tier.check_invariants()
    tier.abandon()
    tier = place.open()
    assert User(tier).found(0, 1, 2) == [2]
    tier.close()


def test_block_that_is_put_again_elsewhere_leaves_its_old_place(place: Place) -> None:
    """Otherwise a restart would find the old one when the new one is dropped."""
    tier = place.open()
    User(tier).put(0, 1)
    tier.drop([stored_key(0), stored_key(1)])
    place.system.fail("journal")
    assert User(tier).put(1) == [FAILED]
    tier.check_invariants()
    assert User(tier).put(1) == [THERE]
    tier.drop([stored_key(1)], for_good=True)
    tier.abandon()
    tier = place.open()
    assert User(tier).found(0, 1) == []
    tier.close()


def test_lasting_keys_name_all_that_a_restart_would_find(place: Place) -> None:
    tier = place.open()
    User(tier).put(0, 1, 2)
    tier.drop([stored_key(0)])
    tier.drop([stored_key(1)], for_good=True)
    assert sorted(tier.lasting_keys()) == sorted([stored_key(0), stored_key(2)])
    assert tier.unindexed_keys() == []
    tier.drop(tier.lasting_keys(), for_good=True)
    tier.check_invariants()
    assert tier.lasting_keys() == []
    tier.abandon()
    tier = place.open()
    assert User(tier).found(0, 1, 2) == []
    tier.close()
