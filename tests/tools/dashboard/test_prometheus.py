"""Every panel's query, run by a real Prometheus.

It scrapes a real ``kvtier serve``, and an exporter of all series that engines have.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from kvtier.observe import specs
from tests.serve.server.program import program

from .exporter import exporting
from .prometheus import IS_WANTED, MISSING, PROGRAM, Prometheus, prometheus
from .shown import ALERTS, PANELS, RULES, Panel, metrics_in

if PROGRAM is None or not IS_WANTED:
    pytest.skip(MISSING, allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.engine]

OF_SERVER = {*specs.CACHE, *specs.SERVER}
REAL, STAND_IN = "kvtier", "stand-in"
QUIET = {
    "kvtier_audits_total",
    "kvtier_damaged_blocks_total",
    "kvtier_failed_blocks_total",
    "kvtier_failed_copies_total",
    "kvtier_hints_total",
    "kvtier_lookup_seconds",
    "kvtier_probed_blocks_total",
    "kvtier_refused_blocks_total",
    "kvtier_scrubbed_bytes_total",
    "kvtier_server_closed_connections_total",
    "kvtier_server_hint_actions_total",
    "kvtier_unadmitted_blocks_total",
    "kvtier_unwritten_blocks_total",
    "kvtier_warmed_blocks_total",
    "kvtier_warmed_bytes_total",
}
"""Metrics that a server without failures and hints need not show."""
OPTIONS = ("--device-capacity", "8MiB", "--host-capacity", "32MiB", "--disk-capacity", "64MiB")
NUM_PROMPTS = 24
"""More than fit in the device tier."""
NUM_ROUNDS = 8
"""Fewer rounds give too few observations for quantiles."""


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    disk = ("--disk-path", str(folder / "slab"), "--record", str(folder / "trace.jsonl"))
    with program(*OPTIONS, *disk) as (_, url), exporting() as stand_in:
        targets = {REAL: url.removeprefix("http://"), STAND_IN: stand_in}
        with prometheus(folder, targets, RULES) as made:
            made.wait_for_scrapes(REAL, 2)
            _ask_for_answers(url)
            made.wait_for_scrapes(REAL, 6)
            made.wait_for_scrapes(STAND_IN, 6)
            yield made


def _ask_for_answers(url: str) -> None:
    prompts = [
        f"# {at}\n" + f"def f{at}(x):\n    return x + {at}\n\n" * 12 for at in range(NUM_PROMPTS)
    ]

    def ask(prompt: str) -> int:
        body = {"model": "kvtier-tiny", "prompt": prompt, "max_tokens": 2}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=120).status_code

    with ThreadPoolExecutor(4) as executor:
        statuses = list(executor.map(ask, prompts * NUM_ROUNDS))
    assert set(statuses) == {200}


def _filled(query: str, job: str) -> str:
    values = {
        "job": job,
        "instance": ".*",
        "window": "5m",
        "__range": "5m",
        "__rate_interval": "2m",
    }
    return re.sub(r"\$(\w+)", lambda found: values[found[1]], query)


def _check(found: list[dict[str, object]], legend: str) -> None:
    """Check that each line has a finite value, and the labels of its legend."""
    for sample in found:
        labels, value = sample["metric"], sample["value"]
        assert isinstance(labels, dict)
        assert isinstance(value, list)
        assert math.isfinite(float(value[1])), sample
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) == labels.keys()


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_a_panel_shows_something_for_every_engine(asked: Prometheus, panel: Panel) -> None:
    for query in panel.queries:
        found = asked.ask(_filled(query.text, STAND_IN))
        assert len(found) == 1, query.text
        _check(found, query.legend)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_a_panel_shows_what_a_real_server_exports(asked: Prometheus, panel: Panel) -> None:
    exported = set(asked.get("label/__name__/values", **{"match[]": f'{{job="{REAL}"}}'}))
    for query in panel.queries:
        found = asked.ask(_filled(query.text, REAL))
        _check(found, query.legend)
        named = metrics_in(query.text)
        if named[0] not in OF_SERVER:
            continue
        names = {spec.name for spec in named if spec in OF_SERVER}
        is_there = {name for name in names if {name, f"{name}_count"} & exported}
        _, quantile, enough = query.text.rpartition(" and ")
        if names and names == is_there and not names & QUIET:
            # A quantile exists only if there are enough observations.
            assert bool(found) == (not quantile or bool(asked.ask(_filled(enough, REAL)))), query


def test_a_real_server_exports_the_declared_metrics(asked: Prometheus) -> None:
    exported = set(asked.get("label/__name__/values", **{"match[]": f'{{job="{REAL}"}}'}))
    of_server = {
        spec.name + ("_count" if spec.kind == "histogram" else "")
        for spec in OF_SERVER
        if spec.name not in QUIET
    }
    assert of_server <= exported


def test_what_is_shown_is_what_the_server_counted(asked: Prometheus) -> None:
    found = next(panel for panel in PANELS if panel.title == "Prompt tokens by source")
    shares = {
        str(sample["metric"]["tier"]): float(sample["value"][1])
        for sample in asked.ask(_filled(found.queries[0].text, REAL))
    }
    assert shares.keys() <= {"device", "host", "disk"}
    assert 0.5 < sum(shares.values()) < 1  # the first round finds nothing
    of_real = f'{{job="{REAL}"}}'
    counted = asked.ask(
        f"sum(kvtier_hit_blocks_total{of_real}) / sum(kvtier_prompt_blocks_total{of_real})"
    )
    assert sum(shares.values()) == pytest.approx(float(counted[0]["value"][1]), abs=0.05)


def test_instances_are_known_by_what_they_export(asked: Prometheus) -> None:
    found = asked.get("label/job/values", **{"match[]": '{__name__=~"kvtier_slots"}'})
    assert found == [REAL, STAND_IN]
    found = asked.get("label/job/values", **{"match[]": '{__name__=~"vllm:num_requests_running"}'})
    assert found == [STAND_IN]


def test_every_alert_is_evaluated(asked: Prometheus) -> None:
    (group,) = asked.get("rules")["groups"]
    assert [rule["name"] for rule in group["rules"]] == [alert.name for alert in ALERTS]
    for rule in group["rules"]:
        assert rule["health"] == "ok", rule
    of_real = [each for each in asked.get("alerts")["alerts"] if each["labels"]["job"] == REAL]
    assert of_real == []
