"""Plug-ins are found by name, and the core does without optional packages."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from kvtier.core.errors import ConfigError, DeviceError
from kvtier.core.system import plugins
from kvtier.devices import find_device
from kvtier.devices.cpu import CpuDevice


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Entry points by "group/name"; a test may add its own."""
    known = {"kvtier.devices/cpu": "kvtier.devices.cpu:CpuDevice"}

    def installed_plugins(group: str) -> EntryPoints:
        names = {name: name.partition("/") for name in known if name.startswith(f"kvtier.{group}/")}
        return EntryPoints(EntryPoint(names[at][2], known[at], names[at][0]) for at in names)

    monkeypatch.setattr(plugins, "installed_plugins", installed_plugins)
    return known


def test_plugin_is_found_by_its_name(installed: dict[str, str]) -> None:
    assert plugins.load_plugin("devices", "cpu") is CpuDevice


def test_installed_packages_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scans = list[str]()

    def entry_points(group: str) -> EntryPoints:
        scans.append(group)
        return EntryPoints()

    monkeypatch.setattr(plugins, "entry_points", entry_points)
    plugins.installed_plugins.cache_clear()
    for _ in range(2):
        assert plugins.known_plugins("of a test") == {}
    assert scans == ["kvtier.of a test"]


def test_unknown_plugin_names_those_that_are_known(installed: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"'kettle' in kvtier.devices; known: cpu"):
        plugins.load_plugin("devices", "kettle")
    with pytest.raises(ConfigError, match="known: none"):
        plugins.load_plugin("tiers", "kettle")


def test_device_is_found_by_its_name(installed: dict[str, str]) -> None:
    assert isinstance(find_device("cpu"), CpuDevice)


def test_every_other_device_is_served_by_torch(installed: dict[str, str]) -> None:
    """The plug-in gets the whole name, index included."""
    installed["kvtier.devices/torch"] = "builtins:str"
    with pytest.raises(DeviceError, match="'xpu:1' made a str, not a Device"):
        find_device("xpu:1")


def test_a_kind_with_drivers_of_its_own_tries_those_first(installed: dict[str, str]) -> None:
    installed["kvtier.devices/ascend"] = "builtins:list"
    installed["kvtier.devices/torch"] = "builtins:str"
    with pytest.raises(DeviceError, match="'ascend' for device 'npu:1' made a list"):
        find_device("npu:1")


def test_a_kind_of_anothers_is_served_by_the_plug_in_of_its_name(
    installed: dict[str, str],
) -> None:
    installed["kvtier.devices/kettle"] = "builtins:list"
    installed["kvtier.devices/torch"] = "builtins:str"
    with pytest.raises(DeviceError, match="'kettle' for device 'kettle:1' made a list"):
        find_device("kettle:1")


def test_device_that_nothing_serves_says_why_for_each_back_end(installed: dict[str, str]) -> None:
    with pytest.raises(DeviceError, match=r"no device 'cuda'.*cuda: .*hip: .*torch: no plug-in"):
        find_device("cuda")


def test_core_needs_no_torch() -> None:
    code = (
        "import sys, kvtier, kvtier.cache.tokens, kvtier.devices.cpu\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
