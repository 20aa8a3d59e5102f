"""P: hit ratios of eviction policies on real traces, by the size of the tier.

    python -m benchmarks.policies.hit_ratios --traces DIR            a table
    python -m benchmarks.policies.hit_ratios --traces DIR --json -   JSON on stdout as well
    python -m benchmarks.policies.hit_ratios --traces DIR --through tiers   in index and ladder

Every request of a trace goes through ``kvtier.index.policies.replayed``. A hit is a block of the
longest cached prefix at arrival. Needs zstd. See README.md for the method.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from rich.table import Table

from benchmarks.policies.tiers import TierReplay
from benchmarks.policies.traces import (
    BLOCK_TOKENS,
    FOLDER,
    Trace,
    agentic,
    conversation,
    default_folder,
)
from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, table_of
from benchmarks.report.targets import judged
from kvtier.index.policies.replayed import POLICIES, PolicyReplay
from kvtier.tools.report.stats import exactly

EVEN_TOKENS = 32_768
"""Depth in a prompt at which attention costs as much as everything else. A hit there saves twice
the time of one at the beginning."""
EVEN_BLOCKS = EVEN_TOKENS / BLOCK_TOKENS
BY_TIME = "runs, by time"
"""The same policy, but it maximises saved time instead of hit blocks."""
CONTESTANTS = (*POLICIES, BY_TIME)
OURS, LRU = "runs", "lru"
REPLAY, TIERS = "replay", "tiers"
SEED = 11
"""Seed of the sessions' start times; the targets hold for it."""
WANTED = {
    "conversation": {0.005: 7.9, 0.01: 10.8, 0.02: 15.2, 0.05: 23.0, 0.1: 29.5, 0.2: 34.9},
    "agentic, 200 sessions": {0.005: 28.0, 0.01: 41.2, 0.02: 58.3, 0.05: 83.5, 0.1: 93.1},
    "agentic, all sessions": {0.005: 37.0, 0.01: 55.0, 0.02: 76.0},
}
"""Hits in % of blocks, by capacity as a share of the trace's unique blocks."""
SHARES = (0.005, 0.01, 0.02, 0.05, 0.1)
MAX_BELOW_LRU = 0.3
LEAST_REFS_PER_S = 1_000_000


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one capacity."""

    trace: str
    seed: int | None
    policy: str
    share: float
    """Capacity as a share of the trace's unique blocks."""
    capacity_blocks: int
    hit_ratio: float
    saved: float
    """Share of the prompts' compute time that hits save."""
    stored: float
    """Stored blocks as a share of the requested ones."""
    history: float
    """Most entries in the policy's history, as a multiple of the capacity."""
    bytes_per_block: float
    refs_per_s: float


def _work(num_blocks: int) -> float:
    """Return the time to compute so many blocks; the first block takes 1."""
    return num_blocks + num_blocks * num_blocks / 2 / EVEN_BLOCKS


_replayed: list[tuple[Trace, int | None]] = []
"""Traces in a worker process, with the seeds of their start times."""


def _made(policy: str, capacity: int, through: str) -> PolicyReplay | TierReplay:
    name, doubles_at = (OURS, EVEN_BLOCKS) if policy == BY_TIME else (policy, 0.0)
    if through == TIERS:
        return TierReplay(name, capacity, doubles_at_blocks=doubles_at)
    return PolicyReplay(name, capacity, doubles_at_blocks=doubles_at)


def measure(number: int, policy: str, share: float, through: str = REPLAY) -> Row:
    """Replay a whole trace, beginning with an empty tier."""
    trace, seed = _replayed[number]
    capacity = max(1, int(share * trace.num_unique))
    replay = _made(policy, capacity, through)
    num_hits = history = 0
    saved = work = seconds = 0.0
    for at, chain in zip(trace.times, trace.chains, strict=True):
        began = time.thread_time()
        hits = replay.request(chain, at)
        seconds += time.thread_time() - began
        num_hits += hits
        saved += _work(hits)
        work += _work(len(chain))
        history = max(history, replay.num_history)
    replay.check_invariants()
    return Row(
        trace.name,
        seed,
        policy,
        share,
        capacity,
        num_hits / trace.num_refs,
        saved / work,
        replay.num_stored / trace.num_refs,
        history / capacity,
        replay.num_bytes / capacity,
        trace.num_refs / max(seconds, 1e-9),
    )


