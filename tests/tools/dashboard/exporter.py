"""An exporter of every declared metric, with all labels. All values grow steadily."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from kvtier.observe.specs import DECLARED

PER_S = 50.0
VALUES = {"place": "memory"}
"""Values of labels that a panel selects."""
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Growing(Collector):
    """Counters grow by ``PER_S``; the observations of histograms lie between 0.1 and 1."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def collect(self) -> Iterator[Family]:
        number = 1000 + PER_S * (time.monotonic() - self._began)
        for spec in DECLARED.values():
            # As in vLLM and SGLang, every series has the name of its model.
            model = ("model_name",) if ":" in spec.name else ()
            labels = (*model, *spec.labels)
            values = [VALUES.get(label, f"some-{label}") for label in labels]
            if spec.kind == "counter":
                counter = CounterMetricFamily(spec.name, spec.meaning, labels=labels)
                counter.add_metric(values, number)
                yield counter
            elif spec.kind == "gauge":
                gauge = GaugeMetricFamily(spec.name, spec.meaning, labels=labels)
                gauge.add_metric(values, 1.0)
                yield gauge
            else:
                buckets = [("0.1", 0.0), ("1.0", number), ("+Inf", number)]
                histogram = HistogramMetricFamily(spec.name, spec.meaning, labels=labels)
                histogram.add_metric(values, buckets, number / 2)
                yield histogram


@contextmanager
def exporting() -> Iterator[str]:
    """Yield the exporter's address for Prometheus's configuration.

    It serves the plain text format. In the OpenMetrics format the client library writes ``vllm_``
    for ``vllm:`` unless the scraper accepts such names, and Prometheus before 3 does not.
    """
    registry = CollectorRegistry()
    registry.register(Growing())

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)
            self.end_headers()
            self.wfile.write(generate_latest(registry))

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
