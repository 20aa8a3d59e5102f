"""T1': a hit's time to first token, against computing its tail and moving its bytes.

    python -m benchmarks.server.first_token            a table
    python -m benchmarks.server.first_token --json -   JSON on stdout, the table on stderr

Each round serves one prompt by the embedded engine, with a new salt: computed without a cache, then
from the device, from host memory and from disk. The lower bound of a hit is the sum of:

    tail    the engine's time to compute the tokens that were not reused, in the hit from the device
    bytes   the loaded bytes, at the tier's rate in this run: bytes per second over all its reads,
            without queueing

Ratios are taken within a round; the result is their median. See README.md for the method.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.table import Table

from benchmarks.report.machine import machine_facts
from benchmarks.report.output import parser_of, report, table_of
from benchmarks.report.targets import judged
from kvtier.core.types import DEVICE, DISK, HOST, LoadPolicy
from kvtier.observe import specs
from kvtier.serve.engine import Engine, SamplingParams
from kvtier.tools.bench_serve.engines import (
    clear_tiers,
    open_engine,
    probe,
    run_one,
    scratch_disk,
    settle,
)
from kvtier.tools.bench_serve.options import ServeOptions
from kvtier.tools.report.corpus import Prompt
from kvtier.tools.report.stats import median_with_interval

PROMPT_TOKENS = 3500
NUM_ROUNDS = 31
WANTED = 1.15
ROUTE_FROM = {HOST: (HOST, DEVICE), DISK: (DISK, HOST)}
"""Route whose copies show a tier's read rate."""


@dataclass(frozen=True, slots=True)
class Hit:
    """Times of one request."""

    ttft_s: float
    """Time until its first token."""
    prefill_s: float
    """Part of ``ttft_s`` that was spent computing."""


@dataclass
class Rounds:
    """Requests by tier and round, and the read rate of each tier."""

    hits: dict[str, list[Hit]] = field(default_factory=lambda: {DEVICE: [], HOST: [], DISK: []})
    cold: list[Hit] = field(default_factory=list)
    """Requests that found nothing."""
    num_bytes: int = 0
    """Bytes that a hit loads."""
    bytes_per_s: dict[str, float] = field(default_factory=dict)

    def least_s(self, tier: str, at: int) -> float:
        """Return the lower bound of a hit's time in round ``at``."""
        load_s = self.num_bytes / self.bytes_per_s[tier] if tier != DEVICE else 0.0
        return self.hits[DEVICE][at].prefill_s + load_s

    def ratios(self, tier: str) -> list[float]:
        return [hit.ttft_s / self.least_s(tier, at) for at, hit in enumerate(self.hits[tier])]


class Bench:
    """Sends the prompt to the engine in every way, and records the times."""

    def __init__(self, engine: Engine, prompt: Prompt, reused_tokens: int) -> None:
        self._engine = engine
        self._prompt = prompt
        self._reused_tokens = reused_tokens
        self._prefill_s = 0.0
        self.rounds = Rounds()
        engine.call(self._listen)

    def _listen(self) -> None:
        """Wrap ``observe_prefill`` of the engine's cache, to sum the seconds of each prefill."""
        cache = self._engine.cache
        tell = cache.observe_prefill

        def observe(num_before: int, num_tokens: int, seconds: float) -> None:
            self._prefill_s += seconds
            tell(num_before, num_tokens, seconds)

        cache.observe_prefill = observe  # type: ignore[method-assign]

    def run(self, turn: int) -> None:
        clear_tiers(self._engine, DEVICE, HOST)
        gc.collect()
        cold = self._ask(turn, {})
        settle(self._engine)
        found = [self._ask(turn, {DEVICE: self._reused_tokens})]
        for lost in ((DEVICE,), (DEVICE, HOST)):
            clear_tiers(self._engine, *lost)
            tier = HOST if lost == (DEVICE,) else DISK
            found.append(self._ask(turn, {tier: self._reused_tokens}))
        if turn > 0:  # the first one warms up
            self.rounds.cold.append(cold)
            for tier, hit in zip((DEVICE, HOST, DISK), found, strict=True):
                self.rounds.hits[tier].append(hit)

    def _ask(self, turn: int, hits: dict[str, int]) -> Hit:
        self._prefill_s = 0.0
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        completion = run_one(self._engine, self._prompt, params, salt=f"round {turn}")
        assert completion.hit_tokens == hits, f"{dict(completion.hit_tokens)} instead of {hits}"
        settle(self._engine)
        return Hit(completion.ttft_s, self._prefill_s)

    def finish(self, num_bytes: int) -> Rounds:
        self.rounds.num_bytes = num_bytes
        for tier, (src, dst) in ROUTE_FROM.items():
            labels = {"src": src, "dst": dst}
            sample = self._engine.cache.metrics.registry.get_sample_value
            moved = sample(specs.COPIED_BYTES.name, labels)
            seconds = sample(f"{specs.COPY_SECONDS.name}_sum", labels)
            assert moved, f"nothing came from {src}"
            assert seconds
            self.rounds.bytes_per_s[tier] = moved / seconds
        return self.rounds


