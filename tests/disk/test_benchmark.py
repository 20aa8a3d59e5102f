"""The benchmark of the recovery checks what it opens, and reports in the agreed form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import slab_recovery


def test_recovery_benchmark_reports_rows_and_its_target(tmp_path: Path) -> None:
    report = tmp_path / "slab.json"
    slab_recovery.main(["--records", "2000", "--rounds", "1", "--json", str(report)])
    result = json.loads(report.read_text(encoding="utf-8"))
    assert result["benchmark"] == "slab_recovery"
    assert [row["num_blocks"] for row in result["rows"]] == [2000, 1000]
    assert [target["id"] for target in result["targets"]] == ["S4"]


def test_recovery_benchmark_notices_a_lost_block(monkeypatch: pytest.MonkeyPatch) -> None:
    seal = slab_recovery.seal

    def spoil(records: slab_recovery.Records) -> None:
        seal(records)
        records["depth"][-1] ^= 1

    monkeypatch.setattr(slab_recovery, "seal", spoil)
    with pytest.raises(AssertionError, match="blocks found"):
        slab_recovery.main(["--records", "100", "--rounds", "1"])
