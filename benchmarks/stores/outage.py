"""R3: cost of a dead or slow store for requests that it can't help."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.report.output import table_of
from benchmarks.report.targets import judged
from benchmarks.stores.servers import Place
from kvtier.serve.engine import Engine, SamplingParams
from kvtier.tools.bench_serve.engines import Setting, open_engine, probe, run_one
from kvtier.tools.bench_serve.options import ServeOptions
from kvtier.tools.report.corpus import Prompt
from kvtier.tools.report.figures import TOO_FEW
from kvtier.tools.report.stats import P99_VALUES, Estimate, Summary, percentile_ratio, summarize

MODEL, PROMPT_TOKENS, OUTPUT_TOKENS = "kvtier-tiny", 512, 2
STORED_BYTES = 1 << 30
MAX_RATIO = 1.02
SETTLE_S = 3.5
"""Time until three look-ups have failed and the store is no longer used."""


@dataclass(frozen=True, slots=True)
class TroubleRow:
    """One store."""

    store: str
    trouble: str
    """Either "dead-store" or "slow-store"."""
    first_ms: float
    """Time to first token of the first request after the trouble began."""
    with_it: Summary
    without: Summary
    num_pairs: int
    """Pairs of new prompts, with the store and without it, in turn."""
    p99_ratio: Estimate

    def as_json(self) -> dict[str, object]:
        return {
            "store": self.store,
            "measure": f"{self.trouble}, ms to first token",
            "first": round(self.first_ms, 2),
            "with_it": self.with_it.as_json(),
            "without": self.without.as_json(),
            "num_pairs": self.num_pairs,
            "p99_ratio": asdict(self.p99_ratio) if self.p99_ratio.is_bounded else None,
        }

    def target(self) -> dict[str, object]:
        return judged(
            "R3",
            self.p99_ratio,
            MAX_RATIO,
            at_least=False,
            store=self.store,
            trouble=self.trouble,
            measure=f"p99 of the time to first token, of {self.num_pairs} pairs",
        )


def measure_trouble(
    places: Sequence[type[Place]], trouble: str, num_pairs: int
) -> list[TroubleRow]:
    """Measure each store that can have this trouble."""
    setting = probe(ServeOptions(model=MODEL, ttft_prompts=2))
    rows = []
    for kind in places:
        if trouble not in kind.troubles:
            continue
        with tempfile.TemporaryDirectory(prefix="kvtier-store-") as folder:
            place = kind(Path(folder))
            try:
                rows.append(_measure(place, setting, trouble, num_pairs))
            finally:
                place.close()
    return rows


def _measure(place: Place, setting: Setting, trouble: str, num_pairs: int) -> TroubleRow:
    prompts = iter(setting.prompts(num_pairs + 3, PROMPT_TOKENS))
    pairs = []
    with (
        place.way() as (port, cause),
        _engine(setting, place.location(port, 2)) as ours,
        _engine(setting, "") as other,
    ):
        for engine in (ours, other):
            _ask(engine, next(prompts))
        with cause(trouble):
            first_ms = _ask(ours, next(prompts))
            time.sleep(SETTLE_S)
            for number, prompt in enumerate(prompts):
                order = (ours, other) if number % 2 else (other, ours)
                took = {engine: _ask(engine, prompt) for engine in order}
                pairs.append((took[ours], took[other]))
    with_it, without = (summarize([pair[at] for pair in pairs]) for at in (0, 1))
    assert with_it is not None, "there are pairs"
    assert without is not None, "there are pairs"
    ratio = percentile_ratio(pairs, 99, P99_VALUES)
    return TroubleRow(place.name, trouble, first_ms, with_it, without, len(pairs), ratio)


@contextmanager
def _engine(setting: Setting, location: str) -> Iterator[Engine]:
    options, info = setting.options, setting.info
    blocks = 8 * options.blocks(PROMPT_TOKENS + OUTPUT_TOKENS)
    storage = (location, STORED_BYTES) if location else None
    with open_engine(options, info, blocks, 4 * blocks, storage=storage) as engine:
        yield engine


def _ask(engine: Engine, prompt: Prompt) -> float:
    """Return the milliseconds to the first token."""
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    return 1000 * run_one(engine, prompt, params).ttft_s


def trouble_table(trouble: str, rows: Sequence[TroubleRow]) -> Table:
    lines = []
    for row in rows:
        ratio = TOO_FEW
        if row.p99_ratio.is_bounded:
            found = row.p99_ratio
            ratio = f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"
        figures: list[float | None] = [row.first_ms, row.with_it.p50, row.without.p50]
        figures += [row.with_it.p99, row.without.p99]
        cells = ("–" if figure is None else f"{figure:.1f}" for figure in figures)
        lines.append((row.store, *cells, ratio))
    headings = ("first", "p50", "without", "p99", "without", "p99 ratio")
    return table_of(f"ms to the first token: {trouble}, and none", ("store",), headings, lines)