@contextmanager
def opened(options: ServeOptions, num_rounds: int) -> Iterator[tuple[Bench, int]]:
    """Yield a bench on an engine with three tiers, and the number of bytes that a load moves."""
    setting = probe(options)
    num_tokens = options.ttft_tokens
    (prompt,) = setting.prompts(1, num_tokens)
    room, cached = options.blocks(num_tokens + 1), options.blocks(num_tokens)
    reused = options.reused_tokens(num_tokens)
    with (
        scratch_disk(options) as disk,
        open_engine(
            options,
            setting.info,
            2 * room,
            4 * cached,
            disk,
            (num_rounds + 2) * cached,
            load_policy=LoadPolicy.ALWAYS,
        ) as engine,
    ):
        num_bytes = options.blocks(reused) * setting.info.bytes_per_block
        yield Bench(engine, prompt, reused), num_bytes


def measure(options: ServeOptions, num_rounds: int) -> Rounds:
    with opened(options, num_rounds) as (bench, num_bytes):
        for turn in range(num_rounds + 1):
            bench.run(turn)
        return bench.finish(num_bytes)


def table(rounds: Rounds) -> Table:
    lines = []
    for tier, hits in {**rounds.hits, "nothing": rounds.cold}.items():
        times = [median(hit.ttft_s for hit in hits), median(hit.prefill_s for hit in hits)]
        if tier in rounds.hits:
            times.append(median(rounds.least_s(tier, at) for at in range(len(hits))))
        shown = [f"{seconds * 1e3:.2f}" for seconds in times]
        ratio = f"{median(rounds.ratios(tier)):.3f}" if tier in rounds.hits else ""
        lines.append([tier, *shown, *[""] * (3 - len(shown)), ratio])
    return table_of(
        "time to first token, milliseconds, medians",
        ("from",),
        ("TTFT", "computing", "tail + bytes", "ratio"),
        lines,
    )


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of("server.first_token", __doc__)
    parser.add_argument("--model", default="kvtier-tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=PROMPT_TOKENS, help="of the prompt")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--disk-path", type=Path, help="directory for the slab (temporary files)")
    given = parser.parse_args(arguments)
    machine = machine_facts()
    options = ServeOptions(
        model=given.model,
        device=given.device,
        disk_path=given.disk_path,
        ttft_tokens=given.tokens,
    )
    rounds = measure(options, given.rounds)
    targets = [
        judged("T1'", median_with_interval(rounds.ratios(tier)), WANTED, at_least=False, tier=tier)
        for tier in rounds.hits
    ]
    rows = [
        {"tier": tier, "ttft_s": hit.ttft_s, "prefill_s": hit.prefill_s}
        for tier, hits in {**rounds.hits, "nothing": rounds.cold}.items()
        for hit in hits
    ]
    rates = {tier: round(rate / 1e9, 3) for tier, rate in rounds.bytes_per_s.items()}
    shown = table(rounds)
    report(given.json, "first_token", machine, rows, targets, shown, gigabytes_per_s=rates)


if __name__ == "__main__":
    main()
