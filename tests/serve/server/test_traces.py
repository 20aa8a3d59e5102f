"""Spans of a real server, sent to a receiver that parses the OpenTelemetry exporter's requests."""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import EntryPoint
from threading import Thread
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvtier.core.errors import ConfigError
from kvtier.core.types import DEVICE
from kvtier.observe.traces import PROTOCOL_VARIABLES, open_traces
from kvtier.serve.engine import Engine, EngineBusy, RequestHandle
from kvtier.serve.server.config import ServerConfig
from tests.kit.waiting import wait_until

from .conftest import MODEL, running
from .test_errors import FailsAfterTwoTokens, StandIn

pytestmark = pytest.mark.engine

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class GrpcExporter(SpanExporter):
    """Stands for the exporter of another package. is_closed: whether it was shut down."""

    is_closed = False

    def shutdown(self) -> None:
        GrpcExporter.is_closed = True


class RefusesAll(StandIn):
    """An engine whose queue is full."""

    def submit(self, *_: object, **__: object) -> RequestHandle:
        raise EngineBusy("64 requests are waiting")


class Collector:
    """A small OTLP/HTTP receiver. spans: all received spans."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.names: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                content = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    content = gzip.decompress(content)
                collector.take(ExportTraceServiceRequest.FromString(content))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            found = _attributes(resource.resource)
            self.names.add(str(found["service.name"]))
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def _attributes(span: Any) -> dict[str, object]:
    return {
        attribute.key: getattr(attribute.value, str(attribute.value.WhichOneof("value")))
        for attribute in span.attributes
    }


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    made = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    yield made
    made.close()


def _ask(url: str, prompt: str, **headers: str) -> httpx.Response:
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "cache_salt": "traced"}
    return httpx.post(f"{url}/v1/completions", json=asked, headers=headers, timeout=60)


def test_a_request_is_spans_below_that_of_its_client(
    engine: Engine, prefix: str, collector: Collector
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    with running(engine, ServerConfig(traces=True)) as made:
        _ask(made.url, prefix, **headers)
        wait_until(lambda: bool(collector.named("kvtier.store")), "the store is told")
        assert engine.drain()
        engine.clear_tier(DEVICE)
        _ask(made.url, prefix, **headers)
        wait_until(lambda: len(collector.named("POST /v1/completions")) == 2, "both are told")
    cold, warm = sorted(
        collector.named("POST /v1/completions"), key=lambda span: span.start_time_unix_nano
    )
    assert collector.names == {"kvtier"}
    for root in (cold, warm):
        assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    parts = {
        root.span_id: {
            span.name: span for span in collector.spans if span.parent_span_id == root.span_id
        }
        for root in (cold, warm)
    }
    names = [set(parts[root.span_id]) for root in (cold, warm)]
    assert names[0] == {"kvtier.fetch", "kvtier.prefill", "kvtier.store"}
    assert names[1] == {"kvtier.fetch", "kvtier.load", "kvtier.prefill"}
    for root in (cold, warm):
        for name, span in parts[root.span_id].items():
            assert span.trace_id.hex() == TRACE
            assert span.start_time_unix_nano <= span.end_time_unix_nano
            if name != "kvtier.store":
                assert root.start_time_unix_nano <= span.start_time_unix_nano
                assert span.end_time_unix_nano <= root.end_time_unix_nano
    fetched = _attributes(parts[warm.span_id]["kvtier.fetch"])
    loaded = _attributes(parts[warm.span_id]["kvtier.load"])
    stored = _attributes(parts[cold.span_id]["kvtier.store"])
    assert fetched["kvtier.host_tokens"] == fetched["kvtier.reused_tokens"] > 0  # type: ignore[operator]
    num_blocks = int(str(fetched["kvtier.reused_tokens"])) // engine.info.block_size
    assert loaded["kvtier.bytes"] == num_blocks * engine.info.bytes_per_block
    assert stored["kvtier.tier"] == "host"
    cached = _attributes(warm)["gen_ai.usage.cache_read.input_tokens"]
    assert cached == fetched["kvtier.reused_tokens"]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """OpenTelemetry's exporter in memory, as the only one of this environment."""
    made = InMemorySpanExporter()
    entry = SimpleNamespace(load=lambda: lambda: made)
    monkeypatch.setattr("kvtier.observe.traces.entry_points", lambda **_: [entry])
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "memory")
    return made


