"""Value of a policy to users: part of a trace, sent as real prompts to a server per policy.

    python -m benchmarks.policies.served             a table
    python -m benchmarks.policies.served --json -    one JSON object on stdout, the table on stderr
    python -m benchmarks.policies.served --engine vllm

Each request goes to one server after the other, in turns. Needs zstd, and for vLLM the environment
of `make bench-vllm`. See README.md for the method.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from rich.console import Console
from rich.table import Table

from benchmarks.engines.model import KV_BYTES_PER_TOKEN, make_model
from benchmarks.engines.protocol import read_by_label, read_counters
from benchmarks.engines.requests import in_turn
from benchmarks.engines.run import narrator, running, versions
from benchmarks.engines.servers import (
    LOOPBACK,
    SERVED_AS,
    Contestant,
    Server,
    Size,
    Tokens,
    words_of,
)
from benchmarks.policies.trace_prompts import Prompts, part_of
from benchmarks.policies.traces import conversation, default_folder
from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, table_of
from benchmarks.vllm.servers import with_kvtier
from kvtier.observe import specs

POLICIES = ("lru", "runs")
WARM_SHARE = 0.2
"""Share of the requests that are not counted: policies do not differ until tiers are full."""
RESAMPLES = 2000
BLOCK_TOKENS = {"kvtier": 16, "vllm": 32}


@dataclass(frozen=True, slots=True)
class Served(Contestant):
    """kvtier's own server."""

    environment: str = ""
    below: Mapping[str, object] = field(default_factory=dict)
    """Further options of the server."""

    block = BLOCK_TOKENS["kvtier"]
    reset_path = ""
    asked_with: ClassVar[Mapping[str, object]] = {}

    @property
    def python(self) -> Path:
        return Path(sys.executable)

    @property
    def has_tier(self) -> bool:
        return True

    @property
    def packages(self) -> list[str]:
        return ["kvtier", "torch", "transformers"]

    def command(self, model: Path, port: int, folder: Path, size: Size) -> list[str]:
        arguments = {
            "--host": LOOPBACK,
            "--port": port,
            "--served-model-name": SERVED_AS,
            "--dtype": "float32",
            "--threads": 1,
            "--block-size": self.block,
            "--chunk-tokens": self.block,
            "--device-capacity": size.device_blocks * self.block * KV_BYTES_PER_TOKEN,
            "--disk-path": folder / "disk",
            **self.below,
        }
        return ["-m", "kvtier.tools.cli", "serve", str(model), *words_of(arguments)]

    def environ(self) -> dict[str, str]:
        return self.variables

    def read_tokens(self, metrics: str) -> Tokens:
        counted = read_counters(metrics)
        hits = read_by_label(metrics, specs.HIT_BLOCKS.name, "tier")
        below = sum(num for tier, num in hits.items() if tier != "device")
        return Tokens(
            counted.get(specs.SERVER_PROMPT_TOKENS.name, 0),
            counted.get(specs.SERVER_CACHED_TOKENS.name, 0),
            below * self.block,
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One policy."""

    engine: str
    policy: str
    requests: int
    prompt_tokens: int
    mean_ttft_ms: float
    """Mean over the requests that are counted."""
    p90_ttft_ms: float
    """90th percentile over the requests that are counted."""
    cached_tokens: int
    hit_blocks: dict[str, float]
    """Hits of all requests, by tier."""
    written_bytes: float
    """Bytes written to the disk."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Time to the first token under ``runs``, divided by that under ``lru``.

    Each field has the ratio and the bounds of its 95 % bootstrap interval.
    """

    engine: str
    mean: tuple[float, float, float]
    p90: tuple[float, float, float]


def contestants(options: argparse.Namespace, prompts: Prompts) -> list[Contestant]:
    block_bytes = prompts.block_tokens * KV_BYTES_PER_TOKEN
    host = int(options.host * prompts.num_blocks) * block_bytes
    disk = int(options.disk * prompts.num_blocks) * block_bytes
    made: list[Contestant] = []
    for policy in POLICIES:
        if options.engine == "kvtier":
            below = {"--host-capacity": host, "--disk-capacity": disk, "--eviction-policy": policy}
            made.append(Served(policy, below=below))
        else:
            folder = str(options.scratch / f"disk-{policy}")
            settings = {"disk_path": folder, "disk_capacity": disk, "eviction_policy": policy}
            vllm = with_kvtier(str(host), policy, **settings)
            made.append(replace(vllm, block_tokens=prompts.block_tokens))
    return made


class Measurement:
    """All requests to all servers.

    ``ttft_ms`` has the requests of each policy, in their order.
    """

    def __init__(self, prompts: Prompts, options: argparse.Namespace) -> None:
        self.prompts = prompts
        self.options = options
        self.ttft_ms: dict[str, list[float]] = {}
        self.cached: dict[str, int] = {}
        self.metrics: dict[str, str] = {}

    def measure(self, chosen: Sequence[Contestant], size: Size) -> list[Row]:
        say = narrator(self.options.silent)
        with running(chosen, self.options, size) as servers:
            for number in range(len(self.prompts.chains)):
                prompt = self.prompts.tokens(number)
                for server in in_turn(servers, number):
                    self._ask(server, prompt)
                if number % 100 == 99:
                    found = {name: statistics.fmean(all_) for name, all_ in self.ttft_ms.items()}
                    say(f"{number + 1} requests: {found} ms")
            for server in servers:
                server.settle()
                self.metrics[server.contestant.name] = server.metrics()
        return [self._row(each.name) for each in chosen]

    def _ask(self, server: Server, prompt: Sequence[int]) -> None:
        answer = server.ask(prompt, 1)
        name = server.contestant.name
        self.ttft_ms.setdefault(name, []).append(answer.ttft_ms)
        self.cached[name] = self.cached.get(name, 0) + answer.cached_tokens

    def judged_ttft_ms(self, policy: str) -> list[float]:
        found = self.ttft_ms[policy]
        return found[int(WARM_SHARE * len(found)) :]

    def _row(self, policy: str) -> Row:
        ttft_ms, metrics = self.judged_ttft_ms(policy), self.metrics[policy]
        return Row(
            self.options.engine,
            policy,
            len(self.ttft_ms[policy]),
            sum(len(chain) for chain in self.prompts.chains) * self.prompts.block_tokens,
            statistics.fmean(ttft_ms),
            p90(ttft_ms),
            self.cached[policy],
            hits_by_tier(metrics, self.options.engine),
            written_to_disk(metrics, self.options.engine),
        )

    def compared(self) -> Compared:
        """Return both ratios.

        Requests are resampled in pairs, because both servers had the same ones.
        """
        pairs = list(zip(*(self.judged_ttft_ms(name) for name in POLICIES), strict=True))
        rng = random.Random(self.options.seed)
        means, tails = [], []
        for _ in range(RESAMPLES):
            lru, runs = zip(*rng.choices(pairs, k=len(pairs)), strict=True)
            means.append(statistics.fmean(runs) / statistics.fmean(lru))
            tails.append(p90(runs) / p90(lru))
        lru, runs = zip(*pairs, strict=True)
        return Compared(
            self.options.engine,
            (statistics.fmean(runs) / statistics.fmean(lru), *middle(means)),
            (p90(runs) / p90(lru), *middle(tails)),
        )


def p90(values: Sequence[float]) -> float:
    return sorted(values)[int(0.9 * (len(values) - 1))]


def middle(values: Sequence[float]) -> tuple[float, float]:
    """Return the bounds of the middle 95 % of the values."""
    ordered = sorted(values)
    return ordered[int(0.025 * len(ordered))], ordered[int(0.975 * (len(ordered) - 1))]


def hits_by_tier(metrics: str, engine: str) -> dict[str, float]:
    name = specs.HIT_BLOCKS.name if engine == "kvtier" else specs.VLLM_LOADED_CHUNKS.name
    return read_by_label(metrics, name, "tier")


def written_to_disk(metrics: str, engine: str) -> float:
    name = specs.COPIED_BYTES.name if engine == "kvtier" else specs.VLLM_MOVED_BYTES.name
    return read_by_label(metrics, name, "dst").get("disk", 0.0)


def table(rows: Sequence[Row]) -> Table:
    lines = []
    for row in rows:
        tiers = ", ".join(f"{tier} {num:.0f}" for tier, num in row.hit_blocks.items())
        share = f"{100 * row.cached_tokens / row.prompt_tokens:.1f} %"
        times = f"{row.mean_ttft_ms:.1f}", f"{row.p90_ttft_ms:.1f}"
        lines.append((row.policy, *times, share, tiers, f"{row.written_bytes / 1e9:.2f}"))
    return table_of(
        "The same prompts, under two policies",
        ("policy",),
        ("mean TTFT ms", "p90 TTFT ms", "cached tokens", "hits by tier", "GB written"),
        lines,
    )


def main(arguments: list[str] | None = None) -> None:
    options = read_options(arguments)
    prompts = part_of(
        conversation(options.traces),
        options.share,
        options.most_blocks,
        BLOCK_TOKENS[options.engine],
    )
    machine = machine_facts()
    with tempfile.TemporaryDirectory(prefix="kvtier-policies-") as folder:
        options.scratch = Path(folder)
        options.model = make_model(options.scratch / "model")
        chosen = contestants(options, prompts)
        measurement = Measurement(prompts, options)
        device_blocks = prompts.longest + options.device_blocks
        longest = (prompts.longest + 2) * prompts.block_tokens
        rows = measurement.measure(chosen, Size(device_blocks, longest))
    compared = measurement.compared()
    report(
        options.json,
        "served_policies",
        machine,
        rows,
        (),
        table(rows),
        versions=versions(chosen[0]),
        plan={
            "requests": len(prompts.chains),
            "blocks": prompts.num_blocks,
            "block_tokens": prompts.block_tokens,
            "device_blocks": device_blocks,
            "host": options.host,
            "disk": options.disk,
        },
        compared=asdict(compared),
    )
    Console(stderr=True).print(json.dumps(asdict(compared)))


def read_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of("policies.served", __doc__)
    parser.add_argument("--engine", choices=list(BLOCK_TOKENS), default="kvtier")
    parser.add_argument("--traces", type=Path, default=default_folder(), help="folder of them")
    parser.add_argument("--share", type=float, default=0.2, help="of the conversations (0.2)")
    parser.add_argument("--most-blocks", type=int, default=48, help="of a prompt (48)")
    parser.add_argument("--device-blocks", type=int, default=64, help="beside the longest (64)")
    parser.add_argument("--host", type=float, default=0.02, help="share of all blocks (0.02)")
    parser.add_argument("--disk", type=float, default=0.1, help="share of all blocks (0.1)")
    parser.add_argument("--seed", type=int, default=1, help="of the resampling (1)")
    parser.add_argument("--silent", action="store_true", help="no progress on stderr")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
