"""S5 through SGLang's controller: cold pages between its host pool and the storage below it.

    python -m benchmarks.sglang.storage            tables
    python -m benchmarks.sglang.storage --json -   one JSON object on stdout, the tables on stderr

Compares HiCache's `file`, NIXL and kvtier's storage back end in turn, through SGLang's own code, in
batches of 128 pages. Also times a look-up of 512 pages in each. See README.md for the method.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.table import Table

from benchmarks.disk.against_peers import (
    SHARE_OF_CPU,
    SIZES,
    TIMES_FASTER,
    run,
    table,
    targets,
)
from benchmarks.disk.peer_processes import Worker
from benchmarks.peers import OURS, Contestant
from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, set_usual, table_of
from benchmarks.report.targets import Bounds, bounds, estimate, judged, ratio
from kvtier.tools.report.stats import Estimate

PAGES = 128
"""Pages of a batch, as in SGLang's controller."""
ASKED = 512
"""Pages of a prompt in a look-up."""
QUESTIONS = 20
"""Look-ups per round; their median counts."""
FILE, NIXL = "sglang file", "nixl"
TIMES_SOONER = 20.0
FAST_AS_NIXL = 1.0
LEFT_OUT = {
    "mooncake": "it keeps pages in memory, not on a disk, and its wheel needs libibverbs",
    "sglang-fs-linker": "its linker does not take what SGLang 0.5.23 gives to it: `forward_stream`",
}
IN_MEMORY = Path("/dev/shm")
"""Folder of the one file that holds all contestants' host pools. They share it because a virtual
machine's physical pages differ: pools of one process were filled at rates that differed by a factor
of two."""
SERVER, STORES = "sglang-server", "sglang-storage"
"""Environments: SGLang's server with kvtier, and the same with other storage back ends."""


def contestant(
    name: str, peer: str, environment: str, backend: str, package: str, **extra: object
) -> Contestant:
    options: dict[str, object] = {"backend": backend, "package": package, "extra": extra}
    return Contestant(name, peer, "sglang_controller", options, environment)


CONTESTANTS = (
    contestant("kvtier", OURS, SERVER, "dynamic", "kvtier", disk_verify="always"),
    contestant("kvtier, unverified", OURS, SERVER, "dynamic", "kvtier", disk_verify="off"),
    contestant("sglang file", FILE, SERVER, "file", "sglang"),
    contestant("nixl posix", NIXL, STORES, "nixl", "nixl", l3_cleaner_enabled=False),
)


@dataclass(frozen=True, slots=True)
class Lookup:
    """Time to look up all pages of a prompt: the median of the rounds' medians."""

    contestant: str
    peer: str
    block: str
    pages: int
    exists_us: float
    exists_us_between: Bounds

    @property
    def time(self) -> Estimate:
        """Time in microseconds, with its interval."""
        return estimate(self.exists_us, self.exists_us_between)


def measure_lookups(
    workers: Sequence[Worker], block: str, num_blocks: int, num_rounds: int
) -> list[Lookup]:
    """Look up stored pages in random order, in turns. The first round warms up."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    num_pages = min(ASKED, num_blocks)
    for turn in range(num_rounds + 1):
        rng = np.random.default_rng(turn)
        prompts = [
            rng.choice(num_blocks, num_pages, replace=False).tolist() for _ in range(QUESTIONS)
        ]
        first = turn % len(workers)
        for worker in [*workers[first:], *workers[:first]]:
            answer = worker.ask("look_up", batches=prompts)
            if turn:
                found[worker.contestant.name].append(1e6 * statistics.median(answer["each_s"]))
    return [
        Lookup(
            worker.contestant.name,
            worker.contestant.peer,
            block,
            num_pages,
            statistics.median(found[worker.contestant.name]),
            bounds(found[worker.contestant.name]),
        )
        for worker in workers
    ]


def wanted(peer: str) -> tuple[float, float | None]:
    """Return the wanted multiple of a peer's GB/s, and share of its CPU time."""
    return (FAST_AS_NIXL, None) if peer == NIXL else (TIMES_FASTER, SHARE_OF_CPU)


def lookup_targets(lookups: Sequence[Lookup]) -> list[dict[str, object]]:
    """Return how many times faster look-ups are than those of `file`, at the worst size."""
    found: list[dict[str, object]] = []
    for ours in dict.fromkeys(lookup.contestant for lookup in lookups if lookup.peer == OURS):
        times = [
            ratio(file.time, mine.time)
            for mine in lookups
            for file in lookups
            if mine.contestant == ours and file.peer == FILE and file.block == mine.block
        ]
        if times:
            least = min(times, key=lambda each: each.value)
            common = {"contestant": ours, "peer": FILE, "measure": f"exists of {ASKED} pages"}
            found.append(judged("S5", least, TIMES_SOONER, at_least=True, **common))
    return found


def lookup_table(lookups: Sequence[Lookup]) -> Table:
    return table_of(
        f"exists of {ASKED} pages that are all there",
        ("page", "storage"),
        ("median µs",),
        ((lookup.block, lookup.contestant, f"{lookup.exists_us:.0f}") for lookup in lookups),
    )


def read_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of("sglang.storage", __doc__)
    parser.add_argument("--quick", action="store_true", help="fewer of everything: to see it run")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    parser.add_argument("--gib", type=float, help="pages of each contestant (1.5)")
    parser.add_argument("--rounds", type=int, help="(6)")
    parser.add_argument("--batches", type=int, help="per round and direction (4)")
    parser.add_argument("--peers", nargs="*", help="only these: 'sglang file' nixl")
    plan = parser.parse_args(arguments)
    set_usual(plan, USUAL, {"gib": 0.4, "rounds": 1, "batches": 1})
    # Small pages are only for the memory that prepares pages; SGLang's pool holds the moved ones.
    plan.small_pages, plan.batch, plan.sizes = False, PAGES, SIZES
    return plan


USUAL = {"gib": 1.5, "rounds": 6, "batches": 4}


def main(arguments: list[str] | None = None) -> None:
    plan = read_options(arguments)
    machine = machine_facts()
    chosen = [each for each in CONTESTANTS if not plan.peers or each.peer in (OURS, *plan.peers)]
    if not chosen[0].python.exists():
        sys.exit("SGLang is missing: `make bench-sglang` installs it, and kvtier into it")
    for name, reason in LEFT_OUT.items():
        print(f"{name}: left out: {reason}", file=sys.stderr)
    lookups: list[Lookup] = []

    def look_up(workers: Sequence[Worker], block: str, num_blocks: int) -> None:
        lookups.extend(measure_lookups(workers, block, num_blocks, plan.rounds))

    with tempfile.TemporaryDirectory(prefix="kvtier-pool-", dir=IN_MEMORY) as folder:
        memory = {"memory": str(Path(folder) / "pages")}
        shared = [replace(each, options={**each.options, **memory}) for each in chosen]
        rows, versions = run(plan, shared, look_up)
    report(
        plan.json,
        "sglang_storage",
        machine,
        (*rows, *lookups),
        (*targets(rows, wanted), *lookup_targets(lookups)),
        table(rows, PAGES),
        lookup_table(lookups),
        versions=versions,
        plan={name: getattr(plan, name) for name in (*USUAL, "batch")},
    )


if __name__ == "__main__":
    main()
