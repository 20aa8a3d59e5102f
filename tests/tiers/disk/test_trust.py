"""Only blocks that an owner wrote or verified are given out unverified."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers import Outcome
from kvtier.tiers.disk.format.records import RecordKind, Records, blank, seal
from kvtier.tiers.disk.format.superblock import HALF_BYTES, Membership, Superblock
from kvtier.tiers.disk.format.superblock import decode as decode_superblock
from kvtier.tiers.disk.format.trust import decode, encode, num_bytes_of
from kvtier.tiers.disk.inspect.check import check_slab
from tests.tiers.disk.faulty_disk import FaultyDisk
from tests.tiers.disk.harness import SLOT_BYTES, Harness, flip, harness, key, zero

OK, CORRUPT = Outcome.THERE, Outcome.DAMAGED
NUM_BLOCKS = 30
LAZY = pytest.mark.parametrize("verify", ["off", "sampled"])


def num_trusted(here: Harness) -> int:
    return int(here.tier.parts[0].slab.look_up(np.arange(here.tier.num_slots))[1].sum())


@LAZY
@pytest.mark.parametrize("num_closes", [1, 3])
def test_blocks_that_a_crash_lost_are_never_given_out_however_often_it_was_closed_since(
    tmp_path: Path, verify: str, num_closes: int
) -> None:
    with harness(tmp_path, NUM_BLOCKS, verify=verify, sample_every=1000) as here:
        here.put(*range(NUM_BLOCKS))
        here.crash()
        zero(here.options.path, range(NUM_BLOCKS))
        here.open()
        for _ in range(num_closes):
            here.reopen()
        assert here.get(*range(NUM_BLOCKS)) == [CORRUPT] * NUM_BLOCKS


@LAZY
def test_what_was_verified_once_is_believed_by_the_next_owners(tmp_path: Path, verify: str) -> None:
    """This is a control, too: these tests would notice a block that is trusted wrongly."""
    with harness(tmp_path, NUM_BLOCKS, verify=verify, sample_every=1000) as here:
        here.put(*range(NUM_BLOCKS))
        here.crash()
        here.open()
        assert here.get(*range(10)) == [OK] * 10
        here.tier.scrub(SLOT_BYTES)
        here.reopen()
        here.reopen()
        assert num_trusted(here) == 10
        zero(here.options.path, range(NUM_BLOCKS))
        slots = here.claim([key(number) for number in range(NUM_BLOCKS)])
        blocks = here.pieces(NUM_BLOCKS)
        results = here.tier.load([key(number) for number in range(NUM_BLOCKS)], slots, blocks)
        assert results.count(OK) == (10 if verify == "off" else 9)
        assert set(results[10:]) == {CORRUPT}


@LAZY
def test_what_was_written_since_the_last_start_is_believed_after_a_clean_close(
    tmp_path: Path, verify: str
) -> None:
    with harness(tmp_path, 8, verify=verify) as here:
        here.put(1, 2)
        here.crash()
        here.open()
        here.put(3)
        here.reopen()
        assert num_trusted(here) == 1


def write_a_byte(folder: Path) -> None:
    with (folder / "data.slab").open("r+b") as file:
        file.seek(7 * SLOT_BYTES)
        file.write(b"x")


def write_and_turn_back_the_clock(folder: Path) -> None:
    before = (folder / "data.slab").stat()
    write_a_byte(folder)
    os.utime(folder / "data.slab", ns=(before.st_atime_ns, before.st_mtime_ns - 1))


def replace_by_a_copy(folder: Path) -> None:
    shutil.copy2(folder / "data.slab", folder / "copy")
    os.replace(folder / "copy", folder / "data.slab")


def grow(folder: Path) -> None:
    before = (folder / "data.slab").stat()
    os.truncate(folder / "data.slab", before.st_size + 1)
    os.utime(folder / "data.slab", ns=(before.st_atime_ns, before.st_mtime_ns))


def flip_trust(folder: Path) -> None:
    flip(folder / "trust", (folder / "trust").stat().st_size - 1, 0x80)


def lose_trust(folder: Path) -> None:
    (folder / "trust").unlink()


def link_trust(folder: Path) -> None:
    (folder / "trust").rename(folder / "elsewhere")
    (folder / "trust").symlink_to(folder / "elsewhere")


def append_to_the_journal(folder: Path) -> None:
    with (folder / "journal").open("ab") as file:
        file.write(bytes(64))


def damage_the_older_superblock(folder: Path) -> None:
    halves = (folder / "superblock").read_bytes()
    epochs = []
    for at in (0, HALF_BYTES):
        superblock = decode_superblock(halves[at : at + HALF_BYTES])
        assert superblock is not None
        epochs.append(superblock.epoch)
    flip(folder / "superblock", epochs.index(min(epochs)) * HALF_BYTES + 100)


@pytest.mark.parametrize(
    "change",
    [write_a_byte, write_and_turn_back_the_clock, replace_by_a_copy, grow, flip_trust, lose_trust,
     append_to_the_journal, damage_the_older_superblock],
)  # fmt: skip
def test_nothing_is_believed_once_somebody_else_has_changed_the_slab(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """The change may come soon after the close, within one tick of the file system's clock."""
    with harness(tmp_path, 8, verify="off") as here:
        here.put(*range(8))
        here.tier.close()
        here.open()
        assert num_trusted(here) == 8
        here.tier.close()
        change(here.options.path)
        here.open()
        assert num_trusted(here) == 0
        assert here.get(*range(7)) == [OK] * 7


