"""From measurements to targets and JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvtier.bench.accuracy import bits_equal
from kvtier.bench.ttft import served_from
from kvtier.bench.words import headline, outcome, percent, verdicts
from tests.bench import samples

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
        assert set(summary) == {"mean", "p50", "p90", "p99"}
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
    assert not result.targets[0].met
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
    assert not result.targets[0].met


def test_loss_is_the_worse_of_both_ratios() -> None:
    assert samples.overhead(1.02, 0.999).loss == pytest.approx(0.02)
    assert samples.overhead(1.002, 0.95).loss == pytest.approx(0.05)
    assert samples.overhead(0.99, 1.01).loss < 0


def test_a_loss_that_can_not_be_told_from_the_target_is_unclear() -> None:
    clear, unclear = (
        samples.serve_result(overhead=samples.overhead(ttft_ratio)).targets[0]
        for ttft_ratio in (1.05, 1.008)
    )
    assert (outcome(clear), clear.as_json()["met"], "sure" in clear.as_json()) == (
        "not met",
        False,
        False,
    )
    assert (outcome(unclear), unclear.as_json()["sure"]) == ("unclear", False)


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
    assert samples.serve_result(slow_disk=samples.slow_disk(1.0, 10)).targets[0].deviation
    assert headline(result).startswith("A disk slower than computing cost")
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
    assert len(found["rows"]) == 20
    assert [(row["id"], row["met"], "quick" in row) for row in found["targets"]] == [
        ("G2", True, False),
        ("G3", True, False),
    ]
    assert headline(result).startswith("83.3")
    assert verdicts(result)[0].title == "Loading while computing"


@pytest.mark.parametrize(("followed_ms", "met"), [(52.0, [True, True]), (53.0, [False, True])])
def test_a_load_counts_as_hidden_from_a_share_on(followed_ms: float, met: list[bool]) -> None:
    targets = samples.serve_result(overlap=samples.overlap(followed_ms)).targets
    assert [target.met for target in targets] == met


def test_overlap_on_a_smaller_machine_is_marked() -> None:
    targets = samples.serve_result(overlap=samples.overlap(at_full_size=False)).targets
    assert all(target.deviation for target in targets)


def test_other_logits_behind_a_load_are_an_error() -> None:
    result = samples.serve_result(overlap=samples.overlap(same=False))
    assert not result.correct
    assert verdicts(result)[0].good is False
