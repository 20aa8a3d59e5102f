"""First requests of a new replica, without and with the KV of their system prompts in a file.

    python -m benchmarks.stores.pack_file
    python -m benchmarks.stores.pack_file --rounds 9 --json -

The file is made by ``kvtier export``. Each round starts replicas of the embedded engine with
nothing in memory: one alone, one with the file as a store, one with a directory into which it was
imported, and one with a disk into which it was imported. The order changes every round. Each
replica gets one request per system prompt, with a question behind it, and all logits are compared.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, table_of
from kvtier.core.config import CacheConfig
from kvtier.core.types import LoadPolicy
from kvtier.serve.engine import Engine, EngineConfig, SamplingParams

NUM_PROMPTS: Final = 3
NUM_TOKENS: Final = 2048
NUM_QUESTION: Final = 64
BLOCK_SIZE: Final = 64
MODEL: Final = "kvtier-tiny"
WITHOUT: Final = "nothing"


@dataclass(frozen=True, slots=True)
class Started:
    """First requests of one replica.

    ttft_s: median time to first token. computed_tokens, loaded_tokens: of all prompts.
    same_logits: whether all logits are those of computing, bit for bit.
    """

    source: str
    ttft_s: float
    computed_tokens: int
    loaded_tokens: int
    same_logits: bool


def kvtier(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "kvtier.tools.cli", *words], check=True)


def start(
    source: str, cache: CacheConfig, prompts: list[list[int]], expected: list[np.ndarray]
) -> Started:
    """Start a replica, and send it its first requests. expected: logits; filled if empty."""
    settings = EngineConfig(
        model=MODEL, block_size=BLOCK_SIZE, device_capacity="96MiB", threads=1, cache=cache
    )
    with Engine(settings) as engine:
        params = SamplingParams(max_tokens=4, ignore_eos=True, keep_logits=True)
        answers = [engine.submit(prompt, params).result(600) for prompt in prompts]
    logits = [np.asarray(answer.logits) for answer in answers]
    expected += [] if expected else logits
    loaded = sum(answer.num_cached_tokens for answer in answers)
    return Started(
        source,
        statistics.median(answer.ttft_s for answer in answers),
        sum(map(len, prompts)) - loaded,
        loaded,
        all(np.array_equal(one, other) for one, other in zip(logits, expected, strict=True)),
    )


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of("stores.pack_file", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    random = np.random.default_rng(0)
    systems = random.integers(5, 500, (NUM_PROMPTS, NUM_TOKENS)).tolist()
    questions = random.integers(5, 500, (NUM_PROMPTS, NUM_QUESTION)).tolist()
    prompts = [[*system, *own] for system, own in zip(systems, questions, strict=True)]
    started: dict[str, list[Started]] = defaultdict(list)
    expected: list[np.ndarray] = []
    with tempfile.TemporaryDirectory(prefix="kvtier-pack-") as folder:
        lines, file = Path(folder) / "prompts.jsonl", str(Path(folder) / "prompts.kvpack")
        lines.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in systems))
        disk, near = f"{folder}/disk", f"dir://{folder}/kv"
        sizes = ["--block-size", str(BLOCK_SIZE), "--threads", "1"]
        kvtier("export", str(lines), file, "--model", MODEL, *sizes)
        kvtier("import", file, near)
        kvtier("import", file, f"disk:{disk}", "--disk-capacity", "256MiB")
        alone = CacheConfig(
            host_capacity="256MiB",
            disk_capacity="256MiB",
            load_policy=LoadPolicy.ALWAYS,
            lookup_deadline_s=10.0,
        )
        caches = {
            WITHOUT: alone,
            "pack file": replace(alone, storage=(f"pack://{file}",)),
            "directory": replace(alone, storage=(near,)),
            "disk": replace(alone, disk_path=disk),
        }
        names = list(caches)
        for number in range(options.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                started[name].append(start(name, caches[name], prompts, expected))
    ratios = {
        name: [a.ttft_s / b.ttft_s for a, b in zip(started[WITHOUT], started[name], strict=True)]
        for name in names
    }
    rows = [one for name in names for one in started[name]]
    cells = [
        (
            name,
            f"{started[name][0].computed_tokens:,}",
            f"{started[name][0].loaded_tokens:,}",
            f"{1e3 * statistics.median(one.ttft_s for one in started[name]):,.0f}",
            f"{statistics.median(ratios[name]):.1f}",
            "yes" if all(one.same_logits for one in started[name]) else "no",
        )
        for name in names
    ]
    right = ["computed", "loaded", "ttft ms", "times as fast", "same logits"]
    table = table_of("first requests", ["replica has"], right, cells)
    report(options.json, "pack-file", machine_facts(), rows, (), table, ratios=ratios)


if __name__ == "__main__":
    main()
