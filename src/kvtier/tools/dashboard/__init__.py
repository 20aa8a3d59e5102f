"""A Grafana dashboard and Prometheus alerts, made from the tables of metrics.

``series.py``  what Prometheus has of ``kvtier serve``, of vLLM and of SGLang with kvtier under them
``queries.py`` PromQL over these, and over nothing else
``rows.py``    what is shown; ``alerts.py`` what somebody is told of
``grafana.py`` and ``rules.py`` write both down as the programs read them
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
