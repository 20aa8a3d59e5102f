"""Spans of requests for OpenTelemetry.

They are created after the request, from recorded times, outside the compute thread. OpenTelemetry's
own environment variables configure destination, sampling and service name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from threading import Thread
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvtier.core.errors import ConfigError, install_command
from kvtier.core.system.hosts import is_local

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]

PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
"""Entry points of the exporters called "otlp", by OpenTelemetry's names of protocols."""
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
CLOSE_S = 3.0
"""Longest wait at close for the last spans to be delivered."""


def _ns(perf_s: float) -> int:
    """Return a ``time.perf_counter`` as nanoseconds since 1970."""
    return time.time_ns() - int((time.perf_counter() - perf_s) * 1e9)


class RequestSpan:
    """Span of one request. Times are ``time.perf_counter``."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span)
        self.is_recording = span.is_recording()

    def child(
        self, name: str, began_s: float, ended_s: float, attributes: Attributes, error: str = ""
    ) -> None:
        """Add a completed part of the request, which may itself be over.

        attributes: their names get the prefix "kvtier.".
        """
        if not self.is_recording:
            return
        began = _ns(began_s)
        span = self._tracer.start_span(f"kvtier.{name}", self._context, start_time=began)
        _fill(span, {f"kvtier.{key}": value for key, value in attributes.items()}, error)
        span.end(began + max(0, int((ended_s - began_s) * 1e9)))

    def end(self, attributes: Attributes, error: str = "") -> None:
        """End the span: the answer is complete, or has failed."""
        _fill(self._span, attributes, error)
        self._span.end()


class Traces:
    """Creates spans and passes them to an exporter.

    close: closes the exporter if kvtier made it.
    """

    def __init__(self, tracer: Tracer, close: Callable[[], object] | None) -> None:
        self._tracer = tracer
        self._close = close

    def begin(
        self, name: str, headers: Mapping[str, str], began_s: float, attributes: Attributes
    ) -> RequestSpan:
        """Begin a request's span, below this process's span or the ``traceparent`` header."""
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(
            name,
            _parent(headers),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=_ns(began_s),
        )
        return RequestSpan(self._tracer, span)

    def close(self) -> None:
        """Send the remaining spans, waiting at most ``CLOSE_S`` for the collector."""
        if self._close is not None:
            thread = Thread(target=self._close, name="kvtier-traces-end", daemon=True)
            thread.start()
            thread.join(CLOSE_S)


def _parent(headers: Mapping[str, str]) -> Context | None:
    from opentelemetry.propagate import extract
    from opentelemetry.trace import get_current_span

    if get_current_span().get_span_context().is_valid:
        return None  # the server's own instrumentation has read the headers
    return extract(headers)


def _fill(span: Span, attributes: Attributes, error: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attributes(attributes)
    if error:
        span.set_status(Status(StatusCode.ERROR, error))


def open_traces(version: str) -> Traces:
    """Return traces as configured by the environment.

    Uses the provider of this process if there is one. Raises ``ConfigError`` for a missing package
    or an unknown exporter.
    """
    try:
        from opentelemetry import trace

        provider = trace.get_tracer_provider()
        if not isinstance(provider, trace.ProxyTracerProvider):
            return Traces(provider.get_tracer("kvtier", version), None)
        made = _make_provider()
    except ImportError as error:
        raise ConfigError(
            f"traces: {error}; install what they need: {install_command('traces')}"
        ) from error
    return Traces(made.get_tracer("kvtier", version), made.shutdown)


def _make_provider() -> TracerProvider:
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    is_named = "OTEL_SERVICE_NAME" in os.environ or SERVICE_NAME in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    resource = Resource.create({} if is_named else {SERVICE_NAME: "kvtier"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for name in os.environ.get("OTEL_TRACES_EXPORTER", "otlp").split(","):
        if (wanted := name.strip()) != "none":
            provider.add_span_processor(BatchSpanProcessor(_make_exporter(wanted)))
    return provider


def _make_exporter(name: str) -> SpanExporter:
    if name != "otlp":
        return _exporter_class(name, f"OTEL_TRACES_EXPORTER={name!r}", "otlp, console or none")()
    variable, protocol = _first_set(PROTOCOL_VARIABLES) or (PROTOCOL_VARIABLES[1], "http/protobuf")
    said = f"{variable}={protocol!r}"
    others = " or ".join(each for each in PROTOCOLS if each != protocol)
    kind = _exporter_class(PROTOCOLS.get(protocol, protocol), said, others)
    _, endpoint = _first_set(ENDPOINT_VARIABLES) or ("", "http://localhost:4318")
    if protocol != "http/protobuf" or not is_local(urlsplit(endpoint).hostname or ""):
        return kind()
    from requests import Session

    session = Session()
    session.trust_env = False  # a proxy of the environment can't reach this machine's loopback
    return kind(session=session)


def _first_set(variables: Sequence[str]) -> tuple[str, str] | None:
    """Return name and value of the first environment variable that is set and not empty."""
    named = ((name, os.environ.get(name, "").strip()) for name in variables)
    return next((each for each in named if each[1]), None)


def _exporter_class(entry_point: str, said: str, known: str) -> Callable[..., SpanExporter]:
    """Return an exporter. said: the setting that asks for it; known: values that it may have."""
    for entry in entry_points(group="opentelemetry_traces_exporter", name=entry_point):
        kind: Callable[..., SpanExporter] = entry.load()
        return kind
    is_known = entry_point in PROTOCOLS.values()
    package = f"opentelemetry-exporter-{entry_point.replace('_', '-')}"
    raise ConfigError(
        f"traces: {said} in the environment, and no package has it; use {known}, or install "
        f"{package if is_known else 'the exporter'}"
    )
