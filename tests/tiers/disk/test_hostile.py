"""Malicious slabs with right checksums are refused with one sentence."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtier.core.errors import CacheError, ConfigError, TierError, printable
from kvtier.core.hot import SlotTable
from kvtier.core.system.memory import available_bytes
from kvtier.tiers import Outcome
from kvtier.tiers.disk import DiskOptions, DiskSystem
from kvtier.tiers.disk.format.limits import BYTES_PER_SLOT, MAX_SEQUENCE, most_journal_bytes
from kvtier.tiers.disk.format.records import (
    RECORD_BYTES,
    RecordKind,
    as_keys,
    as_words,
    blank,
    seal,
)
from kvtier.tiers.disk.inspect.check import check_slab
from kvtier.tiers.disk.inspect.report import report_slab
from kvtier.tiers.disk.recovery import Recovery, newest, recover
from tests.tiers.disk.forging import forge_superblock, read_records, write_records
from tests.tiers.disk.harness import SLOT_BYTES, harness, key, open_blocks, records_of

OK, CORRUPT = Outcome.THERE, Outcome.DAMAGED
NUM_BLOCKS = 4
ESCAPE = b"\x1b]0;owned\x07\x1b[2J"


def run(*words: object) -> subprocess.CompletedProcess[str]:
    """Run ``kvtier`` in a process of its own with little memory and time, so that a crash shows."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))

    return subprocess.run(
        [sys.executable, "-m", "kvtier.tools.cli", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=limit,
        check=False,
    )


@pytest.fixture
def slab(tmp_path: Path) -> Path:
    """Return a closed slab of eight slots with four blocks."""
    with harness(tmp_path, 8) as here:
        here.put(*range(NUM_BLOCKS))
    return tmp_path / "slab"


def refused(folder: Path, *parts: str) -> None:
    """Check that report, check, repair and open each refuse the slab with one sentence."""
    for work in (
        lambda: report_slab(folder, 0.0),
        lambda: check_slab(folder, repair=False),
        lambda: check_slab(folder, repair=True),
        lambda: open_blocks(folder),
    ):
        with pytest.raises(CacheError) as caught:
            work()
        message = str(caught.value)
        assert message.isprintable()
        assert str(folder) in message
        for part in parts:
            assert part in message


# -- numbers of a superblock -----------------------------------------------------------------------

BIG = 2**64 - 1


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"block_bytes": 2**30}, "bytes per slot: 4096"),
        ({"block_bytes": 0}, "bytes per block: 0"),
        ({"block_bytes": BIG}, "bytes per slot: 4096"),
        ({"slot_bytes": 0}, "bytes per slot: 0"),
        ({"slot_bytes": 4097}, "bytes per slot: 4097"),
        ({"slot_bytes": 8192}, "bytes per slot: 8192"),
        ({"slot_bytes": 2**63, "block_bytes": 2**63}, "bytes in all slots"),
        ({"num_slots": 0}, "slots: 0"),
        ({"num_slots": BIG}, f"slots: {BIG}"),
        ({"num_slots": 2**32 + 1}, f"slots: {2**32 + 1}"),
        ({"num_ranks": 0}, "ranks: 0"),
        ({"rank": 1}, "rank: 1"),
        ({"rank": 2**32 - 1, "num_ranks": 2**32 - 1}, f"rank: {2**32 - 1}"),
        ({"epoch": BIG}, f"epoch: {BIG}"),
        ({"generation": BIG}, f"generation: {BIG}"),
        ({"step": BIG}, f"step: {BIG}"),
        ({"description_bytes": 4000}, "both superblocks"),
        ({"description": ESCAPE}, "both superblocks"),
        ({"description": b"\xff" * 3800}, "both superblocks"),
        ({"layout": ESCAPE}, "both superblocks"),
        ({"layout": b"\xe9" * 32}, "both superblocks"),
        ({"version": 9}, "version 9"),
    ],
    ids=str,
)
def test_superblock_with_an_impossible_number_is_refused(
    slab: Path, fields: dict[str, int | bytes], part: str
) -> None:
    forge_superblock(slab, **fields)
    refused(slab, part)


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_commands_tell_an_impossible_number_in_one_line_and_fail(slab: Path, command: str) -> None:
    forge_superblock(slab, block_bytes=2**30)
    said = run(command, slab, "--json")
    assert said.returncode == 2
    assert said.stdout == ""
    assert said.stderr.count("\n") == 1
    assert "bytes per slot: 4096" in said.stderr


