"""HTML report in one file without external resources, for wide, narrow and dark screens."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.tools.replay import plots
from kvtier.tools.replay.policies import OPTIMUM
from kvtier.tools.replay.result import ReplayResult
from kvtier.tools.replay.sizing import Point
from kvtier.tools.replay.summary import (
    CANT_TELL,
    RECOMMENDED,
    SIZE_COLUMNS,
    WRITTEN,
    accelerators,
    headline,
    hit_rows,
    money,
    paragraphs,
    policy_name,
    setup_cells,
    size_cells,
    size_mark,
    subtitle,
    unique_bytes,
)
from kvtier.tools.report.figures import Verdict, capacity, duration, number, percent
from kvtier.tools.report.page import render_page


@dataclass(frozen=True, slots=True)
class ReportRow:
    """Row of a table of sizes. style: a class of the page."""

    cells: list[str]
    style: str


def render_report(result: ReplayResult) -> str:
    """Return the report as one HTML document."""
    host_bytes = result.best_host.num_bytes if result.best_host is not None else 0
    return render_page(
        "kvtier.tools.replay/replay.html.j2",
        result=result,
        headline=headline(result),
        subtitle=subtitle(result),
        paragraphs=paragraphs(result),
        cards=_cards(result),
        policies=[policy_name(name) for name in result.curves],
        hit_rows=hit_rows(result),
        hits=plots.hits(result) if result.host else None,
        saved=plots.saved(result) if result.host else None,
        host_rows=_rows(result, result.host, is_disk=False),
        disk_rows=_rows(result, result.disk, is_disk=True),
        disk_title=f"A disk below {capacity(host_bytes) if host_bytes else 'no'} host memory",
        size_columns=SIZE_COLUMNS,
        written=WRITTEN,
        setups=[setup_cells(result, setup) for setup in result.setups],
    )


def _cards(result: ReplayResult) -> list[Verdict]:
    facts, evidence = result.facts, result.evidence
    busy = facts.computing_s / facts.window_s if facts.window_s else 0.0
    cards = [
        Verdict(
            "Prefill without reuse",
            f"{number(busy)} accelerators" if facts.window_s else "–",
            f"Computing all {facts.tokens:,} prompt tokens takes {duration(facts.computing_s)}.",
        ),
        Verdict(
            "Reusable blocks",
            percent(facts.ceiling),
            f"{facts.num_references - facts.num_unique:,} of {facts.num_references:,} blocks "
            f"occurred before. Distinct blocks take {capacity(unique_bytes(result))}.",
        ),
    ]
    if evidence.age_p50_s is not None and evidence.age_p90_s is not None:
        cards.append(
            Verdict(
                "Median time to reuse",
                duration(evidence.age_p50_s),
                f"90 % of the reused blocks are reused within {duration(evidence.age_p90_s)}.",
            )
        )
    if result.gained is not None and result.choice is not None and result.choice.net > 0:
        low, high = (
            (duration(max(0.0, result.gained.low)), duration(result.gained.high))
            if result.gained.is_bounded
            else ("?", "?")
        )
        cards.append(
            Verdict(
                "Saved per hour",
                f"{duration(result.gained.value)} of accelerator time",
                f"The work of {accelerators(result.gained.value / 3600)}. 95 % sure: {low} to "
                f"{high}. Net of its cost, {money(result.choice.net)} per hour.",
            )
        )
    ours = result.curves.get(result.policy, ())
    best = result.curves.get(OPTIMUM, ())
    gaps = [(b.hit_ratio - a.hit_ratio, a.num_bytes) for a, b in zip(ours, best, strict=False)]
    if gaps:
        gap, size = max(gaps)
        cards.append(
            Verdict(
                "Gap to the optimum",
                f"{100 * gap:.1f} points",
                f"The largest difference of hit ratios between {policy_name(result.policy)} and "
                f"the optimum, at {capacity(size)}.",
            )
        )
    return cards


def _rows(result: ReplayResult, points: tuple[Point, ...], is_disk: bool) -> list[ReportRow]:
    styles = {RECOMMENDED: "good", CANT_TELL: "pale"}
    rows = []
    for point in points:
        mark = size_mark(result, point, is_disk)
        rows.append(ReportRow([*size_cells(result, point, is_disk), mark], styles.get(mark, "")))
    return rows
