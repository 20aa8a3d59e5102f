"""I1 to I5: prefixes of 2,048 tokens in blocks of 16, in kvtier's index and in SGLang's.

    python -m benchmarks.micro.index            a table
    python -m benchmarks.micro.index --json -   JSON on stdout, the table on stderr

10,000 prompts in groups of 100 that share their first half. SGLang takes part if `make
peers-sglang` installed it. See README.md for the method.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.peers import ENVIRONMENTS
from benchmarks.peers.lines import LineProcess
from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, table_of
from benchmarks.report.targets import Bounds, bounds, estimate, judged, ratio
from kvtier.core import hot
from kvtier.tools.report.stats import Estimate, exactly

PEER = ENVIRONMENTS / "sglang" / "bin" / "python"
PHASES = ("insert", "hit", "hit+slots", "half", "miss", "evict")
OURS, RUST = "native", "sglang rust"
CONTESTANTS = (OURS, "python", RUST, "sglang python")
TURN = 250  # calls of one contestant before the next one's turn
EVICTED_TOKENS = 8192
TARGETS = {
    "I1": ("hit+slots", 4.0),
    "I2": ("insert", 3.0),
    "I3": ("evict", 4.0),
    "I4": ("miss", 4.0),
}
MAX_BYTES = 200


@dataclass(frozen=True, slots=True)
class Row:
    """One phase of one contestant. Microseconds per call; cpu_us is CPU time of its process."""

    contestant: str
    phase: str
    calls: int
    median_us: float
    p10_us: float
    p99_us: float
    cpu_us: float
    median_us_between: Bounds

    @property
    def estimate(self) -> Estimate:
        """Median with its interval."""
        return estimate(self.median_us, self.median_us_between)


class Contestant(LineProcess):
    """A worker process. It is idle between its turns."""

    def __init__(self, name: str, python: str, num: int, length: int, page: int) -> None:
        self.taken: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.cpu_s = dict.fromkeys(PHASES, 0.0)
        sizes = ("--num", num, "--length", length, "--page", page)
        command = ("-m", "benchmarks.micro.index_worker", "--index", name, *sizes)
        super().__init__(name, python, command)

    def turn(self, phase: str, start: int, stop: int) -> None:
        answer = self.ask(phase, start=start, stop=stop)
        self.taken[phase] += answer["us"]
        self.cpu_s[phase] += answer["cpu_s"]

    def row(self, phase: str) -> Row:
        taken = sorted(self.taken[phase])
        return Row(
            self.name,
            phase,
            len(taken),
            statistics.median(taken),
            taken[len(taken) // 10],
            taken[int(len(taken) * 0.99)],
            1e6 * self.cpu_s[phase] / len(taken),
            bounds(taken),
        )


def start(names: list[str], num: int, length: int, page: int) -> list[Contestant]:
    """Start the contestants that can run. Print a line on stderr for each of the others."""
    ready: list[Contestant] = []
    for name in names:
        is_peer = name.startswith("sglang")
        if is_peer and not PEER.exists():
            print(f"{name}: left out, `make peers-sglang` installs it", file=sys.stderr)
            continue
        if name == OURS and not hot.NATIVE:
            print(f"{name}: left out, {hot.NATIVE_REASON}", file=sys.stderr)
            continue
        contestant = Contestant(name, str(PEER) if is_peer else sys.executable, num, length, page)
        try:
            contestant.answer()
        except RuntimeError as error:
            print(f"{error}: left out", file=sys.stderr)
            contestant.close()
        else:
            ready.append(contestant)
    return ready


def run(
    contestants: list[Contestant], num: int, length: int, page: int
) -> tuple[list[Row], dict[str, dict[str, Any]]]:
    """Run all phases, in each of them the contestants in turn, some calls each."""
    facts: dict[str, dict[str, Any]] = {}
    half = length // 2 // page * page
    num_tokens = num // min(100, num) * half + num * (length // page * page - half)
    num_calls = {"half": min(2000, num), "miss": 5000, "evict": num_tokens // EVICTED_TOKENS}
    for phase in PHASES:
        total = num_calls.get(phase, num)
        for first in range(0, total, TURN):
            for contestant in contestants:
                contestant.turn(phase, first, min(first + TURN, total))
        if phase == "insert":
            facts = {contestant.name: contestant.ask("facts") for contestant in contestants}
    return [contestant.row(phase) for phase in PHASES for contestant in contestants], facts


def targets(rows: list[Row], facts: dict[str, dict[str, Any]]) -> list[dict[str, object]]:
    """Return the speed-up of the native index over SGLang's Rust core, and bytes per block."""
    medians = {(row.contestant, row.phase): row.estimate for row in rows}
    found: list[dict[str, object]] = []
    for name, (phase, target) in TARGETS.items():
        if {(OURS, phase), (RUST, phase)} <= medians.keys():
            times = ratio(medians[RUST, phase], medians[OURS, phase])
            found.append(judged(name, times, target, at_least=True, digits=2))
    if OURS in facts:
        num_bytes = exactly(float(facts[OURS]["bytes_per_block"]))
        found.append(judged("I5", num_bytes, MAX_BYTES, at_least=False, digits=1))
    return found


def table(rows: list[Row]) -> Table:
    """Return a table with a section per phase."""
    rust = {row.phase: row.median_us for row in rows if row.contestant == RUST}
    return table_of(
        "Microseconds per call; faster: than SGLang's Rust core, by the median",
        ("phase", "index"),
        ("median", "p10", "p99", "CPU", "faster"),
        (
            (
                row.phase,
                row.contestant,
                *(f"{us:.1f}" for us in (row.median_us, row.p10_us, row.p99_us, row.cpu_us)),
                f"{rust[row.phase] / row.median_us:.2f}" if rust else "",
            )
            for row in rows
        ),
        sections=1,
    )


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of("micro.index", __doc__)
    parser.add_argument("--prompts", type=int, default=10_000, help="(10000)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a prompt (2048)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a block (16)")
    parser.add_argument(
        "--contestants",
        nargs="+",
        choices=CONTESTANTS,
        default=CONTESTANTS,
        help="(all)",
    )
    options = parser.parse_args(arguments)

    sizes = (options.prompts, options.length, options.page_size)
    machine = machine_facts()
    contestants = start(options.contestants, *sizes)
    try:
        rows, facts = run(contestants, *sizes)
    finally:
        for contestant in contestants:
            contestant.close()
    found = targets(rows, facts)
    report(options.json, "index", machine, rows, found, table(rows), memory=facts)


if __name__ == "__main__":
    main()
