"""A Grafana dashboard and Prometheus alerts, made from the tables of metrics.

``series.py``  series of ``kvtier serve``, and of vLLM and SGLang with kvtier
``queries.py`` PromQL over these series only
``rows/``      rows of panels
``alerts.py``  alerts
``grafana.py`` the dashboard as JSON for Grafana
``rules.py``   the alerts as YAML for Prometheus
"""

from __future__ import annotations

from kvtier.tools.dashboard.alerts import ALERTS, Alert
from kvtier.tools.dashboard.grafana import make_dashboard
from kvtier.tools.dashboard.panels import Panel, Query
from kvtier.tools.dashboard.rows import ROWS
from kvtier.tools.dashboard.rules import make_rules
from kvtier.tools.dashboard.series import SERIES, EngineKind, Series

__all__ = [
    "ALERTS",
    "ROWS",
    "SERIES",
    "Alert",
    "EngineKind",
    "Panel",
    "Query",
    "Series",
    "make_dashboard",
    "make_rules",
]
