"""Telemetry: a record per request, and the metrics derived from it."""

from __future__ import annotations

from kvtier.telemetry.metrics import METRICS, Metrics, MetricSpec, RequestRecord

__all__ = ["METRICS", "MetricSpec", "Metrics", "RequestRecord"]
