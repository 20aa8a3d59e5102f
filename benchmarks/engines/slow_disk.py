"""Cost of known prompts on a disk that is slower than computing, under an engine.

kvtier stores prompts on a throttled disk, because host memory is too small for them. Then they are
requested again, in turn with an engine that never saw them. No load is worth waiting for at that
rate.
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
"""Time to read a prompt, as a multiple of the time to compute it."""
OUTPUT_TOKENS = 4
P50, P99 = 1.03, 1.10


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt that is on the disk."""

    ttft_ms: float
    cold_ms: float
    loaded_tokens: int
    """Tokens that were loaded nevertheless."""


@dataclass(frozen=True, slots=True)
class SlowDisk:
    """Result for one contestant."""

    bytes_per_s: int
    """Rate of the disk."""
    prompt_bytes: int
    """Bytes of a prompt's KV."""
    asked: list[Asked]

    def rows(self, contestant: str) -> list[dict[str, object]]:
        """Return the row of one contestant, as a list."""
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
        """Return T3: the time as a multiple of a cold one. met: None if the prompts are too few."""
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
    """Prompts that are stored on the disk."""

    num_prompts: int
    num_blocks: int
    """Blocks of each prompt. All prompts together exceed device and host memory."""
    bytes_per_token: int
    """KV bytes per token."""
    bytes_per_s: int = 0
    """Rate of the disk; 0 for twice as slow as computing."""


def measure_slow_disk(
    alone: Server,
    with_disk: Callable[[int, int], Contestant],
    slow: Slow,
    model: Path,
    folder: Path,
    size: Size,
    say: Callable[[str], None],
) -> SlowDisk:
    """Store prompts on a slow disk, and request them in turn with an engine without a cache.

    Args:
        alone: server of the engine without a cache.
        with_disk: makes a contestant from the disk's bytes per second and the bytes of a prompt's
            KV.
        slow: the prompts.
        model: folder of the model.
        folder: of the contestant's server.
        size: of both servers.
        say: prints progress.
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
            time.sleep(prompt_bytes / rate)  # until the prompt is written
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
