"""A Grafana dashboard and Prometheus alerts, made from the tables of metrics.

``series.py``  what Prometheus has of ``kvtier serve``, of vLLM and of SGLang with kvtier under them
``queries.py`` PromQL over these, and over nothing else
``rows.py``    what is shown; ``alerts.py`` what somebody is told of
``grafana.py`` and ``rules.py`` write both down as the programs read them
"""

from __future__ import annotations

from kvtier.dashboard.alerts import ALERTS, Alert
from kvtier.dashboard.grafana import make_dashboard
from kvtier.dashboard.panels import Panel, Query
from kvtier.dashboard.rows import ROWS
from kvtier.dashboard.rules import make_rules
from kvtier.dashboard.series import SERIES, Engine, Series

__all__ = [
    "ALERTS",
    "ROWS",
    "SERIES",
    "Alert",
    "Engine",
    "Panel",
    "Query",
    "Series",
    "make_dashboard",
    "make_rules",
]
