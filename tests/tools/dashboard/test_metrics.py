"""Dashboard and alerts use declared metrics and their labels; each declared metric is shown."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from kvtier.observe import specs
from kvtier.tools.cli import app

from .shown import ALERTS, DASHBOARD, FOLDER, PANELS, RULES, Alert, Panel, metrics_in

NOT_SHOWN = {
    specs.VLLM_UNCLAIMED_CHUNKS,
    specs.WARMED_BLOCKS,
    specs.WARMED_BYTES,
    specs.NODE_ENGINE_INFO,
}
"""Metrics without a panel: they matter only in the minutes after a restart, or are only labels."""
BY_PROMETHEUS = {"le", "job", "instance"}
"""Labels that every metric, or every bucket of a histogram, has."""


def labels_in(query: str) -> set[str]:
    """Return the labels that a query selects or groups by, without those of Prometheus."""
    grouped = re.findall(r"\b(?:by|on|group_left) \((.*?)\)", query)
    selected = re.findall(r"[{,](\w+)(?:=|!=|=~|!~)\"", query)
    return {*selected, *(word for found in grouped for word in found.split(", ") if word)}


def check_labels(query: str) -> None:
    """Check that each label in a query belongs to one of its metrics."""
    metrics = metrics_in(query)
    assert metrics, query
    known = {label for spec in metrics for label in spec.labels}
    assert labels_in(query) <= known | BY_PROMETHEUS, query


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_a_panel_names_declared_metrics_and_their_labels(panel: Panel) -> None:
    for query in panel.queries:
        check_labels(query.text)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_names_declared_metrics_and_their_labels(alert: Alert) -> None:
    check_labels(alert.condition)
    kept = labels_in(alert.condition) | {"job", "instance"}
    assert set(re.findall(r"\$labels\.(\w+)", alert.summary + alert.advice)) <= kept


@pytest.mark.parametrize(
    "query",
    [
        "sum (rate(kvtier_no_such_total[5m]))",
        "sum by (src) (rate(kvtier_hit_blocks_total[5m]))",
        'sum (rate(kvtier_hit_blocks_total{src="disk"}[5m]))',
    ],
)
def test_another_name_or_label_is_noticed(query: str) -> None:
    with pytest.raises((KeyError, AssertionError)):
        check_labels(query)


def test_each_declared_metric_is_shown() -> None:
    shown = {spec for panel in PANELS for spec in panel.metrics}
    assert {*specs.DECLARED.values()} - shown == NOT_SHOWN


@pytest.mark.parametrize(
    "query",
    [query.text for panel in PANELS for query in panel.queries]
    + [alert.condition for alert in ALERTS],
)
def test_a_metric_is_queried_as_its_type_allows(query: str) -> None:
    """Counters are queried by growth, gauges by level, histograms by their parts."""
    for function, series in re.findall(r"(\w*)\((?=(?:kvtier_|vllm:|sglang:))([\w:]+)", query):
        (spec,) = metrics_in(series)
        has_part = series != spec.name
        assert has_part == (spec.kind == "histogram"), query
        is_new = re.search(rf"\({series}({{[^}}]*}}|) unless {series}\1 offset", query)
        grows = function in ("rate", "increase") or is_new is not None
        assert grows == (spec.kind != "gauge"), query


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_a_panel_explains_each_metric_as_it_is_declared(panel: Panel) -> None:
    meaning, _, found = panel.description.partition("\n\n")
    assert meaning.endswith((".", ")"))
    assert found == "\n".join(f"- `{spec.name}`: {spec.meaning}" for spec in panel.metrics)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_a_legend_names_only_labels_that_its_query_keeps(panel: Panel) -> None:
    for query in panel.queries:
        kept = {
            word
            for by in re.findall(r"(?:sum|max) by \((.*?)\)", query.text)
            for word in by.split(", ")
        }
        assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) == kept - {"le"}, query


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, "columns of Grafana's grid"
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]
        taken |= cells


def test_panels_have_numbers_and_titles_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)


def test_every_variable_that_a_query_asks_for_is_there() -> None:
    text = (FOLDER / "kvtier.json").read_text()
    variables = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval", "__range", "__all"}
    assert variables == {each["name"] for each in DASHBOARD["templating"]["list"]}


def test_the_command_prints_the_shipped_files() -> None:
    for arguments, path in (([], FOLDER / "kvtier.json"), (["--alerts"], RULES)):
        done = CliRunner().invoke(app, ["dashboard", *arguments])
        assert done.exit_code == 0
        assert done.stdout == path.read_text()
