"""Telemetry: a record per request, and the metrics derived from it."""

from __future__ import annotations

from kvtier.observe.metrics import Metrics, RequestRecord
from kvtier.observe.specs import MetricSpec

__all__ = ["MetricSpec", "Metrics", "RequestRecord"]
