"""What is not a file, or not there, in place of a slab's: told in one line, never waited for."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.errors import CacheError
from kvtier.tiers.disk import DiskOptions, DiskTier
from tests.disk.command import run
from tests.disk.world import SLOT_BYTES, SMALL, Arena, world


@pytest.fixture
def slab(tmp_path: Path) -> Path:
    """A slab with four blocks, closed."""
    with world(tmp_path, 8) as here:
        here.put(*range(4))
    return tmp_path / "slab"


def as_pipe(path: Path) -> None:
    os.mkfifo(path)


def as_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # its path may be too long for a socket
        made.bind(path.name)
        os.chdir(here)


def as_device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("may not make a device here")


def as_link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    "make", [Path.mkdir, as_pipe, as_socket, as_device, as_link_to_itself], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("name", ["superblock", "journal", "data.slab", "flock"])
def test_what_is_no_file_is_refused_and_not_waited_for(
    slab: Path, name: str, make: Callable[[Path], None]
) -> None:
    (slab / name).unlink()
    make(slab / name)
    for command in ("inspect", "verify"):
        if (name, command) == ("data.slab", "inspect"):
            continue  # it does not look at blocks
        said = run(command, slab)
        assert said.returncode == 2
        assert said.stderr.count("\n") == 1
        assert str(slab / name) in said.stderr
    with pytest.raises(CacheError):
        DiskTier(DiskOptions(slab, 8 * SLOT_BYTES), SMALL, Arena().memory)


def test_file_or_pipe_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    as_pipe(tmp_path / "pipe")
    for name in ("file", "pipe"):
        for command in ("inspect", "verify"):
            said = run(command, tmp_path / name)
            assert said.returncode == 2
            assert "holds no slab" in said.stderr


@pytest.mark.parametrize("name", ["superblock", "journal", "data.slab"])
def test_file_that_is_gone_is_named(slab: Path, name: str) -> None:
    (slab / name).unlink()
    said = run("verify", slab)
    assert said.returncode == 2
    assert said.stderr.count("\n") == 1
    assert name in said.stderr
