"""Paths that are missing or not files are reported in one line, without a wait."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtier.core.errors import CacheError
from kvtier.tiers.disk.inspect.check import check_slab
from kvtier.tiers.disk.inspect.report import report_slab
from kvtier.tools.cli import app
from tests.tiers.disk.harness import harness, open_blocks


def told(command: str, slab: Path) -> str:
    """Return the one line of a command that cannot read the slab."""
    said = CliRunner().invoke(app, [command, str(slab)])
    assert said.exit_code == 2
    assert said.stdout == ""
    assert said.stderr.count("\n") == 1
    return said.stderr


@pytest.fixture
def slab(tmp_path: Path) -> Path:
    """Return a closed slab with four blocks."""
    with harness(tmp_path, 8) as here:
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


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "make", [Path.mkdir, as_pipe, as_socket, as_device, as_link_to_itself], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("name", ["superblock", "journal", "data.slab"])
def test_what_is_no_file_is_refused_and_not_waited_for(
    slab: Path, name: str, make: Callable[[Path], None]
) -> None:
    (slab / name).unlink()
    make(slab / name)
    for command in ("inspect", "verify"):
        if (name, command) == ("data.slab", "inspect"):
            continue  # it does not look at blocks
        with pytest.raises(CacheError):
            report_slab(slab, 0.0) if command == "inspect" else check_slab(slab, repair=False)
        assert str(slab / name) in told(command, slab)
    with pytest.raises(CacheError):
        open_blocks(slab)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [Path.mkdir, as_pipe, as_socket], ids=lambda f: f.__name__)
def test_lock_that_is_no_file_is_not_waited_for(slab: Path, make: Callable[[Path], None]) -> None:
    (slab / "flock").unlink()
    make(slab / "flock")
    with contextlib.suppress(CacheError):
        report_slab(slab, 0.0)
    with contextlib.suppress(CacheError):
        check_slab(slab, repair=False)
    with contextlib.suppress(CacheError):
        open_blocks(slab).close()


def test_file_or_pipe_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    as_pipe(tmp_path / "pipe")
    for name in ("file", "pipe"):
        for command in ("inspect", "verify"):
            assert "holds no slab" in told(command, tmp_path / name)


@pytest.mark.parametrize("name", ["superblock", "journal", "data.slab"])
def test_file_that_is_gone_is_named(slab: Path, name: str) -> None:
    (slab / name).unlink()
    assert name in told("verify", slab)
