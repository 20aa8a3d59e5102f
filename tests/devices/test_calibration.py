"""Calibration of copy paths, and what is remembered of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.core.errors import DeviceError
from kvtier.devices import Direction
from kvtier.devices.calibration import calibrate
from kvtier.devices.copies import Copies
from kvtier.devices.driver_device import DriverDevice
from kvtier.devices.path_table import Measured, PathTable, load_table, save_table, table_path
from kvtier.devices.paths import CopyPath
from kvtier.devices.rig import open_rig
from tests.devices.drivers import BATCH_CALLS, make_device
from tests.kit.fakes.fake import Fake

ALL = frozenset({CopyPath.BATCH, CopyPath.ROWS, CopyPath.EACH})


def _row(path: CopyPath, size: int, count: int, rate: float) -> Measured:
    return Measured(Direction.LOAD, path, size, count, rate)


TABLE = PathTable(
    (
        _row(CopyPath.BATCH, 4096, 64, 5e9),
        _row(CopyPath.ROWS, 4096, 64, 8e9),
        _row(CopyPath.BATCH, 65536, 64, 9e9),
        _row(CopyPath.ROWS, 65536, 64, 2e9),
    ),
    ALL,
)


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.devices.calibration.RIG_BYTES", (64 << 20, 32 << 20))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvtier"


@pytest.fixture
def fake() -> Iterator[Fake]:
    fake = Fake("cann91")
    yield fake
    assert fake.violations == []


@pytest.fixture
def device(fake: Fake) -> Iterator[DriverDevice]:
    device = make_device(fake)
    yield device
    device.close()


def test_best_path_is_that_of_the_nearest_measurement() -> None:
    assert TABLE.best_first(Direction.LOAD, 50, 3000)[0] is CopyPath.ROWS
    assert TABLE.best_first(Direction.LOAD, 50, 1 << 20)[0] is CopyPath.BATCH
    assert list(TABLE.best_first(Direction.STORE, 50, 3000)) == []


def test_table_is_the_same_after_it_was_saved(tmp_path: Path) -> None:
    path = table_path("some accelerator", tmp_path / "deep" / "folder")
    assert load_table(path) is None
    assert save_table(TABLE, path, "some accelerator")
    assert load_table(path) == TABLE
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"version": 1}', '{"version": 99, "rows": []}']
)
def test_table_that_cant_be_read_counts_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(content)
    assert load_table(path) is None


def test_folder_that_cant_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not save_table(TABLE, tmp_path / "file" / "table.json", "some accelerator")


def test_every_path_is_measured_in_both_directions(device: DriverDevice) -> None:
    table = calibrate(device, copy_bytes=(512, 4096), num_copies=(16, 64), repeats=1)
    found = {(row.direction, row.path, row.copy_bytes, row.num_copies) for row in table.rows}
    assert found == {
        (direction, path, size, count)
        for direction in Direction
        for path in ALL
        for size in (512, 4096)
        for count in (16, 64)
    }
    assert all(row.bytes_per_s > 0 for row in table.rows)
    assert table.tried == ALL


def test_path_that_brings_wrong_bytes_is_left_out(
    device: DriverDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = device.driver.copy_batch

    def forgets_one(copies: Copies, direction: Direction, stream: int) -> None:
        last = len(copies) - 1
        right(Copies(copies.dst[:last], copies.src[:last], copies.size[:last]), direction, stream)

    monkeypatch.setattr(device.driver, "copy_batch", forgets_one)
    table = calibrate(device, copy_bytes=(512,), num_copies=(16,), repeats=1)
    assert {row.path for row in table.rows} == ALL - {CopyPath.BATCH}
    assert table.tried == ALL
    assert "it brought wrong bytes" in caplog.text


def test_what_was_measured_is_remembered_and_used(
    fake: Fake, device: DriverDevice, cache: Path
) -> None:
    table = PathTable(tuple(_row(path, 4096, 64, 1e9) for path in ALL), ALL)
    best = PathTable((*table.rows, _row(CopyPath.EACH, 512, 64, 9e9)), ALL)
    assert save_table(best, table_path(device.driver.identity), device.driver.identity)
    device.prepare()
    device.prepare()
    assert fake.count("copies") == 0, "nothing was measured anew"
    with open_rig(device, 1 << 20) as rig:
        device.copy(rig.scattered(Direction.LOAD, 512, 64), Direction.LOAD)
    assert fake.count("aclrtMemcpyAsync") == 64
    assert fake.count(BATCH_CALLS["ascend"]) == 0
    (line,) = (finding for finding in device.findings() if finding.topic == "fastest loads")
    assert line.found.startswith("each from 512 B")
    assert "512 B 9.0, 4 KiB 1.0" in line.note


def test_measured_once_per_machine(fake: Fake, device: DriverDevice, cache: Path) -> None:
    topics = [line.topic for line in device.findings()]
    assert "fastest copies" in topics, "nothing was measured yet"
    device.prepare()
    num_copies = fake.count("copies")
    assert num_copies > 0
    (file,) = cache.iterdir()
    saved = json.loads(file.read_text())
    assert saved["accelerator"] == "Ascend910B-fake, CANN 9.1 or newer"
    other = make_device(fake)
    other.prepare()
    assert fake.count("copies") == num_copies
    other.prepare(again=True)
    assert fake.count("copies") > num_copies
    other.close()


def test_way_that_was_not_there_before_is_measured(
    fake: Fake, device: DriverDevice, cache: Path
) -> None:
    old = PathTable((_row(CopyPath.EACH, 4096, 64, 1e9),), frozenset({CopyPath.EACH}))
    assert save_table(old, table_path(device.driver.identity), device.driver.identity)
    device.prepare()
    assert fake.count("copies") > 0


def test_device_without_memory_to_measure_with_works_unmeasured(
    fake: Fake,
    device: DriverDevice,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(nbytes: int) -> int:
        raise DeviceError(f"no {nbytes} bytes")

    monkeypatch.setattr(device.driver, "allocate", refuse)
    device.prepare()
    assert "could not be measured" in caplog.text
    assert not cache.exists()


def test_device_with_little_memory_is_measured_with_less(
    fake: Fake, device: DriverDevice, cache: Path
) -> None:
    fake.fail_call("aclrtMalloc", 207001)
    device.prepare()
    assert len(list(cache.iterdir())) == 1
