"""The benchmark of the recovery checks what it opens, and reports in the agreed form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.disk import direct, recovery
from benchmarks.scale import compaction, restart, slabs
from kvtier.tiers.disk.format.records import Records, seal


def test_recovery_benchmark_reports_rows_and_its_target(tmp_path: Path) -> None:
    report = tmp_path / "slab.json"
    recovery.main(["--records", "2000", "--rounds", "1", "--json", str(report)])
    result = json.loads(report.read_text(encoding="utf-8"))
    assert result["benchmark"] == "slab_recovery"
    assert [row["num_blocks"] for row in result["rows"]] == [2000, 1000]
    assert [target["id"] for target in result["targets"]] == ["S4"]


def test_recovery_benchmark_notices_a_lost_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(records: Records) -> None:
        seal(records)
        if len(records) > 1:  # not the header
            records["depth"][-1] ^= 1

    monkeypatch.setattr(slabs, "seal", spoil)
    with pytest.raises(AssertionError, match="blocks found"):
        recovery.main(["--records", "100", "--rounds", "1"])


@pytest.mark.slow
@pytest.mark.nightly
def test_restarts_are_measured_with_every_rank_and_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restart, "SIZES", (1500, 6000))
    monkeypatch.setattr(restart, "ONE_IN", 1000)
    part = restart.measure(quick=True)
    assert {row.num for row in part.rows} == {1500, 6000}
    assert [target["id"] for target in part.targets] == ["S4", "N3", "N3", "N3", "N4"]
    on_the_wire = part.targets[3]
    assert isinstance(on_the_wire["value"], float)
    assert on_the_wire["value"] <= 34, "keys are sent by one rank"
    lossy = [row.more["not_everywhere"] for row in part.rows if "lost" in row.operation]
    assert all(isinstance(num, int) and num > 0 for num in lossy)


def test_compactions_are_measured_beside_look_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "SIZES", (1000, 4000))
    part = compaction.measure(quick=True)
    assert len(part.rows) == 6
    assert [target["id"] for target in part.targets] == ["N6"]


def test_ways_from_disk_are_measured_in_turns_and_checked(tmp_path: Path) -> None:
    report = tmp_path / "direct.json"
    direct.main(["--quick", "--path", str(tmp_path), "--json", str(report)])
    result = json.loads(report.read_text(encoding="utf-8"))
    assert [row["verify"] for row in result["rows"]] == [True, False] * 3
    assert [target["id"] for target in result["targets"]] == ["R4"] * 6


def test_ways_from_disk_that_bring_wrong_bytes_are_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "repack", lambda *arguments: None)
    with pytest.raises(AssertionError, match="wrong bytes"):
        direct.main(["--quick", "--path", str(tmp_path)])
