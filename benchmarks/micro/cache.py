"""Cost of a block in a `Cache` in Python over its life, without a model.

    python -m benchmarks.micro.cache            a table
    python -m benchmarks.micro.cache --json -   JSON on stdout, the table on stderr

Requests come one after the other to a cache of two tiers over small blocks in plain memory:
fetch, commit, release, match, poll. Both tiers are full, so each new block also evicts one from
either. The time is that of the thread that owns the cache; copies run on others. README.md says the
method.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.report.machine import machine_facts
from kvtier import _hot
from kvtier.cache import Cache
from kvtier.config import CacheConfig
from kvtier.devices.base import Memory
from kvtier.devices.cpu import CpuDevice
from kvtier.keys import token_labels
from kvtier.layout import DType, full_attention, named_layout
from kvtier.tiers import DeviceTier

BLOCK_SIZE = 64
GROUP = full_attention(1, 1, 1, DType.FLOAT16, BLOCK_SIZE)
BLOCKS_PER_PROMPT = 32
NAMESPACE = b"benchmark"


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds of the calling thread per new block; calls of the index as a part of it."""

    write_policy: str
    native: bool
    blocks: int
    total_us: float
    index_us: float
    index_calls: float


class Clocked:
    """An index whose calls are timed, by the CPU seconds of the calling thread."""

    def __init__(self, index: object) -> None:
        self._index = index
        self.spent_ns = 0
        self.num_calls = 0

    def __len__(self) -> int:
        return len(self._index)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> object:
        found = getattr(self._index, name)
        if not callable(found):
            return found

        def call(*arguments: object, **named: object) -> object:
            began = time.perf_counter_ns()
            try:
                return found(*arguments, **named)
            finally:
                self.spent_ns += time.perf_counter_ns() - began
                self.num_calls += 1

        setattr(self, name, call)
        return call


def make_cache(write_policy: str, device_blocks: int, host_blocks: int) -> Cache:
    layout = named_layout("block_first", GROUP, device_blocks)
    buffer = np.zeros(layout.nbytes, np.uint8)
    pool = DeviceTier(Memory(buffer.ctypes.data, buffer.nbytes, "host", buffer), layout)
    config = CacheConfig(
        host_capacity=host_blocks * GROUP.bytes_per_block,
        write_policy=write_policy,  # type: ignore[arg-type]
        store_batch_bytes=BLOCKS_PER_PROMPT * GROUP.bytes_per_block,
    )
    return Cache(config, CpuDevice(threads=1), pool)


def request(cache: Cache, tokens: np.ndarray) -> int:
    """One request from start to end. Returns how many blocks were new."""
    labels = token_labels(tokens, BLOCK_SIZE)
    while (lease := cache.fetch(NAMESPACE, labels, len(tokens), len(labels) + 1)) is None:
        assert cache.drain()  # what is being stored can't leave yet
    if not lease.ready:
        assert cache.drain()
    num_new = len(labels) - lease.num_shared
    cache.commit(lease, len(labels))
    cache.release(lease)
    assert cache.match(NAMESPACE, labels).num_blocks == len(labels), "what was committed is lost"
    cache.poll()
    return num_new


def _put_in_place(cache: Cache, index: object) -> None:
    ladder = cache._ladder
    for part in (cache, ladder, ladder.eviction, ladder.transfers, ladder.storage_lookup):
        part._index = index  # type: ignore[assignment, attr-defined]


def run(write_policy: str, num_requests: int, device_blocks: int, host_blocks: int) -> Row:
    rng = np.random.default_rng(0)
    cache = make_cache(write_policy, device_blocks, host_blocks)
    size = BLOCKS_PER_PROMPT * BLOCK_SIZE
    prompts = [rng.integers(0, 128_000, size) for _ in range(num_requests)]
    num_warm = host_blocks // BLOCKS_PER_PROMPT + 2
    for prompt in prompts[:num_warm]:  # until both tiers are full
        request(cache, prompt)
    assert cache.drain()
    clocked = Clocked(cache._index)
    _put_in_place(cache, clocked)
    num_blocks = 0
    began = time.thread_time()
    for prompt in prompts[num_warm:]:
        num_blocks += request(cache, prompt)
    spent_s = time.thread_time() - began
    _put_in_place(cache, clocked._index)
    assert cache.drain()
    cache.check_invariants()
    cache.close()
    return Row(
        write_policy,
        _hot.NATIVE,
        num_blocks,
        total_us=1e6 * spent_s / num_blocks,
        index_us=clocked.spent_ns / 1e3 / num_blocks,
        index_calls=clocked.num_calls / num_blocks,
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro.cache", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the result here; - is stdout")
    parser.add_argument("--requests", type=int, default=600, help="requests in all (600)")
    parser.add_argument("--device-blocks", type=int, default=2048, help="(2048)")
    parser.add_argument("--host-blocks", type=int, default=8192, help="(8192)")
    options = parser.parse_args(arguments)

    machine = machine_facts()
    rows = [
        run(policy, options.requests, options.device_blocks, options.host_blocks)
        for policy in ("write_through", "write_back")
    ]
    table = Table(title="Microseconds of Python per block, from its commit to its last eviction")
    for heading in ("write policy", "native", "blocks", "in all", "in the index", "calls"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.write_policy,
            str(row.native),
            str(row.blocks),
            f"{row.total_us:.1f}",
            f"{row.index_us:.1f}",
            f"{row.index_calls:.1f}",
        )
    Console(stderr=options.json == "-").print(table)
    result = {
        "benchmark": "cache",
        "machine": machine,
        "rows": [asdict(row) for row in rows],
        "targets": [],
    }
    if options.json == "-":
        json.dump(result, sys.stdout, indent=1)
        print()
    elif options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