def test_spans_have_the_conventional_attributes(
    engine: Engine, spans: InMemorySpanExporter
) -> None:
    with running(engine, ServerConfig(traces=True)) as made, made.client() as client:
        answer = client.with_options(
            default_headers={"X-Request-Id": "from-the-gateway", "User-Agent": "a" * 999}
        ).completions.create(
            model=MODEL, prompt="def f(", max_tokens=3, n=2, temperature=0.5, top_p=0.9, seed=7
        )
        asked = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
        for form in ({}, {"response_format": {"type": "json_object"}}):
            sent = {**asked, **form, "max_completion_tokens": 2}
            httpx.post(f"{made.url}/v1/chat/completions", json=sent, timeout=60)
    found = spans.get_finished_spans()
    completion = next(span for span in found if span.name == "POST /v1/completions").attributes
    assert completion is not None
    host, port = made.url.removeprefix("http://").split(":")
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "http.response.status_code": 200,
        "server.address": host,
        "server.port": int(port),
        "client.address": "127.0.0.1",
        "network.protocol.version": "1.1",
        "user_agent.original": "a" * 256,
        "kvtier.request_id": "from-the-gateway",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kvtier",
        "gen_ai.output.type": "text",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.stream": False,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 7,
        "gen_ai.response.id": answer.id,
        "gen_ai.response.model": MODEL,
        "gen_ai.response.finish_reasons": tuple(choice.finish_reason for choice in answer.choices),
        "gen_ai.usage.input_tokens": answer.usage and answer.usage.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": answer.usage and answer.usage.completion_tokens,
    }
    assert dict(completion) == expected
    text, json_ = (
        span.attributes or {} for span in found if span.name == "POST /v1/chat/completions"
    )
    assert text["gen_ai.operation.name"] == "chat"
    assert text["gen_ai.request.stream"] is True
    assert (text["gen_ai.output.type"], json_["gen_ai.output.type"]) == ("text", "json")
    first_s = text["gen_ai.response.time_to_first_chunk"]
    assert isinstance(first_s, float)
    assert first_s > 0


def test_a_fault_of_the_client_leaves_the_status_of_its_span_unset(
    engine: Engine, spans: InMemorySpanExporter
) -> None:
    with running(RefusesAll(engine), ServerConfig(traces=True)) as made:
        assert _ask(made.url, "x").status_code == 429
    (root,) = spans.get_finished_spans()
    assert root.status.status_code is StatusCode.UNSET
    assert root.attributes is not None
    assert root.attributes["http.response.status_code"] == 429
    assert "error.type" not in root.attributes


def test_what_fails_and_what_is_refused_ends_its_span_with_an_error(
    engine: Engine, collector: Collector
) -> None:
    with running(FailsAfterTwoTokens(engine), ServerConfig(traces=True)) as made:
        assert _ask(made.url, "x").status_code == 500
        wait_until(lambda: bool(collector.spans), "it is told")
    (root,) = collector.named("POST /v1/completions")
    found = _attributes(root)
    assert (root.status.code, root.status.message) == (2, "engine_error")
    assert (found["http.response.status_code"], found["error.type"]) == (
        500,
        "engine_error",
    )


def test_requests_that_their_client_does_not_sample_send_nothing(
    engine: Engine, collector: Collector
) -> None:
    with running(engine, ServerConfig(traces=True)) as made:
        for flag in ("00", "01"):
            _ask(made.url, "x", traceparent=f"00-{TRACE}-{PARENT}-{flag}")
    assert len(collector.named("POST /v1/completions")) == 1


def test_a_collector_that_is_gone_holds_up_nobody(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("kvtier.observe.traces.CLOSE_S", 0.1)
    with running(engine, ServerConfig(traces=True)) as made:
        assert _ask(made.url, "x").status_code == 200


def test_an_exporter_that_there_is_not_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "pigeon")
    with pytest.raises(ConfigError, match="OTEL_TRACES_EXPORTER='pigeon' in the environment"):
        open_traces("0")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    open_traces("0").close()


@pytest.mark.parametrize("variable", PROTOCOL_VARIABLES)
@pytest.mark.parametrize("protocol", ["grpc", "http/json"])
def test_a_protocol_that_no_installed_exporter_speaks_is_refused(
    variable: str, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, protocol)
    with pytest.raises(ConfigError, match=f"{variable}='{protocol}' in the environment"):
        open_traces("0")


def test_the_protocol_of_traces_counts_before_that_of_all_signals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for_traces, for_all = PROTOCOL_VARIABLES
    monkeypatch.setenv(for_all, "grpc")
    monkeypatch.setenv(for_traces, "http/protobuf")
    open_traces("0").close()


def test_an_installed_exporter_of_grpc_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = EntryPoint("otlp_proto_grpc", f"{__name__}:GrpcExporter", "any")
    monkeypatch.setattr("kvtier.observe.traces.entry_points", lambda **_: [exporter])
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    open_traces("0").close()
    assert GrpcExporter.is_closed


def test_spans_for_a_collector_on_this_machine_go_to_no_proxy(
    engine: Engine, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with running(engine, ServerConfig(traces=True)) as made:
        httpx.post(
            f"{made.url}/v1/completions",
            json={"model": MODEL, "prompt": "x", "max_tokens": 2},
            timeout=60,
            trust_env=False,
        )
    assert collector.named("POST /v1/completions")


def test_what_is_off_imports_nothing() -> None:
    code = (
        "import sys, kvtier.cache.tokens, kvtier.tools.cli.serve, kvtier.observe.traces, "
        "kvtier.observe.publisher; "
        "print({'opentelemetry.sdk', 'zmq', 'msgspec'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
