"""Latency of honest clients beside hostile ones: H1.

A real ``kvtier serve`` on loopback, twenty clients with short requests, and in every other round
a thousand requests that nobody honest sends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.report.machine import machine_facts

KEY = "the-key-of-this-benchmark"
NUM_CLIENTS = 20
THINK_S = 1.0
"""A client waits so long between two requests, on average: the server is used, not full."""
MAX_TOKENS = 16
TARGET = 2.0
READY = re.compile(r"kvtier serves \S+ on \S+ at http://(127\.0\.0\.1):(\d+)\n")


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds that honest clients saw in all rounds of a kind.

    round_p99_s: of each round. health: of a new connection. server_cores: processor time by time.
    """

    load: str
    requests: int
    failed: int
    p50_s: float
    p99_s: float
    worst_s: float
    round_p99_s: list[float]
    health_worst_s: float
    server_rss_mib: float
    server_cores: float


@dataclass(slots=True)
class Seen:
    """The same while it is collected."""

    seconds: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    round_p99_s: list[float] = field(default_factory=list)
    num_failed: int = 0
    rss_mib: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0

    def row(self, load: str) -> Row:
        ordered = sorted(self.seconds)
        return Row(
            load,
            len(ordered),
            self.num_failed,
            p50_s=ordered[len(ordered) // 2],
            p99_s=p99(self.seconds),
            worst_s=ordered[-1],
            round_p99_s=self.round_p99_s,
            health_worst_s=max(self.health),
            server_rss_mib=self.rss_mib,
            server_cores=self.cpu_s / self.wall_s,
        )


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) * 99 // 100]


@contextmanager
def server(*options: str) -> Iterator[tuple[str, int, psutil.Process]]:
    """``kvtier serve`` with its defaults, but for ``options``, on a free port of this machine."""
    serve = (sys.executable, "-m", "kvtier.cli", "serve", "--port", "0", "--threads", "1")
    command = [*serve, *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "KVTIER_API_KEY": KEY}
    )
    try:
        assert process.stdout is not None
        ready = READY.fullmatch(process.stdout.readline())
        assert ready, "the server does not start"
        yield ready[1], int(ready[2]), psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes | None
) -> tuple[int, bytes]:
    """One request on an open connection: its status and its answer. None asks for the health."""
    line = "GET /health" if body is None else "POST /v1/completions"
    writer.write(
        f"{line} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body or b'')}\r\n\r\n".encode()
        + (body or b"")
    )
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    assert length, head
    return int(head[9:12]), await reader.readexactly(int(length[1]))


async def honest(
    address: tuple[str, int], at: int, until: float, seen: Seen, texts: dict[str, str]
) -> None:
    """One client: asks, thinks, asks again. A known prompt must get the text it got before."""
    rng = random.Random(at)
    connection = await asyncio.open_connection(*address)
    num_asked = 0
    while True:
        await asyncio.sleep(rng.expovariate(1 / THINK_S))
        if time.perf_counter() >= until:
            break
        prompt = f"# client {at}\n" + f"def method_{num_asked % 8}(self):\n    return " * 8
        num_asked += 1
        body = json.dumps(
            {
                "model": "kvtier-tiny",
                "prompt": prompt,
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
            }
        )
        began = time.perf_counter()
        try:
            status, answer = await ask(*connection, body.encode())
        except (OSError, asyncio.IncompleteReadError):  # an idle one may be closed: as clients do
            connection[1].close()
            connection = await asyncio.open_connection(*address)
            status, answer = await ask(*connection, body.encode())
        seen.seconds.append(time.perf_counter() - began)
        if status != 200:
            seen.num_failed += 1
            continue
        usage = json.loads(answer)["usage"]
        assert usage["completion_tokens"] == MAX_TOKENS
        text = json.loads(answer)["choices"][0]["text"]
        # Under load, tokens are decoded in batches, which round differently: the first ones count.
        assert texts.setdefault(prompt, text)[:4] == text[:4], "an honest client got another text"
    connection[1].close()