def targets(rows: list[Row], through: str = REPLAY) -> list[dict[str, object]]:
    """Return each column of the table, the worst deficit to LRU, and the slowest replay."""
    found = {(row.trace, row.seed, row.share, row.policy): row for row in rows}
    judgements = []
    for (trace, seed, share, policy), row in found.items():
        wanted = WANTED.get(trace, {}).get(share)
        if policy == OURS and seed in (None, SEED) and wanted is not None:
            value = exactly(100 * row.hit_ratio)
            column = f"{trace}, {100 * share:g} %"
            judgements.append(judged("P", value, wanted, at_least=True, digits=2, column=column))
    ours = [row for row in rows if row.policy == OURS]
    below = [
        100 * (other.hit_ratio - row.hit_ratio)
        for row in ours
        if (other := found.get((row.trace, row.seed, row.share, LRU)))
    ]
    if below:
        worst = exactly(max(below))
        judgements.append(
            judged("P", worst, MAX_BELOW_LRU, at_least=False, digits=2, column="below LRU, points")
        )
    if ours and through == REPLAY:
        slowest = exactly(min(row.refs_per_s for row in ours))
        judgements.append(
            judged("P", slowest, LEAST_REFS_PER_S, at_least=True, digits=0, column="blocks per s")
        )
    return judgements


def tables(rows: list[Row]) -> Iterator[Table]:
    """Yield tables of hits and of saved time: a line per policy, a column per size."""
    for title, value in (("hits, % of blocks", "hit_ratio"), ("time saved, %", "saved")):
        for trace, seed in dict.fromkeys((row.trace, row.seed) for row in rows):
            these = [row for row in rows if (row.trace, row.seed) == (trace, seed)]
            name = trace if seed in (None, SEED) else f"{trace}, other beginnings ({seed})"
            shares = list(dict.fromkeys(row.share for row in these))
            lines = []
            for policy in dict.fromkeys(row.policy for row in these):
                cells = {row.share: row for row in these if row.policy == policy}
                figures = (f"{100 * getattr(cells[share], value):.2f}" for share in shares)
                lines.append([policy, *figures])
            headings = [f"{100 * share:g} %" for share in shares]
            yield table_of(f"{name}: {title}", ("policy",), headings, lines)


def replay_all(traces: list[tuple[Trace, int | None]], options: argparse.Namespace) -> list[Row]:
    """Measure all that the options select, in worker processes that inherit the traces."""
    jobs: list[tuple[int, str, float, str]] = []
    for number, (trace, _) in enumerate(traces):
        shares = options.shares or WANTED.get(trace.name, SHARES)
        names = options.policies
        jobs += [(number, name, share, options.through) for share in shares for name in names]
    for trace, _ in traces:
        assert trace.num_unique  # counted once, before the fork
    fork = get_context("fork")
    with ProcessPoolExecutor(options.processes, fork, _replayed.extend, (traces,)) as pool:
        return list(pool.map(measure, *zip(*jobs, strict=True)))


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of("policies.hit_ratios", __doc__)
    parser.add_argument(
        "--traces",
        type=Path,
        default=default_folder(),
        help=f"folder of the traces; else ${FOLDER}, or shared/traces beside the sources",
    )
    parser.add_argument("--policies", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--shares", nargs="+", type=float, help="capacities, of the unique blocks")
    parser.add_argument("--only", choices=["conversation", "agentic", "all"], help="one trace")
    parser.add_argument("--sessions", type=int, default=200, help="of the agentic trace (200)")
    parser.add_argument("--hours", type=float, default=2.3, help="that they begin in (2.3)")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[SEED], help=f"of their beginnings ({SEED})"
    )
    parser.add_argument(
        "--through",
        choices=[REPLAY, TIERS],
        default=REPLAY,
        help="what answers: a policy alone, or index, ladder and policy",
    )
    parser.add_argument("--processes", type=int, default=2, help="(2)")
    options = parser.parse_args(arguments)

    if not options.traces.is_dir():
        print(f"policies: left out, no traces in {options.traces}", file=sys.stderr)
        return
    traces: list[tuple[Trace, int | None]] = []
    if options.only in (None, "conversation"):
        traces.append((conversation(options.traces), None))
    if options.only in (None, "agentic"):
        for seed in options.seeds:
            trace = agentic(options.traces, options.sessions, options.hours, seed)
            traces.append((trace, seed))
    if options.only in (None, "all"):
        traces.append((agentic(options.traces, None, 8.0, SEED), SEED))
    machine = machine_facts()
    rows = replay_all(traces, options)
    report(
        options.json,
        "policies",
        machine,
        rows,
        targets(rows, options.through),
        *tables(rows),
        through=options.through,
        traces=[
            {"name": each.name, "seed": seed, "blocks": each.num_refs, "unique": each.num_unique}
            for each, seed in traces
        ],
    )


if __name__ == "__main__":
    main()
