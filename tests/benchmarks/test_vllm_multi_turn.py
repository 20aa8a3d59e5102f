"""Parsing and arithmetic of the benchmark under vLLM; its servers need `make bench-vllm`."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines.multi_turn_script import (
    Run,
    Turn,
    Workload,
    digest,
    in_both,
    num_failures,
    read_turns,
    words,
)
from benchmarks.engines.protocol import (
    Process,
    family_of,
    last_error,
    read_answer,
    read_counters,
    read_process,
)
from benchmarks.engines.report import Results, tables
from benchmarks.engines.requests import Asked, Burst, Check, NewPrompts, in_turn, tokens
from benchmarks.engines.run import value_of
from benchmarks.engines.servers import Size
from benchmarks.engines.slow_disk import Asked as AskedOfDisk
from benchmarks.engines.slow_disk import SlowDisk
from benchmarks.vllm.fetch import find_link, unpack
from benchmarks.vllm.multi_turn import contestants, read_options, result_json
from benchmarks.vllm.servers import ENDLESS, LMCACHE, ON_DISK, OURS, VLLM, with_kvtier


def test_answer_has_every_step_and_the_usage() -> None:
    step = {"tokens": ["a", "b"], "top_logprobs": [{"a": -0.5, "x": -1.0}, {"b": -0.25}]}
    events: list[Any] = [
        {"choices": [{"text": "ab", "logprobs": step}], "usage": None},
        {"choices": [{"text": "c", "logprobs": {"tokens": ["c"], "top_logprobs": [{"c": 0.0}]}}]},
        {
            "choices": [],
            "usage": {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 128}},
        },
    ]
    answer = read_answer(events, 5.0, 9.0)
    assert (answer.num_tokens, answer.cached_tokens) == (3, 128)
    assert answer.texts == ("a", "b", "c")
    assert answer.steps == ({"a": -0.5, "x": -1.0}, {"b": -0.25}, {"c": 0.0})


def test_answer_without_details_reused_nothing() -> None:
    events = [{"choices": [], "usage": {"completion_tokens": 1, "prompt_tokens_details": None}}]
    assert read_answer(events, 1.0, 1.0).cached_tokens == 0


def test_counters_are_summed_over_labels() -> None:
    text = '# HELP x y\nx{engine="0"} 1.5\nx{engine="1"} 2.0\ny:z 1e+03\n'
    assert read_counters(text) == {"x": 3.5, "y:z": 1000.0}


def test_reason_of_an_end_is_the_innermost_error() -> None:
    log = (
        "INFO fine\n"
        "(EngineCore pid=1) ValueError: host: 'x' is no size\n"
        "(APIServer pid=2) RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert last_error(log) == "ValueError: host: 'x' is no size"
    assert last_error("Killed\n") == "Killed"
    assert last_error("") == "it ended without a word"


def test_process_name_may_hold_spaces_and_brackets() -> None:
    fields = ["S", "7", *["0"] * 17, "4711", "0"]
    assert read_process(f"12 (a ) (b) {' '.join(fields)}") == Process(12, 7, 4711)


def test_family_is_a_process_and_all_below_it() -> None:
    parents = {1: 0, 2: 1, 3: 2, 4: 2, 5: 1, 6: 5}
    everyone = [Process(pid, parent, 0) for pid, parent in parents.items()]
    assert sorted(each.pid for each in family_of(2, everyone)) == [2, 3, 4]
    assert family_of(99, everyone) == []


def test_settings_reach_the_connector() -> None:
    connector = with_kvtier("1GiB", disk_path="/d").connector
    assert connector is not None
    assert connector["kv_connector_extra_config"] == {
        "spec_name": "kvtier",
        "host_capacity": "1GiB",
        "disk_path": "/d",
    }


def test_setting_is_json_where_it_can_be() -> None:
    assert [value_of(each) for each in ("2", "true", "8GiB")] == [2, True, "8GiB"]


def test_text_is_the_same_for_a_seed_and_another_for_another() -> None:
    assert words(1, 120) == words(1, 120)
    assert not set(words(1, 1200).splitlines()) & set(words(2, 1200).splitlines())


def test_prompts_of_two_seeds_share_no_beginning() -> None:
    assert tokens(1, 50) == tokens(1, 50)
    assert tokens(1, 50)[:4] != tokens(2, 50)[:4]


def test_shape_of_the_model_decides_on_options_of_every_server(tmp_path: Path) -> None:
    options = read_options(["--shape", "qwen3-next", "--contestants", "vllm", "lmcache"])
    options.scratch = tmp_path
    assert (options.parts, options.device_blocks) == (["multi-turn"], 56)
    for contestant in contestants(options):
        command = contestant.command(tmp_path, 1, tmp_path, Size(options.device_blocks))
        assert command[command.index("--dtype") + 1] == "bfloat16"


def test_workload_says_what_the_script_asks_for() -> None:
    config = json.loads(json.dumps(Workload(num_conversations=3, turns=(4, 6)).config()))
    assert config["filetype"] == "generate_conversations"
    assert config["num_conversations"] == 3
    assert config["prompt_input"]["num_turns"] == {"distribution": "uniform", "min": 4, "max": 6}
    assert set(config["prompt_input"]) == {
        "num_turns",
        "common_prefix_num_tokens",
        "prefix_num_tokens",
        "num_tokens",
    }
    assert set(config["prompt_output"]) == {"num_tokens"}


def test_turns_are_numbered_within_their_conversation() -> None:
    stats = [
        {
            "conversation_id": "CONV_ID_1",
            "input_num_turns": messages,
            "ttft_ms": 10.0,
            "tpot_ms": 2.0,
            "latency_ms": 30.0,
            "start_time_ms": 5.0,
            "input_num_tokens": 100,
            "output_num_tokens": 9,
        }
        for messages in (1, 3, 5)
    ]
    assert [turn.number for turn in read_turns(stats)] == [0, 1, 2]


def test_requests_that_failed_are_counted_over_the_clients() -> None:
    log = "(num_successes=5, num_failures=0)\n(num_successes=3, num_failures=2)"
    assert num_failures(log) == 2
    with pytest.raises(RuntimeError, match="no client"):
        num_failures("Traceback")


def test_digest_sees_the_answers_only() -> None:
    def talk(question: str, answer: str) -> str:
        return digest(
            [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        )

    assert talk("a", "x") == talk("b", "x") != talk("a", "y")


def _run(ttft_ms: dict[tuple[str, int], float], cpu_s: float = 4.0) -> Run:
    turns = tuple(
        Turn(conversation, number, ttft, 2.0, ttft + 10, 100.0 * place, 1000, 20)
        for place, ((conversation, number), ttft) in enumerate(ttft_ms.items())
    )
    return Run(turns, {"a": "same"}, 1000, 500, 400, len(turns), cpu_s)


def test_runs_are_compared_by_the_turns_of_both() -> None:
    first, second = in_both(_run({("a", 0): 9.0, ("a", 1): 3.0}), _run({("a", 1): 4.0}))
    assert [turn.ttft_ms for turn in first.turns] == [3.0]
    assert [turn.ttft_ms for turn in second.turns] == [4.0]


def test_first_turns_are_left_out_of_the_later_ones() -> None:
    run = _run({("a", 0): 100.0, ("a", 1): 10.0, ("a", 2): 20.0})
    assert run.later_ttft_ms == 15.0
    assert run.ttft_ms == pytest.approx(130 / 3)
    assert run.seconds == pytest.approx((200 + 30) / 1000)


def _results(ours: float = 40.0, loss: float = 1.005) -> Results:
    alone, mine = _run({("a", 0): 100.0, ("a", 1): 100.0}), _run({("a", 0): ours, ("a", 1): ours})
    return Results(
        [Check(VLLM, 2, 2, 0, 2, 0, 2)],
        {number: {VLLM: alone, OURS: mine} for number in range(6)},
        {OURS: [_new(loss)] * 6},
    )


def _new(loss: float) -> NewPrompts:
    """Return the row of one start. loss: ratio of the times with and without kvtier."""
    return NewPrompts(
        [[Asked(VLLM, 10.0, 2.0, 1.0, 0), Asked(OURS, 10.0 * loss, 2.0, 1.0, 0)]] * 8,
        [[Burst(VLLM, 100.0, 2.0), Burst(OURS, 100.0 / loss, 2.0)]] * 4,
    )


@pytest.mark.parametrize(("ours", "met"), [(50.0, True), (51.0, False)])
def test_t4_wants_half_of_the_time_to_first_token(ours: float, met: bool) -> None:
    (target,) = (each for each in result_json(_results(ours=ours))["targets"] if each["id"] == "T4")
    assert target["value"] == pytest.approx(ours / 100 - 1)
    assert target["met"] is met


@pytest.mark.parametrize(("name", "ours", "met"), [(OURS, 42.0, True), (ON_DISK, 45.0, False)])
def test_t4_prime_compares_with_a_pool_that_never_evicts(name: str, ours: float, met: bool) -> None:
    results = _results()
    for runs in results.runs.values():
        runs[ENDLESS] = _run({("a", 0): 40.0, ("a", 1): 40.0})
        runs[name] = _run({("a", 0): ours, ("a", 1): ours})
    targets = result_json(results)["targets"]
    (target,) = (
        target for target in targets if target["id"] == "T4'" and target["contestant"] == name
    )
    assert target["value"] == pytest.approx(ours / 40.0)
    assert target["met"] is met


@pytest.mark.parametrize(("loss", "met"), [(0.9, True), (1.01, True), (1.02, False)])
def test_t2_wants_no_more_than_a_hundredth_lost(loss: float, met: bool) -> None:
    found = [each for each in result_json(_results(loss=loss))["targets"] if each["id"] == "T2"]
    assert [each["measure"] for each in found] == ["TTFT", "throughput"]
    assert [each["met"] for each in found] == [met, met]


def test_t2_is_the_median_over_starts_of_the_servers() -> None:
    losses = [0.9, 0.95, 1.0, 1.02, 1.1, 1.2]
    results = replace(_results(), new={OURS: [_new(loss) for loss in losses]})
    (ratios,) = (each for each in result_json(results)["rows"] if "starts" in each)
    assert ratios["ttft_ratio"] == {"value": 1.01, "low": 0.9, "high": 1.2, "by_start": losses}


def test_t4_of_a_peer_is_its_own_row() -> None:
    results = _results()
    for runs in results.runs.values():
        runs[LMCACHE] = runs[OURS]
    found = [each["contestant"] for each in result_json(results)["targets"] if each["id"] == "T4"]
    assert found == [OURS, LMCACHE]


@pytest.mark.parametrize(("ours", "met"), [(103.0, [True, True]), (109.0, [False, True])])
def test_t3_compares_with_a_vllm_that_never_saw_the_prompt(ours: float, met: list[bool]) -> None:
    slow = SlowDisk(1_000_000, 500_000, [AskedOfDisk(ours, 100.0, 0)] * 100)
    found = result_json(Results(slow_disk={OURS: slow}))
    assert [each["met"] for each in found["targets"]] == met
    assert found["rows"][0]["load_ms"] == 500.0


def test_nothing_measured_gives_no_targets() -> None:
    assert result_json(Results()) == {"rows": [], "targets": []}


def test_rows_are_json_and_the_medians_in_tables() -> None:
    found = result_json(_results())
    json.dumps(found)
    titles = [table.title for table in tables(found["rows"])]
    assert titles == ["check", "multi-turn, medians", "new prompts", "new prompts, ratios"]


def test_check_fails_where_nothing_came_from_below() -> None:
    good = Check(OURS, 2, 2, 2, 2, 2, 2)
    assert good.failure(has_tier=True) is None
    assert "came back" in (replace(good, from_tier=1).failure(has_tier=True) or "")
    assert "logprobs" in (replace(good, same_logprobs=1).failure(has_tier=True) or "")
    alone = replace(good, from_tier=0, same_logprobs=0)
    assert alone.failure(has_tier=False) is None, "vLLM alone computes it again"
    assert "tokens" in (replace(alone, same_tokens=0).failure(has_tier=False) or "")


def test_another_contestant_begins_each_time() -> None:
    order = [in_turn(["a", "b", "c"], number)[0] for number in range(4)]
    assert order == ["a", "b", "c", "a"]


PAGE = '<a href="../../packages/v-1.tar.gz#sha256=beef">v-1.tar.gz</a><a href="v-2.tar.gz">2</a>'


def test_link_is_found_beside_its_checksum() -> None:
    at = "https://index.example/simple/v/"
    assert find_link(PAGE, at, "v-1.tar.gz") == (
        "https://index.example/packages/v-1.tar.gz",
        "beef",
    )
    assert find_link(PAGE, at, "v-2.tar.gz") == (at + "v-2.tar.gz", None)
    with pytest.raises(LookupError, match="no v-3"):
        find_link(PAGE, at, "v-3.tar.gz")


def test_only_the_benchmark_is_unpacked(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name in ("v-1/benchmarks/multi_turn/run.py", "v-1/setup.py", "v-1/x/multi_turn/no.py"):
            member = tarfile.TarInfo(name)
            member.size = 1
            tar.addfile(member, io.BytesIO(b"#"))
    assert unpack(packed.getvalue(), tmp_path) == [tmp_path / "run.py"]
    assert [each.name for each in tmp_path.iterdir()] == ["run.py"]