@LAZY
def test_journal_that_was_exchanged_for_another_of_the_same_size_is_not_believed(
    tmp_path: Path, verify: str
) -> None:
    """The journal of one life of a slab does not fit the data of another one that began alike."""
    with harness(tmp_path, 8, verify=verify, sample_every=1000) as here:
        folder, before = here.options.path, tmp_path / "before"
        here.put(*range(4))
        here.tier.close()
        shutil.copytree(folder, before)
        here.open()
        here.put(5)
        here.tier.close()
        shutil.copy(folder / "journal", tmp_path / "journal")
        shutil.rmtree(folder)
        shutil.copytree(before, folder)
        here.open()
        here.put(6)
        here.reopen()
        assert num_trusted(here) >= 1
        here.tier.close()
        assert (folder / "journal").stat().st_size == (tmp_path / "journal").stat().st_size
        shutil.copy(tmp_path / "journal", folder / "journal")
        here.open()
        assert num_trusted(here) == 0
        assert here.get(*range(4)) == [OK] * 4
        assert here.get(5) == [CORRUPT], "the bytes are those of block 6"


def test_journal_of_before_a_compaction_is_not_believed(tmp_path: Path) -> None:
    """Its size is the same where nothing was deleted."""
    with harness(tmp_path, 8, verify="off") as here:
        journal = here.options.path / "journal"
        here.put(*range(4))
        here.tier.close()
        before = journal.read_bytes()
        here.open()
        here.tier.parts[0].slab.compact()
        here.reopen()
        assert num_trusted(here) == 4
        here.tier.close()
        assert journal.stat().st_size == len(before)
        journal.write_bytes(before)
        here.open()
        assert num_trusted(here) == 0


def test_trust_outlives_a_compaction(tmp_path: Path) -> None:
    """Slots that hold nothing have a record before it, and none after."""
    with harness(tmp_path, 8, verify="off") as here:
        slots = here.put(*range(6))
        here.tier.forget(slots[:2])
        here.tier.parts[0].slab.compact()
        here.reopen()
        assert num_trusted(here) >= 4
        assert here.get(2) == [OK]
        here.tier.forget(here.claim([key(3)]))
        here.reopen()
        here.tier.parts[0].slab.compact()
        here.reopen()
        assert num_trusted(here) >= 3


def test_a_link_in_place_of_the_trust_is_not_followed(tmp_path: Path) -> None:
    with harness(tmp_path, 8, verify="off") as here:
        here.put(1)
        here.tier.close()
        link_trust(here.options.path)
        before = (here.options.path / "elsewhere").read_bytes()
        here.open()
        assert num_trusted(here) == 0
        here.tier.close()
        assert (here.options.path / "elsewhere").read_bytes() == before


