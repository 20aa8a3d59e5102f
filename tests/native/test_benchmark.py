"""The benchmark of the copy checks its bytes and reports in the agreed form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.micro import index, index_worker
from kvtier.core import hot

copy = pytest.importorskip(
    "benchmarks.micro.copy", reason="needs the engine extra", exc_type=ImportError
)


def test_copy_benchmark_reports_rows_and_targets(tmp_path: Path) -> None:
    report = tmp_path / "copy.json"
    copy.main(["--blocks", "4", "--threads", "1", "--rounds", "1", "--json", str(report)])
    result = json.loads(report.read_text(encoding="utf-8"))
    assert result["benchmark"] == "copy"
    assert result["machine"]["cores"] >= 1
    compared = {(row["case"], row["direction"]) for row in result["rows"]}
    assert compared == {(case, way) for case in ("D1", "D2", "D3") for way in ("store", "load")}
    copies = [row for row in result["rows"] if row["case"] != "D3"]
    assert all(row["ratio"] > 0 for row in copies)
    plans = [row for row in result["rows"] if row["case"] == "D3"]
    assert {row["num_copies"] for row in plans} == {14_336}
    measured = [target["id"] for target in result["targets"]]
    assert measured == [*(["D1", "D2"] if hot.NATIVE else []), "D3", "D3"]
    for target in result["targets"]:
        low, high = target["interval_95"]
        if target["id"] == "D3":
            assert low <= target["value"] <= high
        else:
            assert target["met"] is low is high is None, "one round tells nothing"


def test_plan_benchmark_notices_a_wrong_address() -> None:
    from benchmarks.micro import copy_plan
    from kvtier.cache.transfer.staging import stage

    layers, blocks = (
        copy_plan._Pool("layer_first", 4, 0),
        copy_plan._Pool("block_first", 4, 1 << 44),
    )
    args: Any = layers, [2, 0], blocks, [1, 3]
    batch = stage(*args)
    copy_plan._check([batch], *args)
    batch.dst_offset[7] += 1
    with pytest.raises(SystemExit, match="wrong"):
        copy_plan._check([batch], *args)


@pytest.mark.parametrize("damaged", ["named", "other"])
def test_copy_benchmark_notices_a_wrong_byte(damaged: str) -> None:
    rng = np.random.default_rng(1)
    group = copy.CASES[0].group
    src = copy.make_pool("layer_first", group, 8, 2, rng)
    dst = copy.make_pool("block_first", group, 3, 2, rng)
    copy.fill(src, rng)
    copy.reference_copy_batch(*copy.copy_list(src, dst))
    copy.check(src, dst, "right")
    named = {int(block) for block in dst.blocks}
    block = next(b for b in range(3) if (b in named) == (damaged == "named"))
    dst.block(block)[-1, -1] ^= 1
    with pytest.raises(AssertionError, match="did not arrive" if damaged == "named" else "changed"):
        copy.check(src, dst, "wrong")


@pytest.mark.slow
def test_index_benchmark_reports_rows_and_targets(tmp_path: Path) -> None:
    report = tmp_path / "index.json"
    sizes = ["--prompts", "10", "--length", "4096", "--contestants", "native", "python"]
    index.main([*sizes, "--json", str(report)])
    result = json.loads(report.read_text(encoding="utf-8"))
    assert result["benchmark"] == "index"
    kinds = {"native", "python"} if hot.NATIVE else {"python"}
    measured = {(row["contestant"], row["phase"]) for row in result["rows"]}
    assert measured == {(kind, phase) for kind in kinds for phase in index.PHASES}
    assert [target["id"] for target in result["targets"]] == (["I5"] if hot.NATIVE else [])


def test_index_benchmark_notices_a_wrong_result() -> None:
    worker = index_worker.Kvtier("python", 16)
    contest: Any = index_worker.Contest(worker, 10, 64, 16)
    assert contest.run("insert", 0, 10)["wrong"] == 0
    assert contest.run("hit+slots", 0, 10)["wrong"] == 0
    contest.index.evict(64)
    assert contest.run("hit+slots", 0, 10)["wrong"] > 0
    assert contest.run("hit", 0, 10)["wrong"] > 0
