"""Time to the first token from disks of several rates: loaded, computed, or from both ends.

    python -m benchmarks.server.both_ends             a table
    python -m benchmarks.server.both_ends --json -    JSON on stdout, the table on stderr

Prompts are on a disk whose rate is a multiple of the rate of computing. Three engines serve each of
them in turn: one that plans, one that always loads, and one without a cache. All logits must be
equal. See README.md for the method.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from rich.table import Table

import kvtier.cache.transfer.local
from benchmarks.engines.requests import in_turn, tokens
from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, table_of
from benchmarks.report.targets import judged
from kvtier.core.config import CacheConfig
from kvtier.core.types import LoadPolicy
from kvtier.serve.engine import Completion, Engine, EngineConfig, SamplingParams
from kvtier.tools.report.stats import LEAST_VALUES, percentile_ratio

TIMES = 0.25, 0.5, 1.0, 2.0, 4.0
"""Rates of the disk, as multiples of the rate of computing."""
PLANS, LOADS, COMPUTES = "both ends", "load", "compute"
NUM_WARM = 2
"""Prompts with which the engines learn the rates."""
P50, P99, TOGETHER = 1.03, 1.10, 0.6
"""Targets: of the better of both, and at the rate of computing."""
GREEDY = SamplingParams(max_tokens=2, ignore_eos=True, keep_logits=True)


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt; times to the first token in milliseconds."""

    times: float
    both_ends_ms: float
    load_ms: float
    compute_ms: float
    loaded_tokens: int


def config_of(folder: Path, num_prompts: int, num_tokens: int) -> EngineConfig:
    """Return the settings of an engine whose host memory has room for one prompt."""
    size = -(-num_tokens // 64) * 64 * 5120
    cache = CacheConfig(
        host_capacity=2 * size, disk_path=str(folder), disk_capacity=(num_prompts + 2) * size
    )
    return EngineConfig(device_capacity=3 * size, threads=1, cache=cache)


def ask(engine: Engine, prompt: list[int]) -> Completion:
    """Return the answer, when all copies have ended."""
    found = engine.submit(prompt, GREEDY).result(600)
    assert not found.error, found.error
    assert engine.drain(600)
    return found


def run(folder: Path, num_prompts: int, num_tokens: int) -> list[Row]:
    """Serve the prompts at each rate."""
    prompts = [tokens(number, num_tokens) for number in range(NUM_WARM + num_prompts)]
    config = config_of(folder / "slab", len(prompts), num_tokens)
    with Engine(config) as engine:
        cold = [ask(engine, prompt).ttft_s for prompt in prompts]
        num_bytes = engine.info.bytes_per_block * (num_tokens // 128 * 128 // 64)
    rate = num_bytes / median(cold)
    return [row for times in TIMES for row in run_rate(config, times, rate, prompts, folder)]


def run_rate(
    config: EngineConfig, times: float, rate: float, prompts: list[list[int]], folder: Path
) -> list[Row]:
    """Serve the prompts from a disk of ``times`` the ``rate`` of computing, bytes per second."""
    cache = replace(config.cache, disk_bytes_per_s=int(times * rate))
    always = replace(cache, load_policy=LoadPolicy.ALWAYS)
    configs = {
        PLANS: replace(config, cache=cache),
        LOADS: replace(config, cache=always),
        COMPUTES: replace(config, prefix_cache=False, cache=CacheConfig(host_capacity=0)),
    }
    rows = []
    with ExitStack() as stack:
        engines = {}
        for name, settings in configs.items():
            if name != COMPUTES:
                own = shutil.copytree(folder / "slab", folder / f"{name} {times}")
                own_cache = replace(settings.cache, disk_path=str(own))
                settings = replace(settings, cache=own_cache)
            engines[name] = stack.enter_context(Engine(settings))
        for number, prompt in enumerate(prompts):
            found = {name: ask(engines[name], prompt) for name in in_turn([*engines], number)}
            logits = [answer.logits for answer in found.values()]
            assert all(np.array_equal(logits[0], other) for other in logits), "other bits"
            seconds = [1000 * found[name].ttft_s for name in (PLANS, LOADS, COMPUTES)]
            rows.append(Row(times, *seconds, found[PLANS].num_cached_tokens))
    return rows[NUM_WARM:]


def targets(rows: list[Row]) -> list[dict[str, object]]:
    """Return T3 for each rate: against the better of load and compute, p50 and p99."""
    found = []
    for times in TIMES:
        own = [row for row in rows if row.times == times]
        better = min(
            "load_ms", "compute_ms", key=lambda name: median(getattr(r, name) for r in own)
        )
        pairs = [(row.both_ends_ms, getattr(row, better)) for row in own]
        for percentile, target in ((50, TOGETHER if times == 1 else P50), (99, P99)):
            ratio = percentile_ratio(pairs, percentile, LEAST_VALUES)
            name = f"T3 p{percentile} at {times:g}, against {better.removesuffix('_ms')}"
            found.append(judged(name, ratio, target, at_least=False))
    return found


def table(rows: list[Row]) -> Table:
    """Return a line per rate, with medians."""
    return table_of(
        "time to the first token, ms (median)",
        ("rate of the disk",),
        (PLANS, LOADS, COMPUTES, "loaded tokens"),
        (
            (
                f"{times:g}",
                *(
                    f"{median(getattr(row, name) for row in rows if row.times == times):.0f}"
                    for name in ("both_ends_ms", "load_ms", "compute_ms", "loaded_tokens")
                ),
            )
            for times in TIMES
        ),
    )


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of("server.both_ends", __doc__)
    parser.add_argument("--prompts", type=int, default=20, help="prompts per rate (20)")
    parser.add_argument("--length", type=int, default=3500, help="tokens per prompt (3500)")
    options = parser.parse_args(arguments)
    # The check of 4 MiB of an idle disk would take as long as a quarter of a prompt.
    kvtier.cache.transfer.local.SCRUB_PAUSE_S = float("inf")
    machine = machine_facts()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        rows = run(Path(folder), options.prompts, options.length)
    report(options.json, "both ends", machine, rows, targets(rows), table(rows))


if __name__ == "__main__":
    main()
