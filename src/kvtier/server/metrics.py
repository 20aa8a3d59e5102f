"""Metrics of the server: what clients see. The cache's own are in ``kvtier.telemetry``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvtier.engine import Engine
from kvtier.server.responses import Usage
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
        "left unread (write_timeout), others needed the room (room), no HTTP (invalid_http).",
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
    MetricSpec("kvtier_server_running", "gauge", "Requests that the engine works on."),
    MetricSpec("kvtier_server_waiting", "gauge", "Requests that wait for the engine."),
)

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


class ServerMetrics:
    """The metrics of one server, in a registry of their own. Used by the event loop's thread.

    num_running, num_waiting: asked when the metrics are read.
    """

    def __init__(self, num_running: Callable[[], int], num_waiting: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        specs = {spec.name: spec for spec in SERVER_METRICS}

        def counter(name: str) -> Counter:
            spec = specs[name]
            return Counter(spec.name, spec.meaning, spec.labels, registry=self.registry)

        def histogram(name: str) -> Histogram:
            spec = specs[name]
            return Histogram(
                spec.name, spec.meaning, spec.labels, registry=self.registry, buckets=_SECONDS
            )

        def gauge(name: str, function: Callable[[], int]) -> None:
            made = Gauge(name, specs[name].meaning, registry=self.registry)
            made.set_function(function)

        self._requests = counter("kvtier_server_requests_total")
        self._closed = counter("kvtier_server_closed_connections_total")
        self._prompt_tokens = counter("kvtier_server_prompt_tokens_total")
        self._cached_tokens = counter("kvtier_server_cached_tokens_total")
        self._completion_tokens = counter("kvtier_server_completion_tokens_total")
        self._recorded = counter("kvtier_server_recorded_requests_total")
        self._ttft = histogram("kvtier_server_ttft_seconds")
        self._e2e = histogram("kvtier_server_e2e_seconds")
        gauge("kvtier_server_running", num_running)
        gauge("kvtier_server_waiting", num_waiting)

    def request(self, endpoint: str, status: int) -> None:
        """An HTTP request ended."""
        self._requests.labels(endpoint, str(status)).inc()

    def closed(self, reason: str) -> None:
        """The server closed a connection."""
        self._closed.labels(reason).inc()

    def recorded(self, written: bool) -> None:
        """A request was recorded, or left out. From any thread."""
        self._recorded.labels("written" if written else "dropped").inc()

    def first_token(self, endpoint: str, seconds: float) -> None:
        self._ttft.labels(endpoint).observe(seconds)

    def answered(self, endpoint: str, seconds: float, usage: Usage) -> None:
        """A request got its whole answer."""
        self._e2e.labels(endpoint).observe(seconds)
        self._prompt_tokens.inc(usage["prompt_tokens"])
        self._cached_tokens.inc(usage["prompt_tokens_details"]["cached_tokens"])
        self._completion_tokens.inc(usage["completion_tokens"])

    def text(self) -> bytes:
        """In prometheus' text format."""
        return generate_latest(self.registry)


class CacheMetrics:
    """The cache's metrics, which only the engine's thread can read: between two of its steps.

    Everybody who asks meanwhile gets the same text, and nobody waits longer than ``PATIENCE_S``.
    """

    PATIENCE_S = 2.0

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reading: asyncio.Future[bytes] | None = None
        self._last = b""

    async def text(self) -> bytes:
        """In prometheus' text format; where the engine does not come to it, what it was before."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.wrap_future(self._engine.call_later(self._read))
        done, _ = await asyncio.wait({self._reading}, timeout=self.PATIENCE_S)
        if done:
            self._last = self._reading.result()
        return self._last

    def _read(self) -> bytes:
        return generate_latest(self._engine.cache.update_metrics().registry)
