"""Two servers behind the example router, against the same two in turn (round-robin).

    python -m benchmarks.server.routed             a table
    python -m benchmarks.server.routed --json -    JSON on stdout, the table on stderr
    python -m benchmarks.server.routed --quick     fewer rounds
    python -m benchmarks.server.routed --node      a node below both servers

Conversations of several turns, by a few clients at a time, with the built-in model. Rounds with the
router and rounds in turn alternate; each has conversations of its own. See README.md.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from threading import Lock

import httpx

from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, table_of
from kvtier.tools.report.stats import median_with_interval

ROUTER = Path(__file__).parents[2] / "examples" / "router" / "router.py"
SERVE = ("-m", "kvtier.tools.cli", "serve", "--threads", "1", "--port", "0")
TIERS = ("--device-capacity", "24MiB", "--host-capacity", "24MiB")
"""Room for 9,800 tokens per server: not for all conversations, but for half of them."""
NODE = ("-m", "kvtier.tools.cli", "node", "run", "--host-capacity", "64MiB")
READY = re.compile(r"(http://127\.0\.0\.1:\d+|kvtier node serves)")
MODES = ("router", "in turn")
IDS = range(10, 4000)
NUM_SESSIONS, NUM_TURNS, NUM_CLIENTS = 8, 4, 2
FIRST_TOKENS, TURN_TOKENS = 1280, 128


@dataclass(frozen=True, slots=True)
class Row:
    """Requests of one round."""

    mode: str
    mean_ttft_ms: float
    p90_ttft_ms: float
    prompt_tokens: int
    cached_tokens: int


@contextmanager
def process(*arguments: str) -> Iterator[str]:
    """Run Python with these arguments. Yield the match of ``READY`` in its output."""
    command = [sys.executable, *arguments]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert running.stdout is not None
        found = (READY.search(line) for line in running.stdout)
        yield next(match[1] for match in found if match)
    finally:
        running.terminate()
        running.communicate()


def ask(url: str, prompt: Sequence[int], salt: str) -> tuple[float, int]:
    """Stream one token. Return the seconds until it arrives, and the cached tokens."""
    body = {
        "model": "kvtier-tiny",
        "prompt": prompt,
        "max_tokens": 4,
        "ignore_eos": True,
        "cache_salt": salt,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first_s, cached, began = 0.0, 0, time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                first_s = first_s or time.perf_counter() - began
                usage = json.loads(line[6:]).get("usage") or {}
                cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", cached)
    return first_s, cached


def one_round(mode: str, urls: Sequence[str], number: int) -> Row:
    """Run all conversations, each turn after the one before. urls: taken in turn."""
    chosen, lock = random.Random(number), Lock()
    due = [(chosen.choices(IDS, k=FIRST_TOKENS), 1) for _ in range(NUM_SESSIONS)]
    turns, times, tokens = count(), list[float](), list[tuple[int, int]]()

    def client(_: int) -> None:
        while True:
            with lock:  # any conversation that no other client continues
                if not due:
                    return
                prompt, turn = due.pop(chosen.randrange(len(due)))
                url = urls[next(turns) % len(urls)]
            first_s, cached = ask(url, prompt, f"{mode} {number}")
            times.append(1000 * first_s)
            tokens.append((len(prompt), cached))
            if turn < NUM_TURNS:
                more = random.Random(prompt[0] + turn).choices(IDS, k=TURN_TOKENS)
                due.append((prompt + more, turn + 1))

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        list(clients.map(client, range(NUM_CLIENTS)))
    assert len(times) == NUM_SESSIONS * NUM_TURNS
    prompts, cached_tokens = map(sum, zip(*tokens, strict=True))
    return Row(mode, fmean(times), sorted(times)[len(times) * 9 // 10], prompts, cached_tokens)


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of("server.routed", __doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--node", action="store_true", help="a node below both servers")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    with ExitStack() as stack:
        tiers = TIERS
        if options.node:
            folder = stack.enter_context(TemporaryDirectory(prefix="kvtier-routed-"))
            at = ("--socket", f"{folder}/node.sock")
            stack.enter_context(process(*NODE, *at))
            tiers += ("--node", at[1])
        servers = [stack.enter_context(process(*SERVE, *tiers)) for _ in range(2)]
        router = (str(ROUTER), *servers, "--port", "0", "--deadline-s", "2")
        urls = {"router": [stack.enter_context(process(*router))], "in turn": servers}
        for number in range(2 if options.quick else 7):
            for mode in MODES if number % 2 else MODES[::-1]:
                row = one_round(mode, urls[mode], number)
                if number:  # the first round warms up
                    rows.append(row)
    by_mode = {mode: [row for row in rows if row.mode == mode] for mode in MODES}
    ratios = [
        routed.mean_ttft_ms / in_turn.mean_ttft_ms
        for routed, in_turn in zip(*(by_mode[mode] for mode in MODES), strict=True)
    ]
    ratio = median_with_interval(ratios)
    cells = []
    for mode, of_mode in by_mode.items():
        ttfts = (fmean(row.mean_ttft_ms for row in of_mode), fmean(r.p90_ttft_ms for r in of_mode))
        found = sum(row.cached_tokens for row in of_mode) / sum(r.prompt_tokens for r in of_mode)
        cells.append((mode, *(f"{ms:,.0f}" for ms in ttfts), f"{found:.0%}"))
    table = table_of(
        f"{len(ratios)} rounds of {NUM_SESSIONS * NUM_TURNS} requests each",
        ["requests go"],
        ["mean TTFT, ms", "p90 TTFT, ms", "tokens found"],
        cells,
    )
    more = {"ttft_ratio": ratio.value, "interval_95": ratio.interval_json()}
    report(options.json, "routed", machine_facts(), rows, [], table, **more)


if __name__ == "__main__":
    main()
