"""S5: the disk tier against the disk caches of SGLang, LMCache and vLLM.

    python -m benchmarks.disk_peers            a table
    python -m benchmarks.disk_peers --json -   one JSON object on stdout, the table on stderr

Batches of 64 blocks, read cold from one disk, in turns. A peer takes part where `make peers` has
put it. README.md says the method.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.disk import FIO, FIO_DEPTHS, fio
from benchmarks.machine import machine_facts
from benchmarks.peers import CONTESTANTS, OURS, ROOT, Contestant
from benchmarks.peers.store import BATCH
from benchmarks.targets import Bounds, bounds, estimate, judged, ratio
from kvtier.serve_bench.stats import Estimate

MIB = 1 << 20
SIZES = {"1 MiB": MIB, "2.5 MiB": 5 * MIB // 2}
READ, WRITE = "read", "write"
TIMES_FASTER = 1.5
SHARE_OF_CPU = 0.2
COLD = 0.95
"""Of what a contestant read, this much has to come from the disk."""

QUIET = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
}
"""For the peers: no messages, to us or to anybody."""


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant, one size, one direction; GB/s and CPU by the median round. GB are 1e9 bytes.

    acknowledged_gb_per_s: of writes, until the cache says that they are done; gb_per_s is until
    they have left the page cache. from_disk: bytes fetched from the disk per byte read.
    """

    contestant: str
    peer: str
    block: str
    direction: str
    gb_per_s: float
    best_gb_per_s: float
    worst_gb_per_s: float
    cpu_s_per_gb: float | None = None
    acknowledged_gb_per_s: float | None = None
    from_disk: float | None = None
    gb_per_s_between: Bounds = (None, None)
    cpu_s_per_gb_between: Bounds = (None, None)

    @property
    def rate(self) -> Estimate:
        """GB/s, with its interval."""
        return estimate(self.gb_per_s, self.gb_per_s_between)

    @property
    def cost(self) -> Estimate:
        """CPU seconds per GB, with its interval."""
        return estimate(self.cpu_s_per_gb or 0.0, self.cpu_s_per_gb_between)


class Worker:
    """A contestant's process. It waits between its turns."""

    def __init__(
        self,
        contestant: Contestant,
        folder: Path,
        block_bytes: int,
        num_blocks: int,
        small_pages: bool = False,
    ) -> None:
        self.contestant = contestant
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in close()
        (folder / "blocks").mkdir(parents=True)
        arguments = {
            "--module": contestant.module,
            "--options": json.dumps(contestant.options),
            "--folder": folder / "blocks",
            "--block-bytes": block_bytes,
            "--num-blocks": num_blocks,
        }
        self._process = subprocess.Popen(
            [contestant.python, "-W", "ignore", "-m", "benchmarks.peers.worker"]
            + [str(part) for pair in arguments.items() for part in pair]
            + ["--small-pages"] * small_pages,
            cwd=ROOT,
            env={**os.environ, **QUIET},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
        )

    def answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._complaints.seek(0)
            lines = self._complaints.read().strip().splitlines()
            # Threads may have more to say after the exception.
            errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
            reason = (errors or lines or ["it ended"])[-1]
            raise RuntimeError(f"{self.contestant.name}: {reason}")
        return json.loads(line)

    def ask(self, do: str, **what: object) -> dict[str, float]:
        """Have it do something. Raises AssertionError where bytes were wrong."""
        assert self._process.stdin is not None
        print(json.dumps({"do": do, **what}), file=self._process.stdin, flush=True)
        answer = self.answer()
        if answer.get("wrong"):
            raise AssertionError(f"{self.contestant.name}: {answer['wrong']} wrong blocks in {do}")
        return answer

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()
        self._complaints.close()


