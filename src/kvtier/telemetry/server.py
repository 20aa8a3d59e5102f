"""Table of the metrics of ``kvtier serve`` about its HTTP clients."""

from __future__ import annotations

from kvtier.telemetry.metrics import MetricSpec

SERVER_METRICS = (
    MetricSpec(
        "kvtier_server_requests_total",
        "counter",
        "HTTP requests; status 499 is a client that left before its answer was complete.",
        ("endpoint", "status"),
    ),
    MetricSpec(
        "kvtier_server_closed_connections_total",
        "counter",
        "Connections that the server closed: no complete header in time (header_timeout), an "
        "answer left unread (write_timeout), too many connections (room), not HTTP "
        "(invalid_http), not TLS on a TLS port (tls).",
        ("reason",),
    ),
    MetricSpec(
        "kvtier_server_ttft_seconds",
        "histogram",
        "Time from the arrival of a request to its first token.",
        ("endpoint",),
    ),
    MetricSpec(
        "kvtier_server_e2e_seconds",
        "histogram",
        "Time from the arrival of a request to the end of its complete answer.",
        ("endpoint",),
    ),
    MetricSpec("kvtier_server_prompt_tokens_total", "counter", "Prompt tokens."),
    MetricSpec(
        "kvtier_server_cached_tokens_total", "counter", "Prompt tokens served from the cache."
    ),
    MetricSpec("kvtier_server_completion_tokens_total", "counter", "Generated tokens."),
    MetricSpec(
        "kvtier_server_hint_actions_total",
        "counter",
        "Actions in orchestrators' kv_hints: kv.fetch and kvtier.hint were read, unknown and "
        "invalid ones ignored.",
        ("action",),
    ),
    MetricSpec(
        "kvtier_server_recorded_requests_total",
        "counter",
        "Requests written to the recording, or dropped since its queue was full.",
        ("outcome",),
    ),
    MetricSpec(
        "kvtier_server_info",
        "gauge",
        "1; the labels name the served model and kvtier's version.",
        ("model_name", "version"),
    ),
    MetricSpec("kvtier_server_uptime_seconds", "gauge", "Time since the server started."),
    MetricSpec("kvtier_server_running", "gauge", "Running requests."),
    MetricSpec("kvtier_server_waiting", "gauge", "Waiting requests."),
)
