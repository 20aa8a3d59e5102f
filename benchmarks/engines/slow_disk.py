"""A disk slower than computing, under an engine: what does it cost to have known prompts there?

kvtier keeps prompts on a throttled disk, host memory being too small for them. Then they are asked
again, in turn with an engine that never saw them. No load is worth waiting for at that rate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engines.requests import BEYOND, in_turn, tokens
from benchmarks.engines.servers import Contestant, Server, Size
from kvtier.tools.report.stats import LEAST_VALUES, P99_VALUES, percentile_ratio, rounded, summarize
from kvtier.tools.report.target import is_met

SLOWER_THAN_COMPUTING = 2.0
"""A prompt takes so many times as long to read as to compute."""
OUTPUT_TOKENS = 4
P50, P99 = 1.03, 1.10


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt that lies on the disk. loaded_tokens: those that were loaded all the same."""

    ttft_ms: float
    cold_ms: float
    loaded_tokens: int


@dataclass(frozen=True, slots=True)
class SlowDisk:
    """bytes_per_s: the rate. prompt_bytes: of a prompt's KV."""

    bytes_per_s: int
    prompt_bytes: int
    asked: list[Asked]

    def rows(self, contestant: str) -> list[dict[str, object]]:
        """One."""
        ours = summarize([each.ttft_ms for each in self.asked])
        cold = summarize([each.cold_ms for each in self.asked])
        assert ours is not None, "at least one prompt was asked"
        assert cold is not None, "at least one prompt was asked"
        return [
            {
                "kind": "slow disk",
                "contestant": contestant,
                "prompts": len(self.asked),
                "bytes_per_s": self.bytes_per_s,
                "load_ms": round(1000 * self.prompt_bytes / self.bytes_per_s, 1),
                "ttft_p50_ms": round(ours.p50, 1),
                "cold_p50_ms": round(cold.p50, 1),
                "ttft_p99_ms": rounded(ours.p99, 1),
                "cold_p99_ms": rounded(cold.p99, 1),
                "loaded_tokens": sum(each.loaded_tokens for each in self.asked),
            }
        ]

    def targets(self, contestant: str) -> list[dict[str, object]]:
        """T3: times as long as cold. met: None where the prompts are too few to tell."""
        found: list[dict[str, object]] = []
        pairs = [(each.ttft_ms, each.cold_ms) for each in self.asked]
        for percentile, least, target in ((50, LEAST_VALUES, P50), (99, P99_VALUES, P99)):
            ratio = percentile_ratio(pairs, percentile, least)
            found.append(
                {
                    "id": "T3",
                    "contestant": contestant,
                    "measure": f"p{percentile}",
                    "value": rounded(ratio.value),
                    "interval_95": ratio.interval_json(),
                    "target": target,
                    "met": is_met(ratio, target, at_least=False),
                }
            )
        return found


@dataclass(frozen=True, slots=True)
class Slow:
    """Prompts that lie on a disk.

    num_blocks: of each; more of them than device and host have room for. bytes_per_token: of KV.
    bytes_per_s: the rate; 0 for twice as slow as computing.
    """

    num_prompts: int
    num_blocks: int
    bytes_per_token: int
    bytes_per_s: int = 0


def measure_slow_disk(
    alone: Server,
    with_disk: Callable[[int, int], Contestant],
    slow: Slow,
    model: Path,
    folder: Path,
    size: Size,
    say: Callable[[str], None],
) -> SlowDisk:
    """alone: an engine to compare with.

    with_disk: one whose disk moves so many bytes per second, where a prompt has so many bytes.
    """
    block, num_prompts = alone.contestant.block, slow.num_prompts
    prompt_bytes = slow.num_blocks * block * slow.bytes_per_token
    length = slow.num_blocks * block + BEYOND
    if num_prompts * (slow.num_blocks + 1) <= 2 * size.device_blocks:
        raise ValueError(f"{num_prompts} prompts of {slow.num_blocks} blocks: too few for the pool")
    usual = statistics.median(
        alone.ask(tokens(-1 - number, length), OUTPUT_TOKENS).ttft_ms for number in range(4)
    )
    rate = slow.bytes_per_s or int(prompt_bytes / (SLOWER_THAN_COMPUTING * usual / 1000))
    contestant = with_disk(rate, prompt_bytes)
    prompts = [tokens(50_000 + number, length) for number in range(num_prompts)]
    server = Server(contestant, model, folder, size)
    try:
        server.wait()
        server.ask(tokens(-9, length), OUTPUT_TOKENS)
        for prompt in prompts:
            server.ask(prompt, OUTPUT_TOKENS)
            time.sleep(prompt_bytes / rate)  # until it is written
        say(f"{num_prompts} prompts lie on a disk of {rate / 1e6:.1f} MB/s")
        asked = []
        for number, prompt in enumerate(prompts):
            answers = {}
            for each in in_turn([server, alone], number):
                answers[each] = each.ask(prompt, OUTPUT_TOKENS)
                each.settle()
            ours, cold = answers[server], answers[alone]
            asked.append(Asked(ours.ttft_ms, cold.ttft_ms, ours.cached_tokens))
            say(f"{ours.ttft_ms:.0f} ms, cold {cold.ttft_ms:.0f} ms")
    finally:
        server.close()
    return SlowDisk(rate, prompt_bytes, asked)