class Numbers:
    """Blocks to read, drawn from those that are stored; and numbers of new ones."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._next = num_blocks

    def stored(self, num_batches: int, seed: int) -> list[list[int]]:
        """All different: the second time a block would come from the page cache."""
        rng = np.random.default_rng(seed)
        drawn = rng.choice(self._num_blocks, (num_batches, BATCH), replace=False)
        return [batch.tolist() for batch in drawn]

    def new(self, num_batches: int) -> list[list[int]]:
        first = self._next
        self._next += num_batches * BATCH
        return [list(range(at, at + BATCH)) for at in range(first, self._next, BATCH)]


def start(
    contestants: Sequence[Contestant],
    folder: Path,
    block_bytes: int,
    num_blocks: int,
    small_pages: bool = False,
) -> tuple[list[Worker], dict[str, str]]:
    """Those that can take part, with their blocks on disk, and the versions; a line on stderr for
    each that can't."""
    ready: list[Worker] = []
    versions: dict[str, str] = {}
    for number, contestant in enumerate(contestants):
        if not contestant.python.exists():
            print(
                f"{contestant.name}: left out, `make peers-{contestant.peer}` installs it",
                file=sys.stderr,
            )
            continue
        small = small_pages and contestant.peer != OURS
        worker = Worker(contestant, folder / str(number), block_bytes, num_blocks, small)
        try:
            version = str(worker.answer()["version"])
            worker.ask("fill")
        except RuntimeError as error:
            if contestant.peer == OURS:
                raise
            print(f"{error}: left out", file=sys.stderr)
            worker.close()
            continue
        versions[contestant.peer] = version
        ready.append(worker)
    return ready, versions


def measure_size(
    workers: Sequence[Worker], block: str, block_bytes: int, plan: argparse.Namespace, path: Path
) -> list[Row]:
    """All rows of one size. The first round warms up; whose turn is first changes."""
    num_blocks = num_blocks_of(plan.gib, block_bytes)
    numbers = Numbers(num_blocks)
    gb = plan.batches * BATCH * block_bytes / 1e9
    found: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    limits: dict[str, list[float]] = defaultdict(list)
    for turn in range(plan.rounds + 1):
        batches, new = numbers.stored(plan.batches, turn), numbers.new(plan.batches)
        first = turn % len(workers)
        for worker in [*workers[first:], *workers[:first]]:
            for direction, which in ((READ, batches), (WRITE, new)):
                answer = worker.ask(direction, batches=which)
                if turn:
                    found[worker.contestant.name, direction].append(answer)
        if turn and shutil.which(FIO):
            for direction in (READ, WRITE):
                rates = [
                    fio(path, direction == WRITE, block_bytes, n, plan.batches * BATCH)
                    for n in FIO_DEPTHS
                ]
                limits[direction].append(max(rates))
    rows = [
        row(worker.contestant, block, direction, gb, found[worker.contestant.name, direction])
        for direction in (READ, WRITE)
        for worker in workers
    ]
    for direction, rates in limits.items():
        rates.sort()
        rows.append(Row(FIO, FIO, block, direction, statistics.median(rates), rates[-1], rates[0]))
    return rows


def row(
    contestant: Contestant,
    block: str,
    direction: str,
    gb: float,
    answers: list[dict[str, float]],
) -> Row:
    def median(what: str) -> float | None:
        values = [answer[what] for answer in answers if what in answer]
        return statistics.median(values) if values else None

    seconds = sorted(answer["seconds"] for answer in answers)
    acknowledged, from_disk = median("acknowledged_s"), median("from_disk")
    if from_disk is not None and from_disk < COLD:
        print(
            f"{contestant.name}, {block}: only {from_disk:.0%} of its reads came from the disk",
            file=sys.stderr,
        )
    return Row(
        contestant=contestant.name,
        peer=contestant.peer,
        block=block,
        direction=direction,
        gb_per_s=gb / statistics.median(seconds),
        best_gb_per_s=gb / seconds[0],
        worst_gb_per_s=gb / seconds[-1],
        cpu_s_per_gb=statistics.median(answer["cpu_s"] for answer in answers) / gb,
        acknowledged_gb_per_s=gb / acknowledged if acknowledged else None,
        from_disk=from_disk,
        gb_per_s_between=bounds([gb / each for each in seconds]),
        cpu_s_per_gb_between=bounds([answer["cpu_s"] / gb for answer in answers]),
    )