async def watch(
    address: tuple[str, int], until: float, seen: Seen, process: psutil.Process
) -> None:
    """Ask for the health, each time on a new connection, as a supervisor does."""
    while time.perf_counter() < until:
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection(*address)
        status, _ = await ask(reader, writer, None)
        writer.close()
        seen.health.append(time.perf_counter() - began)
        seen.num_failed += status != 200
        seen.rss_mib = max(seen.rss_mib, process.memory_info().rss / 2**20)
        await asyncio.sleep(0.25)


async def round_of(
    address: tuple[str, int],
    process: psutil.Process,
    seconds: float,
    load: list[str],
    seen: Seen,
    texts: dict[str, str],
) -> dict[str, dict[str, int]]:
    """One round; gives how the hostile requests ended. load: options of ``hostile_load``."""
    hostile = None
    if load:
        hostile = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "benchmarks.server.hostile_load",
                address[0],
                str(address[1]),
                KEY,
            ),
            *("--seconds", str(seconds), *load),
            stdout=subprocess.PIPE,
        )
    num_before = len(seen.seconds)
    began, cpu_s = time.perf_counter(), sum(process.cpu_times()[:2])
    until = began + seconds
    await asyncio.gather(
        watch(address, until, seen, process),
        *(honest(address, at, until, seen, texts) for at in range(NUM_CLIENTS)),
    )
    seen.cpu_s += sum(process.cpu_times()[:2]) - cpu_s
    seen.round_p99_s.append(p99(seen.seconds[num_before:]))
    seen.wall_s += time.perf_counter() - began
    if hostile is None:
        return {}
    printed, _ = await hostile.communicate()
    found: dict[str, dict[str, int]] = json.loads(printed)
    return found


async def measure(seconds: float, load: list[str], rounds: int) -> dict[str, object]:
    quiet, loud, ends = Seen(), Seen(), dict[str, Counter[str]]()
    texts: dict[str, str] = {}
    with server() as (host, port, process):
        address = (host, port)
        await round_of(address, process, seconds / 2, [], Seen(), texts)  # warms up
        for _ in range(rounds):
            await round_of(address, process, seconds, [], quiet, texts)
            found = await round_of(address, process, seconds, load, loud, texts)
            for kind, counts in found.items():
                ends.setdefault(kind, Counter()).update(counts)
    rows = [quiet.row("quiet"), loud.row("hostile")]
    ratio = median(loud.round_p99_s) / median(quiet.round_p99_s)
    value = ratio if not rows[1].failed else float("inf")
    return {
        "rows": [asdict(row) for row in rows],
        "hostile": ends,
        "targets": [{"id": "H1", "value": value, "target": TARGET, "met": value <= TARGET}],
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.server.hostile", description=__doc__
    )
    parser.add_argument("--json", metavar="FILE", help="write the result here; - is stdout")
    parser.add_argument("--requests", type=int, default=1000, help="hostile ones a round (1000)")
    parser.add_argument("--seconds", type=float, default=20.0, help="a round (20)")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind (5)")
    parser.add_argument("--kinds", nargs="+", help="of hostile requests (all)")
    options = parser.parse_args(arguments)

    machine = machine_facts()
    load = ["--requests", str(options.requests)]
    load += ["--kinds", *options.kinds] if options.kinds else []
    measured = asyncio.run(measure(options.seconds, load, options.rounds))
    result = {"benchmark": "hostile", "machine": machine, **measured}
    table = Table(title="What honest clients notice, seconds")
    rows = measured["rows"]
    assert isinstance(rows, list)
    for heading in (
        "load",
        "requests",
        "failed",
        "p50",
        "p99",
        "worst",
        "health",
        "RSS MiB",
        "cores",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        shown = [each for each in row.values() if not isinstance(each, list)]
        table.add_row(*(f"{each:.2f}" if isinstance(each, float) else str(each) for each in shown))
    console = Console(stderr=options.json == "-")
    console.print(table)
    console.print(f"how the hostile ones ended: {measured['hostile']}")
    if options.json == "-":
        json.dump(result, sys.stdout, indent=1)
        print()
    elif options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
