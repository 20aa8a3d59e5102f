"""Findings of the probe, over fakes, in processes of its own."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from kvtier.core.system.child_process import KILLED_S
from kvtier.tiers.disk.io import probe as probing
from kvtier.tiers.disk.io.probe import Probe, Reach, findings, main, probe
from kvtier.tiers.disk.io.vendors import VENDORS
from tests.kit.fakes.storage import STORAGE, StorageFake

KINDS = {"cuda": "cufile", "hip": "hipfile", "ascend": "nds"}
POPEN = "kvtier.core.system.child_process.subprocess.Popen"
DEVICES = {"cuda": "cuda:0", "hip": "cuda:0", "ascend": "npu:0"}


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_known", {})


@pytest.fixture(params=STORAGE)
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StorageFake:
    return use(request.param, monkeypatch)


def use(name: str, monkeypatch: pytest.MonkeyPatch) -> StorageFake:
    """Use these libraries, also in child processes."""
    made = StorageFake(name)
    monkeypatch.setenv(made.library_variable, str(made.path))
    monkeypatch.setenv(f"KVTIER_{made.vendor.upper()}_LIBRARY", str(made.path))
    return made


def probed(fake: StorageFake, folder: Path, limit_s: float = 240.0) -> Probe:
    found = probe(KINDS[fake.vendor], str(folder), DEVICES[fake.vendor], limit_s)
    assert list(folder.iterdir()) == [], "it leaves no file behind"
    return found


def test_a_machine_that_can_is_found_to(fake: StorageFake, tmp_path: Path) -> None:
    found = probed(fake, tmp_path)
    assert (found.reach, found.why_not) == (Reach.DIRECT, "")
    version = {
        "cufile113": " 1.13",
        "cufile115": " 1.15",
        "cufile120": " 1.20",
        "hipfile03": " 0.3",
    }
    assert found.library.endswith(version.get(fake.name, "NDS"))
    line = found.finding()
    assert line.found.startswith(f"GPU-direct: {found.library}, ")
    assert "GB/s" in line.note
    assert fake.num_transfers == 0, "not in this process"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cufile113", "cuFileDriverOpen answered 5001 (its kernel driver is not loaded, or"),
        ("cufile115", "cuFileDriverOpen answered 5001 (its kernel driver is not loaded, or"),
        ("cufile120", "cuFileDriverOpen answered 5001 (its kernel driver is not loaded, or"),
        ("hipfile03", "not on this file system"),
    ],
)
def test_compatibility_mode_is_called_what_it_is(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_FAKE_DRIVER", "bounced")
    found = probed(use(name, monkeypatch), tmp_path)
    assert found.reach is Reach.BOUNCED
    assert reason in found.why_not
    line = found.finding()
    assert line.found.startswith("compatibility mode: ")
    assert "every byte goes through host memory" in line.note


@pytest.mark.parametrize("name", ["cufile113", "cufile120"])
def test_a_disk_that_udev_does_not_know_is_told_of(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same is true in a container without /run/udev, or on a machine without nvidia-fs."""
    fake = use(name, monkeypatch)
    monkeypatch.delenv("CUFILE_LOGFILE_PATH", raising=False)
    monkeypatch.setenv("KVTIER_HIPFILE_LIBRARY", "/no/hipfile.so")
    monkeypatch.setenv("KVTIER_FAKE_DRIVER", "no udev")
    found = probed(fake, tmp_path)
    assert found.reach is Reach.NONE
    assert found.finding().note == (
        "not directly: cuFileDriverOpen answered 5001 (its kernel driver is not loaded, or not "
        "open); nor in compatibility mode: cuFileHandleRegister answered 5027 (the file is not "
        "registered; does udev's database in /run/udev have its disk?)"
    )
    assert [step.log for step in found.steps] == [
        ("the kernel module is not loaded",),
        ("udev property not found: ID_FS_USAGE vda",),
    ]
    monkeypatch.setattr("sys.argv", ["probe", str(tmp_path)])
    main()
    told = capsys.readouterr().out
    assert "tried GPU-direct: cuFileDriverOpen answered 5001" in told
    assert "tried compatibility mode: cuFileHandleRegister answered 5027" in told
    assert f"{found.library} says: udev property not found: ID_FS_USAGE vda" in told


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("KVTIER_FAKE_DRIVER", "absent", "answered 5033"),
        ("KVTIER_FAKE_DRIVER", "abort", "ended by signal 6"),
        ("KVTIER_FAKE_BYTES", "wrong", "it brought wrong bytes"),
    ],
)
def test_a_machine_that_cant_is_told_why(
    fake: StorageFake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    told: str,
) -> None:
    monkeypatch.setenv(variable, value)
    found = probed(fake, tmp_path)
    assert found.reach is Reach.NONE
    assert told in found.why_not
    assert found.finding().found == "no"


