"""Write the alerts as YAML rules for Prometheus."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from kvtier.tools.dashboard.alerts import Alert

_HEAD = """\
# Alerts for kvtier serve, and for vLLM and SGLang with kvtier under them.
# Made by: kvtier dashboard --alerts
groups:
  - name: kvtier
    rules:
"""


def make_rules(alerts: Sequence[Alert]) -> str:
    """Return a file of rules, in YAML."""
    return _HEAD + "".join(line for alert in alerts for line in _rule(alert))


def _rule(alert: Alert) -> Iterator[str]:
    # A JSON string is a YAML string, too.
    yield f"      - alert: {alert.name}\n"
    yield f"        expr: {json.dumps(alert.condition)}\n"
    yield f"        for: {alert.lasts}\n"
    yield f"        labels:\n          severity: {alert.severity}\n"
    yield "        annotations:\n"
    yield f"          summary: {json.dumps(alert.summary)}\n"
    yield f"          description: {json.dumps(alert.advice)}\n"
