"""``kvtier inspect`` and ``kvtier verify``."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtier.tiers import Outcome
from kvtier.tools.cli import app
from tests.tiers.disk.faulty_disk import FaultyDisk
from tests.tiers.disk.harness import SLOT_BYTES, Clock, Harness, flip, harness, key

OK, CORRUPT = Outcome.THERE, Outcome.DAMAGED


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, result.output


def run_json(*words: object) -> tuple[int, dict[str, object]]:
    result = CliRunner().invoke(app, [str(word) for word in words] + ["--json"])
    return result.exit_code, json.loads(result.stdout)


def fill(here: Harness) -> None:
    """Store three blocks of one namespace, three younger ones of another; forget one of these."""
    slots = here.allocate(6)
    assert all(here.store([key(n) for n in range(3)], slots[:3], namespace=b"1" * 32))
    here.clock.now += 86400
    assert all(here.store([key(n) for n in range(3, 6)], slots[3:], namespace=b"2" * 32))
    here.tier.forget(slots[5:])


def test_inspect_tells_what_is_in_a_slab(tmp_path: Path) -> None:
    clock = Clock()
    clock.now = 1_000_000_000
    with harness(tmp_path, 8, clock=clock) as here:
        fill(here)
    code, told = run_json("inspect", tmp_path / "slab")
    assert code == 0
    expected = {"num_blocks": 5, "num_slots": 8, "used_bytes": 5 * SLOT_BYTES, "is_clean": True,
                "capacity_bytes": 8 * SLOT_BYTES, "owner": None, "num_dead": 2}  # fmt: skip
    assert expected.items() <= told.items()  # dead: what was forgotten, and that it was
    assert told["namespaces"] == [
        {"digest": (b"1" * 32).hex(), "num_blocks": 3, "num_bytes": 3 * SLOT_BYTES,
         "longest_blocks": 3, "oldest_at": 1_000_000_000, "newest_at": 1_000_000_000},
        {"digest": (b"2" * 32).hex(), "num_blocks": 2, "num_bytes": 2 * SLOT_BYTES,
         "longest_blocks": 2, "oldest_at": 1_000_086_400, "newest_at": 1_000_086_400},
    ]  # fmt: skip
    ages = told["ages"]
    assert isinstance(ages, list)
    assert [age["num_blocks"] for age in ages] == [0] * 7 + [5]
    code, text = run("inspect", tmp_path / "slab")
    assert code == 0
    for part in ("5 of 8 slots", "closed in order", "3131313131313131", "full attention"):
        assert part in text


def test_inspect_prints_to_a_terminal_of_ascii(tmp_path: Path) -> None:
    with harness(tmp_path, 8) as here:
        here.put(1)
        path = here.options.path
    done = subprocess.run(
        [sys.executable, "-m", "kvtier.tools.cli", "inspect", str(path)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "k 2?4, v 2?4" in done.stdout


def test_inspect_beside_an_owner_changes_nothing_and_says_who_it_is(tmp_path: Path) -> None:
    with harness(tmp_path, 8) as here:
        fill(here)
        before = {each.name: each.read_bytes() for each in here.options.path.iterdir()}
        code, told = run_json("inspect", here.options.path)
        assert code == 0
        assert told["num_blocks"] == 5
        assert str(os.getpid()) in str(told["owner"])
        assert before == {each.name: each.read_bytes() for each in here.options.path.iterdir()}
        here.put(7)
        here.crash()
        assert "not closed in order" in run("inspect", here.options.path)[1]


def test_inspect_of_an_empty_slab(tmp_path: Path) -> None:
    with harness(tmp_path, 8):
        pass
    code, text = run("inspect", tmp_path / "slab")
    assert code == 0
    assert "0 of 8 slots" in text


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_what_is_no_slab_is_told_in_one_line(tmp_path: Path, command: str) -> None:
    code, text = run(command, tmp_path / "nothing")
    assert code == 2
    assert f"there is no directory {tmp_path}/nothing; name the directory that a server has" in text
    assert list(tmp_path.iterdir()) == []
    code, text = run(command, tmp_path)
    assert code == 2
    assert "holds no slab (its file superblock is missing); name the directory that" in text
    assert list(tmp_path.iterdir()) == []


def test_verify_of_a_good_slab(tmp_path: Path) -> None:
    with harness(tmp_path, 8) as here:
        fill(here)
    before = {each.name: each.read_bytes() for each in (tmp_path / "slab").iterdir()}
    code, told = run_json("verify", tmp_path / "slab")
    assert code == 0
    assert told["is_right"] is True
    assert told["num_blocks"] == 5
    assert before == {each.name: each.read_bytes() for each in (tmp_path / "slab").iterdir()}
    assert "nothing is wrong" in run("verify", tmp_path / "slab")[1]


def test_verify_finds_and_repairs_damage(tmp_path: Path) -> None:
    with harness(tmp_path, 8) as here:
        fill(here)
        slab = here.options.path
    for name, offset in (
        ("data.slab", SLOT_BYTES + 3),
        ("journal", 2 * 64 + 40),
        ("superblock", 9),
    ):
        flip(slab / name, offset)
    code, told = run_json("verify", slab)
    assert code == 1
    bad = told["bad_blocks"]
    assert isinstance(bad, list)
    assert [(each["slot"], each["key"], each["reason"]) for each in bad] == [
        (1, key(1).hex(), "checksum")
    ]
    assert told["num_damaged_records"] == 1
    assert told["num_whole_superblocks"] == 1
    assert told["is_repaired"] is False
    code, text = run("verify", slab)
    assert code == 1
    for part in ("1 bad block", key(1).hex()[:16], "1 damaged record", "superblocks", "--repair"):
        assert part in text
    code, text = run("verify", slab, "--repair")
    assert code == 0
    assert "repaired" in text
    code, told = run_json("verify", slab)
    assert code == 0
    assert told["is_right"] is True
    with harness(tmp_path, 8) as here:
        assert here.get(0, 1, 2, 3, 4) == [CORRUPT, CORRUPT, OK, OK, OK]
        assert here.tier.num_free + 3 == 8


def test_verify_finds_a_slab_that_was_cut(tmp_path: Path) -> None:
    with harness(tmp_path, 8) as here:
        fill(here)
    os.truncate(tmp_path / "slab" / "data.slab", 2 * SLOT_BYTES)
    code, told = run_json("verify", tmp_path / "slab")
    assert code == 1
    bad = told["bad_blocks"]
    assert isinstance(bad, list)
    assert [(each["slot"], each["reason"]) for each in bad] == [(s, "short") for s in (2, 3, 4)]


def test_repair_gives_quarantined_slots_back_that_can_be_read(tmp_path: Path) -> None:
    system = FaultyDisk()
    with harness(tmp_path, 8, system=system) as here:
        slots = here.put(1)
        system.fail("read", 1, errno.EIO)
        here.load([key(1)], slots)
        here.tier.free(slots)
        assert here.tier.slots.num_quarantined == 1
    code, text = run("verify", tmp_path / "slab", "--repair")
    assert code == 0
    assert "1 slot quarantined after I/O errors, 1 of them used again" in text
    with harness(tmp_path, 8) as here:
        assert here.tier.slots.num_quarantined == 0
        assert here.tier.num_free == 8


@pytest.mark.parametrize("repair", [[], ["--repair"]])
def test_verify_beside_an_owner_is_refused(tmp_path: Path, repair: list[str]) -> None:
    with harness(tmp_path, 8) as here:
        slots = here.put(1)
        code, text = run("verify", here.options.path, *repair)
        assert code == 2
        assert f"in use by process {os.getpid()}" in text
        assert here.load([key(1)], slots) == [OK]
