"""Time to the first token after the tool call of an agent, with hints and without.

    python -m benchmarks.server.agent_pauses             a table
    python -m benchmarks.server.agent_pauses --json -    JSON on stdout, the table on stderr

A session sends a prompt, waits while a tool runs (0.2 to 5 s), and sends a longer prompt. With
hints it gives the time of the next prompt, and the last prompt has ``ended``. Host memory holds a
third of the sessions, and the disk has a limited rate. In each round every server gets new
sessions, one server after the other. See README.md for the method.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from rich.table import Table

from benchmarks.engines.model import TOKENIZER
from benchmarks.engines.protocol import read_by_label
from benchmarks.engines.requests import in_turn, tokens
from benchmarks.engines.run import narrator, started
from benchmarks.engines.servers import Server, Size
from benchmarks.policies.served import Served
from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, table_of
from kvtier.observe import specs
from kvtier.tools.report.stats import median_with_interval

BLOCK, BLOCK_BYTES, CHUNK = 16, 80 << 10, 128
"""Tokens and bytes of a block of the built-in model, in float32, and tokens of a chunk."""
FIRST_TOKENS, TURN_TOKENS = 768, 64
PAUSE_S = 0.2, 5.0
KNOWN_WITHIN = 0.3
"""Greatest relative error of the pause that an agent expects."""
HINTS = {
    "none": (),
    "back_in_s": ("back_in_s",),
    "prefetch": ("prefetch",),
    "endless host": (),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One way to give hints."""

    hints: str
    mean_ttft_ms: float
    """After a pause, over all rounds."""
    p90_ttft_ms: float
    of_endless: float
    """Mean over that with an endless host tier in the same round, median over the rounds."""
    interval_95: tuple[float, float] | None
    hit_blocks: dict[str, float]
    outcomes: dict[str, float]
    """Results of hints."""


@dataclass(frozen=True, slots=True)
class Session:
    """One agent's session: the seed of its tokens and pauses, and the salt of its tenant."""

    seed: int
    turns: int
    salt: str

    def run(self, server: Server, hints: Sequence[str]) -> list[float]:
        """Run it. Return the milliseconds to the first token after each pause."""
        rng = random.Random(self.seed)
        prompt, found = tokens(self.seed, FIRST_TOKENS), []
        time.sleep(rng.uniform(0, 2))
        for turn in range(self.turns + 1):
            pause_s = PAUSE_S[0] * (PAUSE_S[1] / PAUSE_S[0]) ** rng.random()
            expected_s = pause_s * rng.uniform(1 - KNOWN_WITHIN, 1 + KNOWN_WITHIN)
            soonest_s = expected_s / (1 + KNOWN_WITHIN)
            given = {"back_in_s": expected_s, "prefetch": {"within_s": soonest_s}}
            said: dict[str, object] = {name: given[name] for name in hints}
            if hints and turn == self.turns:
                said = {"ended": True}
            answer = server.ask(prompt, 1, kvtier=said, cache_salt=self.salt)
            if turn:
                found.append(answer.ttft_ms)
            prompt += tokens(self.seed + turn, TURN_TOKENS)
            time.sleep(pause_s)
        return found


@dataclass
class Measurement:
    """Milliseconds to the first token, by hints and round."""

    ttft_ms: dict[str, list[list[float]]] = field(default_factory=dict)

    def run(self, servers: Sequence[Server], options: argparse.Namespace) -> None:
        say = narrator(options.silent)
        for number in range(options.rounds + 1):
            for server in in_turn(servers, number):
                name = server.contestant.name
                first = number * options.sessions
                seeds = [1000 * (first + at) for at in range(options.sessions)]
                salts = ["" if options.one_tenant else str(seed) for seed in seeds]
                with ThreadPoolExecutor(options.sessions) as pool:
                    running = [
                        pool.submit(Session(seed, options.turns, salt).run, server, HINTS[name])
                        for seed, salt in zip(seeds, salts, strict=True)
                    ]
                    found = [ms for each in running for ms in each.result()]
                server.settle()
                say(f"round {number}: {name}: {fmean(found):.1f} ms")
                if number:  # the first one warms up
                    self.ttft_ms.setdefault(name, []).append(found)

    def row(self, name: str, metrics: str) -> Row:
        """Return the row of a server. metrics: the content of its ``/metrics``."""
        rounds, endless = self.ttft_ms[name], self.ttft_ms["endless host"]
        pairs = zip(rounds, endless, strict=True)
        ratio = median_with_interval([fmean(ms) / fmean(other) for ms, other in pairs])
        every = sorted(ms for found in rounds for ms in found)
        return Row(
            name,
            fmean(every),
            every[int(0.9 * (len(every) - 1))],
            ratio.value,
            (ratio.low, ratio.high) if ratio.is_bounded else None,
            read_by_label(metrics, specs.HIT_BLOCKS.name, "tier"),
            read_by_label(metrics, specs.HINTS.name, "outcome"),
        )


def contestants(options: argparse.Namespace) -> list[Served]:
    longest = -(-(FIRST_TOKENS + options.turns * TURN_TOKENS) // BLOCK) + 1
    all_bytes = options.sessions * longest * BLOCK_BYTES
    made = []
    for name in HINTS:
        host = 4 * all_bytes if name == "endless host" else all_bytes // 3
        below = {
            "--chunk-tokens": CHUNK,
            "--device-capacity": 2 * longest * BLOCK_BYTES,
            "--host-capacity": host,
            "--disk-capacity": 2 * (options.rounds + 1) * all_bytes,
            "--disk-bytes-per-s": options.disk_bytes_per_s,
        }
        made.append(Served(name, below=below))
    return made


def table(rows: Sequence[Row]) -> Table:
    lines = []
    for row in rows:
        hits = [f"{row.hit_blocks.get(tier, 0):.0f}" for tier in ("host", "disk")]
        times = f"{row.mean_ttft_ms:.1f}", f"{row.p90_ttft_ms:.1f}", f"{row.of_endless:.2f}"
        lines.append((row.hints, *times, *hits))
    right = ("mean TTFT ms", "p90 TTFT ms", "of endless", "host blocks", "disk blocks")
    return table_of("After a tool's pause", ("hints",), right, lines)


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of("server.agent_pauses", __doc__)
    parser.add_argument("--rounds", type=int, default=6, help="after one that warms up (6)")
    parser.add_argument("--sessions", type=int, default=12, help="at a time (12)")
    parser.add_argument("--turns", type=int, default=3, help="of a session, after pauses (3)")
    parser.add_argument("--disk-bytes-per-s", type=int, default=100_000_000, help="(100 MB/s)")
    parser.add_argument("--one-tenant", action="store_true", help="not a tenant per session")
    parser.add_argument("--silent", action="store_true", help="no progress on stderr")
    options = parser.parse_args(arguments)
    machine = machine_facts()
    measurement = Measurement()
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-pauses-") as folder,
        started(contestants(options), TOKENIZER, Path(folder), Size(0)) as servers,
    ):
        measurement.run(servers, options)
        rows = [measurement.row(server.contestant.name, server.metrics()) for server in servers]
    plan = {name: getattr(options, name) for name in ("rounds", "sessions", "turns")}
    plan |= {"disk_bytes_per_s": options.disk_bytes_per_s, "one_tenant": options.one_tenant}
    report(options.json, "agent_pauses", machine, rows, (), table(rows), plan=plan)


if __name__ == "__main__":
    sys.exit(main())
