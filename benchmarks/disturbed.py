"""Q1: how soon a tier is used again after the process was stopped during reads from it.

    python -m benchmarks.disturbed            a table
    python -m benchmarks.disturbed --json -   JSON on stdout, the table on stderr

One process per tier serves prompts that only a real disk or a real Valkey has. Midway it stops
itself just after loads begin, as on a busy or suspended machine. All figures are counts of prompts
and blocks. No model runs: compute times are only reported to the planner.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Event, Thread

import numpy as np

import kvtier
from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, table_of
from benchmarks.stores.servers import ValkeyPlace
from kvtier.cache.tokens import Cache
from kvtier.core.types import DEVICE

BLOCK_SIZE, NUM_BLOCKS, NUM_PROMPTS = 16, 8, 12
KV_SHAPE = (8, 2, 4 * NUM_BLOCKS, BLOCK_SIZE, 16, 128)
"""Blocks of 1 MiB in float16, for four prompts."""
PREFILL_S = 0.01
"""Reported seconds per computed block: several times as long as a load takes."""
STOP_S = 0.5
MAX_DELAY_S = 0.004
"""Longest time from the beginning of a load to the stop."""
PROMPT_S = 0.05
"""Time between prompts."""
MAX_PROMPTS, MAX_S = 20, 2.0
"""Target: all prompts are loaded in full again after so many prompts or seconds."""


@dataclass(frozen=True, slots=True)
class DisturbedRow:
    """Loads from one tier before, while and after the process is stopped."""

    tier: str
    before: float
    """Share of blocks loaded before the stops."""
    disturbed: float
    """Share of blocks loaded during the stops."""
    after: float
    """Share of blocks loaded after the stops."""
    num_prompts: int
    """Prompts from the last stop until all following ones were loaded in full."""
    seconds: float
    """Time for ``num_prompts``."""

    @property
    def is_back(self) -> bool:
        return self.num_prompts <= MAX_PROMPTS or self.seconds <= MAX_S


def _prompts() -> list[list[int]]:
    rng = random.Random(1)
    num_tokens = NUM_BLOCKS * BLOCK_SIZE + 1
    return [[rng.randrange(10_000) for _ in range(num_tokens)] for _ in range(NUM_PROMPTS)]


class Served:
    """Prompts that are served over one tier below a small host memory."""

    def __init__(self, config: kvtier.CacheConfig) -> None:
        self._cache = kvtier.open_cache(np.zeros(KV_SHAPE, np.float16), "disturbed", config)
        self._prompts = _prompts()
        self._at = 0

    def serve(self, beside: Callable[[], object] | None = None) -> float:
        """Serve the next prompt. Return the share of its blocks that was loaded.

        Args:
            beside: called when the load begins.
        """
        prompt = self._cache.prompt(self._prompts[self._at])
        self._at = (self._at + 1) % NUM_PROMPTS
        self._cache.call(_clear_device)
        if beside is not None:
            beside()
        lease = self._cache.fetch(prompt, wait_s=60.0)
        assert lease is not None, "no other request uses the memory"
        num = lease.num_shared
        tokens = num * BLOCK_SIZE
        if num < NUM_BLOCKS:
            seconds = (NUM_BLOCKS - num) * PREFILL_S
            self._cache.observe_prefill(tokens, NUM_BLOCKS * BLOCK_SIZE - tokens, seconds)
        self._cache.finish(lease)
        time.sleep(PROMPT_S)
        return num / NUM_BLOCKS

    def store(self) -> None:
        """Compute all prompts once, and wait until storage has them."""
        for tokens in self._prompts:
            self.serve()
            num_stored = self._cache.stored(self._cache.prompt(tokens)).result(60.0)
            assert num_stored == NUM_BLOCKS * BLOCK_SIZE, "storage did not take all blocks"
        for _ in range(3 * NUM_PROMPTS):  # the first copies include one-time costs
            self.serve()

    def close(self) -> None:
        self._cache.close()


def _clear_device(cache: Cache) -> None:
    cache.clear(DEVICE)


def _stop_soon(rng: random.Random) -> None:
    """Stop this process after a random delay. Its parent resumes it."""

    def stop() -> None:
        time.sleep(rng.uniform(0, MAX_DELAY_S))
        os.kill(os.getpid(), signal.SIGSTOP)

    Thread(target=stop).start()


def _measure(tier: str, config: kvtier.CacheConfig, num_after: int) -> DisturbedRow:
    assert parent_process() is not None, "this process would stop for ever"
    served, rng = Served(config), random.Random(2)
    served.store()
    before = [served.serve() for _ in range(2 * NUM_PROMPTS)]
    disturbed = [served.serve(lambda: _stop_soon(rng)) for _ in range(2 * NUM_PROMPTS)]
    began_s, after, ends_s = time.monotonic(), list[float](), list[float]()
    for _ in range(num_after):
        after.append(served.serve())
        ends_s.append(time.monotonic() - began_s)
    served.close()
    missed = [at for at, share in enumerate(after) if share < 1]
    num = missed[-1] + 1 if missed else 0
    return DisturbedRow(
        tier, _mean(before), _mean(disturbed), _mean(after), num, ends_s[num - 1] if num else 0.0
    )


def _mean(shares: list[float]) -> float:
    return round(sum(shares) / len(shares), 3)


@contextmanager
def _continuing(executor: ProcessPoolExecutor) -> Iterator[None]:
    """Resume the executor's processes ``STOP_S`` after they stopped."""
    is_over = Event()

    def go_on() -> None:
        while not is_over.wait(STOP_S / 10):
            for pid in list(executor._processes):
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                if state == "T":
                    time.sleep(STOP_S)
                    os.kill(pid, signal.SIGCONT)

    thread = Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def measure(num_after: int) -> list[DisturbedRow]:
    """Measure a disk, and Valkey where it is installed."""
    with tempfile.TemporaryDirectory(prefix="kvtier-disturbed-") as name:
        folder, host = Path(name), f"{NUM_BLOCKS + 4}MiB"
        configs = {
            "disk": kvtier.CacheConfig(
                host_capacity=host, disk_path=str(folder / "disk"), disk_capacity="256MiB"
            )
        }
        place = None
        if (missing := ValkeyPlace.missing()) is None:
            place = ValkeyPlace(folder)
            location = place.location(place.port, 2)
            configs["valkey"] = kvtier.CacheConfig(host_capacity=host, storage=(location,))
        else:
            print(f"valkey is left out: {missing}")
        rows = []
        try:
            for tier, config in configs.items():
                with (
                    ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor,
                    _continuing(executor),
                ):
                    rows.append(executor.submit(_measure, tier, config, num_after).result())
        finally:
            if place is not None:
                place.close()
        return rows


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of("disturbed", __doc__)
    parser.add_argument("--prompts", type=int, default=100, help="prompts after the disturbance")
    options = parser.parse_args(arguments)
    rows = measure(options.prompts)
    table = table_of(
        "blocks that were loaded",
        ("tier",),
        ("before", "meanwhile", "after", "prompts until all", "seconds"),
        (
            (
                row.tier,
                *(f"{share:.0%}" for share in (row.before, row.disturbed, row.after)),
                str(row.num_prompts),
                f"{row.seconds:.2f}",
            )
            for row in rows
        ),
    )
    targets = [
        {
            "id": "Q1",
            "tier": row.tier,
            "value": row.num_prompts,
            "seconds": round(row.seconds, 2),
            "target": MAX_PROMPTS,
            "met": row.is_back,
        }
        for row in rows
    ]
    report(options.json, "disturbed", machine_facts(), rows, targets, table)


if __name__ == "__main__":
    main()
