"""Panels and alerts ask for what there is; what there is, is shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtier.cli import app
from kvtier.connectors.vllm.counts import METRICS as UNDER_VLLM
from kvtier.telemetry import METRICS
from kvtier.telemetry.node import NODE_METRICS
from kvtier.telemetry.server import SERVER_METRICS
from kvtier.tools.dashboard import ALERTS, ROWS, SERIES, Panel, make_dashboard
from kvtier.tools.dashboard.grafana import COLUMNS
from kvtier.tools.dashboard.queries import QueryScope, share
from kvtier.tools.dashboard.series import ENGINES_OWN

PANELS = [panel for row in ROWS for panel in row.panels]
NAME = re.compile(r"(?:kvtier_|vllm:|sglang:)\w+")
GIVEN = Path(__file__).parents[3] / "deploy"


def tables() -> dict[str, tuple[str, ...]]:
    """Labels by what Prometheus calls a metric; read from the tables, not from the dashboard."""
    found = {
        spec.name: spec.labels for spec in (*METRICS, *SERVER_METRICS, *NODE_METRICS, *ENGINES_OWN)
    }
    found |= {
        each.name + ("_total" if each.kind == "counter" else ""): each.labels for each in UNDER_VLLM
    }
    return found


def asked(query: str) -> set[str]:
    known = tables()
    return {
        name if name in known else re.sub("_(bucket|sum|count)$", "", name)
        for name in NAME.findall(query)
    }


def test_every_metric_that_a_panel_names_is_in_the_tables() -> None:
    named = {name for panel in PANELS for query in panel.queries for name in asked(query.text)}
    assert len(named) > 40
    assert named <= tables().keys()


def test_every_metric_that_an_alert_names_is_in_the_tables() -> None:
    for alert in ALERTS:
        assert asked(alert.condition), alert.name
        assert asked(alert.condition) <= tables().keys(), alert.name


def test_every_metric_in_the_tables_is_shown() -> None:
    shown = {name for panel in PANELS for query in panel.queries for name in asked(query.text)}
    assert tables().keys() - shown == set()


def test_what_is_told_of_a_metric_is_what_its_table_says() -> None:
    fill = next(panel for panel in PANELS if panel.title == "Fill")
    assert "- `kvtier_used_slots`: Slots in use." in fill.description
    assert "- `vllm:kvtier_chunks`: Blocks that a tier has slots for." in fill.description


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_a_legend_names_only_labels_that_its_query_keeps(panel: Panel) -> None:
    for query in panel.queries:
        kept = {
            word for by in re.findall(r"sum by \((.*?)\)", query.text) for word in by.split(", ")
        }
        kept |= {
            word for by in re.findall(r"max by \((.*?)\)", query.text) for word in by.split(", ")
        }
        labels = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
        assert labels == kept - {"le"}, query


@pytest.mark.parametrize(
    ("method", "name", "by"),
    [
        ("rate", "kvtier_no_such_total", ()),
        ("rate", "kvtier_slots", ("tier",)),
        ("level", "kvtier_hit_blocks_total", ()),
        ("rate", "kvtier_hit_blocks_total", ("src",)),
        ("mean", "kvtier_hit_blocks_total", ()),
    ],
)
def test_another_name_kind_or_label_is_no_query(
    method: str, name: str, by: tuple[str, ...]
) -> None:
    with pytest.raises((KeyError, AssertionError), match=name):
        getattr(QueryScope(), method)(name, *by)


def test_a_quantile_of_few_is_not_asked_for() -> None:
    query = QueryScope('job="x"', "5m").quantile(0.95, "kvtier_lookup_seconds", "tier")
    assert query == (
        "histogram_quantile(0.95, "
        'sum by (le, tier) (rate(kvtier_lookup_seconds_bucket{job="x"}[5m])))'
        ' and sum by (tier) (increase(kvtier_lookup_seconds_count{job="x"}[5m])) >= 100'
    )


def test_a_share_of_nothing_is_nothing() -> None:
    assert share("a", "b", ("job",)) == "a / on (job) group_left () (b > 0)"


def test_panels_fill_lines_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    numbers = []
    for panel in _list(make_dashboard(ROWS)["panels"]):
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]
        taken |= cells
        numbers.append(panel["id"])
    assert len(set(numbers)) == len(numbers)
    assert len({panel["title"] for panel in _list(make_dashboard(ROWS)["panels"])}) == len(numbers)


def _list(found: object) -> list:
    assert isinstance(found, list)
    return found


def test_every_variable_that_a_query_asks_for_is_there() -> None:
    made = json.dumps(make_dashboard(ROWS))
    variables = set(re.findall(r"\$\{?(\w+)", made)) - {"__rate_interval", "__range", "__all"}
    templating = make_dashboard(ROWS)["templating"]
    assert isinstance(templating, dict)
    assert variables == {each["name"] for each in _list(templating["list"])}


def test_the_command_prints_what_is_given_beside_the_deployment_files() -> None:
    for arguments, name in (
        ([], "grafana/kvtier.json"),
        (["--alerts"], "prometheus/kvtier-rules.yml"),
    ):
        done = CliRunner().invoke(app, ["dashboard", *arguments])
        assert done.exit_code == 0
        told = f"kvtier dashboard {' '.join(arguments)}".strip()
        assert (GIVEN / name).read_text() == done.stdout, f"{told} > deploy/{name}"


def test_every_series_has_a_sentence() -> None:
    for series in SERIES.values():
        assert series.meaning.endswith("."), series.name
