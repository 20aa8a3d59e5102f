"""A disk slower than computing: the cost of having cached prompts on it.

An engine computes all prompts once and stores them on disk. Then two engines serve the same prompts
alternately: one over that disk, throttled to a low rate, and one without a cache. At such a rate no
load is worth waiting for. The planner must notice that, and the time to first token must be that of
a cold run. The order of the engines alternates with every prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier.core.config import parse_size
from kvtier.serve.engine import Engine
from kvtier.tools.bench_serve.engines import Setting, open_engine, scratch_disk, settle
from kvtier.tools.bench_serve.experiment import ExperimentResult, RequestRunner
from kvtier.tools.bench_serve.options import FULL_TTFT_PROMPTS
from kvtier.tools.report.corpus import Prompt
from kvtier.tools.report.progress import Progress
from kvtier.tools.report.stats import (
    LEAST_VALUES,
    P99_VALUES,
    Estimate,
    Summary,
    percentile_ratio,
    rounded,
    summarize,
)
from kvtier.tools.report.target import Target

AUTO = "auto"
SLOWER_THAN_COMPUTING = 2.0
"""With ``AUTO``, time to read a prompt / time to compute it."""
OUTPUT_TOKENS = 4
T3_P50_TARGET = 0.03
T3_P99_TARGET = 0.10


@dataclass(frozen=True, slots=True)
class SlowDiskRow:
    """One prompt.

    ttft_ms: time to first token over the throttled disk. cold_ms: the same without a cache.
    reused_tokens: tokens that were loaded all the same.
    """

    prompt: int
    ttft_ms: float
    cold_ms: float
    reused_tokens: int


@dataclass(frozen=True)
class SlowDiskResult(ExperimentResult):
    """All prompts, in order. bytes_per_s: rate of the disk. prompt_bytes: a prompt's KV on disk."""

    name = "slow-disk"
    full_rows = FULL_TTFT_PROMPTS
    rows: tuple[SlowDiskRow, ...]
    prompt_bytes: int
    bytes_per_s: int

    @property
    def warm(self) -> Summary:
        summary = summarize([row.ttft_ms for row in self.rows])
        assert summary is not None, "there is at least one prompt"
        return summary

    @property
    def cold(self) -> Summary:
        summary = summarize([row.cold_ms for row in self.rows])
        assert summary is not None, "there is at least one prompt"
        return summary

    @property
    def p50_loss(self) -> Estimate:
        """Relative increase of the median time to first token over cold runs."""
        return self._loss(50, LEAST_VALUES)

    @property
    def p99_loss(self) -> Estimate:
        """Relative increase of the 99th percentile over cold runs."""
        return self._loss(99, P99_VALUES)

    def _loss(self, percentile: int, least: int) -> Estimate:
        pairs = [(row.ttft_ms, row.cold_ms) for row in self.rows]
        return percentile_ratio(pairs, percentile, least).changed(lambda ratio: ratio - 1)

    @property
    def load_s(self) -> float:
        """Seconds to read a prompt."""
        return self.prompt_bytes / self.bytes_per_s

    def as_json(self) -> Mapping[str, object]:
        p99 = self.p99_loss
        return {
            "ttft_ms": {"slow_disk": self.warm.as_json(), "cold": self.cold.as_json()},
            "p50_ratio": rounded(1 + self.p50_loss.value),
            "p99_ratio": rounded(1 + p99.value) if p99.is_bounded else None,
            "bytes_per_s": self.bytes_per_s,
            "prompt_bytes": self.prompt_bytes,
            "load_s": rounded(self.load_s),
            "prompt_tokens": self.prompt_tokens,
        }

    def targets(self) -> list[Target]:
        return [
            self._target(
                "T3",
                f"{which} time to first token lost over a disk slower than computing",
                loss,
                wanted,
                at_least=False,
            )
            for which, loss, wanted in (
                ("median", self.p50_loss, T3_P50_TARGET),
                ("p99", self.p99_loss, T3_P99_TARGET),
            )
        ]


def measure_slow_disk(setting: Setting, progress: Progress) -> SlowDiskResult:
    """Fill a disk, throttle it, and request the prompts on it."""
    options, info = setting.options, setting.info
    count, length = options.ttft_prompts, options.ttft_tokens
    *prompts, warm_up = setting.prompts(count + 1, length)
    cached = options.blocks(options.cached_tokens(length))
    prompt_bytes = cached * info.bytes_per_block
    device_blocks = 2 * options.blocks(length + OUTPUT_TOKENS)
    progress.begin("A slow disk", 3 * count + 3)
    bench = RequestRunner(progress, OUTPUT_TOKENS, keep_logits=False)
    with scratch_disk(options) as disk:
        sizes = (device_blocks, 4 * cached, disk, (count + 1) * cached)
        with open_engine(options, info, *sizes) as engine:
            bench.ask(engine, warm_up)
            cold_ms = [bench.ask(engine, prompt).ttft_ms for prompt in prompts]
            settle(engine)
        rate = _rate(options.disk_bytes_per_s, prompt_bytes, cold_ms)
        with (
            open_engine(options, info, *sizes, disk_bytes_per_s=rate) as slow,
            open_engine(options, info, device_blocks, 0) as cold,
        ):
            for engine in (slow, cold):
                bench.ask(engine, warm_up)
            rows = [
                _compare(bench, number, prompt, slow, cold) for number, prompt in enumerate(prompts)
            ]
    return SlowDiskResult(tuple(rows), length, prompt_bytes, rate)


def _rate(wanted: str, prompt_bytes: int, cold_ms: Sequence[float]) -> int:
    """Return the rate of the disk: as requested, or too low for any load to be worth it."""
    if wanted != AUTO:
        return parse_size(wanted, "disk_bytes_per_s")
    usual = summarize(cold_ms)
    assert usual is not None
    return max(1, int(prompt_bytes / (SLOWER_THAN_COMPUTING * usual.p50 / 1000)))


def _compare(
    bench: RequestRunner, number: int, prompt: Prompt, slow: Engine, cold: Engine
) -> SlowDiskRow:
    engines = (slow, cold) if number % 2 == 0 else (cold, slow)
    answers = {engine: bench.ask(engine, prompt) for engine in engines}
    reused_tokens = sum(answers[slow].hit_tokens.values())
    return SlowDiskRow(number, answers[slow].ttft_ms, answers[cold].ttft_ms, reused_tokens)
