"""The memory of weights: damaged, somebody else's, full, or not there."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from threading import Thread

import pytest

from kvtier.identity import WeightsMemory
from kvtier.identity.files import Stamp
from kvtier.identity.memory import MAX_BYTES, MAX_MODELS

MODEL = "/models/one"
RECORDS = {f"{MODEL}/{at}.safetensors": (Stamp(at, 2, 3, 4), "ab" * 32) for at in range(3)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kvtier" / "weights"


@pytest.fixture
def memory(folder: Path) -> WeightsMemory:
    made = WeightsMemory(folder)
    assert made.remember(MODEL, RECORDS)
    return made


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_what_is_remembered_is_recalled_by_another_process(
    folder: Path, memory: WeightsMemory
) -> None:
    assert WeightsMemory(folder).recall(MODEL) == RECORDS
    assert memory.recall("/models/two") == {}


def test_memory_is_for_this_user_only(folder: Path, memory: WeightsMemory) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(only_file(folder).stat().st_mode) == 0o600


def test_memory_lies_in_the_users_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert WeightsMemory().remember(MODEL, RECORDS)
    assert (tmp_path / "kvtier" / "weights").is_dir()


def test_any_damage_is_as_good_as_nothing(folder: Path, memory: WeightsMemory) -> None:
    file = only_file(folder)
    whole = file.read_bytes()
    for at in range(0, len(whole), 7):
        file.write_bytes(whole[:at])
        assert memory.recall(MODEL) == {}
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert memory.recall(MODEL) in ({}, RECORDS)
    digit = whole.index(b"abab")
    file.write_bytes(whole[:digit] + b"c" + whole[digit + 1 :])
    assert memory.recall(MODEL) == {}, "another digest would be another model's name"


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'"x"', b"{}", b"\xff\xfe", b"[" * 100_000, b'{"check": 1, "files": []}'],
)
def test_what_is_no_memory_at_all_is_nothing(
    folder: Path, memory: WeightsMemory, content: bytes
) -> None:
    only_file(folder).write_bytes(content)
    assert memory.recall(MODEL) == {}
    assert memory.remember(MODEL, RECORDS)
    assert memory.recall(MODEL) == RECORDS


def test_file_of_another_version_or_model_is_nothing(folder: Path, memory: WeightsMemory) -> None:
    other = WeightsMemory(folder)
    other.remember("/models/two", RECORDS)
    first, second = (folder / name for name in sorted(os.listdir(folder)))
    content = {file: file.read_bytes() for file in (first, second)}
    first.write_bytes(content[second])
    second.write_bytes(content[first])
    assert memory.recall(MODEL) == memory.recall("/models/two") == {}


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720])
def test_folder_that_others_may_write_to_is_not_believed(
    folder: Path, memory: WeightsMemory, mode: int
) -> None:
    folder.chmod(mode)
    assert memory.recall(MODEL) == {}
    assert not memory.remember(MODEL, RECORDS)


def test_file_that_others_may_write_to_is_not_believed(folder: Path, memory: WeightsMemory) -> None:
    only_file(folder).chmod(0o666)
    assert memory.recall(MODEL) == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_somebody_else_owns_is_not_believed(folder: Path, memory: WeightsMemory) -> None:
    os.chown(only_file(folder), 12345, -1)
    assert memory.recall(MODEL) == {}
    os.chown(only_file(folder), os.geteuid(), -1)
    assert memory.recall(MODEL) == RECORDS
    os.chown(folder, 12345, -1)
    assert memory.recall(MODEL) == {}
    assert not memory.remember(MODEL, RECORDS)


def test_links_are_not_followed(folder: Path, memory: WeightsMemory, tmp_path: Path) -> None:
    file = only_file(folder)
    elsewhere = tmp_path / "elsewhere.json"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert memory.recall(MODEL) == {}
    assert memory.remember(MODEL, RECORDS), "the link is replaced, and not what it leads to"
    assert not file.is_symlink()
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert WeightsMemory(link).recall(MODEL) == {}


def test_pipe_in_the_place_of_the_file_keeps_nobody_waiting(
    folder: Path, memory: WeightsMemory
) -> None:
    file = only_file(folder)
    file.unlink()
    os.mkfifo(file, 0o600)
    assert memory.recall(MODEL) == {}


def test_folder_that_cannot_be_made_costs_the_memory_only(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    memory = WeightsMemory(tmp_path / "file" / "weights")
    assert not memory.remember(MODEL, RECORDS)
    assert memory.recall(MODEL) == {}
    memory.forget(MODEL)


def test_memory_is_bounded(folder: Path, memory: WeightsMemory) -> None:
    for at in range(MAX_MODELS + 5):
        memory.remember(f"/models/{at}", RECORDS)
        for file in folder.iterdir():  # no two in one tick of the clock
            before = file.stat().st_mtime_ns
            os.utime(file, ns=(before - 10**9, before - 10**9))
    assert len(list(folder.iterdir())) == MAX_MODELS
    assert memory.recall(MODEL) == {}
    assert memory.recall(f"/models/{MAX_MODELS + 4}") == RECORDS
    many = {f"{'x' * 1000}{at}": (Stamp(1, 2, 3, 4), "") for at in range(MAX_BYTES // 1000)}
    assert not memory.remember(MODEL, many)


def test_forgotten_model_is_not_recalled(memory: WeightsMemory) -> None:
    memory.forget(MODEL)
    assert memory.recall(MODEL) == {}
    memory.forget(MODEL)


def test_writers_at_the_same_time_leave_one_whole_file(folder: Path, memory: WeightsMemory) -> None:
    def write(number: int) -> None:
        records = {f"{number}": (Stamp(number, 2, 3, 4), "cd" * 32)}
        for _ in range(30):
            assert WeightsMemory(folder).remember(MODEL, records)
            assert len(WeightsMemory(folder).recall(MODEL)) == 1

    threads = [Thread(target=write, args=(number,)) for number in range(4)]
    memory.remember(MODEL, {"0": (Stamp(0, 2, 3, 4), "cd" * 32)})
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(json.loads(only_file(folder).read_bytes())["files"]) == 1
