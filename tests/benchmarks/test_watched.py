"""The observability benchmark switches everything off and on again, and reads its rounds right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from benchmarks.server.observability import prompts_of, ratio
from benchmarks.server.observability_server import METHODS, Switch
from kvtier.ladder.cost_metrics import CostMetrics
from kvtier.plan import CostModel
from kvtier.telemetry import Metrics
from kvtier.telemetry.block_events import BlockLog
from kvtier.types import DISK, BlockId


@pytest.fixture
def switch() -> Iterator[Switch]:
    made = Switch()
    yield made
    made.turn_all_on()


def counted(registry: CollectorRegistry) -> float:
    return sum(
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    )


def test_what_is_off_tells_nothing_and_what_is_on_again_does(switch: Switch) -> None:
    metrics, log = Metrics(), BlockLog()
    for parts, num_counted, num_told in (((), 0, 0), (("events",), 0, 2), (METHODS, 3, 2)):
        switch.turn(parts)
        metrics.count("kvtier_requests_total", 3)
        log.prompt(b"", [b"label"], [BlockId(1)], [DISK])
        log.moved(DISK, [BlockId(1)], True)
        assert counted(metrics.registry) == num_counted
        changes, was_lost = log.take()
        assert (len(changes), was_lost) == (num_told, False)


def test_the_planner_learns_all_the_same(switch: Switch) -> None:
    costs, metrics = CostModel(), Metrics()
    switch.turn(())
    for num_tokens in (500, 1000, 2000):
        CostMetrics(metrics, costs).observe_prefill(0, num_tokens, num_tokens / 1000)
    costs.snapshot()  # fits what was observed
    assert costs.expected_prefill_s(0, 1000) > 0
    assert counted(metrics.registry) == 0


def test_phases_are_of_equal_length_and_of_other_prompts() -> None:
    first, second = prompts_of(7), prompts_of(8)
    assert [len(prompt) for prompt in first] == [len(prompt) for prompt in second]
    assert not {*first} & {*second}
    assert {*prompts_of(11)} & {*first}, "of the round before some are asked for again"


def test_a_ratio_is_of_all_rounds_together() -> None:
    rows = [{"on_s": 1.0 + at % 2, "off_s": 1.0} for at in range(20)]
    found = ratio(rows, "s")
    assert found.value == pytest.approx(1.5)
    assert found.low < 1.5 < found.high
    assert not ratio(rows[:5], "s").is_bounded
