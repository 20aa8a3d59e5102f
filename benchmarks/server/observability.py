"""Cost of observability: W1, page, metrics and events together, on against off.

One real server of the embedded engine on loopback. It serves phases of the same work, in which all
of it is on or off; four of them are a round, on and off both early and late in it. Processor time
of the server's process is compared, all its threads counted: it varies less than time does, and
what throughput loses is no more. A page that is open, a Prometheus that asks every 15 seconds and a
router that reads every event are outside of the process.

With ``--count`` the processor time is counted where it is spent instead: finer by far, but of what
these make slower beside themselves nothing is seen.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import Event, Thread

import httpx
import numpy as np
import zmq
from rich.table import Table

from benchmarks.report.machine import machine_facts
from benchmarks.report.output import report
from benchmarks.report.targets import judged
from kvtier.live.files import LIVE_PATH, content_of
from kvtier.live.reading import Reading
from kvtier.live.scrape import read_text
from kvtier.tools.report.figures import TOO_FEW
from kvtier.tools.report.stats import Estimate, Floats, estimate

PARTS = ("page", "metrics", "events")
TARGET = 1.01
NUM_CLIENTS = 4
NUM_NEW = 8
"""Prompts of a phase that nobody has asked for; half as many are asked for again, and as many of
the phase in the same place of the round before, which the device has no more."""
TEXT = "def method_{0:06d}(self, value):\n    return value + {0:06d}\n\n"
NUM_LINES = 20
SETTLE_S = 0.15
"""After the last answer of a phase: what it has to store and to publish belongs to it."""
ORDERS = (("on", "off", "off", "on"), ("off", "on", "on", "off"))
METRICS_PATH = "/metrics"
SCRAPE_S = 15.0
NUM_LOOKS = 30
"""Looks of each kind that are counted while nobody asks for anything else."""


class Viewer:
    """A page that is open, and a Prometheus.

    While nothing is on their time stands still, so that there are as many looks for each second
    that is measured, however short the phases are.
    """

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=60)
        self._left_s = 0.0
        self._every_s = look_s()
        self._next_scrape_s = 0.0
        self.num_looks = 0

    def get(self, path: str) -> None:
        self._client.get(path).raise_for_status()

    def watch(self, is_over: Event) -> None:
        """Until it is."""
        while True:
            began_s = time.monotonic()
            if is_over.wait(self._left_s):
                self._left_s = max(0.0, self._left_s - (time.monotonic() - began_s))
                return
            self.get(LIVE_PATH)
            if self.num_looks * self._every_s >= self._next_scrape_s:
                self.get(METRICS_PATH)
                self._next_scrape_s += SCRAPE_S
            self.num_looks += 1
            self._left_s = self._every_s


def look_s() -> float:
    """Return the interval of the page's requests, in seconds."""
    said = re.search(rb"EVERY_MS = (\d+)", content_of("page.js"))
    assert said, "the page says how often it asks"
    return int(said[1]) / 1000


