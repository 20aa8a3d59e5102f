"""Start of a node after the files of its memory were damaged: right bytes, or new memory."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.core.errors import ConfigError
from kvtier.core.system.private_files import read_checked_file, replace_checked_file
from kvtier.node.server import records
from kvtier.node.server.records import FOLDER, HEADER, SEGMENTS
from kvtier.node.server.users import SlotUsers
from tests.node.damaging import DAMAGES, survive
from tests.node.test_takeover import NUM, harness

LOST = "the blocks in memory of the previous node are lost"
FILES = ("lock", "memory", "header", "segments", "engine", "generations", "slots")


def find(directory: Path, name: str) -> Path:
    """Return a file of a node's memory by the name of its kind."""
    paths = [directory / name, *(directory / FOLDER).glob(f"*{name}*")]
    return next(path for path in paths if path.exists())


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_damaged_file_is_new_memory_or_costs_its_blocks(
    tmp_path: Path, name: str, kind: Callable[[Path, random.Random], None]
) -> None:
    rng = random.Random(f"{name} {kind.__name__}")
    for case in range(3):
        survive(tmp_path / str(case), lambda directory: kind(find(directory, name), rng))


def test_undamaged_memory_is_taken_over_beside_a_stopped_engine(tmp_path: Path) -> None:
    assert survive(tmp_path, lambda _: None)


def test_every_flipped_bit_of_an_engines_file_is_noticed(tmp_path: Path) -> None:
    users = SlotUsers(tmp_path)
    users.add_client(users.enter("engine"), os.getpid())
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    for at in range(8 * len(content)):
        changed = bytearray(content)
        changed[at // 8] ^= 1 << at % 8
        path.write_bytes(changed)
        with pytest.raises(ValueError, match="damaged"):
            SlotUsers(tmp_path).load()
    path.write_bytes(content)
    SlotUsers(tmp_path).load()


def test_slot_that_an_engine_is_to_fill_stays_aside_without_its_bit(tmp_path: Path) -> None:
    def lose_users(directory: Path) -> None:
        with find(directory, "slots").open("r+b") as file:
            file.write(bytes(8 * NUM))

    assert survive(tmp_path, lose_users), "one file that is damaged costs no more than it must"


def test_segment_without_a_tag_is_noticed(tmp_path: Path) -> None:
    """Without a tag it would count as free, while an engine may still write to it."""
    assert not survive(tmp_path, lambda it: find(it, SEGMENTS).write_bytes(bytes(8 * 16)))


def test_record_of_before_never_counts_again_if_generations_were_lost(tmp_path: Path) -> None:
    """A slot whose generation begins anew would reach that of a deleted block's record."""
    with harness(tmp_path) as here:
        (slot,) = here.store(1)
        here.seal()
        before = int(here.partition.tier.generations[slot])
        here.kill()
        find(here.node.config.directory, "generations").write_bytes(bytes(4096))
        here.start()
        assert here.found(1) == []
        assert here.partition.tier.generations[slot] > before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 99}, "records of format 99"),
        ({"num_segments": 99}, "it has 99 segments"),
        ({"inode": 99}, None),
        ({"boot": "another"}, None),
    ],
)
def test_memory_of_another_node_is_not_taken_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], reason: str | None
) -> None:
    with harness(tmp_path) as here:
        here.store(1)
        here.seal()
        path = here.node.config.directory / FOLDER / HEADER
        header = json.loads(read_checked_file(path))
        replace_checked_file(path, json.dumps(header | change))
        here.crash()
        assert (LOST in caplog.text) == (reason is not None)
        assert (reason or "") in caplog.text
        assert here.found(1) == []


def test_memory_of_the_format_before_is_lost_in_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its header and engines have no checksum."""
    with harness(tmp_path) as here:
        here.store(1)
        here.seal()
        path = here.node.config.directory / FOLDER / HEADER
        header = json.loads(read_checked_file(path))
        path.write_text(json.dumps(header | {"format": 1}))
        here.crash()
        assert caplog.text.count(LOST) == 1
        assert "of another version" in caplog.text
        assert here.found(1) == []


def test_another_file_in_place_of_the_memory_is_not_taken_over(tmp_path: Path) -> None:
    with harness(tmp_path) as here:
        here.store(1)
        here.seal()
        memory = here.node.config.directory / "memory"
        shutil.copy(memory, tmp_path / "copy")
        (tmp_path / "copy").rename(memory)
        here.crash()
        assert here.found(1) == []


# -- a full file system ----------------------------------------------------------------------------


def full(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_memory_is_taken_over_in_a_full_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with harness(tmp_path) as here:
        here.store(1)
        here.seal()
        with monkeypatch.context() as patch:
            patch.setattr(records, "replace_checked_file", full)
            here.crash()
        assert here.found(1) == [1]


def test_new_memory_is_made_if_the_old_can_not_be_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The old one takes the space that the new one needs."""
    with harness(tmp_path) as here:
        here.store(1)
        here.seal()
        here.options = {"disk_path": str(tmp_path / "disk")}
        plain = replace_checked_file
        calls: list[Path] = []

        def once(path: Path, content: str) -> None:
            calls.append(path)
            if len(calls) == 1:
                full()
            plain(path, content)

        monkeypatch.setattr(records, "replace_checked_file", once)
        here.crash()
        assert f"{LOST}: " in caplog.text
        assert "No space left" in caplog.text
        assert here.found(1) == []


def test_full_file_system_without_memory_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "replace_checked_file", full)
    with pytest.raises(ConfigError, match=r"memory_path: .*No space left on device.*enlarge it"):
        harness(tmp_path).__enter__()
    assert not (tmp_path / "memory" / "memory").exists(), "it keeps no memory"
