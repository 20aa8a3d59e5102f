"""Requests: what clients see."""

from __future__ import annotations

from kvtier.tools.dashboard.panels import Panel, PanelRow, Query, Unit
from kvtier.tools.dashboard.rows.common import NOW, QUANTILES, TOO_FEW, quantiles

REQUESTS = PanelRow(
    "Requests",
    (
        Panel(
            "Requests that ended",
            "By how they did.",
            Unit.REQUESTS_PER_S,
            (
                Query(
                    NOW.rate("kvtier_server_requests_total", "endpoint", "status"),
                    "{{endpoint}} {{status}}",
                ),
                Query(NOW.rate("kvtier_requests_total"), "leases of the cache"),
                Query(
                    NOW.rate("vllm:request_success_total", "finished_reason"),
                    "vLLM {{finished_reason}}",
                ),
                Query(NOW.rate("sglang:num_requests_total"), "SGLang"),
            ),
        ),
        Panel(
            "Hints of orchestrators",
            "Actions in kv_hints of requests. Unknown and invalid ones are ignored.",
            Unit.PER_S,
            (
                Query(NOW.rate("kvtier_server_hint_actions_total", "action"), "{{action}}"),
                Query(NOW.rate("vllm:kvtier_hint_actions_total", "action"), "vLLM {{action}}"),
            ),
        ),
        Panel(
            "Running and waiting",
            "Requests in the engine, and in line for it.",
            Unit.NUMBER,
            (
                Query(NOW.level("kvtier_server_running"), "running"),
                Query(NOW.level("kvtier_server_waiting"), "waiting"),
                Query(NOW.level("vllm:num_requests_running"), "vLLM running"),
                Query(NOW.level("vllm:num_requests_waiting"), "vLLM waiting"),
                Query(NOW.level("sglang:num_running_reqs"), "SGLang running"),
                Query(NOW.level("sglang:num_queue_reqs"), "SGLang waiting"),
            ),
        ),
        Panel(
            "Server",
            "Time since kvtier serve started, and what it serves.",
            Unit.SECONDS,
            (
                Query(NOW.highest("kvtier_server_uptime_seconds"), "uptime"),
                Query(
                    NOW.level("kvtier_server_info", "model_name", "version"),
                    "{{model_name}}, kvtier {{version}}",
                ),
            ),
        ),
        Panel(
            "Tokens in answers",
            "Of requests that were answered in full.",
            Unit.PER_S,
            (
                Query(NOW.rate("kvtier_server_completion_tokens_total"), "kvtier serve"),
                Query(NOW.rate("vllm:generation_tokens_total"), "vLLM"),
                Query(NOW.rate("sglang:generation_tokens_total"), "SGLang"),
            ),
        ),
        Panel(
            "Time to first token",
            f"From a request's arrival. {QUANTILES}",
            Unit.SECONDS,
            (
                *quantiles("kvtier_server_ttft_seconds", legend=""),
                *quantiles("vllm:time_to_first_token_seconds", legend="vLLM"),
                *quantiles("sglang:time_to_first_token_seconds", legend="SGLang"),
            ),
            without=TOO_FEW,
        ),
        Panel(
            "Request latency",
            f"From a request's arrival. {QUANTILES}",
            Unit.SECONDS,
            (
                *quantiles("kvtier_server_e2e_seconds", legend=""),
                *quantiles("vllm:e2e_request_latency_seconds", legend="vLLM"),
                *quantiles("sglang:e2e_request_latency_seconds", legend="SGLang"),
            ),
            without=TOO_FEW,
        ),
        Panel(
            "Connections closed, recordings",
            "Why kvtier serve closed connections; requests for kvtier replay that were recorded or "
            "dropped.",
            Unit.PER_S,
            (
                Query(
                    NOW.rate("kvtier_server_closed_connections_total", "reason"),
                    "closed: {{reason}}",
                ),
                Query(
                    NOW.rate("kvtier_server_recorded_requests_total", "outcome"),
                    "recording: {{outcome}}",
                ),
                Query(
                    NOW.rate("vllm:kvtier_recorded_requests_total", "outcome"),
                    "vLLM recording: {{outcome}}",
                ),
            ),
        ),
    ),
)
