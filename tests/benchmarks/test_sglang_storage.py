"""Arithmetic of the benchmark behind SGLang's controller; `make bench-sglang` runs it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.disk.against_peers import READ, Row, targets
from benchmarks.peers import ENVIRONMENTS, OURS
from benchmarks.sglang.storage import (
    ASKED,
    CONTESTANTS,
    FILE,
    NIXL,
    PAGES,
    Lookup,
    lookup_targets,
    measure_lookups,
    read_options,
    wanted,
)


def _row(peer: str, rate: float, cpu: float) -> Row:
    exact: Any = {"gb_per_s_between": (rate, rate), "cpu_s_per_gb_between": (cpu, cpu)}
    return Row(peer, peer, "1 MiB", READ, rate, rate, rate, cpu, **exact)


def test_file_is_a_target_for_both_and_nixl_for_the_rate_alone() -> None:
    rows = [_row(OURS, 3.0, 0.02), _row(FILE, 2.0, 0.1), _row(NIXL, 4.0, 0.01)]
    found = [(target["peer"], target["measure"], target["met"]) for target in targets(rows, wanted)]
    assert found == [(FILE, "GB/s", True), (FILE, "CPU", True), (NIXL, "GB/s", False)]


def _lookup(peer: str, block: str, us: float) -> Lookup:
    return Lookup(peer, peer, block, ASKED, us, (us, us))


@pytest.mark.parametrize(("us", "met"), [(50.0, True), (51.0, False)])
def test_look_up_is_judged_by_its_worst_size(us: float, met: bool) -> None:
    lookups = [
        _lookup(OURS, "1 MiB", us),
        _lookup(OURS, "2.5 MiB", 10.0),
        _lookup(FILE, "1 MiB", 1000.0),
        _lookup(FILE, "2.5 MiB", 1000.0),
        _lookup(NIXL, "1 MiB", 1.0),
    ]
    [target] = lookup_targets(lookups)
    assert target["value"] == pytest.approx(1000 / us, abs=0.001)
    assert target["met"] is met


def test_without_file_there_is_no_target_for_look_ups() -> None:
    assert lookup_targets([_lookup(OURS, "1 MiB", 1.0)]) == []


class _Answers:
    """A worker that takes as many microseconds as the turn has number."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.contestant = SimpleNamespace(name=name, peer=OURS)
        self.asked = asked
        self._turn = 0

    def ask(self, do: str, batches: list[list[int]]) -> dict[str, object]:
        assert do == "look_up"
        assert all(len(set(batch)) == len(batch) == 200 for batch in batches)
        self.asked.append(self.contestant.name)
        self._turn += 1
        return {"each_s": [self._turn * 1e-6] * len(batches)}


def test_look_ups_come_in_turns_and_the_first_round_does_not_count() -> None:
    asked: list[str] = []
    workers = [_Answers("a", asked), _Answers("b", asked)]
    found = measure_lookups(workers, "1 MiB", 200, 3)  # type: ignore[arg-type]
    assert [each.exists_us for each in found] == [3.0, 3.0]
    assert [each.pages for each in found] == [200, 200]
    assert asked == ["a", "b", "b", "a", "a", "b", "b", "a"]


def test_contestants_run_where_sglang_is() -> None:
    environments = {each.peer: each.python.parents[1] for each in CONTESTANTS}
    assert environments[OURS] == ENVIRONMENTS / "sglang-server"
    assert environments[NIXL] == ENVIRONMENTS / "sglang-storage"
    assert {each.target for each in CONTESTANTS} == {"peers-sglang-server", "peers-sglang-storage"}


def test_quick_is_less_of_everything_and_what_is_said_counts() -> None:
    usual, quick = read_options([]), read_options(["--quick", "--rounds", "2"])
    assert quick.gib < usual.gib
    assert (usual.rounds, quick.rounds, quick.batch) == (6, 2, PAGES)
