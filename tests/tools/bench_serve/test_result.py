"""From measurements to targets and JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvtier.tools.bench_serve.accuracy import bits_equal
from kvtier.tools.bench_serve.summary import conclusion, headline, verdicts
from kvtier.tools.bench_serve.ttft import served_from
from kvtier.tools.report.figures import about, percent
from kvtier.tools.report.stats import Estimate
from kvtier.tools.report.target import target_words
from tests.tools.bench_serve import samples

pytestmark = pytest.mark.engine


def test_json_has_the_promised_shape() -> None:
    result = samples.serve_result(
        samples.accuracy(), samples.ttft(from_device=40), samples.overhead(), samples.slow_disk()
    )
    found = json.loads(json.dumps(result.as_json(), allow_nan=False))
    assert found["benchmark"] == "serve"
    assert found["accuracy"]["prompts"] == 20
    assert found["accuracy"]["equal"] == 20
    assert found["accuracy"]["control_noticed"] == 20
    assert set(found["ttft_ms"]) == {"cold", "device", "host", "disk"}
    for summary in found["ttft_ms"].values():
        assert set(summary) == {"mean", "p50", "p90", "p99", "max"}
    assert found["reduction"] == {
        "mean": 0.966,
        "device": 0.975,
        "host": 0.96,
        "disk": 0.945,
    }
    assert found["hit_tokens"] == {
        "device": 40 * 3456,
        "host": 60 * 3456,
        "disk": 100 * 3456,
    }
    assert found["overhead"]["ttft_ratio"] == 1.004
    assert found["overhead"]["throughput_ratio"] == 0.998
    assert found["overhead"]["num_pairs"] == 40
    assert found["slow_disk"]["p50_ratio"] == 1.01
    assert found["slow_disk"]["load_s"] == 2.0
    assert len(found["rows"]) == 60 + 300 + 40 + 100
    assert [(row["id"], row["met"]) for row in found["targets"]] == [
        ("C1", True),
        ("T1", True),
        ("T1", True),
        ("T2", True),
        ("T3", True),
        ("T3", True),
    ]
    assert not any("quick" in row for row in found["targets"])
    assert result.correct


def test_smaller_sizes_and_another_mix_of_tiers_are_marked() -> None:
    result = samples.serve_result(
        samples.accuracy(num_prompts=6), samples.ttft(from_device=60), samples.overhead()
    )
    marked = {row["id"] for row in result.as_json()["targets"] if row.get("quick")}  # type: ignore[attr-defined]
    assert marked == {"C1", "T1"}


def test_latent_attention_counts_for_its_own_target() -> None:
    result = samples.serve_result(samples.accuracy(), attention="latent")
    assert [target.target_id for target in result.targets] == ["C2"]


def test_one_differing_prompt_misses_the_target() -> None:
    result = samples.serve_result(samples.accuracy(unequal=1))
    assert result.as_json()["accuracy"]["equal"] == 19  # type: ignore[index]
    assert result.targets[0].met is False
    assert not result.correct
    assert any(verdict.good is False for verdict in verdicts(result))


def test_one_unnoticed_damage_misses_the_target() -> None:
    result = samples.serve_result(samples.accuracy(unnoticed=2))
    accuracy = result.accuracy
    assert accuracy is not None
    assert (accuracy.num_equal(), accuracy.num_noticed()) == (20, 18)
    assert accuracy.num_noticed("host") == 20
    assert not result.correct


def test_differing_logits_in_the_second_pass_are_told() -> None:
    result = samples.serve_result(ttft=samples.ttft(different=3))
    assert not result.correct
    assert any("3 requests" in verdict.figure for verdict in verdicts(result))


def test_a_slower_second_pass_is_called_later() -> None:
    result = samples.serve_result(ttft=samples.ttft(cold_ms=20.0, device_ms=25.0, host_ms=25.0))
    assert headline(result) == "The first token came 25.0\u00a0% later."
    assert result.targets[0].met is False


def test_loss_is_the_worse_of_both_ratios() -> None:
    assert samples.overhead(1.02, 0.999).loss.value == pytest.approx(0.02)
    assert samples.overhead(1.002, 0.95).loss.value == pytest.approx(0.05)
    assert samples.overhead(0.99, 1.01).loss.value < 0


@pytest.mark.parametrize(
    ("ratio", "num_pairs", "prompt_tokens", "met", "words"),
    [
        (1.05, 40, 3500, False, "not met"),
        (1.001, 40, 3500, True, "met"),
        (1.010, 40, 3500, None, "too few runs to tell"),
        (1.05, 10, 3500, False, "not met (from fewer runs than the target's)"),
        (1.001, 5, 3500, None, "too few runs to tell (from fewer runs than the target's)"),
        (1.09, 5, 3500, None, "too few runs to tell (from fewer runs than the target's)"),
        (1.09, 40, 1200, None, "too small a run to tell (with shorter prompts than the target's)"),
    ],
)
def test_target_is_met_or_not_only_where_the_runs_can_tell(
    ratio: float, num_pairs: int, prompt_tokens: int, met: bool | None, words: str
) -> None:
    made = samples.overhead(ratio, num_pairs=num_pairs, prompt_tokens=prompt_tokens)
    (target,) = samples.serve_result(overhead=made).targets
    row = json.loads(json.dumps(target.as_json(), allow_nan=False))
    assert row["met"] is met
    assert target_words(target).endswith(f"target at most 1.0\u00a0%: {words}")
    low, high = row["interval_95"]
    if num_pairs < 6:
        assert low is high is None
    else:
        assert low < row["value"] < high


def test_what_may_be_nothing_is_told_as_an_interval() -> None:
    small, none, few = (
        verdicts(samples.serve_result(overhead=samples.overhead(ratio, 1.0, num_pairs)))[-1].figure
        for ratio, num_pairs in ((0.9, 40), (1.001, 40), (1.2, 5))
    )
    assert small.startswith("first token \u221210.0\u00a0% (\u2212"), small
    assert none.startswith("first token \u2212"), none
    assert few == "too small a run to tell"


@pytest.mark.parametrize(
    ("num_prompts", "words"),
    [
        (5, "5 requests: half of them took at most 55\u00a0ms, the slowest 55\u00a0ms."),
        (12, "90 % at most 55\u00a0ms, the slowest 55\u00a0ms."),
        (100, "99 % at most 55\u00a0ms."),
    ],
)
def test_percentile_is_told_where_there_are_values_beyond_it(num_prompts: int, words: str) -> None:
    made = samples.ttft(num_prompts=num_prompts, from_device=num_prompts // 3)
    found = {each.title: each for each in verdicts(samples.serve_result(ttft=made))}
    assert found["From disk, after a restart"].meaning.endswith(words)
    # A share is told from six requests on.
    is_known = num_prompts // 3 >= 6
    assert ("(" in found["From device memory"].figure) == is_known
    summary = made.summary("disk")
    assert summary is not None
    assert (summary.p90 is None, summary.p99 is None) == (num_prompts < 10, num_prompts < 100)


def test_too_few_prompts_have_no_headline() -> None:
    result = samples.serve_result(ttft=samples.ttft(num_prompts=5, from_device=2))
    assert (
        headline(result) == "After 5 prompts it can't be told whether the first token came sooner."
    )
    assert [target.met for target in result.targets] == [None, None]


def test_tier_is_compared_with_the_same_prompts_computed() -> None:
    """Otherwise a tier that served the long prompts would look slow."""
    made = samples.ttft(num_prompts=30, from_device=10, slower=3.0)
    device, host = made.reduction_from("device"), made.reduction_from("host")
    assert device is not None
    assert host is not None
    assert device.value == pytest.approx(0.975)
    assert host.value == pytest.approx(0.96)
    assert made.reduction_from("tape") is None


def test_equal_logits_at_a_smaller_size_prove_less_and_different_ones_as_much() -> None:
    equal, different = (
        samples.serve_result(samples.accuracy(num_prompts=6, unequal=unequal)).targets[0]
        for unequal in (0, 1)
    )
    assert (equal.met, different.met) == (None, False)
    assert "too small a run to tell" in target_words(equal)


def test_source_of_a_request_is_where_most_tokens_came_from() -> None:
    assert served_from({"device": 10, "host": 30}) == "host"
    assert served_from({"device": 30, "host": 10}) == "device"
    assert served_from({"device": 0, "host": 0}) == "cold"
    assert served_from({}) == "cold"


def test_equal_means_every_bit() -> None:
    one = np.array([[1.0, np.nan], [0.0, 2.0]], np.float32)
    assert bits_equal(one, one.copy())
    negative_zero = one.copy()
    negative_zero[1, 0] = -0.0
    assert not bits_equal(one, negative_zero)
    assert not bits_equal(one, one[:1])


def test_percent_has_no_negative_zero() -> None:
    assert percent(-0.0001, signed=True) == "0.0\u00a0%"
    assert percent(-0.953, signed=True) == "\u221295.3\u00a0%"
    assert percent(0.004, signed=True) == "+0.4\u00a0%"


@pytest.mark.parametrize(
    ("ratio", "met"), [(0.9, [True, True]), (1.05, [False, True]), (1.2, [False, False])]
)
def test_a_slow_disk_may_cost_little_in_the_middle_and_a_bit_more_at_the_end(
    ratio: float, met: list[bool]
) -> None:
    result = samples.serve_result(slow_disk=samples.slow_disk(ratio))
    assert [target.met for target in result.targets] == met
    assert [target.deviation for target in result.targets] == ["", ""]
    few = samples.serve_result(slow_disk=samples.slow_disk(1.0, 99)).targets
    assert [(target.met, bool(target.deviation)) for target in few] == [(True, True), (None, True)]
    assert headline(result).startswith("The cost of a disk slower than computing: ")
    assert verdicts(result)[0].title == "A disk slower than computing"


def test_a_load_is_hidden_as_far_as_it_costs_nothing_over_a_hit_on_the_device() -> None:
    result = samples.serve_result(overlap=samples.overlap())
    found = json.loads(json.dumps(result.as_json(), allow_nan=False))
    assert found["overlap"]["hidden"] == {"followed": 0.8333, "awaited": 0.0}
    assert found["overlap"]["share_of_cold"] == 0.05
    assert found["overlap"]["ttft_ms"] == {
        "cold": 1000.0,
        "device": 40.0,
        "followed": 50.0,
        "awaited": 100.0,
    }
    assert len(found["rows"]) == 28
    assert [(row["id"], row["met"], "quick" in row) for row in found["targets"]] == [
        ("G2", True, False),
        ("G3", True, False),
    ]
    assert headline(result) == "The hidden share of a load: 83.3\u00a0%."
    assert verdicts(result)[0].title == "Loading while computing"


@pytest.mark.parametrize(("followed_ms", "met"), [(52.0, [True, True]), (53.0, [False, True])])
def test_a_load_counts_as_hidden_from_a_share_on(followed_ms: float, met: list[bool]) -> None:
    targets = samples.serve_result(overlap=samples.overlap(followed_ms)).targets
    assert [target.met for target in targets] == met
    smaller = samples.serve_result(overlap=samples.overlap(followed_ms, at_full_size=False))
    assert all(target.deviation for target in smaller.targets)


def test_other_logits_behind_a_load_are_an_error() -> None:
    result = samples.serve_result(overlap=samples.overlap(same=False))
    assert not result.correct
    assert verdicts(result)[0].good is False


def test_cost_from_few_pairs_is_no_finding() -> None:
    """No report shows a figure for such a cost, whether a gain or a loss."""
    for ratio in (1.2, 0.8):
        made = samples.overhead(ratio, ratio, num_pairs=10, prompt_tokens=1200)
        result = samples.serve_result(overhead=made)
        verdict = verdicts(result)[-1]
        assert verdict.figure == "too small a run to tell"
        told = [headline(result), verdict.meaning, *conclusion(result)]
        told += map(target_words, result.targets)
        assert not any("\u00a0%" in each.replace("target at most 1.0\u00a0%", "") for each in told)


def test_no_digit_is_told_that_the_runs_do_not_know() -> None:
    assert about(Estimate(0.9534, 0.951, 0.956)) == "95.3\u00a0%"
    assert about(Estimate(0.9534, 0.91, 0.98)) == "95\u00a0%"
    assert about(Estimate(-0.9534, -0.98, -0.91), signed=True) == "\u221295\u00a0%"


def test_store_is_told_by_hits_time_bytes_and_look_ups() -> None:
    result = samples.serve_result(store=samples.store(num_hits=15))
    found = json.loads(json.dumps(result.as_json(), allow_nan=False))["store"]
    assert (found["prompts"], found["hits"], found["hit_tokens"]) == (20, 15, 15 * 3456)
    assert found["ttft_ms"]["store"]["mean"] == 50.0
    assert (found["bytes_read"], found["lookups"], found["lookup_ms"]) == (200 << 20, 20, 1.5)
    titles = {verdict.title: verdict.figure for verdict in verdicts(result)}
    assert titles["Not from the store"] == "5 prompts"
    assert result.correct


def test_store_that_gives_nothing_or_something_else_is_told() -> None:
    nothing = samples.serve_result(store=samples.store(num_hits=0, lookup_ms=None))
    assert headline(nothing) == "Nothing came from the store."
    assert json.loads(json.dumps(nothing.as_json()))["store"]["reduction"] is None
    wrong = samples.serve_result(store=samples.store(different=1))
    assert not wrong.correct
    assert [verdict.good for verdict in verdicts(wrong)] == [None, False]
