"""Metrics: one table of names, and values that match the events they count."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from kvtier.core.types import DEVICE, HOST
from kvtier.observe import Metrics, MetricSpec, RequestRecord, specs
from tests.cache.tokens.harness import count

UNITS = ("_total", "_seconds", "_bytes", "_slots", "_ratio", "_state", "_in_flight")


@pytest.mark.parametrize("spec", specs.CACHE, ids=lambda spec: spec.name)
def test_names_carry_their_unit_and_a_meaning(spec: MetricSpec) -> None:
    name, kind, meaning = spec.name, spec.kind, spec.meaning
    assert name.startswith("kvtier_")
    assert name.endswith(UNITS)
    assert (kind == "counter") == name.endswith("_total")
    assert meaning.endswith(".")


def test_only_the_declaration_spells_a_name() -> None:
    """Check sources, comments and pages. Grafana and Prometheus read their own files."""
    package = Path(specs.__file__).parents[1]
    sources = {*package.rglob("*.py"), *package.rglob("*.js"), *package.rglob("*.html")}
    sources |= {*(package.parents[1] / "benchmarks").rglob("*.py")}
    name = re.compile("|".join(rf"\b{name.removesuffix('_total')}" for name in specs.DECLARED))
    assert name.search(Path(specs.__file__).read_text())
    spelled = [
        f"{path}: {found[0]}"
        for path in sources - {Path(specs.__file__)}
        if (found := name.search(path.read_text()))
    ]
    assert spelled == []


def test_every_metric_is_exposed_before_anything_happened() -> None:
    text = generate_latest(Metrics().registry).decode()
    for spec in specs.CACHE:
        exposed = spec.name.removesuffix("_total") if spec.kind == "counter" else spec.name
        assert f"# HELP {exposed}" in text


def test_two_caches_count_apart() -> None:
    one, two = Metrics(), Metrics()
    one.count(specs.REQUESTS)
    assert count(one, "kvtier_requests_total") == 1
    assert count(two, "kvtier_requests_total") == 0


def test_request_is_counted_once_with_its_tiers() -> None:
    metrics = Metrics()
    metrics.record(
        RequestRecord(num_asked_blocks=7, hit_blocks={DEVICE: 2, HOST: 3}, load_bytes=9, load_s=2)
    )
    metrics.record(RequestRecord(num_asked_blocks=1))
    assert count(metrics, "kvtier_requests_total") == 2
    assert count(metrics, "kvtier_prompt_blocks_total") == 8
    assert count(metrics, "kvtier_hit_blocks_total", tier=DEVICE) == 2
    assert count(metrics, "kvtier_hit_blocks_total", tier=HOST) == 3
    assert count(metrics, "kvtier_load_seconds_sum") == 2
    assert count(metrics, "kvtier_load_seconds_count") == 1


def test_occupancy_is_the_last_one_told() -> None:
    metrics = Metrics()
    metrics.occupancy({DEVICE: 3}, {DEVICE: 8})
    metrics.occupancy({DEVICE: 2}, {DEVICE: 8})
    assert count(metrics, "kvtier_used_slots", tier=DEVICE) == 2
    assert count(metrics, "kvtier_slots", tier=DEVICE) == 8


def test_numbers_are_taken_once_by_an_engine_with_metrics_of_its_own() -> None:
    metrics = Metrics(is_exposed=False)
    metrics.keep_observations([specs.LOAD_ERROR_RATIO])
    metrics.count(specs.REQUESTS, 2)
    metrics.gauge(specs.SLOTS, 8, tier=HOST)
    metrics.observe(specs.LOAD_ERROR_RATIO, 1.5, src=HOST)
    metrics.observe(specs.LOAD_ERROR_RATIO, 0.5, src=HOST)
    metrics.observe(specs.COPY_SECONDS, 0.5, src=HOST, dst=DEVICE)
    assert metrics.take_levels() == {(specs.SLOTS, (HOST,)): 8}
    assert metrics.take_observations() == {(specs.LOAD_ERROR_RATIO, (HOST,)): [1.5, 0.5]}
    assert metrics.take_recent()[specs.REQUESTS, ()] == 2
    assert not metrics.take_levels()
    assert not metrics.take_observations()
    assert not list(metrics.registry.collect())
