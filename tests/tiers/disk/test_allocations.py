"""A pool on an accelerator that is several allocations.

Each allocation is registered by itself, and a piece is moved directly if one of them holds it.

Every test also fails if a fake saw a call that hardware might punish, or a resource that was not
released.
"""

from __future__ import annotations

import errno
import gc
import weakref
from pathlib import Path

import pytest

from kvtier.core.errors import ConfigError
from kvtier.core.types import Direct
from kvtier.devices.base import Memory
from kvtier.layout import KVGroup
from kvtier.tiers import Outcome
from kvtier.tiers.disk.io import direct, file_library
from tests.kit.fakes.storage import LIBRARIES, Fault
from tests.tiers.disk.accelerated import (
    BY_LAYER,
    GQA,
    MLA,
    THERE,
    Accelerated,
    accelerated,
    hang,
    keys,
    line_of,
)

REGISTERING = [name for name in LIBRARIES if name != "nds"]
"""Libraries that want to know memory first."""
IN_THIRD = 16 * 3 + 6
"""A page of a pool of ``GQA``, layer first: within what the third of its parts, the keys of the
second layer, has of block 3."""


@pytest.mark.parametrize(
    ("group", "cuts", "num_known"),
    [(GQA, BY_LAYER, 4), (GQA, BY_LAYER, 1), (GQA, (), 1), (MLA, (), 1)],
    ids=["all", "only the first", "one", "MLA"],
)
@pytest.mark.parametrize("name", LIBRARIES)
def test_blocks_go_straight_where_every_allocation_is_known(
    name: str, group: KVGroup, cuts: tuple[int, ...], num_known: int, tmp_path: Path
) -> None:
    with accelerated(name, tmp_path, group=group, cuts=cuts) as harness:
        is_whole = num_known == len(harness.allocations)
        del harness.allocations[num_known:]
        tier = harness.stored()
        copies = harness.fake.count("copies")
        assert tier.get(keys(), harness.in_pool(), 60) == THERE
        harness.check_pool()
        went_straight = harness.fake.num_transfers > 0 and harness.fake.count("copies") == copies
        assert went_straight == is_whole
        assert (line_of(tier, "disk to device").found == "direct") == is_whole
        kind = harness.pool.memory.kind
        assert kind in tier.facts.reaches
        assert not tier.facts.can_write_from(kind), "no checksum is computed there"


@pytest.mark.parametrize("name", REGISTERING)
def test_each_allocation_is_registered_once_and_let_go_once(name: str, tmp_path: Path) -> None:
    with accelerated(name, tmp_path, cuts=BY_LAYER) as harness:
        for turn in (1, 2):
            tier = harness.stored()
            for _ in range(3):
                assert tier.get(keys(), harness.in_pool(), 60) == THERE
            assert harness.num_calls("BufRegister") == 4 * turn
            tier.close()
            assert harness.num_calls("BufDeregister") == 4 * turn


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
@pytest.mark.parametrize("name", REGISTERING)
def test_where_one_registration_is_refused_the_others_are_let_go(
    name: str, nth: int, tmp_path: Path
) -> None:
    with accelerated(name, tmp_path, cuts=BY_LAYER) as harness:
        call = f"{harness.prefix}BufRegister"
        harness.fake.fail_call(call, 5036, nth)
        with pytest.raises(ConfigError, match="answered 5036.*can't be pinned.*leave it at auto"):
            harness.open(direct=Direct.ON)
        assert harness.fake.storage_leaks == []
        assert harness.num_calls("BufDeregister") == nth - 1
        harness.fake.fail_call(call, 5036, nth)
        tier = harness.stored()
        assert "answered 5036" in line_of(tier, "disk to device").note
        assert harness.fake.storage_leaks == []
        assert tier.get(keys(), harness.in_pool(), 60) == THERE, "by the buffer"
        harness.check_pool()
        assert harness.fake.num_transfers == 0


@pytest.mark.parametrize("name", REGISTERING)
def test_memory_that_is_no_one_allocation_is_not_registered_as_one(
    name: str, tmp_path: Path
) -> None:
    """The control: memory registered as one allocation has no direct path at all."""
    harness = Accelerated(name, tmp_path, cuts=BY_LAYER)
    harness.allocations = [harness.pool.memory]
    tier = harness.stored()
    assert "answered 5014" in line_of(tier, "disk to device").note
    assert tier.get(keys(), harness.in_pool(), 60) == THERE, "by the buffer, piece by piece"
    assert harness.fake.num_transfers == 0
    harness.close()
    assert "a copy leaves the piece of memory that it begins in" in harness.fake.violations


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_pool_whose_pieces_are_cut_is_refused_with_the_number(name: str, tmp_path: Path) -> None:
    reason = "a piece of 8192 bytes is not inside one of the accelerator's 2 allocations"
    with accelerated(name, tmp_path, cuts=[1]) as harness:
        with pytest.raises(ConfigError, match=f"direct: on, and .*{reason}; leave it at auto"):
            harness.open(direct=Direct.ON)
        tier = harness.stored()
        assert line_of(tier, "disk to device").note == reason
        assert tier.get(keys(), harness.in_pool(), 60) == THERE
        harness.check_pool()
        assert harness.fake.num_transfers == 0