def test_many_slots_that_the_data_does_not_have_cost_nothing(slab: Path) -> None:
    """2^32 slots are a quarter of a TiB of table, and 16 TiB of data."""
    forge_superblock(slab, num_slots=2**32)
    said = run("inspect", slab, "--json")
    assert said.returncode == 0
    assert json.loads(said.stdout)["num_blocks"] == NUM_BLOCKS
    for words in (["--json"], ["--json", "--repair"]):
        said = run("verify", slab, *words)
        assert said.returncode == 0
        assert json.loads(said.stdout)["num_blocks"] == NUM_BLOCKS
    assert (slab / "data.slab").stat().st_size == 8 * SLOT_BYTES
    with harness(slab.parent, 8) as here:
        assert here.get(*range(NUM_BLOCKS)) == [OK] * NUM_BLOCKS


def test_holes_as_data_are_no_reason_for_a_table_larger_than_memory(slab: Path) -> None:
    num_slots = 2 * available_bytes()[0] // BYTES_PER_SLOT
    forge_superblock(slab, num_slots=num_slots)
    os.truncate(slab / "data.slab", num_slots * SLOT_BYTES)
    assert run("inspect", slab).returncode == 0
    said = run("verify", slab, "--repair")
    assert said.returncode == 2
    assert "the table of the slab in" in said.stderr
    assert "are left" in said.stderr


def test_block_larger_than_memory_is_not_read(slab: Path) -> None:
    num_bytes = 2 * available_bytes()[0] // SLOT_BYTES * SLOT_BYTES
    forge_superblock(slab, block_bytes=num_bytes, slot_bytes=num_bytes, num_slots=4)
    os.truncate(slab / "data.slab", 4 * num_bytes)
    said = run("verify", slab)
    assert said.returncode == 2
    assert "a block of the slab in" in said.stderr
    assert "are left" in said.stderr


def test_capacity_of_more_slots_than_a_record_can_name_is_refused(tmp_path: Path) -> None:
    for capacity, most in ((2**45, 2**32), (2**80, 2**32)):
        with pytest.raises(ConfigError, match=rf"more than a slab can have \({most}\); lower"):
            open_blocks(DiskOptions(tmp_path / "slab", capacity))
    assert not (tmp_path / "slab").exists()


@pytest.mark.parametrize("made_at", [0, 2**32, BIG])
def test_any_time_can_be_reported(slab: Path, made_at: int) -> None:
    forge_superblock(slab, made_at=made_at)
    records = read_records(slab)
    records["time"] = [0, 0, 1, 2**31, 2**32 - 1, 2**32 - 1]
    records["depth"] = 2**32 - 1
    write_records(slab, records)
    said = run("inspect", slab)
    assert (said.returncode, said.stderr) == (0, "")
    assert json.loads(run("inspect", slab, "--json").stdout)["made_at"] == made_at


# -- the journal -----------------------------------------------------------------------------------


def test_sequence_that_nobody_counts_to_is_refused(slab: Path) -> None:
    for seq in (BIG, MAX_SEQUENCE):
        records = read_records(slab)
        records["seq"][-1] = seq
        write_records(slab, records)
        refused(slab, f"sequence number: {seq}")


def test_highest_sequence_that_is_read_can_be_counted_on_from(slab: Path) -> None:
    records = read_records(slab)
    records["seq"][-1] = MAX_SEQUENCE - 1
    write_records(slab, records)
    with harness(slab.parent, 8) as here:
        assert here.get(*range(NUM_BLOCKS)) == [OK] * NUM_BLOCKS
        slots = here.put(10, 11)
        assert here.load([key(10), key(11)], slots) == [OK, OK]


