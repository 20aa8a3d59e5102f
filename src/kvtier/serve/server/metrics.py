"""Metrics about the server's clients.

``kvtier.observe.specs`` declares them, and the cache's own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvtier import __version__
from kvtier.core.hints import HintAction
from kvtier.observe import MetricSpec, specs
from kvtier.serve.engine import Engine
from kvtier.serve.server.responses import Usage


class ServerMetrics:
    """The metrics of one server, in their own registry. Used by the event loop's thread.

    num_running, num_waiting: called when the metrics are read.
    """

    def __init__(
        self,
        model_name: str,
        num_running: Callable[[], int],
        num_waiting: Callable[[], int],
    ) -> None:
        self.registry = CollectorRegistry()

        def counter(spec: MetricSpec) -> Counter:
            return Counter(spec.name, spec.meaning, spec.labels, registry=self.registry)

        def histogram(spec: MetricSpec) -> Histogram:
            return Histogram(
                spec.name, spec.meaning, spec.labels, registry=self.registry, buckets=spec.buckets
            )

        def gauge(spec: MetricSpec, function: Callable[[], float]) -> None:
            made = Gauge(spec.name, spec.meaning, registry=self.registry)
            made.set_function(function)

        self._requests = counter(specs.SERVER_REQUESTS)
        self._closed = counter(specs.SERVER_CLOSED_CONNECTIONS)
        self._prompt_tokens = counter(specs.SERVER_PROMPT_TOKENS)
        self._cached_tokens = counter(specs.SERVER_CACHED_TOKENS)
        self._completion_tokens = counter(specs.SERVER_COMPLETION_TOKENS)
        self._hint_actions = counter(specs.SERVER_HINT_ACTIONS)
        self._recorded = counter(specs.SERVER_RECORDED_REQUESTS)
        self._ttft = histogram(specs.SERVER_TTFT_SECONDS)
        self._e2e = histogram(specs.SERVER_E2E_SECONDS)
        info = specs.SERVER_INFO
        made = Gauge(info.name, info.meaning, info.labels, registry=self.registry)
        made.labels(model_name, __version__).set(1)
        began_s = time.monotonic()
        gauge(specs.SERVER_UPTIME_SECONDS, lambda: time.monotonic() - began_s)
        gauge(specs.SERVER_RUNNING, num_running)
        gauge(specs.SERVER_WAITING, num_waiting)

    def request(self, endpoint: str, status: int) -> None:
        """Count an ended HTTP request."""
        self._requests.labels(endpoint, str(status)).inc()

    def closed(self, reason: str) -> None:
        """Count a connection that the server closed."""
        self._closed.labels(reason).inc()

    def hinted(self, actions: Iterable[HintAction]) -> None:
        """Count the actions of an orchestrator's envelope."""
        for action in actions:
            self._hint_actions.labels(action.value).inc()

    def recorded(self, written: bool) -> None:
        """Count a request that was recorded or dropped. Thread-safe."""
        self._recorded.labels("written" if written else "dropped").inc()

    def first_token(self, endpoint: str, seconds: float) -> None:
        self._ttft.labels(endpoint).observe(seconds)

    def answered(self, endpoint: str, seconds: float, usage: Usage) -> None:
        """Count a request that got its whole answer."""
        self._e2e.labels(endpoint).observe(seconds)
        self._prompt_tokens.inc(usage["prompt_tokens"])
        self._cached_tokens.inc(usage["prompt_tokens_details"]["cached_tokens"])
        self._completion_tokens.inc(usage["completion_tokens"])

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)


T = TypeVar("T")


class CacheMetrics(Generic[T]):
    """The cache's metrics, which only the engine's thread can read, between two of its steps.

    Concurrent callers share one reading, and none waits longer than ``PATIENCE_S``.

    read: reads a registry, on the engine's thread.
    last: result until the first reading.
    """

    PATIENCE_S = 2.0

    def __init__(self, engine: Engine, read: Callable[[CollectorRegistry], T], last: T) -> None:
        self._engine = engine
        self._read_registry = read
        self._reading: asyncio.Future[T] | None = None
        self._last = last

    async def read(self) -> T:
        """Return the current metrics, or the previous ones if the engine takes too long."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.wrap_future(self._engine.call_later(self._read))
        reading = self._reading  # others may begin the next one meanwhile
        done, _ = await asyncio.wait({reading}, timeout=self.PATIENCE_S)
        if done:
            self._last = reading.result()
        return self._last

    def _read(self) -> T:
        return self._read_registry(self._engine.cache.update_metrics().registry)
