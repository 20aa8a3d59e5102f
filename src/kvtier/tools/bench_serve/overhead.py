"""Overhead: the cost of the cache if no prompt can be reused.

Two engines in one process, one with both tiers and one without, serve the same new prompts: a long
one, for its time to first token, then a batch of shorter ones with their output, for throughput.
The order of the engines alternates. Each ratio is between two consecutive measurements, so that
other load on the machine cancels out. The result is the median over all pairs. The tiers are small
and soon full, so eviction is part of the cost.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.serve.engine import Completion, Engine, SamplingParams
from kvtier.tools.bench_serve.engines import (
    REQUEST_TIMEOUT_S,
    Setting,
    check_complete,
    open_engine,
    run_one,
    settle,
)
from kvtier.tools.bench_serve.experiment import ExperimentResult
from kvtier.tools.bench_serve.options import BenchError
from kvtier.tools.report.corpus import Prompt
from kvtier.tools.report.progress import Progress
from kvtier.tools.report.stats import Estimate, median_with_interval, rounded
from kvtier.tools.report.target import Target

TTFT_OUTPUT_TOKENS = 4
T2_TARGET = 0.01
FULL_PAIRS = 30
"""Pairs for which the target is defined."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Result of one engine in a pair.

    Attributes:
        ttft_ms: time to first token of the long prompt.
        tokens_per_s: throughput of the batch, prompts and output.
        cpu_s: processor time of the whole process, background copies included.
        reused_tokens: 0, unless the text repeats itself.
    """

    ttft_ms: float
    tokens_per_s: float
    cpu_s: float
    reused_tokens: int


@dataclass(frozen=True, slots=True)
class OverheadRow:
    """Results of both engines on the same prompts."""

    pair: int
    on: Turn
    off: Turn

    @property
    def ttft_ratio(self) -> float:
        """TTFT with the cache / without it."""
        return self.on.ttft_ms / self.off.ttft_ms

    @property
    def throughput_ratio(self) -> float:
        """Tokens per second with the cache / without it."""
        return self.on.tokens_per_s / self.off.tokens_per_s

    @property
    def cpu_ratio(self) -> float:
        """Processor time with the cache / without it."""
        return self.on.cpu_s / self.off.cpu_s


@dataclass(frozen=True)
class OverheadResult(ExperimentResult):
    """All pairs, in the order of measurement."""

    name = "overhead"
    full_rows = FULL_PAIRS
    rows: tuple[OverheadRow, ...]

    @property
    def ttft_ratio(self) -> Estimate:
        return median_with_interval([row.ttft_ratio for row in self.rows])

    @property
    def throughput_ratio(self) -> Estimate:
        return median_with_interval([row.throughput_ratio for row in self.rows])

    @property
    def cpu_ratio(self) -> Estimate:
        return median_with_interval([row.cpu_ratio for row in self.rows])

    @property
    def loss(self) -> Estimate:
        """The worse of longer TTFT and lower throughput; below 0 if the cache improved both."""
        ttft = self.ttft_ratio.changed(lambda ratio: ratio - 1)
        throughput = self.throughput_ratio.changed(lambda ratio: 1 - ratio)
        return Estimate(
            max(ttft.value, throughput.value),
            max(ttft.low, throughput.low),
            max(ttft.high, throughput.high),
        )

    def as_json(self) -> Mapping[str, object]:
        return {
            "ttft_ratio": rounded(self.ttft_ratio.value),
            "throughput_ratio": rounded(self.throughput_ratio.value),
            "num_pairs": len(self.rows),
            "cpu_ratio": rounded(self.cpu_ratio.value),
            "interval_95": {
                "ttft_ratio": self.ttft_ratio.interval_json(),
                "throughput_ratio": self.throughput_ratio.interval_json(),
                "cpu_ratio": self.cpu_ratio.interval_json(),
            },
            "prompt_tokens": self.prompt_tokens,
        }

    def _row_json(self, row: OverheadRow) -> dict[str, Any]:
        return {
            "pair": row.pair,
            "ttft_ms": {"on": round(row.on.ttft_ms, 3), "off": round(row.off.ttft_ms, 3)},
            "tokens_per_s": {
                "on": round(row.on.tokens_per_s, 1),
                "off": round(row.off.tokens_per_s, 1),
            },
            "cpu_s": {"on": round(row.on.cpu_s, 3), "off": round(row.off.cpu_s, 3)},
        }

    def targets(self) -> list[Target]:
        meaning = "time or throughput lost when nothing can be reused"
        return [self._target("T2", meaning, self.loss, T2_TARGET, at_least=False)]


def measure_overhead(setting: Setting, progress: Progress) -> OverheadResult:
    """Run all pairs on two fresh engines."""
    options = setting.options
    length, batch_length = options.overhead_tokens, options.batch_tokens
    texts = setting.prompts(
        options.overhead_pairs + 1,  # the first pair warms up
        length + options.batch_prompts * batch_length,
    )
    batch_blocks = options.blocks(batch_length + options.batch_output_tokens)
    pair_blocks = options.blocks(length + TTFT_OUTPUT_TOKENS) + options.batch_prompts * batch_blocks
    blocks = 2 * pair_blocks  # full from the third pair on
    progress.begin("Overhead", 4 * (options.overhead_pairs + 1))
    rows: list[OverheadRow] = []
    with (
        open_engine(options, setting.info, blocks, 2 * blocks) as on,
        open_engine(options, setting.info, blocks, 0) as off,
    ):
        bench = _Pairs(on, off, options.batch_output_tokens, progress)
        for pair, text in enumerate(texts):
            batch = _pieces(text[length:], batch_length)
            row = bench.measure(pair, text[:length], batch)
            if pair > 0 and not row.on.reused_tokens:
                rows.append(row)
    if not rows:
        raise BenchError("the text repeats itself: every pair reused something; give other text")
    return OverheadResult(tuple(rows), length)


class _Pairs:
    """Runs the same requests on both engines, one right after the other."""

    def __init__(self, on: Engine, off: Engine, output_tokens: int, progress: Progress) -> None:
        self._engines = (on, off)
        self._few = SamplingParams(max_tokens=TTFT_OUTPUT_TOKENS, ignore_eos=True)
        self._more = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        self._progress = progress

    def measure(self, pair: int, prompt: Prompt, batch: Sequence[Prompt]) -> OverheadRow:
        """Measure one pair. Even pairs begin with the cache on, odd ones with the cache off."""
        done: dict[Engine, list[Completion]] = {engine: [] for engine in self._engines}
        cpu_s = dict.fromkeys(self._engines, 0.0)
        batch_s: dict[Engine, float] = {}
        order = self._engines if pair % 2 == 0 else self._engines[::-1]
        for engine in order:
            began = time.process_time()
            done[engine].append(run_one(engine, prompt, self._few))
            settle(engine)
            cpu_s[engine] += time.process_time() - began
            self._progress.advance()
        for engine in order[::-1]:
            began = time.process_time()
            completions, batch_s[engine] = self._run_batch(engine, batch)
            cpu_s[engine] += time.process_time() - began
            done[engine] += completions
            self._progress.advance()
        on, off = (_turn(done[key], batch_s[key], cpu_s[key]) for key in self._engines)
        return OverheadRow(pair, on, off)

    def _run_batch(self, engine: Engine, batch: Sequence[Prompt]) -> tuple[list[Completion], float]:
        """Run all prompts at once. Return the completions, and the seconds until the last ended."""
        began = time.perf_counter()
        handles = [engine.submit(prompt, self._more) for prompt in batch]
        completions = [handle.result(REQUEST_TIMEOUT_S) for handle in handles]
        seconds = time.perf_counter() - began
        settle(engine)
        for completion in completions:
            check_complete(completion, self._more)
        return completions, seconds


def _turn(done: Sequence[Completion], batch_s: float, cpu_s: float) -> Turn:
    """Return one engine's turn.

    done: the long prompt's completion first, then the batch's.
    """
    num_tokens = sum(each.num_prompt_tokens + len(each.token_ids) for each in done[1:])
    return Turn(
        ttft_ms=1000 * done[0].ttft_s,
        tokens_per_s=num_tokens / batch_s,
        cpu_s=cpu_s,
        reused_tokens=sum(each.num_cached_tokens for each in done),
    )


def _pieces(text: Prompt, length: int) -> list[Prompt]:
    return [text[start : start + length] for start in range(0, len(text), length)]
