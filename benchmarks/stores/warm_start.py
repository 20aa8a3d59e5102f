"""First requests of a new replica over a store behind a slow link, without and with a warm start.

    python -m benchmarks.stores.warm_start
    python -m benchmarks.stores.warm_start --rounds 9 --json -

The store is SeaweedFS on loopback, behind a link of ``--bits-per-s``. Each round starts a replica
of the embedded engine without and one with a warm start, with an empty directory each; the order
changes every round. Requests begin when the warm start has ended.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, table_of
from benchmarks.stores.link import Link
from benchmarks.stores.processes import opened
from benchmarks.stores.servers import S3Place
from kvtier.core.config import CacheConfig
from kvtier.core.types import LoadPolicy
from kvtier.observe.specs import COPIED_BYTES, WARMED_BLOCKS, WARMED_BYTES
from kvtier.serve.engine import Engine, EngineConfig, SamplingParams
from tests.kit.waiting import wait_until

FAR, NEAR, HOST = "store", "directory", "host"
NUM_PROMPTS: Final = 3
NUM_TOKENS: Final = 2048
BLOCK_SIZE: Final = 64
WITHOUT, WITH = "without", "with"


@dataclass(frozen=True, slots=True)
class Started:
    """First requests of one replica.

    ttft_s: median time to first token. hit_tokens: prompt tokens that were loaded.
    copied_blocks, copied_bytes: by the warm start, before the requests.
    far_bytes, near_bytes: read for the requests.
    """

    warm_start: str
    ttft_s: float
    hit_tokens: int
    copied_blocks: int
    copied_bytes: int
    far_bytes: int
    near_bytes: int


def config(*stores: str, warm_start: str | int = 0) -> EngineConfig:
    cache = CacheConfig(
        host_capacity="256MiB",
        storage=stores,
        warm_start=warm_start,
        load_policy=LoadPolicy.ALWAYS,
        lookup_deadline_s=10.0,
    )
    return EngineConfig(
        model="random-gqa", block_size=BLOCK_SIZE, device_capacity="64MiB", threads=1, cache=cache
    )


def start(far: str, kind: str, prompts: list[list[int]], num_blocks: int) -> Started:
    """Start a replica, and send it its first requests."""
    folder = Path(tempfile.mkdtemp(prefix="kvtier-near-"))
    near = f"{NEAR}=dir://{folder / 'kv'}?capacity=1GiB&poll_s=0.2"
    settings = config(near, far, warm_start="1GiB" if kind == WITH else 0)
    with Engine(settings) as engine:

        def count(name: str, **labels: str) -> int:
            registry = engine.call(engine.cache.update_metrics).registry
            return int(registry.get_sample_value(name, labels) or 0)

        if kind == WITH:
            wait_until(lambda: count(WARMED_BLOCKS.name, tier=NEAR) >= num_blocks)
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        answers = [engine.submit(prompt, params).result(600) for prompt in prompts]
        found = Started(
            kind,
            statistics.median(answer.ttft_s for answer in answers),
            sum(answer.num_cached_tokens for answer in answers),
            count(WARMED_BLOCKS.name, tier=NEAR),
            count(WARMED_BYTES.name, tier=NEAR),
            count(COPIED_BYTES.name, src=FAR, dst=HOST),
            count(COPIED_BYTES.name, src=NEAR, dst=HOST),
        )
    shutil.rmtree(folder)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of("stores.warm_start", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bits-per-s", type=float, default=4e8, help="of the link, each way")
    options = parser.parse_args(arguments)
    if reason := S3Place.missing():
        sys.exit(reason)
    random = np.random.default_rng(0)
    prompts = random.integers(5, 500, (NUM_PROMPTS, NUM_TOKENS + 1)).tolist()
    num_blocks = NUM_PROMPTS * NUM_TOKENS // BLOCK_SIZE
    started: dict[str, list[Started]] = defaultdict(list)
    with opened(S3Place) as place:
        assert isinstance(place, S3Place)
        with Engine(config(f"{FAR}={place.location(place.port, 4)}")) as first:
            for prompt in prompts:
                first.submit(prompt, SamplingParams(max_tokens=1)).result(600)
            assert first.drain()
        link = Link(place.port, options.bits_per_s)
        far = f"{FAR}={place.location(link.port, 4)}"
        for number in range(options.rounds):
            for kind in (WITHOUT, WITH) if number % 2 else (WITH, WITHOUT):
                started[kind].append(start(far, kind, prompts, num_blocks))
        link.close()
    ratios = [a.ttft_s / b.ttft_s for a, b in zip(started[WITHOUT], started[WITH], strict=True)]
    rows = [one for some in started.values() for one in some]
    cells = [
        (
            kind,
            f"{statistics.median(one.hit_tokens for one in some):,.0f}",
            f"{statistics.median(one.copied_blocks for one in some):,.0f}",
            f"{statistics.median(one.copied_bytes for one in some) / 1e6:,.1f}",
            f"{statistics.median(one.far_bytes for one in some) / 1e6:,.1f}",
            f"{statistics.median(one.near_bytes for one in some) / 1e6:,.1f}",
            f"{1e3 * statistics.median(one.ttft_s for one in some):,.0f}",
        )
        for kind, some in started.items()
    ]
    title = f"time to first token, without / with: {statistics.median(ratios):.1f}"
    right = ["loaded", "copied", "MB", "MB store", "MB directory", "ttft ms"]
    table = table_of(title, ["warm start"], right, cells)
    report(options.json, "warm-start", machine_facts(), rows, (), table, ratios=ratios)


if __name__ == "__main__":
    main()