@pytest.mark.parametrize("is_known", [True, False], ids=["cut", "not registered"])
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_block_that_no_registration_holds_takes_the_buffer_and_nobody_is_to_blame(
    name: str, is_known: bool, tmp_path: Path
) -> None:
    """One of its pieces is in two allocations, or in none.

    It never counts as an error of the library. All other blocks are still transferred directly.
    """
    begin, end = (IN_THIRD + 1, IN_THIRD + 1) if is_known else (IN_THIRD, IN_THIRD + 2)
    with accelerated(name, tmp_path, cuts=sorted({begin, end})) as harness:
        if not is_known:
            del harness.allocations[1]
        tier = harness.stored(errors_until_off=2)
        for _ in range(5):
            before = harness.fake.num_transfers
            assert tier.get(keys()[3:4], harness.in_pool([3]), 60) == THERE[:1]
            assert harness.fake.num_transfers == before, "not even of its other pieces"
            harness.fill_pool(0)
            before, copies = harness.fake.num_transfers, harness.fake.count("copies")
            assert tier.get(keys(), harness.in_pool(), 60) == THERE
            harness.check_pool()
            assert harness.fake.num_transfers > before
            assert harness.fake.count("copies") - copies == 8 + is_known, "of one block; one is cut"
        assert tier.blocks.slots.num_quarantined == 0
        assert not [finding for finding in tier.findings() if finding.topic == "direct reads"]


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.MUCH, Fault.CUT])
@pytest.mark.parametrize("name", LIBRARIES)
def test_what_fails_in_one_allocation_is_read_again(
    name: str, fault: Fault, tmp_path: Path
) -> None:
    """Any of the transfers may fail."""
    with accelerated(name, tmp_path, cuts=BY_LAYER) as harness:
        tier = harness.stored()
        before = harness.fake.num_transfers
        assert tier.get(keys(), harness.in_pool(), 60) == THERE
        for nth in range(1, harness.fake.num_transfers - before + 1):
            harness.fill_pool(0)
            harness.fake.fail_transfer(fault, {Fault.ERROR: errno.EIO}.get(fault, 0), nth)
            assert tier.get(keys(), harness.in_pool(), 60) == THERE
            harness.check_pool()


class Owner:
    """Owner of an allocation."""


@pytest.mark.parametrize("hangs", [True, False], ids=["hangs", "ends"])
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_driver_that_hangs_is_given_up_and_keeps_every_allocation(
    name: str, hangs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver may still write to any of them, so none is released or reused.

    Blocks go through the buffer from then on.
    """
    monkeypatch.setattr(direct, "GRACE_S", 0.05)
    monkeypatch.setattr(direct, "_given_up", [])
    monkeypatch.setattr(file_library, "_opened", {})
    harness = Accelerated(name, tmp_path, cuts=BY_LAYER)
    owners = [Owner() for _ in harness.allocations]
    harness.allocations = [
        Memory(allocation.address, allocation.nbytes, allocation.kind, owner)
        for allocation, owner in zip(harness.allocations, owners, strict=True)
    ]
    held = [weakref.ref(owner) for owner in owners]
    owners.clear()
    tier = harness.stored()
    if hangs:
        assert set(hang(harness, tier)) <= {Outcome.THERE, Outcome.FAILED}
        harness.fill_pool(0)
    before = harness.fake.num_transfers
    assert tier.get(keys(), harness.in_pool(), 60) == THERE
    harness.check_pool()
    assert (harness.fake.num_transfers == before) == hangs, "that driver is not called again"
    tier.close()
    num_kept = 4 if hangs and harness.fake.vendor != "ascend" else 0
    assert harness.fake.storage_leaks.count("registered memory") == num_kept
    assert any("file" in leak for leak in harness.fake.storage_leaks) == hangs
    harness.close()
    harness.tiers.clear()
    harness.allocations.clear()
    del tier
    gc.collect()
    assert [each() is not None for each in held] == [hangs] * 4
    assert harness.fake.violations == []
    assert harness.fake.leaks == []
    monkeypatch.undo()
    harness.fake.reset_storage()


@pytest.mark.parametrize("behind", [0, 512])
@pytest.mark.parametrize("name", LIBRARIES)
def test_alignment_is_that_of_a_piece_and_not_of_its_allocation(
    name: str, behind: int, tmp_path: Path
) -> None:
    """torch's memory begins at any 512 bytes, and engines align within it."""
    with accelerated(name, tmp_path, cuts=BY_LAYER) as harness:
        second = harness.allocations[1]
        harness.allocations[1] = Memory(
            second.address + behind, second.nbytes - behind, second.kind, None
        )
        tier = harness.stored()
        assert tier.get(keys(), harness.in_pool(), 60) == THERE
        harness.check_pool()
        assert (harness.fake.num_transfers > 0) == (behind == 0), "of block 0 the page is cut"
