"""Parsing and arithmetic of the benchmark under SGLang; its servers need `make bench-sglang`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engines.multi_turn_script import Run, Turn
from benchmarks.engines.protocol import read_by_label
from benchmarks.engines.report import Results, tables
from benchmarks.engines.requests import Asked, Burst, NewPrompts
from benchmarks.engines.servers import Size, Tokens
from benchmarks.engines.slow_disk import Asked as AskedOfDisk
from benchmarks.engines.slow_disk import SlowDisk
from benchmarks.sglang.multi_turn import contestants, host_bytes, read_options, result_json
from benchmarks.sglang.second_pass import (
    FROM_DEVICE,
    GROUPS,
    SecondPass,
    Twice,
    order,
    ratios,
    size_for,
)
from benchmarks.sglang.servers import (
    FILE,
    HICACHE,
    LINKER,
    OURS,
    SGLANG,
    sglang_alone,
    slowed,
    with_file,
    with_hicache,
    with_kvtier,
    with_linker,
)

METRICS = """# HELP sglang:cached_tokens_total x
sglang:cached_tokens_total{cache_source="device",model_name="m"} 10.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 3.0
sglang:cached_tokens_total{cache_source="storage",model_name="m"} 4.0
sglang:cached_tokens_total_more{cache_source="device"} 99.0
sglang:prompt_tokens_total{is_streaming="true"} 30.0
sglang:prompt_tokens_total{is_streaming="false"} 2.0
"""


def test_metric_is_summed_by_a_label() -> None:
    found = read_by_label(METRICS, "sglang:cached_tokens_total", "cache_source")
    assert found == {"device": 10.0, "host": 3.0, "storage": 4.0}
    assert read_by_label("", "sglang:cached_tokens_total", "cache_source") == {}


def test_what_is_not_on_the_device_came_from_below() -> None:
    before, after = Tokens(2, 1, 0), sglang_alone().read_tokens(METRICS)
    assert after == Tokens(32.0, 17.0, 7.0)
    assert after.since(before) == Tokens(30.0, 16.0, 7.0)


def _words(contestant: object, folder: Path) -> dict[str, str]:
    """Its options, by name."""
    words = contestant.command(Path("/model"), 1, folder, Size(96))  # type: ignore[attr-defined]
    return dict(zip(words, [*words[1:], ""], strict=True))


def test_each_server_has_a_folder_of_its_own_for_its_storage(tmp_path: Path) -> None:
    name = "--hicache-storage-backend"
    file = _words(with_file(1.5), tmp_path)
    assert file[name] == "file"
    assert json.loads(file[f"{name}-extra-config"])["file_storage_path"] == str(tmp_path / "pages")
    ours = _words(with_kvtier(1.5, "1GiB", hold_s=9), tmp_path)
    extra = json.loads(ours[f"{name}-extra-config"])
    assert (ours[name], extra["disk_path"], extra["hold_s"]) == (
        "dynamic",
        str(tmp_path / "slab"),
        9,
    )
    linked = json.loads(_words(with_linker(1000, "1GiB"), tmp_path)[LINKER_CONFIG])
    assert linked["linker_extra_config"]["host_capacity"] == 1000


LINKER_CONFIG = "--unified-cache-external-linker-config"


def test_sglang_alone_loads_no_plugin_and_a_slow_disk_is_one() -> None:
    assert sglang_alone().environ()["SGLANG_PLUGINS"] == "none"
    assert with_hicache(1.5).environ()["SGLANG_PLUGINS"] == "kvtier"
    slow = slowed(with_kvtier(1.5, "1GiB"), 123)
    assert slow.environ()["SGLANG_PLUGINS"] == "kvtier,kvtier_slow_disk"
    assert slow.environ()["KVTIER_BENCH_BYTES_PER_S"] == "123"
    assert slow.name == OURS


def test_contestants_are_those_that_were_asked_for() -> None:
    options = read_options(["--contestants", "linker", "hicache", "--set", "load_policy=always"])
    assert [contestant.name for contestant in contestants(options)] == [HICACHE, LINKER]


def test_linker_has_as_much_host_memory_as_hicache() -> None:
    assert host_bytes(1.5, 96) == 1.5 * host_bytes(1.0, 96)


def _run(ttft_ms: float) -> Run:
    turns = tuple(Turn("a", n, ttft_ms, 2.0, ttft_ms + 10, 100.0 * n, 1000, 20) for n in range(3))
    return Run(turns, {"a": "same"}, 1000, 500, 400, len(turns), 4.0)


@pytest.mark.parametrize(("ours", "met"), [(50.0, [True, True]), (80.0, [False, False])])
def test_t4_wants_half_of_hicache_and_less_than_file(ours: float, met: list[bool]) -> None:
    times = {SGLANG: 200.0, HICACHE: 100.0, FILE: 70.0, OURS: ours}
    runs = {number: {name: _run(ms) for name, ms in times.items()} for number in range(6)}
    found = result_json(Results(runs=runs), {})["targets"]
    assert [(each["id"], each["against"]) for each in found] == [("T4", HICACHE), ("T4", FILE)]
    assert [each["met"] for each in found] == met


def test_new_prompts_and_a_slow_disk_are_judged_for_each_way() -> None:
    new = NewPrompts(
        [[Asked(SGLANG, 10.0, 2.0, 1.0, 0), Asked(LINKER, 10.0, 2.0, 1.0, 0)]] * 8,
        [[Burst(SGLANG, 100.0, 2.0), Burst(LINKER, 100.0, 2.0)]] * 4,
    )
    slow = SlowDisk(1_000_000, 500_000, [AskedOfDisk(100.0, 100.0, 0)] * 100)
    results = Results(new={OURS: [new] * 6, LINKER: [new] * 6}, slow_disk={OURS: slow})
    found = result_json(results, {})
    met = [(each["id"], each["contestant"], each["met"]) for each in found["targets"]]
    assert met == [("T2", OURS, True)] * 2 + [("T2", LINKER, True)] * 2 + [("T3", OURS, True)] * 2


def test_second_pass_begins_with_what_the_device_has() -> None:
    on_device, others = order(100)
    assert on_device == list(range(65, 100))
    assert others == list(range(65))
    assert len(on_device) == FROM_DEVICE * 100
    assert size_for(100, 16).device_blocks >= len(on_device) * 17


def _second(second_ms: float) -> SecondPass:
    asked = [Twice(100.0, second_ms, number < 7, True) for number in range(20)]
    return SecondPass(asked, 1074, 0.35, 0.6)


@pytest.mark.parametrize(("second_ms", "met"), [(5.0, True), (6.0, False)])
def test_t1_wants_a_twentieth_of_the_first_time(second_ms: float, met: bool) -> None:
    found = result_json(Results(), {HICACHE: _second(90.0), OURS: _second(second_ms)})
    [target] = found["targets"]
    assert (target["id"], target["contestant"]) == ("T1", OURS)
    assert target["value"] == pytest.approx(second_ms / 100 - 1)
    assert target["met"] is met
    assert [row["contestant"] for row in found["rows"]] == [HICACHE, OURS]
    json.dumps(found)
    assert [table.title for table in tables(found["rows"])] == ["second pass"]


def test_groups_of_a_second_pass_are_alike() -> None:
    prompts = [Twice(100.0, 10.0 if number < 6 else 50.0, number < 6, True) for number in range(12)]
    assert ratios(prompts) == [pytest.approx(0.3)] * GROUPS
    assert ratios(prompts[:2]) == [pytest.approx(0.1)] * 2
