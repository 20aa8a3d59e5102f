"""The metrics of ``kvtier serve``, in one table: what clients see."""

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
        "Connections that the server closed: no whole header in time (header_timeout), an answer "
        "left unread (write_timeout), others needed the room (room), no HTTP (invalid_http), no "
        "TLS where that is spoken (tls).",
        ("reason",),
    ),
    MetricSpec(
        "kvtier_server_ttft_seconds",
        "histogram",
        "From the arrival of a request to its first token.",
        ("endpoint",),
    ),
    MetricSpec(
        "kvtier_server_e2e_seconds",
        "histogram",
        "From the arrival of a request to the end of its answer, of those answered in full.",
        ("endpoint",),
    ),
    MetricSpec("kvtier_server_prompt_tokens_total", "counter", "Tokens in prompts."),
    MetricSpec("kvtier_server_cached_tokens_total", "counter", "Prompt tokens not computed."),
    MetricSpec("kvtier_server_completion_tokens_total", "counter", "Tokens in answers."),
    MetricSpec(
        "kvtier_server_recorded_requests_total",
        "counter",
        "Requests for the recording: written, or dropped since too much waited to be written.",
        ("outcome",),
    ),
    MetricSpec(
        "kvtier_server_info",
        "gauge",
        "1; the labels name the served model and kvtier's version.",
        ("model_name", "version"),
    ),
    MetricSpec("kvtier_server_uptime_seconds", "gauge", "Time since the server started."),
    MetricSpec("kvtier_server_running", "gauge", "Requests that the engine works on."),
    MetricSpec("kvtier_server_waiting", "gauge", "Requests that wait for the engine."),
)
