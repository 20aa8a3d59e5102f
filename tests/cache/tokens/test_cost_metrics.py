"""Planned blocks, expected costs and outcomes, counted where they are decided."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.cache.ladder import CostMetrics
from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.observe import Metrics
from kvtier.plan import CostModel

from .harness import A, Harness, count

MakeHarness = Callable[..., Harness]
LONG = [*A, 9]
ROUTE = (DISK, HOST)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def account(metrics: Metrics) -> CostMetrics:
    return CostMetrics(metrics, CostModel())


def test_a_copy_is_compared_with_what_was_known_before_it(
    account: CostMetrics, metrics: Metrics
) -> None:
    account.observe_copy(ROUTE, 1000, 1.0)
    assert count(metrics, "kvtier_actual_load_seconds_total", src=DISK) == 0, "nobody could tell"
    account.observe_copy(ROUTE, 1000, 3.0)
    assert count(metrics, "kvtier_predicted_load_seconds_total", src=DISK) == 1.0
    assert count(metrics, "kvtier_actual_load_seconds_total", src=DISK) == 3.0
    assert count(metrics, "kvtier_load_error_ratio_sum", src=DISK) == 3.0
    assert count(metrics, "kvtier_load_error_ratio_count", src=DISK) == 1


def test_prefill_is_compared_with_what_plans_were_made_from(metrics: Metrics) -> None:
    costs = CostModel()
    account = CostMetrics(metrics, costs)
    account.observe_prefill(0, 100, 1.0)
    assert count(metrics, "kvtier_predicted_prefill_seconds_total") == 0
    costs.snapshot()
    account.observe_prefill(0, 200, 3.0)
    assert count(metrics, "kvtier_predicted_prefill_seconds_total") == pytest.approx(2.0)
    assert count(metrics, "kvtier_actual_prefill_seconds_total") == 3.0


def test_prefill_is_judged_where_nobody_plans_as_well(
    account: CostMetrics, metrics: Metrics
) -> None:
    for _ in range(40):
        account.observe_prefill(0, 100, 1.0)
    predicted_s = count(metrics, "kvtier_predicted_prefill_seconds_total")
    assert predicted_s == pytest.approx(32.0, abs=0.1), "all but the first eight"


def test_what_waiting_cost_is_taken_off_what_was_saved(metrics: Metrics) -> None:
    costs = CostModel()
    account = CostMetrics(metrics, costs)
    account.saved(0, 100, 0.1)
    assert count(metrics, "kvtier_saved_tokens_total") == 100
    assert count(metrics, "kvtier_saved_seconds_total") == 0, "nobody knows what computing takes"
    costs.observe_prefill(0, 100, 1.0)
    costs.snapshot()
    account.saved(0, 100, 0.25)
    assert count(metrics, "kvtier_saved_seconds_total") == pytest.approx(0.75)
    account.saved(0, 100, 2.0)  # a loss of 1.0
    account.saved(0, 100, 0.5)  # makes up for half of it
    assert count(metrics, "kvtier_saved_seconds_total") == pytest.approx(0.75)
    account.saved(0, 100, 0.25)
    assert count(metrics, "kvtier_saved_seconds_total") == pytest.approx(1.0)
    assert count(metrics, "kvtier_saved_tokens_total") == 500


def test_blocks_that_are_loaded_are_counted_by_decision(make_harness: MakeHarness) -> None:
    harness = make_harness(disk_blocks=30)
    harness.serve(LONG)
    harness.lose_the_device()
    harness.serve(LONG)
    metrics = harness.cache.metrics
    assert count(metrics, "kvtier_planned_blocks_total", decision="load") == 4
    assert count(metrics, "kvtier_planned_blocks_total", decision="recompute") == 0
    assert count(metrics, "kvtier_saved_tokens_total") == 8


def test_blocks_that_are_faster_to_compute_are_counted_so(make_harness: MakeHarness) -> None:
    harness = make_harness(disk_blocks=30)
    harness.serve(LONG)
    harness.lose_the_device()
    harness.cache._ladder.costs.observe_copy((HOST, DEVICE), 1, 1.0)
    harness.cache.observe_prefill(0, 1000, 1e-6)
    harness.serve(LONG)
    metrics = harness.cache.metrics
    assert count(metrics, "kvtier_planned_blocks_total", decision="recompute") == 4
    assert count(metrics, "kvtier_planned_blocks_total", decision="load") == 0
    assert count(metrics, "kvtier_saved_tokens_total") == 0


def test_blocks_on_the_device_are_no_decision(make_harness: MakeHarness) -> None:
    harness = make_harness()
    harness.serve(LONG)
    harness.serve(LONG)
    for decision in ("load", "recompute"):
        name = "kvtier_planned_blocks_total"
        assert count(harness.cache.metrics, name, decision=decision) == 0


def test_loads_are_expected_and_measured_by_where_they_come_from(make_harness: MakeHarness) -> None:
    harness = make_harness(disk_blocks=30)
    harness.serve(LONG)
    for _ in range(2):
        harness.lose_the_device()
        harness.serve(LONG)
    metrics = harness.cache.metrics
    assert count(metrics, "kvtier_load_error_ratio_count", src=HOST) >= 1
    assert count(metrics, "kvtier_predicted_load_seconds_total", src=HOST) > 0
    assert count(metrics, "kvtier_load_error_ratio_count", src=DEVICE) == 0, "stores are no loads"


def test_what_is_under_way_is_a_gauge_until_it_has_ended(make_harness: MakeHarness) -> None:
    harness = make_harness(disk_blocks=30)
    harness.put_on_host(LONG)
    request = harness.ask(LONG)
    route = {"src": HOST, "dst": DEVICE}
    metrics = harness.cache.update_metrics()
    assert count(metrics, "kvtier_transfers_in_flight", **route) == 1
    harness.device.release()
    assert harness.cache.drain()
    harness.finish(request)
    metrics = harness.cache.update_metrics()
    assert count(metrics, "kvtier_transfers_in_flight", **route) == 0
    assert metrics.registry.get_sample_value("kvtier_queued_seconds", route) == 0.0
    assert metrics.registry.get_sample_value("kvtier_breaker_state", {"tier": DISK}) == 0.0


def test_gauges_are_told_once_a_second_by_those_who_poll(make_harness: MakeHarness) -> None:
    harness = make_harness()
    harness.clock.now = 100.0
    harness.cache.poll()
    assert harness.cache.metrics.take_levels()
    harness.clock.now += 0.5
    harness.cache.poll()
    assert not harness.cache.metrics.take_levels()
    harness.clock.now += 0.6
    harness.cache.poll()
    assert harness.cache.metrics.take_levels()
