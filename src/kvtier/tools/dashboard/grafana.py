"""Write the dashboard as JSON for Grafana."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from kvtier.tools.dashboard.panels import Panel, PanelKind, PanelRow, Unit
from kvtier.tools.dashboard.series import EngineKind

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

SCHEMA_VERSION = 39
"""Schema version of Grafana 10.4 and 11; newer versions read it."""
UID = "kvtier"
COLUMNS = 24
HEIGHT = 8
SOURCE: dict[str, Json] = {"type": "prometheus", "uid": "${source}"}

ALWAYS_THERE = {
    EngineKind.KVTIER: "kvtier_server_running",
    EngineKind.VLLM: "vllm:num_requests_running",
    EngineKind.SGLANG: "sglang:num_running_reqs",
    EngineKind.NODE: "kvtier_node_info",
}
"""A series that every instance of an engine exports, by which instances are found."""


def make_dashboard(rows: Sequence[PanelRow]) -> dict[str, Json]:
    """Return the dashboard to import into Grafana, or to place in its provisioning folder."""
    return {
        "uid": UID,
        "title": "kvtier",
        "description": "What the KV cache finds, what that saves, and what stands in its way; for "
        "kvtier serve, vLLM and SGLang with kvtier, and nodes. Made by: kvtier dashboard.",
        "tags": ["kvtier", "llm"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "",
        "templating": {"list": list(_variables())},
        "panels": list(_placed(rows)),
    }


def _variables() -> Iterator[Json]:
    every: dict[str, Json] = {"text": "All", "value": "$__all"}
    yield {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    options: list[Json] = [{**every, "selected": True}]
    options += [
        {"text": engine.value, "value": name, "selected": False}
        for engine, name in ALWAYS_THERE.items()
    ]
    yield {
        "name": "engine",
        "label": "Engine",
        "type": "custom",
        "query": ", ".join(f"{engine} : {name}" for engine, name in ALWAYS_THERE.items()),
        "options": options,
        "current": every,
        "includeAll": True,
        "allValue": "|".join(ALWAYS_THERE.values()),
        "multi": False,
    }
    yield _labels("job", "Job", '{__name__=~"$engine"}')
    yield _labels("instance", "Instance", '{__name__=~"$engine",job=~"$job"}')
    windows = ("5m", "15m", "1h", "6h")
    yield {
        "name": "window",
        "label": "Shares and quantiles over",
        "type": "custom",
        "query": ",".join(windows),
        "options": [{"text": each, "value": each, "selected": each == "15m"} for each in windows],
        "current": {"text": "15m", "value": "15m"},
        "includeAll": False,
        "multi": False,
    }


def _labels(name: str, label: str, series: str) -> Json:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": f"label_values({series}, {name})", "refId": name},
        "current": {"text": ["All"], "value": ["$__all"]},
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "refresh": 2,
        "sort": 1,
    }


def _placed(rows: Sequence[PanelRow]) -> Iterator[Json]:
    """Yield the panels with their positions: from left to right, line by line."""
    number = x = y = 0
    for row in rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
        }
        x, y = 0, y + 1
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y = 0, y + HEIGHT
            number += 1
            place: Json = {"x": x, "y": y, "w": panel.width, "h": HEIGHT}
            yield {"id": number, "gridPos": place, **_panel(panel)}
            x += panel.width
        y += HEIGHT


def _panel(panel: Panel) -> dict[str, Json]:
    targets: list[Json] = [
        {
            "refId": chr(ord("A") + at),
            "datasource": SOURCE,
            "expr": query.text,
            "legendFormat": query.legend,
            "editorMode": "code",
            "range": True,
            "instant": False,
        }
        for at, query in enumerate(panel.queries)
    ]
    return {
        "type": panel.kind.value,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _OPTIONS[panel.kind],
    }


_OPTIONS: dict[PanelKind, Json] = {
    PanelKind.LINES: {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    # The last value, which covers the whole time range, or the window before its end.
    PanelKind.NUMBER: {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "none",
        "textMode": "value_and_name",
    },
    PanelKind.STATES: {"mergeValues": True, "showValue": "auto", "legend": {"showLegend": False}},
}


def _defaults(panel: Panel) -> dict[str, Json]:
    steps: list[Json] = [{"color": "green", "value": None}]
    if panel.bad_from is not None:
        steps.append({"color": "red", "value": panel.bad_from})
    made: dict[str, Json] = {
        "unit": panel.unit.value,
        "min": 0,
        "noValue": panel.without,
        "thresholds": {"mode": "absolute", "steps": steps},
        "color": {"mode": "thresholds" if panel.kind is PanelKind.NUMBER else "palette-classic"},
    }
    if panel.highest is not None:
        made["max"] = panel.highest
    if panel.unit is Unit.RATIO:
        made["decimals"] = 2
    if panel.kind is PanelKind.LINES:
        made["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 30 if panel.is_stacked else 8,
            "showPoints": "auto",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
        }
    if panel.states:
        options: dict[str, Json] = {
            str(value): {"text": text, "color": color, "index": value}
            for value, text, color in panel.states
        }
        made["mappings"] = [{"type": "value", "options": options}]
    return made
