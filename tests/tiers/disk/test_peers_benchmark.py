"""The comparison with other disk caches: rows and targets, a missing peer, wrong bytes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers
from benchmarks.disk import against_peers
from benchmarks.disk.against_peers import READ, WRITE, Numbers, Row, targets
from benchmarks.disk.peer_processes import Worker, start
from benchmarks.peers import OURS, Contestant
from benchmarks.peers.kvtier_disk import LAYER_BYTES, KvtierDisk
from benchmarks.peers.store import BATCH, Arena
from benchmarks.peers.worker import Contest

SMALL = ["--gib", "0.01", "--rounds", "1", "--batches", "1"]


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path / "none")
    monkeypatch.setattr(against_peers, "FIO", "a-program-that-is-not-there")


@pytest.mark.usefixtures("no_peers")
def test_peers_benchmark_reports_our_rows_and_a_line_per_missing_peer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "peers.json"
    arguments = [*SMALL, "--folder", str(tmp_path), "--json", str(report)]
    against_peers.main(arguments, sizes={"64 KiB": LAYER_BYTES})
    result = json.loads(report.read_text(encoding="utf-8"))
    assert result["benchmark"] == "disk_peers"
    assert str(tmp_path) not in report.read_text(encoding="utf-8")
    ours = [each.name for each in peers.CONTESTANTS if each.peer == OURS]
    measured = [(row["contestant"], row["direction"]) for row in result["rows"]]
    assert measured == [(name, way) for way in (READ, WRITE) for name in ours]
    assert all(row["gb_per_s"] > 0 and row["cpu_s_per_gb"] >= 0 for row in result["rows"])
    assert result["targets"] == []
    lines = capsys.readouterr().err.splitlines()
    missing = [each for each in peers.CONTESTANTS if each.peer != OURS]
    for each in missing:
        assert f"{each.name}: left out, `make peers-{each.peer}` installs it" in lines
    assert [path.name for path in tmp_path.iterdir()] == [report.name]


def test_peer_that_cannot_begin_is_left_out_with_its_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Contestant, "python", Path(sys.executable))
    broken = Contestant("broken", "other", "no_such_module")
    workers, versions = start([broken], tmp_path, LAYER_BYTES, BATCH)
    assert (workers, versions) == ([], {})
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("broken: ModuleNotFoundError")
    assert line.endswith("left out")


@pytest.fixture
def contest(tmp_path: Path) -> Iterator[Contest]:
    store = KvtierDisk(Arena(LAYER_BYTES), tmp_path, 2 * BATCH, "off")
    contest = Contest(store)
    contest.fill()
    yield contest
    store.close()


def test_contest_counts_no_wrong_block_of_an_honest_store(contest: Contest) -> None:
    [numbers] = Numbers(2 * BATCH).stored(1, seed=3)
    assert contest.read([numbers])["wrong"] == 0
    assert contest.write([list(range(1000, 1000 + BATCH))])["wrong"] == 0
    assert contest.read([numbers])["wrong"] == 0


@pytest.mark.parametrize("damage", ["first byte", "last byte", "not read", "another block"])
def test_contest_counts_wrong_blocks(
    contest: Contest, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    load = contest.store.load

    def spoil(numbers: list[int]) -> None:
        if damage == "another block":
            load([number + BATCH for number in numbers])
        elif damage != "not read":
            load(numbers)
            contest.arena.blocks[5, 0 if damage == "first byte" else -1] ^= 1

    monkeypatch.setattr(contest.store, "load", spoil)
    expected = 1 if "byte" in damage else BATCH
    assert contest.read([list(range(BATCH))])["wrong"] == expected


def test_wrong_bytes_end_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(peers.CONTESTANTS[0], tmp_path, LAYER_BYTES, BATCH)
    try:
        assert "version" in worker.answer()
        monkeypatch.setattr(worker, "answer", lambda: {"seconds": 1.0, "wrong": 2})
        with pytest.raises(AssertionError, match="kvtier: 2 wrong blocks in read"):
            worker.ask("read", batches=[])
    finally:
        worker.close()


def test_no_block_is_read_twice_in_a_turn_and_new_ones_are_new() -> None:
    numbers = Numbers(4 * BATCH)
    stored = [number for batch in numbers.stored(4, seed=1) for number in batch]
    assert sorted(stored) == list(range(4 * BATCH))
    new = [number for batch in numbers.new(2) + numbers.new(1) for number in batch]
    assert new == list(range(4 * BATCH, 7 * BATCH))


def test_targets_take_a_peer_by_its_best_and_the_worst_size() -> None:
    def row(contestant: str, peer: str, block: str, rate: float, cpu: float) -> Row:
        exact: Any = {"gb_per_s_between": (rate, rate), "cpu_s_per_gb_between": (cpu, cpu)}
        return Row(contestant, peer, block, READ, rate, rate, rate, cpu, **exact)

    rows = [
        row("kvtier", OURS, "1 MiB", 3.0, 0.01),
        row("kvtier", OURS, "2.5 MiB", 4.0, 0.02),
        row("slow", "peer", "1 MiB", 1.0, 0.1),
        row("fast", "peer", "1 MiB", 2.0, 0.2),
        row("slow", "peer", "2.5 MiB", 1.0, 0.1),
        row("fast", "peer", "2.5 MiB", 2.0, 0.2),
        Row("slow", "peer", "1 MiB", WRITE, 9.0, 9.0, 9.0, 0.0),
    ]
    speed, cpu = targets(rows)
    assert (speed["id"], speed["peer"], speed["value"], speed["met"]) == ("S5", "peer", 1.5, True)
    assert (cpu["measure"], cpu["value"], cpu["met"]) == ("CPU", 0.2, True)
