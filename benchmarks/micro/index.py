"""I1 to I5: prefixes of 2,048 tokens in blocks of 16, in kvtier's index and in SGLang's.

    python -m benchmarks.micro.index            a table
    python -m benchmarks.micro.index --json -   JSON on stdout, the table on stderr

10,000 prompts in groups of 100 that share their first half. SGLang takes part if `make
peers-sglang` installed it. See README.md for the method.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.report.machine import machine_facts
from benchmarks.report.output import report
from benchmarks.report.targets import Bounds, bounds, estimate, judged, ratio
from kvtier.core import hot
from kvtier.tools.report.stats import Estimate, exactly

ROOT = Path(__file__).parents[2]
PEER = ROOT / ".peers" / "sglang" / "bin" / "python"
PHASES = ("insert", "hit", "hit+slots", "half", "miss", "evict")
OURS, RUST = "native", "sglang rust"
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


class Contestant:
    """A worker process. It is idle between its turns."""

    def __init__(self, name: str, python: str, num: int, length: int, page: int) -> None:
        self.name = name
        self.taken: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.cpu_s = dict.fromkeys(PHASES, 0.0)
        sizes = {"--num": num, "--length": length, "--page": page}
        options = [str(part) for pair in sizes.items() for part in pair]
        self._process = subprocess.Popen(
            [
                python,
                "-W",
                "ignore",
                "-m",
                "benchmarks.micro.index_worker",
                "--index",
                name,
                *options,
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if python == str(PEER) else None,
            text=True,
        )

    def wait(self) -> str:
        """Wait until it can begin. Return "", or the reason if it can't."""
        assert self._process.stdout is not None
        if self._process.stdout.readline():
            return ""
        _, complaint = self._process.communicate()
        return (complaint or "it ended").strip().splitlines()[-1]

    def ask(self, phase: str, **numbers: int) -> dict[str, object]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"phase": phase, **numbers}), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.name} ended in phase {phase}")
        return json.loads(answer)

    def turn(self, phase: str, start: int, stop: int) -> None:
        answer = self.ask(phase, start=start, stop=stop)
        if answer["wrong"]:
            raise AssertionError(f"{self.name}: {answer['wrong']} wrong results in phase {phase}")
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

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        self._process.wait()


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
        if reason := contestant.wait():
            print(f"{name}: left out, {reason}", file=sys.stderr)
        else:
            ready.append(contestant)
    return ready


def run(
    contestants: list[Contestant], num: int, length: int, page: int
) -> tuple[list[Row], dict[str, dict[str, object]]]:
    """Run all phases, in each of them the contestants in turn, some calls each."""
    facts: dict[str, dict[str, object]] = {}
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


def targets(rows: list[Row], facts: dict[str, dict[str, object]]) -> list[dict[str, object]]:
    """Return the speed-up of the native index over SGLang's Rust core, and bytes per block."""
    medians = {(row.contestant, row.phase): row.estimate for row in rows}
    found: list[dict[str, object]] = []
    for name, (phase, target) in TARGETS.items():
        if {(OURS, phase), (RUST, phase)} <= medians.keys():
            times = ratio(medians[RUST, phase], medians[OURS, phase])
            found.append(judged(name, times, target, at_least=True, digits=2))
    if OURS in facts:
        num_bytes = exactly(float(facts[OURS]["bytes_per_block"]))  # type: ignore[arg-type]
        found.append(judged("I5", num_bytes, MAX_BYTES, at_least=False, digits=1))
    return found


def table(rows: list[Row]) -> Table:
    """Return a table with a section per phase."""
    result = Table(title="Microseconds per call; faster: than SGLang's Rust core, by the median")
    for heading in ("phase", "index"):
        result.add_column(heading, no_wrap=True)
    for heading in ("median", "p10", "p99", "CPU", "faster"):
        result.add_column(heading, justify="right", no_wrap=True)
    rust = {row.phase: row.median_us for row in rows if row.contestant == RUST}
    for before, row in zip([None, *rows], rows, strict=False):
        if before and before.phase != row.phase:
            result.add_section()
        result.add_row(
            row.phase,
            row.contestant,
            *(f"{us:.1f}" for us in (row.median_us, row.p10_us, row.p99_us, row.cpu_us)),
            f"{rust[row.phase] / row.median_us:.2f}" if rust else "",
        )
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro.index", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the result here; - is stdout")
    parser.add_argument("--prompts", type=int, default=10_000, help="(10000)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a prompt (2048)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a block (16)")
    parser.add_argument(
        "--contestants",
        nargs="+",
        default=[OURS, "python", RUST, "sglang python"],
        help="(native python 'sglang rust' 'sglang python')",
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
    result = {
        "benchmark": "index",
        "machine": machine,
        "rows": [asdict(row) for row in rows],
        "memory": facts,
        "targets": targets(rows, facts),
    }
    report(result, options.json, table(rows))


if __name__ == "__main__":
    main()
