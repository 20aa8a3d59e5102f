"""One owner per slab, in a directory that only its user can write to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.core.errors import ConfigError
from kvtier.tiers import Outcome
from kvtier.tiers.disk.format.folder import owner_of
from kvtier.tiers.disk.inspect.check import check_slab
from kvtier.tiers.disk.opening import check_folders
from tests.tiers.disk.harness import harness, key, open_blocks

OK = Outcome.THERE


def refused(path: Path) -> str:
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ConfigError) as caught:
        open_blocks(path)
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open, "a file was left open"
    return str(caught.value)


# -- one owner -------------------------------------------------------------------------------------


def test_a_slab_in_use_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    with harness(tmp_path, 8) as here:
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} "):
            check_folders(here.options)
        options = here.options
    check_folders(options)


def delete_the_lock(slab: Path) -> None:
    (slab / "flock").unlink()


def replace_the_lock(slab: Path) -> None:
    (slab / "flock").unlink()
    (slab / "flock").touch()


def move_the_files(slab: Path) -> None:
    slab.rename(slab.with_name("old"))
    slab.mkdir(0o700)
    for each in slab.with_name("old").iterdir():
        each.rename(slab / each.name)


def move_the_files_but_the_lock(slab: Path) -> None:
    move_the_files(slab)
    (slab / "flock").unlink()


def delete_the_slab(slab: Path) -> None:
    for each in slab.iterdir():
        each.unlink()


@pytest.mark.parametrize(
    "change",
    [delete_the_lock, replace_the_lock, move_the_files, move_the_files_but_the_lock,
     delete_the_slab],
)  # fmt: skip
def test_no_second_owner_is_let_in_whatever_is_deleted_or_moved(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    with harness(tmp_path, 8) as here:
        slots = here.put(1)
        change(here.options.path)
        assert "is in use by" in refused(here.options.path)
        assert here.load([key(1)], slots) == [OK]
        here.put(2)


@pytest.mark.parametrize("compacts", [False, True])
def test_a_folder_that_was_emptied_under_its_owner_is_made_anew_at_the_next_start(
    tmp_path: Path, compacts: bool
) -> None:
    """The owner writes some of its files again: when it compacts its journal, and when it ends."""
    with harness(tmp_path, 8) as here:
        here.put(1)
        delete_the_slab(here.options.path)
        if compacts:
            here.tier.parts[0].slab.compact()
        here.tier.close()
        assert [*here.options.path.iterdir()]
        here.open()
        assert len(here.tier.listed) == 0
        slots = here.put(1)
        assert here.load([key(1)], slots) == [OK]


def test_owner_is_named_and_told_to_who_only_looks(tmp_path: Path) -> None:
    with harness(tmp_path, 8) as here:
        assert f"process {os.getpid()} (" in refused(here.options.path)
        assert f"process {os.getpid()} (" in str(owner_of(here.options.path))
        (here.options.path / "flock").unlink()
        assert owner_of(here.options.path) == "another process"
        with pytest.raises(ConfigError, match="in use by another process"):
            check_slab(here.options.path, repair=False)
        here.tier.close()
        assert owner_of(here.options.path) is None


def test_owner_that_holds_only_the_file_flock_is_respected(tmp_path: Path) -> None:
    import fcntl

    with harness(tmp_path, 8) as here:
        here.tier.close()
        with (here.options.path / "flock").open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(b"process 1 (older)\n")
            file.truncate()
            file.flush()
            assert "in use by process 1 (older)" in refused(here.options.path)
            assert owner_of(here.options.path) == "process 1 (older)"
        here.open()


def test_a_copy_is_a_slab_of_its_own(tmp_path: Path) -> None:
    with harness(tmp_path / "one", 8) as here:
        here.put(1)
        shutil.copytree(tmp_path / "one", tmp_path / "two")
        with harness(tmp_path / "two", 8) as copy:
            assert copy.get(1) == [OK]


# -- whose directory -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o702, 0o777, 0o1777])
def test_a_directory_that_every_user_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    """A sticky one, too: others could still put files there that a slab does not have yet."""
    path = tmp_path / "slab"
    path.mkdir()
    path.chmod(mode)
    message = refused(path)
    assert "every user may write" in message
    assert "chmod o-w" in message
    assert list(path.iterdir()) == []
    with harness(path, 8) as here:  # a directory below it is made for this user
        here.put(1)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o770, 0o2775])
def test_a_directory_of_a_group_is_taken(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "slab"
    path.mkdir()
    path.chmod(mode)
    with harness(tmp_path, 8) as here:
        here.put(1)
    assert path.stat().st_mode & 0o7777 == mode


def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a directory away")
    path = tmp_path / "slab"
    path.mkdir(0o700)
    os.chown(path, 12345, 12345)
    assert "belongs to user 12345" in refused(path)
    assert list(path.iterdir()) == []
