"""Telemetry: one record per request, and metrics made from them."""

from __future__ import annotations

from kvtier.telemetry.metrics import METRICS, Metrics, MetricSpec, RequestRecord

__all__ = ["METRICS", "MetricSpec", "Metrics", "RequestRecord"]
