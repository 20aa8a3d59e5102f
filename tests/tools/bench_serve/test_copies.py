"""``kvtier bench copy``: every method copies the right bytes, compared with one whole copy."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvtier.core.errors import ConfigError
from kvtier.devices.copies import Copies
from kvtier.devices.driver_device import DriverDevice
from kvtier.tools.bench_serve.copies import (
    CONTIGUOUS,
    MANY_BYTES,
    USUAL,
    CopyResult,
    CopyRow,
    measure_copies,
    show_copies,
)
from kvtier.tools.bench_serve.options import BenchError
from kvtier.tools.cli import app
from tests.devices.drivers import make_device
from tests.kit.fakes.fake import Fake


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> DriverDevice:
    device = make_device(Fake("cuda130"))
    monkeypatch.setattr(device, "prepare", lambda again=False: None)
    return device


def _measure(device: DriverDevice) -> CopyResult:
    return measure_copies(device, 1 << 20, 1, copy_bytes=(512, 4096), num_copies=(16, 64))


def test_every_way_is_measured_against_a_copy_in_a_piece(device: DriverDevice) -> None:
    found = _measure(device)
    assert found.is_page_locked
    assert found.left_out == ()
    ways = {CONTIGUOUS, USUAL, "batch", "kernel", "rows", "each"}
    for direction in ("load", "store"):
        for size in (512, 4096):
            for count in (16, 64):
                rows = {
                    row.path: row
                    for row in found.rows
                    if (row.direction, row.copy_bytes, row.num_copies) == (direction, size, count)
                }
                assert set(rows) == ways
                assert rows[CONTIGUOUS].ratio == 1
                for row in rows.values():
                    assert row.ratio == pytest.approx(rows[CONTIGUOUS].median_s / row.median_s)
                    assert row.gb_per_s == pytest.approx(size * count / row.median_s / 1e9)
    result: Any = found.as_json()
    assert json.loads(json.dumps(result)) == result
    assert result["machine"]["accelerator"] == "Fake GPU"
    show_copies(Console(file=None, quiet=True), found)


def test_way_that_brings_wrong_bytes_is_left_out_and_named(
    device: DriverDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device.driver, "copy_rows", lambda rows, direction, stream: None)
    found = _measure(device)
    assert "rows" not in {row.path for row in found.rows}
    assert "rows, load of 16 x 512 bytes: brought wrong bytes" in found.left_out


def test_usual_way_that_brings_wrong_bytes_is_an_error(
    device: DriverDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = device.driver.copy_batch

    def forgets_one(copies: Copies, direction: Any, stream: int) -> None:
        last = max(1, len(copies) - 1)
        right(Copies(copies.dst[:last], copies.src[:last], copies.size[:last]), direction, stream)

    monkeypatch.setattr(device.driver, "copy_batch", forgets_one)
    with pytest.raises(BenchError, match="brought wrong bytes"):
        _measure(device)


def _row(
    size: int, count: int, ratio: float, direction: str = "load", path: str = USUAL
) -> CopyRow:
    return CopyRow(direction, path, size, count, 1, 1, 1, 1, ratio, ratio - 0.005, ratio + 0.005)


def test_targets_are_the_worst_of_many_copies_by_the_usual_way() -> None:
    many = MANY_BYTES // 4096
    rows = (
        _row(4096, many, 0.7), _row(4096, many, 0.65, "store"), _row(4096, 64, 0.1),
        _row(4096, many, 0.2, path="each"),
        _row(8192, many, 0.8),
        _row(32768, many, 0.99), _row(1 << 20, many, 0.96, "store"),
    )  # fmt: skip
    targets = {
        target.target_id: (target.found.value, target.met)
        for target in CopyResult("cuda:0", {}, True, rows, ()).targets
    }
    assert targets == {
        "G1 32 KiB and more": (0.96, True),
        "G1 8 KiB": (0.8, False),
        "G1 4 KiB": (0.65, True),
    }
    assert CopyResult("cpu", {}, True, rows, ()).targets == [], "it is no accelerator"


def test_command_measures_the_cpu() -> None:
    done = CliRunner().invoke(
        app, ["bench", "copy", "--device", "cpu", "--size", "1MiB", "--repeats", "1", "--json", "-"]
    )
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["benchmark"] == "copy paths"
    assert {row["path"] for row in result["rows"]} == {CONTIGUOUS, USUAL}
    assert result["targets"] == []


def test_command_refuses_what_it_cant_measure(device: DriverDevice) -> None:
    with pytest.raises(ConfigError, match="size: 1000 bytes are too few"):
        measure_copies(device, 1000, 1)
    done = CliRunner().invoke(app, ["bench", "copy", "--device", "kettle"])
    assert done.exit_code == 2
    assert "no device 'kettle' here" in done.stderr
