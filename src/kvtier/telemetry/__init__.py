"""Telemetry: a record per request, and the metrics derived from it."""

from __future__ import annotations

from kvtier.telemetry.metrics import Metrics, RequestRecord
from kvtier.telemetry.specs import MetricSpec

__all__ = ["MetricSpec", "Metrics", "RequestRecord"]