def test_a_driver_that_spins_is_killed_at_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = use("cufile120", monkeypatch)
    monkeypatch.setenv("KVTIER_FAKE_DRIVER", "spin")
    children: list[subprocess.Popen[Any]] = []
    real = subprocess.Popen

    def note(*arguments: Any, **named: Any) -> subprocess.Popen[Any]:
        children.append(real(*arguments, **named))
        return children[-1]

    monkeypatch.setattr(POPEN, note)
    began = time.monotonic()
    found = probed(fake, tmp_path, limit_s=4.0)
    assert time.monotonic() - began < 4.0 + KILLED_S + 10.0, "far less than for ever"
    assert found.reach is Reach.NONE
    assert found.why_not == "it did not answer within 4 s, and was killed"
    (child,) = children
    assert child.returncode == -9
    assert not Path(f"/proc/{child.pid}").exists()


def test_a_disk_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use("nds", monkeypatch)
    monkeypatch.setenv("KVTIER_FAKE_DRIVER", "absent")
    first = probed(fake, tmp_path)
    monkeypatch.setattr(POPEN, None)  # a second one would fail
    assert probed(fake, tmp_path) is first
    other = tmp_path / "other"
    other.mkdir()
    assert probed(fake, other) is first, "the same disk"


def test_a_library_leaves_no_log_behind_unless_somebody_wants_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUFILE_LOGFILE_PATH", raising=False)
    assert VENDORS["cufile"].variables(True) == {
        "CUFILE_ALLOW_COMPAT_MODE": "true",
        "CUFILE_LOGFILE_PATH": os.devnull,
    }
    monkeypatch.setenv("CUFILE_LOGFILE_PATH", "mine.log")
    assert VENDORS["cufile"].variables(False) == {
        "CUFILE_ALLOW_COMPAT_MODE": "false",
        "CUFILE_FORCE_COMPAT_MODE": "false",
    }
    assert VENDORS["nds"].variables(False) == {}


def test_no_process_is_begun_for_a_library_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_CUFILE_LIBRARY", "/no/cufile.so")
    monkeypatch.setenv("KVTIER_HIPFILE_LIBRARY", "/no/hipfile.so")
    monkeypatch.setattr(POPEN, None)
    for line in findings(str(tmp_path), "cuda"):
        assert line.found == "no"
        assert "is not on this machine; install the driver, or name its library in" in line.note


def test_a_folder_that_cant_be_written_to_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use("nds", monkeypatch)
    found = probe("nds", str(tmp_path / "none"), "npu:0")
    assert (found.reach, found.library) == (Reach.NONE, "")
    assert "No such file" in found.why_not
    found = probe("nds", "/proc", "npu:0")
    assert (found.reach, found.library) == (Reach.NONE, "NDS")
    assert "/proc/.kvtier-probe-" in found.why_not


def test_people_can_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use("nds", monkeypatch)
    monkeypatch.setattr("sys.argv", ["probe", str(tmp_path), "--device", "npu"])
    main()
    assert capsys.readouterr().out.startswith("disk to accelerator: nds: GPU-direct: NDS, ")


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_this_machine_is_told_as_it_is(device: str) -> None:
    """Probe this machine without fakes.

    The test cannot know what the machine has. It fails for results that are wrong on every machine:
    wrong bytes, and a driver that hangs.
    """
    folder = os.environ.get("KVTIER_PROBE_FOLDER", os.getcwd())
    lines = findings(folder, device)
    if all("is not on this machine" in line.note for line in lines):
        pytest.skip("; ".join(line.note for line in lines))
    for line in lines:
        assert "wrong bytes" not in line.note
        assert "did not answer" not in line.note
        print(f"{line.topic}: {line.found} ({line.note})")
