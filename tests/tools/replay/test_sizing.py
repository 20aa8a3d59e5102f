"""The value of hits, in figures that can be checked by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.core.errors import ConfigError
from kvtier.plan import PrefillCost
from kvtier.tools.replay.assumptions import (
    DEFAULT,
    GIB,
    GIVEN,
    HOURS_PER_MONTH,
    HOURS_PER_YEAR,
    Machine,
    assume,
    prefill_cost,
    rate_of_bench,
)
from kvtier.tools.replay.evidence import Evidence, gather, rate_per_hour
from kvtier.tools.replay.model import kv_group
from kvtier.tools.replay.options import ReplayOptions
from kvtier.tools.replay.policies import Replayer
from kvtier.tools.replay.savings import Prompts
from kvtier.tools.replay.segments import find_segments
from kvtier.tools.replay.sizing import Sizing, usual_sizes

from .oracle import trace_of
from .samples import OPTIONS

PROMPTS = [[1, 2, 3]] * 3

# A block is a token and takes a GiB. A token takes a second to compute, and a second costs $1. A
# GiB of host memory costs 10 cents an hour, one of disk a cent.
MACHINE = Machine(
    bytes_per_token=GIB,
    prefill=PrefillCost(1.0),
    device_bytes=0,
    host_bytes_per_s=1e30,
    disk_bytes_per_s=2 * GIB,
    host_price=HOURS_PER_YEAR / 10,
    disk_price=HOURS_PER_YEAR / 100,
    accelerator_price=3600.0,
    years=1.0,
)


def sizing_of(machine: Machine = MACHINE, num_supported: int = 100) -> Sizing:
    trace = trace_of(PROMPTS, seconds=3600.0)  # two hours
    replayer = Replayer(trace, find_segments(trace))
    none = np.zeros(3, np.int64)
    return Sizing(trace, machine, none, lambda num: replayer.hits("lru", num), num_supported)


def test_host_memory_by_hand() -> None:
    one, two, three = sizing_of().host_curve([GIB, 2 * GIB, 3 * GIB])
    assert one.hit_ratio == pytest.approx(2 / 9)
    assert one.seconds_per_hour == pytest.approx(1.0)  # two requests save a token each in 2 h
    assert one.tokens_per_s == pytest.approx(2 / 7200)
    assert one.saved == pytest.approx(1.0)
    assert one.price == pytest.approx(0.1)
    assert two.saved == pytest.approx(2.0)
    assert two.gain_per_gib == pytest.approx(HOURS_PER_MONTH)
    assert two.price_per_gib == pytest.approx(0.1 * HOURS_PER_MONTH)
    # The last token of a prompt is computed in any case: the third block is worth nothing.
    assert three.hit_ratio == pytest.approx(6 / 9)
    assert three.saved == pytest.approx(2.0)
    assert three.gain_per_gib == 0
    # A stored block is not written again.
    assert three.written_per_day == pytest.approx(3 * GIB * 12)
    assert three.drive_writes == pytest.approx(12)


def test_what_takes_longer_to_load_is_computed() -> None:
    slow = sizing_of(replace(MACHINE, host_bytes_per_s=GIB / 2))
    assert [point.saved for point in slow.host_curve([GIB, 3 * GIB])] == [0, 0]
    # A disk that takes half of the time saves the other half. Slow host memory limits it.
    (point,) = sizing_of().disk_curve([3 * GIB], 0)
    assert point.saved == pytest.approx(1.0)
    (point,) = slow.disk_curve([3 * GIB], 0)
    assert point.saved == 0


def test_each_block_comes_from_the_fastest_tier() -> None:
    trace = trace_of([[1, 2, 3, 4, 5]])
    prompts = Prompts(trace, MACHINE)
    device, host, disk = (np.array([number], np.int64) for number in (1, 3, 4))
    savings = prompts.savings(device, host, disk)
    assert savings.by_tier == (1, 2, 1)
    assert savings.seconds.tolist() == [3.5]
    assert savings.tokens.tolist() == [4]
    # A disk smaller than host memory is not read.
    assert prompts.savings(device, disk, host).by_tier == (1, 3, 0)


def test_short_prompts_are_computed_where_long_ones_are_read() -> None:
    trace = trace_of([[1, 2, 3, 4, 5]])
    machine = replace(MACHINE, prefill=PrefillCost(0.1, 1.0), disk_bytes_per_s=GIB / 2.2)
    prompts = Prompts(trace, machine)
    none, two, four = (np.array([number], np.int64) for number in (0, 2, 4))
    # Tokens 0 to 3 take 0.6, 1.6, 2.6 and 3.6 s to compute, each 2.2 s to read: short prompts are
    # computed, long ones read.
    assert prompts.savings(none, none, two).by_tier == (0, 0, 0)
    assert prompts.savings(none, none, four).by_tier == (0, 0, 0)
    quicker = Prompts(trace, replace(machine, disk_bytes_per_s=GIB / 2.0))
    assert quicker.savings(none, none, four).by_tier == (0, 0, 4)
    assert quicker.savings(none, none, two).by_tier == (0, 0, 0)


def test_what_leaves_most_is_chosen() -> None:
    sizes = [GIB, 2 * GIB, 3 * GIB]
    choice = sizing_of().choose(sizes, sizes)
    assert choice.host is not None
    assert choice.disk is None
    assert choice.host.num_bytes == 2 * GIB
    assert choice.net == pytest.approx(1.8)
    assert not choice.at_edge
    assert sizing_of(num_supported=3).choose(sizes, sizes).at_edge


def test_a_disk_is_chosen_where_host_memory_is_dear() -> None:
    sizes = [GIB, 2 * GIB, 3 * GIB]
    dear = sizing_of(replace(MACHINE, host_price=100 * HOURS_PER_YEAR))
    choice = dear.choose(sizes, sizes)
    assert choice.host is None
    assert choice.disk is not None
    assert choice.disk.num_bytes == 2 * GIB
    assert choice.net == pytest.approx(1.0 - 0.02)


def test_nothing_is_chosen_where_time_is_worth_nothing() -> None:
    choice = sizing_of(replace(MACHINE, accelerator_price=0.0)).choose([GIB], [2 * GIB])
    assert (choice.host, choice.disk, choice.net) == (None, None, 0)


def test_usual_sizes_are_powers_of_two_that_hold_blocks() -> None:
    assert usual_sizes(5 * GIB, GIB) == [2 * GIB, 4 * GIB, 8 * GIB]
    assert usual_sizes(8 * GIB, 3 * GIB) == [4 * GIB, 8 * GIB]
    assert usual_sizes(GIB, GIB) == []
    assert len(usual_sizes(1 << 50, 1)) == 11


def test_evidence_counts_reuse_and_its_age_by_blocks() -> None:
    trace = trace_of([[1, 2, 3], [9], [9], [1, 2, 3], []], seconds=10.0)
    found = gather(trace, find_segments(trace))
    assert found == Evidence(num_reuses=2, age_p50_s=30.0, age_p90_s=30.0, window_s=40.0)
    assert found.weakness.startswith("2 of its requests share a prefix with an earlier one")
    nothing = trace_of([[1], [2]])
    assert gather(nothing, find_segments(nothing)).age_p50_s is None


def test_requests_of_one_moment_tell_nothing() -> None:
    trace = trace_of([[1]] * 200, seconds=0.0)
    assert "come at one time" in gather(trace, find_segments(trace)).weakness
    assert not rate_per_hour(trace, np.ones(200)).is_bounded


def test_rates_come_with_an_interval_from_slices_of_the_trace() -> None:
    trace = trace_of([[1]] * 241, seconds=30.0)  # two hours
    even = rate_per_hour(trace, np.ones(241))
    assert even.value == pytest.approx(120.5)
    assert even.low == pytest.approx(120, abs=1)
    once = np.zeros(241)
    once[100] = 241.0
    rare = rate_per_hour(trace, once)
    assert rare.value == pytest.approx(120.5)
    assert rare.low < 10


def test_prefill_gets_dearer_along_a_prompt() -> None:
    cost = prefill_cost(1000.0, 500.0)
    assert cost.seconds(0, 1000) == pytest.approx(2.0)
    assert cost.seconds(500, 501) == pytest.approx(2 * cost.seconds(0, 1), rel=0.01)
    with pytest.raises(ConfigError, match="prefill_tokens_per_s: 0 is no rate"):
        prefill_cost(0, 500)


def test_prefill_rate_comes_from_a_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    found = {"ttft_ms": {"cold": {"mean": 2000.0}}, "second_pass": {"prompt_tokens": 1000}}
    path.write_text(json.dumps(found))
    assert rate_of_bench(path, 500.0) == pytest.approx(1000.0)
    for text in ("", "[]", json.dumps(found | {"second_pass": None})):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is no result of `kvtier bench serve --json`"):
            rate_of_bench(path, 500.0)


BUILTIN = Path(__file__).parents[3] / "src/kvtier/serve/engine/builtin/kvtier-tiny"


def test_bytes_per_token_of_a_model(tmp_path: Path) -> None:
    assert kv_group(BUILTIN).bytes_per_block == 5 * 2 * 2 * 64 * 2
    assert kv_group(BUILTIN / "config.json", "float8").bytes_per_block == 5 * 2 * 2 * 64
    latent = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"text_config": latent, "torch_dtype": "bfloat16"}))
    assert kv_group(tmp_path).bytes_per_block == 61 * 576 * 2


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("{", "is no JSON"),
        ("[]", "is no model's configuration"),
        ("{}", "has no num_hidden_layers; give --bytes-per-token"),
        ('{"num_hidden_layers": 2}', "has no num_attention_heads; give --bytes-per-token"),
        ('{"layer_types": ["linear_attention"]}', "has linear_attention layers"),
        ('{"torch_dtype": "int3"}', "kv_dtype: 'int3' is unknown"),
    ],
)
def test_configurations_that_dont_say_it_are_told(
    tmp_path: Path, config: str, sentence: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError) as caught:
        kv_group(tmp_path)
    assert sentence in str(caught.value)


def replay_options(**given: Any) -> ReplayOptions:
    return ReplayOptions((), OPTIONS, **given)


def test_every_setting_is_told_with_its_source() -> None:
    options = replay_options(model=BUILTIN, prefill_doubles_at=2.0, device_capacity="2GiB")
    machine, assumptions = assume(options)
    assert machine.bytes_per_token == 2560
    assert machine.prefill == PrefillCost(1e-4, 0.5e-4)
    assert machine.device_bytes == 2 * GIB
    assert (machine.host_bytes_per_s, machine.disk_bytes_per_s) == (25e9, 5e9)
    assert (machine.host_price, machine.disk_price, machine.accelerator_price) == (8, 0.15, 2.5)
    assert (machine.years, machine.disk_writes) == (3, 1825)
    told = [(each.name, each.value.replace("\u00a0", " ")) for each in assumptions]
    assert told == [
        ("KV of a token", "2,560 bytes"),
        ("where time per token doubles", "token 2 of a prompt"),
        ("prefill rate", "10,000 tokens/s of an accelerator"),
        ("the engine's own KV memory", "2 GiB"),
        ("host memory to device", "25 GB/s"),
        ("disk to device", "5 GB/s"),
        ("price of host memory", "$8 per GiB"),
        ("price of disk", "$0.15 per GiB"),
        ("price of an accelerator", "$2.5 per hour"),
        ("time to pay memory off", "3 years"),
        ("life of a disk", "1,825 full writes"),
    ]
    sources = [assumption.source for assumption in assumptions]
    assert sources[0].endswith("kvtier-tiny: 5 layers, full, bfloat16")
    assert sources[1:] == [GIVEN, DEFAULT, GIVEN, *[DEFAULT] * 7]


def test_settings_that_contradict_each_other_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bytes_per_token: --model says it, too"):
        assume(replay_options(bytes_per_token=5, model=BUILTIN))
    with pytest.raises(ConfigError, match="prefill_tokens_per_s: --bench says it, too"):
        assume(replay_options(prefill_tokens_per_s=5.0, bench=tmp_path))
    with pytest.raises(ConfigError, match="bytes_per_token: 0 is not above 0"):
        replace(MACHINE, bytes_per_token=0)
    with pytest.raises(ConfigError, match="disk_price: -1 is below 0"):
        replace(MACHINE, disk_price=-1)


def test_a_disk_that_wears_soon_costs_more() -> None:
    # 3 GiB are written in two hours: half of a disk of 3 GiB in an hour, all of it a year is 4,383.
    wearing = replace(MACHINE, disk_writes=HOURS_PER_YEAR / 4)
    (point,) = sizing_of(wearing).disk_curve([3 * GIB], 0)
    assert point.drive_writes == pytest.approx(12)
    assert point.price == pytest.approx(2 * 0.03)  # worn after half of the year
    lasting = replace(MACHINE, disk_writes=HOURS_PER_YEAR)
    (point,) = sizing_of(lasting).disk_curve([3 * GIB], 0)
    assert point.price == pytest.approx(0.03)