def test_sequences_are_compared_as_they_are_however_large() -> None:
    records = blank(2, RecordKind.PUT)
    records["seq"] = [BIG, 0]
    seal(records)
    found = Recovery(1)
    found.add(records)
    assert found.rows["seq"].tolist() == [BIG]


def test_journal_larger_than_its_slots_explain_is_refused(slab: Path) -> None:
    os.truncate(slab / "journal", most_journal_bytes(8) + 1)
    refused(slab, "the journal in", str(most_journal_bytes(8)))


def test_holes_in_a_journal_cost_nothing_and_are_damage(slab: Path) -> None:
    """The journal has the largest size for 2^32 slots: 4 TiB, all holes but a few blocks."""
    size = most_journal_bytes(2**32)
    content = (slab / "journal").read_bytes()
    forge_superblock(slab, num_slots=2**32)
    with (slab / "journal").open("r+b") as file:
        file.truncate(size)
        file.seek(size // 2)
        file.write(content)
    said = run("inspect", slab, "--json")
    assert said.returncode == 0
    told = json.loads(said.stdout)
    assert told["num_blocks"] == NUM_BLOCKS
    assert told["num_damaged"] > 0
    assert told["journal_bytes"] == size
    with harness(slab.parent, 8) as here:
        assert here.get(*range(NUM_BLOCKS)) == [OK] * NUM_BLOCKS
    assert (slab / "journal").stat().st_size < 1 << 20
    with harness(slab.parent, 8) as here:
        assert here.get(*range(NUM_BLOCKS)) == [OK] * NUM_BLOCKS


class FixedNames(DiskSystem):
    """Renames nothing."""

    def replace(self, source: Path, target: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_journal_with_holes_is_whole_until_another_one_is_there(slab: Path) -> None:
    records = read_records(slab)
    with (slab / "journal").open("r+b") as file:
        file.seek(2 << 20)
        file.write(records[-1:].tobytes())
    with pytest.raises(TierError):
        open_blocks(slab, FixedNames())
    assert (slab / "journal").stat().st_size == (2 << 20) + RECORD_BYTES
    with harness(slab.parent, 8) as here:
        assert here.get(*range(NUM_BLOCKS)) == [OK] * NUM_BLOCKS


def test_records_around_holes_are_all_read(tmp_path: Path) -> None:
    records = blank(300, RecordKind.PUT)
    records["slot"] = records["seq"] = range(300)
    seal(records)
    content = bytearray(2 << 20)
    starts = [0, 64 << 10, (1 << 20) + 64 * 7, (2 << 20) - 64 * 5]
    for start, part in zip(
        starts, (records[:200], records[200:250], records[250:295], records[295:]), strict=True
    ):
        content[start : start + len(part) * RECORD_BYTES] = part.tobytes()
    with (tmp_path / "journal").open("w+b") as file:
        file.truncate(len(content) + 17)
        for start in starts:
            page = start // 4096 * 4096
            file.seek(page)
            file.write(content[page : page + (5 if start == starts[0] else 1) * 4096])
        file.flush()
        found, size = recover(tmp_path, file.fileno(), 300, 300)
    assert size == len(content) + 17
    assert found.num_records == 300
    assert found.num_invalid < len(content) // RECORD_BYTES - 300
    assert found.rows["seq"].tolist() == list(range(300))


def test_keys_made_to_agree_in_eight_bytes_are_found_one_by_one() -> None:
    """A hundred thousand of them: a walk over all for each would take hours."""
    num = 100_000
    keys = [b"12345678" + number.to_bytes(8, "big") * 3 for number in range(num)]
    assert sorted(newest(as_words(as_keys(keys)), np.arange(num))) == list(range(num))
    listed = SlotTable(as_keys(keys), np.arange(num))
    missing = b"12345678" + b"\xff" * 24
    assert listed.find(as_keys([*keys, missing])).tolist() == [*range(num), -1]


def test_more_records_of_names_than_there_are_numbers_do_no_harm(slab: Path) -> None:
    naming = blank(70_000, RecordKind.NAMESPACE)
    naming["namespace"] = np.arange(70_000) % 65536
    naming["key"][-1] = np.frombuffer(b"z" * 32, "V32")[0]
    records = np.concatenate([read_records(slab), naming])
    records["seq"][-len(naming) :] = 1000
    write_records(slab, records)
    assert run("inspect", slab).returncode == 0
    with harness(slab.parent, 8) as here:
        assert here.get(*range(NUM_BLOCKS)) == [OK] * NUM_BLOCKS
        here.put(10)


# -- texts -----------------------------------------------------------------------------------------

DEEP = b"[" * 3800
WORDS = (
    b'{"attention":"\\u001b[2J","num_layers":1,"parts":"\\u009b","dtype":"\\ud800","block_size":{}}'
)


@pytest.mark.parametrize("description", [DEEP, b'{"parts":' + DEEP, WORDS, b"[]", b"7", b""])
def test_description_that_is_no_layout_is_shown_and_obeyed_by_nobody(
    slab: Path, description: bytes
) -> None:
    forge_superblock(slab, description=description)
    said = run("inspect", slab)
    assert (said.returncode, said.stderr) == (0, "")
    assert all(line.isprintable() for line in said.stdout.split("\n"))
    assert json.loads(run("inspect", slab, "--json").stdout)["description"] == description.decode()
    with harness(slab.parent, 8) as here:
        assert here.get(0) == [OK]


@pytest.mark.slow
def test_owner_can_not_command_the_terminal(tmp_path: Path) -> None:
    with harness(tmp_path, 8) as here:
        path = here.options.path
        (path / "flock").write_bytes(ESCAPE + b" owner " + b"\xff" * 300)
        for words in (["inspect"], ["inspect", "--json"], ["verify"]):
            said = run(words[0], path, *words[1:])
            assert "owner" in said.stdout + said.stderr
            assert all(line.isprintable() for line in (said.stdout + said.stderr).split("\n"))


@pytest.mark.slow
def test_name_of_a_directory_can_not_command_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\x1b[2J[red]\xff")
    for command in ("inspect", "verify"):
        said = run(command, path)
        assert said.returncode == 2
        assert "\\x1b[2J[red]\\udcff" in said.stderr
    with harness(path, 8) as here:
        here.put(1)
    for command in ("inspect", "verify"):
        said = run(command, path / "slab")
        assert said.returncode == 0
        assert "\\x1b[2J[red]\\udcff" in said.stdout.replace("\n", "")


def test_printable_text_stays_as_it_is() -> None:
    assert printable("16 layers, ×2") == "16 layers, ×2"
    assert printable("a\x1b\n\u202eb") == "a\\x1b\\n\\u202eb"


# -- repair ----------------------------------------------------------------------------------------


def test_repair_of_a_slab_that_was_cut_keeps_what_is_there(slab: Path) -> None:
    os.truncate(slab / "data.slab", 2 * SLOT_BYTES + 100)
    report = check_slab(slab, repair=True)
    assert [bad_block.slot for bad_block in report.bad_blocks] == [2, 3]
    assert (slab / "data.slab").stat().st_size == 2 * SLOT_BYTES
    assert check_slab(slab, repair=False).is_right
    with harness(slab.parent, 8) as here:
        assert here.get(*range(NUM_BLOCKS)) == [OK, OK, CORRUPT, CORRUPT]


# -- time ------------------------------------------------------------------------------------------


def test_clock_past_what_a_record_can_say_is_the_latest_time(tmp_path: Path) -> None:
    with harness(tmp_path, 8) as here:
        here.clock.now = 2.0**32 + 1000
        slots = here.allocate(1)
        assert here.store([key(1)], slots, depths=[2**32 + 5]) == [True]
        assert records_of(here.options.path, 8)["depth"][slots] == [2**32 - 1]
        here.tier.forget(slots)
        here.tier.free(slots)
        here.put(2)
        table = records_of(here.options.path, 8)
        assert table["time"].max() == 2**32 - 1
        here.reopen()
        assert here.get(2) == [OK]
