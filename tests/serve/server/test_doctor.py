"""``kvtier doctor``: its findings, with and without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.core.errors import install_command
from kvtier.devices import CopyQueue, Device, Direction, Fence, Finding, Memory, find_device
from kvtier.tools.cli import detect
from tests.kit.cli import kvtier
from tests.kit.fakes.storage import StorageFake

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it fails
from kvtier.tools.cli import app
app(["doctor", "--json"])
"""


def run_without_torch(**variables: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **variables},
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


def notes(found: dict[str, object], section: str) -> dict[str, tuple[str, str]]:
    sections = found["sections"]
    assert isinstance(sections, dict)
    return {line["topic"]: (line["found"], line["note"]) for line in sections[section]}


def test_it_works_without_torch() -> None:
    found = run_without_torch(KVTIER_NATIVE="off")
    assert found["device"] == "cpu"
    assert found["native"] is False
    assert "KVTIER_NATIVE=off" in notes(found, "core")["native core"][1]
    devices = notes(found, "devices")
    assert devices["cuda"][0] == devices["npu"][0] == "no"
    assert "torch" in devices["cuda: torch's own copies"][1]
    assert devices["cpu"][0] == "yes"
    assert devices["cpu: copy path"][0] == "pure-Python copy"


def test_a_setting_that_cant_be_read_is_found_too() -> None:
    found = run_without_torch(KVTIER_NATIVE="maybe")
    assert notes(found, "core")["native core"][0] == "broken"
    assert "KVTIER_NATIVE='maybe'" in notes(found, "devices")["cpu"][1]


@pytest.mark.engine
def test_people_get_a_table_and_machines_json() -> None:
    table = kvtier("doctor", COLUMNS="160")
    as_json = kvtier("doctor", "--json")
    assert table.exit_code == as_json.exit_code == 0
    found = json.loads(as_json.output)
    for section, lines in found["sections"].items():
        assert section in table.output
        for line in lines:
            assert line["topic"] in table.output
    assert notes(found, "packages")["torch"][0].startswith("2.")
    assert notes(found, "devices")["auto"][0] == found["device"]


def test_a_missing_driver_is_named_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for vendor, back_end, kind in (
        ("CUDA", "NVIDIA", "cuda"), ("HIP", "AMD", "cuda"), ("ASCEND", "Ascend", "npu"),
    ):  # fmt: skip
        path = str(tmp_path / "libnothing.so")
        monkeypatch.setenv(f"KVTIER_{vendor}_LIBRARY", path)
        found = {line.topic: line for line in detect.devices_found()[0]}
        told = found[f"{kind}: {back_end}'s driver"]
        assert told.found == "no"
        assert told.note == (
            f"{path} is not on this machine; install the driver, or name its library in "
            f"KVTIER_{vendor}_LIBRARY"
        )


def test_what_is_not_installed_is_named_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(detect, "PACKAGES", ("numpy", "no-such-package"))
    numpy, missing = detect.packages()
    assert numpy.found != "not installed"
    assert missing == Finding(
        "no-such-package", "not installed", f"kvtier serve needs it: {install_command('engine')}"
    )


@pytest.mark.parametrize(
    ("content", "found", "note"),
    [
        ("always [madvise] never\n", "yes", "madvise"),
        ("always madvise [never]\n", "no", "switched off"),
        (None, "no", "no transparent huge pages"),
    ],
)
def test_huge_pages_are_found_as_the_system_has_them(
    tmp_path: Path, content: str | None, found: str, note: str
) -> None:
    if content is not None:
        file = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
        file.parent.mkdir(parents=True)
        file.write_text(content)
    told = detect.huge_pages(tmp_path)
    assert told.found == found
    assert note in told.note


def test_memory_is_bounded_by_the_control_group(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable:  8388608 kB\n")
    (tmp_path / "proc/cpuinfo").write_text("model name\t: Some CPU\n")
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(str(3 << 30))
    (group / "memory.current").write_text(str(1 << 30))
    lines = {line.topic: line for line in detect.machine(tmp_path)}
    assert lines["memory left"].found == "2.0 GiB"
    assert "control group" in lines["memory left"].note
    assert lines["CPU"].found == "Some CPU"


class LocksPages(Device):
    """A device that may grant page-locking."""

    name = "testing"

    def __init__(self, grants: bool) -> None:
        self._grants = grants
        self.locked: list[Memory] = []

    def queue(self, direction: Direction) -> CopyQueue:
        raise NotImplementedError

    def fence(self) -> Fence:
        raise NotImplementedError

    def page_lock(self, memory: Memory) -> bool:
        self.locked += [memory] if self._grants else []
        return self._grants

    def unlock(self, memory: Memory) -> None:
        self.locked.remove(memory)

    def findings(self) -> list[Finding]:
        return []


@pytest.mark.parametrize(("grants", "found"), [(True, "yes"), (False, "no")])
def test_page_locking_is_tried_and_undone(grants: bool, found: str) -> None:
    device = LocksPages(grants)
    assert detect.page_locking(device).found == found
    assert device.locked == []


def test_the_cpu_needs_no_page_locking() -> None:
    assert detect.page_locking(find_device("cpu")).found == "not needed"


@pytest.mark.parametrize(
    ("device", "arguments", "topic", "told"),
    [
        ("npu", ["--disk-path", "."], "disk to accelerator: nds", "GPU-direct: NDS, "),
        ("npu", [], "disk to accelerator", "not tried"),
        ("cpu", ["--disk-path", "."], "disk to accelerator", "no"),
    ],
    ids=["a folder", "no folder", "no accelerator"],
)
def test_a_disk_is_tried_where_one_is_named(
    device: str,
    arguments: list[str],
    topic: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = StorageFake("nds")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(fake.library_variable, str(fake.path))
    monkeypatch.setenv("KVTIER_ASCEND_LIBRARY", str(fake.path))
    monkeypatch.setattr(detect, "devices_found", lambda: ((), device))
    found = json.loads(kvtier("doctor", "--json", *arguments).output)
    assert notes(found, "disk")[topic][0].startswith(told)
    assert list(tmp_path.iterdir()) == []