def targets(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Cold reads: how many times a peer's GB/s, and which share of its CPU time. A peer counts
    by its fastest and by its cheapest way, and the worst size counts."""
    reads = [each for each in rows if each.direction == READ and each.peer != FIO]
    peers = list(dict.fromkeys(each.peer for each in reads if each.peer != OURS))
    found: list[dict[str, object]] = []
    for ours in dict.fromkeys(each.contestant for each in reads if each.peer == OURS):
        for peer in peers:
            times, shares = [], []
            for mine in (each for each in reads if each.contestant == ours):
                theirs = [e for e in reads if e.peer == peer and e.block == mine.block]
                fastest = max(theirs, key=lambda each: each.gb_per_s)
                cheapest = min(theirs, key=lambda each: each.cost.value)
                times.append(ratio(mine.rate, fastest.rate))
                shares.append(ratio(mine.cost, cheapest.cost))
            common = {"contestant": ours, "peer": peer}
            least, most = (
                min(times, key=lambda each: each.value),
                max(shares, key=lambda each: each.value),
            )
            found += [
                judged("S5", least, TIMES_FASTER, at_least=True, **common, measure="GB/s"),
                judged("S5", most, SHARE_OF_CPU, at_least=False, **common, measure="CPU"),
            ]
    return found


def table(rows: Sequence[Row]) -> Table:
    """A section per size and direction."""
    result = Table(title="64-block batches; reads are cold, writes until they left the page cache")
    for heading in ("block", "direction", "cache"):
        result.add_column(heading, no_wrap=True)
    for heading in ("GB/s", "best", "worst", "CPU s/GB", "acknowledged", "from disk"):
        result.add_column(heading, justify="right", no_wrap=True)
    for before, each in zip([None, *rows], rows, strict=False):
        if before and (before.block, before.direction) != (each.block, each.direction):
            result.add_section()
        rates = (each.gb_per_s, each.best_gb_per_s, each.worst_gb_per_s)
        result.add_row(
            each.block,
            each.direction,
            each.contestant,
            *(f"{rate:.2f}" for rate in rates),
            "" if each.cpu_s_per_gb is None else f"{each.cpu_s_per_gb:.3f}",
            "" if each.acknowledged_gb_per_s is None else f"{each.acknowledged_gb_per_s:.2f}",
            "" if each.from_disk is None else f"{each.from_disk:.0%}",
        )
    return result


def num_blocks_of(gib: float, block_bytes: int) -> int:
    """Whole batches."""
    return max(1, int(gib * (1 << 30)) // (BATCH * block_bytes)) * BATCH


def run(plan: argparse.Namespace) -> tuple[list[Row], dict[str, str]]:
    """All rows, and the contestants' versions."""
    chosen = [each for each in CONTESTANTS if not plan.peers or each.peer in (OURS, *plan.peers)]
    rows: list[Row] = []
    versions: dict[str, str] = {}
    for block, block_bytes in plan.sizes.items():
        with tempfile.TemporaryDirectory(prefix="kvtier-peers-", dir=plan.folder) as name:
            folder = Path(name)
            limit = folder / "limit"
            num_blocks = num_blocks_of(plan.gib, block_bytes)
            if plan.batches * BATCH > num_blocks:
                sys.exit(f"--batches {plan.batches} of {BATCH} blocks: more than --gib {plan.gib}")
            if shutil.which(FIO):
                make_file(limit, num_blocks * block_bytes)
            workers, found = start(chosen, folder, block_bytes, num_blocks, plan.small_pages)
            versions.update(found)
            try:
                rows += measure_size(workers, block, block_bytes, plan, limit)
            finally:
                for worker in workers:
                    worker.close()
    return rows, versions


def make_file(path: Path, num_bytes: int) -> None:
    """A file for fio, every byte of it written and none in the page cache."""
    with path.open("wb") as file:
        for start_ in range(0, num_bytes, MIB):
            file.write(os.urandom(min(MIB, num_bytes - start_)))
        file.flush()
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main(arguments: list[str] | None = None, sizes: dict[str, int] = SIZES) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disk_peers", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the result here; - is stdout")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    parser.add_argument("--gib", type=float, default=1.5, help="blocks of each contestant (1.5)")
    parser.add_argument("--rounds", type=int, default=6, help="(6)")
    parser.add_argument("--batches", type=int, default=8, help="per round and direction (8)")
    parser.add_argument("--small-pages", action="store_true", help="for the peers, as they have")
    parser.add_argument("--peers", nargs="*", help="only these: sglang lmcache vllm")
    plan = parser.parse_args(arguments)
    plan.sizes = sizes
    machine = machine_facts()
    rows, versions = run(plan)
    result = {
        "benchmark": "disk_peers",
        "machine": machine,
        "versions": versions,
        "peers_have_small_pages": plan.small_pages,
        "rows": [asdict(each) for each in rows],
        "targets": targets(rows),
    }
    console = Console(stderr=plan.json == "-")
    console.print(table(rows))
    for target in result["targets"]:
        console.print(target)
    if plan.json == "-":
        json.dump(result, sys.stdout, indent=1)
        print()
    elif plan.json:
        Path(plan.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
