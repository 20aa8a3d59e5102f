"""Paths that users give: ``~`` where no shell has replaced it, and users without a home."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtier.connectors.sglang.shared.settings import LinkerSettings
from kvtier.connectors.vllm.shared.settings import VllmSettings
from kvtier.core.config import CacheConfig
from kvtier.core.errors import ConfigError
from kvtier.core.system.user_paths import cache_folder, check_socket, user_path
from kvtier.identity.memory import WeightsMemory
from kvtier.node.client.channel import NodeClient
from kvtier.node.config import NodeConfig, control_socket
from kvtier.tiers.codecs.encryption import read_keyring
from kvtier.tiers.disk import DiskOptions
from kvtier.tiers.remote.location import StoreOptions
from kvtier.tiers.row import check_tiers
from kvtier.tools.cli import app


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory; the working directory is another one."""
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    return home


DOORS: dict[str, Callable[[str], object]] = {
    "disk tier": lambda path: DiskOptions(Path(path), 1).path,
    "second disk": lambda path: DiskOptions(Path("/x"), 1, (Path(path),)).more_paths[0],
    "vLLM": lambda path: VllmSettings(disk_path=path, disk_capacity=1).disk_options().path,
    "SGLang": lambda path: (
        LinkerSettings(host_capacity=1, disk_path=path, disk_capacity=1).disk_options().path
    ),
    "node": lambda path: NodeConfig(socket=Path(path)).socket,
    "node's memory": lambda path: NodeConfig(memory_path=Path(path)).memory_path,
    "node's disk": lambda path: Path(NodeConfig(disk_path=path).disk_path),
    "node's client": lambda path: NodeClient(Path(path)).path,
    "node's control": lambda path: control_socket(Path(path)).with_name("kv"),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_tilde_is_the_home_directory_wherever_a_path_is_given(home: Path, door: str) -> None:
    assert DOORS[door]("~/kv") == home / "kv"
    with pytest.raises(ConfigError, match=r"~nobody-like-that/kv: there is no such home directory"):
        DOORS[door]("~nobody-like-that/kv")


def test_secrets_are_read_from_the_home_directory(home: Path) -> None:
    (home / "secret").write_text("a" * 64)
    assert StoreOptions(secret_file="~/secret").secret() == b"a" * 64
    assert read_keyring("file:~/secret") is not None


@pytest.mark.parametrize("how", ["option", "TOML"])
def test_a_folder_of_the_home_directory_is_made_there(home: Path, how: str) -> None:
    config = home / "kvtier.toml"
    config.write_text('disk-path = ["~/kv"]\nhost-capacity = "900TiB"\n')
    given = ["--disk-path=~/kv", "--port=0", "--record=~/no-such-folder/x"]
    options = given if how == "option" else ["--config=~/kvtier.toml", "--port=0"]
    result = CliRunner().invoke(app, ["serve", *options])
    assert result.exit_code == 2, result.output
    assert [*Path.cwd().iterdir()] == []
    if how == "option":
        assert f"record: there is no directory {home}/no-such-folder" in result.stderr
        assert (home / "kv").is_dir()
    else:
        assert "host tier: a capacity of 921600.00 GiB" in result.stderr


def test_a_cache_in_python_is_in_the_home_directory(home: Path) -> None:
    check_tiers(CacheConfig(disk_path="~/kv", disk_capacity="1MiB"), 0)
    assert (home / "kv").is_dir()


def test_arguments_of_commands_are_paths_of_the_home_directory(home: Path) -> None:
    for command in (["inspect", "~/kv"], ["verify", "~/kv"], ["replay", "~/kv", "--no-report"]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2
        assert f"{home}/kv" in result.stderr.replace("\n", "")


def test_a_user_without_a_home_directory_remembers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: object) -> None:
        raise KeyError("no such user")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ConfigError, match="~/kv: there is no such home directory; write the path"):
        user_path("~/kv")
    assert not cache_folder().exists()
    assert WeightsMemory().recall("model") == {}
    assert os.fspath(user_path("/kv")) == "/kv"


@pytest.mark.parametrize(
    "given",
    ["http://127.0.0.1:9000", Path("http://node:9000/x"), "unix:///run/n.sock", "node:9000"],
)
def test_an_address_is_no_path_of_a_socket(given: str | Path) -> None:
    with pytest.raises(ConfigError, match="socket: (http|unix|node):.* is a network address; name"):
        check_socket(given, "socket")


@pytest.mark.parametrize("given", ["/run/kvtier/node.sock", "n.sock", "~/a:1/n.sock", "/a/b:90"])
def test_a_path_of_a_socket_may_have_colons(given: str) -> None:
    check_socket(given, "socket")
