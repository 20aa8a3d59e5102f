"""Cost of telemetry: events, spans, explanations and a JSON log, all on against all off.

Two real ``kvtier serve`` on loopback, asked in turn by the same clients: half of the requests are
asked again, half are new. The processor time of a server and the time of a round are compared.
Beside it, one router reads every event and a collector every span; their time is not counted.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx
import psutil
import zmq
from rich.table import Table

from benchmarks.report.machine import machine_facts
from benchmarks.report.output import report
from kvtier.tools.report.figures import TOO_FEW
from kvtier.tools.report.stats import median_with_interval

READY = re.compile(r"kvtier serves (\S+) on \S+ at (http://\S+)\n")
NUM_CLIENTS = 4
NUM_REQUESTS = 8
"""In a round."""
ALL_ON = ["--events", "tcp://127.0.0.1:{port}", "--events-replay", "tcp://127.0.0.1:*", "--traces"]
TEXT = "def method_{0}(self, value):\n    return value + {0}\n\n"


class Collector(BaseHTTPRequestHandler):
    """Takes spans, and throws them away."""

    num = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        Collector.num += 1
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server:
    """headers: of each request."""

    def __init__(self, process: subprocess.Popen[str], url: str, headers: dict[str, str]) -> None:
        self._process = psutil.Process(process.pid)
        # While the other one is asked, a server closes connections that are kept.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=url, headers=headers, timeout=120, limits=limits)

    def round(self, prompts: list[str]) -> tuple[float, float]:
        """Seconds that it took, and of the server's processor time."""
        before, began = sum(self._process.cpu_times()[:2]), time.perf_counter()
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            for answer in clients.map(self._ask, prompts):
                answer.raise_for_status()
        took = time.perf_counter() - began
        return took, sum(self._process.cpu_times()[:2]) - before

    def _ask(self, prompt: str) -> httpx.Response:
        asked = {"model": "kvtier-tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        return self._client.post("/v1/completions", json=asked)


@contextmanager
def serving(options: list[str], headers: dict[str, str], **variables: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "kvtier.cli", "serve", "--port", "0", "--threads", "1"]
    process = subprocess.Popen(
        [*command, "--device-capacity", "64MiB", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **variables},
    )
    try:
        assert process.stdout is not None
        ready = READY.fullmatch(process.stdout.readline())
        assert ready, "the server does not start"
        yield Server(process, ready[2], headers)
    finally:
        process.terminate()
        process.wait(30)


def prompts_of(round_: int) -> list[str]:
    """Each twice in a row of turns: what was new is found again."""
    new = [
        f"# {round_} {at}\n" + "".join(TEXT.format(line) for line in range(20))
        for at in range(NUM_REQUESTS // 2)
    ]
    return [*new, *new]


def measure(num_rounds: int) -> tuple[list[dict[str, float]], int]:
    """A row for each round, and how many events' batches a router has read."""
    rows: list[dict[str, float]] = []
    with ExitStack() as stack:
        collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
        Thread(target=collector.serve_forever, daemon=True).start()
        stack.callback(collector.shutdown)
        context = stack.enter_context(zmq.Context())
        router = stack.enter_context(context.socket(zmq.SUB))
        router.setsockopt(zmq.SUBSCRIBE, b"")
        port = router.bind_to_random_port("tcp://127.0.0.1")
        router.unbind(f"tcp://127.0.0.1:{port}")
        router.connect(f"tcp://127.0.0.1:{port}")
        on = stack.enter_context(
            serving(
                [each.format(port=port) for each in ALL_ON],
                {"X-KVTier-Explain": "1"},
                KVTIER_LOG_FORMAT="json",
                OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{collector.server_address[1]}",
            )
        )
        off = stack.enter_context(serving([], {}))
        num_batches = 0
        for at in range(num_rounds + 1):
            prompts = prompts_of(at)
            turns = [("on", on), ("off", off)][:: 1 if at % 2 else -1]
            found = {name: server.round(prompts) for name, server in turns}
            while router.poll(0):
                router.recv_multipart()
                num_batches += 1
            if at:  # the first one warms up
                rows.append(
                    {
                        "time_ratio": found["on"][0] / found["off"][0],
                        "cpu_ratio": found["on"][1] / found["off"][1],
                        "on_cpu_ms": 1e3 * found["on"][1] / NUM_REQUESTS,
                        "off_cpu_ms": 1e3 * found["off"][1] / NUM_REQUESTS,
                    }
                )
    return rows, num_batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the result to this file; - for stdout")
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    rows, num_batches = measure(arguments.rounds)
    found = {name: median_with_interval([row[name] for row in rows]) for name in rows[0]}
    table = Table("", "median", "95 % sure", title="all on against all off")
    for name, each in found.items():
        interval = f"{each.low:.3f} to {each.high:.3f}" if each.is_bounded else TOO_FEW
        table.add_row(name, f"{each.value:.3f}", interval)
    result = {
        "benchmark": "told",
        "machine": machine_facts(),
        "rows": rows,
        "medians": {
            name: {"value": each.value, "interval_95": each.interval_json()}
            for name, each in found.items()
        },
        "read": {"event_batches": num_batches, "span_exports": Collector.num},
        "targets": [],
    }
    report(result, arguments.json, table)


if __name__ == "__main__":
    main()