def test_the_trust_of_another_close_is_not_used(tmp_path: Path) -> None:
    with harness(tmp_path, 8, verify="off") as here:
        here.put(1, 2)
        here.tier.close()
        shutil.copy(here.options.path / "trust", tmp_path / "old")
        here.open()
        here.tier.free(here.claim([key(1)]))
        here.tier.close()
        shutil.copy(tmp_path / "old", here.options.path / "trust")
        here.open()
        assert num_trusted(here) == 0


def test_growing_and_shrinking_keeps_what_was_believed(tmp_path: Path) -> None:
    with harness(tmp_path, 8, verify="off") as here:
        here.put(*range(8))
        for num_slots, expected in ((20, 8), (5, 5), (8, 5)):
            here.reopen(capacity_bytes=num_slots * SLOT_BYTES)
            assert num_trusted(here) == expected


def test_a_repair_vouches_for_nothing_that_nobody_verified(tmp_path: Path) -> None:
    with harness(tmp_path, 8, verify="off") as here:
        here.put(1, 2)
        here.crash()
        check_slab(here.options.path, repair=True)
        zero(here.options.path, range(8))
        here.open()
        assert here.get(1, 2) == [CORRUPT, CORRUPT]


@pytest.mark.parametrize("nth", range(1, 4))
def test_a_close_that_fails_leaves_a_slab_of_which_nothing_is_believed(
    tmp_path: Path, nth: int
) -> None:
    system = FaultyDisk()
    with harness(tmp_path, 8, verify="off", system=system) as here:
        here.put(1)
        system.fail("sync", nth)
        here.tier.close()
        system.forget_faults()
        here.open()
        assert num_trusted(here) == 0
        assert here.get(1) == [OK]


# -- the file --------------------------------------------------------------------------------------


def superblock(num_slots: int) -> Superblock:
    member = Membership(b"s" * 16, 5, 77, 76)
    return Superblock(4096, 1, num_slots, 0, 1, "", "", b"i" * 16, 0, member=member)


def table_of(num_slots: int) -> Records:
    table = blank(num_slots, RecordKind.PUT)
    table["slot"] = np.arange(num_slots)
    seal(table)
    return table


@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_trust_comes_back_as_it_was(bits: list[bool]) -> None:
    of, table = superblock(len(bits)), table_of(len(bits))
    content = encode(np.array(bits), table, of)
    assert len(content) == num_bytes_of(len(bits))
    found = decode(content + b"behind it", lambda: table, of)
    assert found is not None
    assert found.tolist() == bits


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.data())
def test_any_byte_of_the_trust_may_be_wrong(bits: list[bool], data: st.DataObject) -> None:
    of, table = superblock(len(bits)), table_of(len(bits))
    content = bytearray(encode(np.array(bits), table, of))
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    assert decode(bytes(content), lambda: table, of) is None
    assert decode(bytes(content[:-1]), lambda: table, of) is None
    assert decode(b"", lambda: table, of) is None


def test_trust_is_of_one_slab_one_session_and_one_size() -> None:
    of, table = superblock(9), table_of(9)
    content = encode(np.ones(9, bool), table, of)
    others = (
        dataclasses.replace(of, slab_id=b"j" * 16),
        dataclasses.replace(of, member=dataclasses.replace(of.member, session=78)),
        dataclasses.replace(of, num_slots=10),
    )
    assert decode(content, lambda: table, of) is not None
    assert [decode(content, lambda: table, other) for other in others] == [None] * 3


@given(st.lists(st.booleans(), min_size=2, max_size=40), st.data())
def test_trust_is_of_the_records_of_the_blocks_that_it_is_about(
    bits: list[bool], data: st.DataObject
) -> None:
    of, table = superblock(len(bits)), table_of(len(bits))
    slot = data.draw(st.integers(0, len(bits) - 1))
    content = encode(np.array(bits), table, of)
    table["seq"][slot] = 7
    seal(table)
    assert (decode(content, lambda: table, of) is None) == bits[slot]
    table["kind"][slot] = RecordKind.DEL
    assert (decode(content, lambda: table, of) is None) == bits[slot]
