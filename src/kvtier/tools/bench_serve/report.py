"""HTML report in one file without external resources, for wide, narrow and dark screens."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.tools.bench_serve import plots
from kvtier.tools.bench_serve.accuracy import TIERS, AccuracyResult
from kvtier.tools.bench_serve.result import ServeResult
from kvtier.tools.bench_serve.store import STORE, StoreResult
from kvtier.tools.bench_serve.summary import (
    FROM_STORE,
    PLACES,
    headline,
    subtitle,
    verdicts,
)
from kvtier.tools.bench_serve.tamper import Damage
from kvtier.tools.bench_serve.ttft import COLD, WARM, TtftResult
from kvtier.tools.report.figures import Verdict, milliseconds, number, percent
from kvtier.tools.report.machine import Fact
from kvtier.tools.report.page import render_page
from kvtier.tools.report.stats import Estimate, Summary
from kvtier.tools.report.target import target_bound, target_figure, target_interval

DAMAGES = {
    Damage.REPEATED: "a block twice",
    Damage.TOKEN: "one token's signs changed",
    Damage.OTHER: "another prompt's block",
}

MACHINE_WORDS = {
    "cpu": "Processor",
    "cores": "Cores",
    "memory_gib": "Memory, GiB",
    "kernel": "Kernel",
    "python": "Python",
    "native_core": "Native core",
    "load_average": "Load average before",
    "load_average_after": "Load average after",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """Bar of the chart at the top. width: per cent of the longest bar."""

    place: str
    name: str
    time: str
    change: str
    width: float


def render_report(result: ServeResult) -> str:
    """Return the report as one HTML document."""
    overhead, ttft = result.overhead, result.ttft
    return render_page(
        "kvtier.tools.bench_serve/serve.html.j2",
        result=result,
        headline=headline(result),
        subtitle=subtitle(result),
        bars=_bars(ttft, result.store),
        cards=_cards(result),
        summaries=[] if ttft is None else _summaries(ttft),
        distribution=None if ttft is None else plots.ttft_distribution(ttft),
        second_pass=None if ttft is None else plots.second_pass(ttft),
        overhead_picture=None
        if overhead is None or not overhead.full_size
        else plots.overhead_pairs(overhead),
        accuracy=None if result.accuracy is None else _accuracy_table(result.accuracy),
        targets=[
            {
                "id": target.target_id,
                "meaning": target.meaning,
                "value": target_figure(target),
                "interval": target_interval(target),
                "bound": target_bound(target),
                "outcome": target.outcome,
                "deviation": target.deviation,
            }
            for target in result.targets
        ],
        machine=[
            (MACHINE_WORDS.get(name, name), _fact(value)) for name, value in result.machine.items()
        ],
        model=_model(result),
    )


def _bars(result: TtftResult | None, store: StoreResult | None) -> list[Bar]:
    """Return bars of mean times: cold, then by tier, slowest first."""
    found: list[tuple[str, str, Summary | None, Estimate | None]] = []
    if result is not None:
        found += [
            (at, name, result.summary(at), None if at == COLD else result.reduction_from(at))
            for at, name in PLACES.items()
        ]
    elif store is not None:
        found.append((COLD, PLACES[COLD], store.cold, None))
    if store is not None:
        found.insert(1, (STORE, FROM_STORE, store.warm, store.saved))
    longest = max((each.mean for _, _, each, _ in found if each is not None), default=0.0)
    bars = []
    for place, name, summary, saved in found:
        if summary is None:
            continue
        change = ""
        if saved is not None and saved.is_bounded:
            change = percent(-saved.value, signed=True)
        width = round(100 * summary.mean / longest, 2)
        bars.append(Bar(place, name, milliseconds(summary.mean), change, width))
    return bars


def _cards(result: ServeResult) -> list[Verdict]:
    """Return the findings that the bars at the top do not show."""
    shown = {"Time to first token", *PLACES.values()} if result.ttft is not None else set()
    cards = [verdict for verdict in verdicts(result) if verdict.title not in shown]
    if result.ttft is not None:
        tokens = sum(result.ttft.hit_tokens(tier) for tier in WARM)
        asked = result.ttft.num_warm * result.ttft.prompt_tokens
        cards.insert(
            0,
            Verdict(
                "Prompt tokens from cache",
                percent(tokens / asked),
                f"{tokens:,} of {asked:,} prompt tokens of the later passes came from the cache.",
            ),
        )
    return cards


def _summaries(result: TtftResult) -> list[tuple[str, str, int, list[str]]]:
    rows = []
    for place in PLACES:
        summary = result.summary(place)
        if summary is not None:
            count = len(result.times_from(place))
            values = (summary.mean, summary.p50, summary.p90, summary.p99, summary.max)
            cells = ["–" if value is None else number(value) for value in values]
            rows.append((place, PLACES[place], count, cells))
    return rows


def _accuracy_table(result: AccuracyResult) -> dict[str, object]:
    asked = result.num_prompts
    return {
        "prompts": asked,
        "prompt_tokens": result.prompt_tokens,
        "reused_tokens": result.reused_tokens,
        "steps": result.steps,
        "tiers": [f"from {tier}" for tier in TIERS],
        "rows": [
            ("same logits, bit for bit", [_cell(result.num_equal(tier), asked) for tier in TIERS]),
            *(
                (
                    f"damage noticed: {words}",
                    [_cell(result.num_noticed(tier, damage=kind), asked) for tier in TIERS],
                )
                for kind, words in DAMAGES.items()
            ),
        ],
    }


def _cell(count: int, asked: int) -> tuple[str, bool]:
    return f"{count} of {asked}", count == asked


def _model(result: ServeResult) -> str:
    info = result.info
    return (
        f"{info.model_name}, {info.num_parameters / 1e6:,.1f} million parameters, {info.attention} "
        f"attention, {info.dtype} on {info.device}; blocks of {info.block_size} tokens "
        f"({info.bytes_per_block / 1024:,.0f} KiB), prefill in chunks of {info.chunk_tokens}"
    )


def _fact(value: Fact) -> str:
    if isinstance(value, list):
        return ", ".join(f"{number:g}" for number in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