class Server:
    """``observability_server`` in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], url: str, answer_tokens: int) -> None:
        self._process = process
        self._answer_tokens = answer_tokens
        # As clock_getcpuclockid(3) makes it: the time of all threads, also of those that ended.
        self._clock = (~process.pid << 3) | 2
        self._client = httpx.Client(base_url=url, timeout=120)

    def turn(self, parts: Sequence[str]) -> dict[str, float]:
        """Switch on exactly these parts, or ["count"].

        Return the processor seconds since, by part.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(*parts, file=self._process.stdin, flush=True)
        done, _, told = self._process.stdout.readline().partition(" ")
        assert done == "done", "the server has ended"
        return {str(part): float(seconds) for part, seconds in json.loads(told).items()}

    @property
    def cpu_s(self) -> float:
        return time.clock_gettime(self._clock)

    def ask(self, prompt: str) -> None:
        asked = {
            "model": "watched",
            "prompt": prompt,
            "max_tokens": self._answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        self._client.post("/v1/completions", json=asked).raise_for_status()


@contextmanager
def serving(arguments: argparse.Namespace, events: str) -> Iterator[tuple[Server, str]]:
    """A server, and its address."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.server.observability_server",
        "--model",
        arguments.model,
    ]
    process = subprocess.Popen(
        [*command, "--device-capacity", arguments.device_capacity, "--events", events],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url, "the server does not start"
        yield Server(process, url, arguments.answer_tokens), url


def prompts_of(phase: int) -> list[str]:
    """Return prompts of equal length in every phase."""

    def prompt(of: int, at: int) -> str:
        lines = (TEXT.format(at + line) for line in range(NUM_LINES))
        return f"# {of:06d} {at:03d}\n" + "".join(lines)

    new = [prompt(phase, at) for at in range(NUM_NEW)]
    before = [prompt(max(0, phase - 4), at) for at in range(NUM_NEW // 2)]
    return [*new, *new[: NUM_NEW // 2], *before]


class Rounds:
    """parts: what is on where something is."""

    def __init__(self, server: Server, viewer: Viewer, parts: Sequence[str]) -> None:
        self._server = server
        self._viewer = viewer
        self._parts = parts
        self._num_phases = 0

    def run(self, order: Sequence[str]) -> dict[str, float]:
        """A round: seconds per request, of the server's processor and as time passes."""
        found = {f"{how}_{what}": 0.0 for how in ("on", "off") for what in ("cpu_s", "s")}
        num_asked = 0
        for how in order:
            prompts = prompts_of(self._num_phases)
            self._num_phases += 1
            num_asked += len(prompts)
            self._server.turn(self._parts if how == "on" else ())
            cpu_s, seconds = self._phase(prompts, how == "on" and "page" in self._parts)
            found[f"{how}_cpu_s"] += cpu_s
            found[f"{how}_s"] += seconds
        return {name: 2 * value / num_asked for name, value in found.items()}

    def _phase(self, prompts: Sequence[str], is_watched: bool) -> tuple[float, float]:
        is_over = Event()
        viewer = Thread(target=self._viewer.watch, args=(is_over,))
        before_s, began_s = self._server.cpu_s, time.perf_counter()
        if is_watched:
            viewer.start()
        ask_all(self._server, prompts)
        took_s = time.perf_counter() - began_s
        time.sleep(SETTLE_S)
        is_over.set()
        if is_watched:
            viewer.join()
        return self._server.cpu_s - before_s, took_s


def ask_all(server: Server, prompts: Sequence[str]) -> None:
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        list(clients.map(server.ask, prompts))


def ratio(rows: Sequence[dict[str, float]], what: str) -> Estimate:
    """On over off, by what all rounds took together.

    A look at the page falls into one phase or the next.
    """

    def figure(samples: Floats) -> Floats:
        on, off = np.moveaxis(samples.mean(axis=-2), -1, 0)
        return np.asarray(on / off)

    return estimate([(row[f"on_{what}"], row[f"off_{what}"]) for row in rows], figure)


class Watched:
    """A server, and who watches it: ``viewer``, and a router that reads every event."""

    def __init__(self, server: Server, url: str, router: zmq.Socket[bytes]) -> None:
        self.server = server
        self.viewer = Viewer(url)
        self._url = url
        self._router = router
        self._num_batches = 0

    def read_events(self) -> None:
        while self._router.poll(0):
            self._router.recv_multipart()
            self._num_batches += 1

    def read(self) -> dict[str, object]:
        """Return how much was read, and how many blocks were hits."""
        told = Reading.parse(read_text(self._url + METRICS_PATH), 0.0)
        hits = told.by("kvtier_hit_blocks_total", "tier")
        return {"looks": self.viewer.num_looks, "event_batches": self._num_batches, "hits": hits}


@contextmanager
def watched(arguments: argparse.Namespace) -> Iterator[Watched]:
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        router = stack.enter_context(context.socket(zmq.SUB))
        router.setsockopt(zmq.SUBSCRIBE, b"")
        port = router.bind_to_random_port("tcp://127.0.0.1")
        router.unbind(f"tcp://127.0.0.1:{port}")
        events = f"tcp://127.0.0.1:{port}"
        router.connect(events)
        server, url = stack.enter_context(serving(arguments, events))
        yield Watched(server, url, router)


def compare(arguments: argparse.Namespace) -> tuple[list[dict[str, float]], dict[str, object]]:
    """A row for each round; and what was read meanwhile."""
    with watched(arguments) as all_of_it:
        rounds = Rounds(all_of_it.server, all_of_it.viewer, arguments.parts)
        rows = []
        for at in range(arguments.warm_up + arguments.rounds):
            row = rounds.run(ORDERS[at % len(ORDERS)])
            if at >= arguments.warm_up:
                rows.append(row)
            all_of_it.read_events()
        return rows, all_of_it.read()


def count(arguments: argparse.Namespace) -> tuple[dict[str, float], dict[str, object]]:
    """The share of each part of the server's processor time; and what was read meanwhile."""
    with watched(arguments) as all_of_it:
        server, viewer = all_of_it.server, all_of_it.viewer
        for phase in range(4 * arguments.warm_up):
            ask_all(server, prompts_of(phase))
        server.turn(["count"])
        before_s, began_s = server.cpu_s, time.perf_counter()
        for phase in range(4 * arguments.warm_up, 4 * (arguments.warm_up + arguments.rounds)):
            ask_all(server, prompts_of(phase))
            all_of_it.read_events()
        took_s, cpu_s = time.perf_counter() - began_s, server.cpu_s - before_s
        counted = server.turn(PARTS)

        def per_call_s(path: str) -> float:
            before_s = server.cpu_s
            for _ in range(NUM_LOOKS):
                time.sleep(1.0)
                if path:
                    viewer.get(path)
            return (server.cpu_s - before_s) / NUM_LOOKS

        idle_s = per_call_s("")
        counted["page"] = took_s / look_s() * (per_call_s(LIVE_PATH) - idle_s)
        counted["scrapes"] = took_s / SCRAPE_S * (per_call_s(METRICS_PATH) - idle_s)
        # What is counted is in the denominator, but for looks and scrapes, of which there are none.
        rest_s = cpu_s - counted["metrics"] - counted["events"]
        return {part: seconds / rest_s for part, seconds in counted.items()}, all_of_it.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the result to this file; - for stdout")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=4, help="rounds that are not counted")
    parser.add_argument(
        "--parts", nargs="*", choices=PARTS, default=list(PARTS), help="what is on; none: a control"
    )
    parser.add_argument("--count", action="store_true", help="where processor time is spent")
    parser.add_argument("--model", default="kvtier-tiny", help="the smaller, the larger the share")
    parser.add_argument("--answer-tokens", type=int, default=8, help="the same (8)")
    parser.add_argument("--device-capacity", default="16MiB", help="host memory has twice of it")
    arguments = parser.parse_args()
    machine = machine_facts()
    if arguments.count:
        report_counted(arguments, machine)
        return
    rows, read = compare(arguments)
    cpu, seconds = ratio(rows, "cpu_s"), ratio(rows, "s")
    table = Table("", "on / off", "95 % sure", title=" and ".join(arguments.parts) or "nothing")
    for name, each in (("processor time", cpu), ("time", seconds)):
        interval = f"{each.low:.4f} to {each.high:.4f}" if each.is_bounded else TOO_FEW
        table.add_row(name, f"{each.value:.4f}", interval)
    result = {
        "benchmark": "watched",
        "machine": machine,
        "answer_tokens": arguments.answer_tokens,
        "parts": list(arguments.parts),
        "rows": rows,
        "time": {"value": seconds.value, "interval_95": seconds.interval_json()},
        "read": read,
        "targets": [judged("W1", cpu, TARGET, at_least=False, digits=4)]
        if set(arguments.parts) == set(PARTS)
        else [],
    }
    report(result, arguments.json, table)


def report_counted(arguments: argparse.Namespace, machine: object) -> None:
    shares, read = count(arguments)
    table = Table("", "of the processor time", title="Counted where it is spent")
    for part, share in (*shares.items(), ("together", sum(shares.values()))):
        table.add_row(part, f"{share:.2%}")
    result = {
        "benchmark": "watched, counted",
        "machine": machine,
        "answer_tokens": arguments.answer_tokens,
        "shares": shares,
        "read": read,
        "targets": [],
    }
    report(result, arguments.json, table)


if __name__ == "__main__":
    main()
