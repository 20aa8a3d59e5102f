"""Report of measurements under an engine: rows and tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from rich.table import Table

from benchmarks.engines.multi_turn_script import Run, in_both
from benchmarks.engines.requests import Asked, Burst, Check, NewPrompts
from benchmarks.engines.slow_disk import SlowDisk
from kvtier.tools.report.stats import Estimate, median_with_interval, rounded, summarize
from kvtier.tools.report.target import is_met

LOSS = 0.01

SINGLE_RUN = "multi-turn"

Row = dict[str, object]
Measured = TypeVar("Measured", Asked, Burst)


@dataclass(slots=True)
class Results:
    """All measurements."""

    checks: list[Check] = field(default_factory=list)
    runs: dict[int, dict[str, Run]] = field(default_factory=dict)
    """By round and contestant."""
    new: dict[str, list[NewPrompts]] = field(default_factory=dict)
    """By contestant, one per start of a pair of servers: one without kvtier and one with it."""
    slow_disk: dict[str, SlowDisk] = field(default_factory=dict)
    """By contestant."""


def turn_row(contestant: str, number: int, run: Run) -> Row:
    """Return the row of one run of the script."""
    ttft = summarize([turn.ttft_ms for turn in run.turns])
    assert ttft is not None, "a run has requests"
    return {
        "kind": SINGLE_RUN,
        "contestant": contestant,
        "round": number,
        "requests": len(run.turns),
        "ttft_ms": round(run.ttft_ms, 1),
        "ttft_p50_ms": round(ttft.p50, 1),
        "ttft_p90_ms": rounded(ttft.p90, 1),
        "later_turns_ttft_ms": round(run.later_ttft_ms, 1),
        "tpot_ms": round(run.tpot_ms, 2),
        "requests_per_s": round(run.requests_per_s, 3),
        "prompt_tokens": run.prompt_tokens,
        "cached_share": round(run.cached_tokens / max(1, run.prompt_tokens), 4),
        "from_tier_share": round(run.from_tier_tokens / max(1, run.prompt_tokens), 4),
        "cpu_s_per_request": round(run.cpu_s / run.num_requests, 3),
    }


def summary_rows(
    runs: dict[int, dict[str, Run]], base: str, beside: Mapping[str, str]
) -> list[Row]:
    """Return each contestant's medians over the rounds, and those of its ratios to ``base``.

    Ratios are taken in the same round, over the requests that both had. ``same_answers`` counts
    conversations that ended in both, with every answer equal to that of ``base``.

    Args:
        runs: by round and contestant.
        base: contestant to compare with.
        beside: further contestants whose time to first token is compared, by a short name.
    """
    names = list(dict.fromkeys(name for run in runs.values() for name in run))
    rows: list[Row] = []
    for name in names:
        mine = [run[name] for run in runs.values() if name in run]
        row: Row = {
            "kind": "multi-turn, medians",
            "contestant": name,
            "rounds": len(mine),
            "ttft_ms": median_of(mine, lambda run: run.ttft_ms),
            "later_turns_ttft_ms": median_of(mine, lambda run: run.later_ttft_ms),
            "tpot_ms": median_of(mine, lambda run: run.tpot_ms),
            "requests_per_s": median_of(mine, lambda run: run.requests_per_s),
            "cpu_s_per_request": median_of(mine, lambda run: run.cpu_s / run.num_requests),
        }
        if both := pairs(runs, base, name):
            for what, of in RUN_RATIOS.items():
                row[what] = spread(median_with_interval([of(mine) / of(it) for it, mine in both]))
            ended = [
                (it.answers[each], mine.answers[each])
                for it, mine in both
                for each in it.answers.keys() & mine.answers.keys()
            ]
            row["same_answers"] = sum(theirs == ours for theirs, ours in ended)
            row["conversations"] = len(ended)
            row["shared_requests"] = sum(len(mine.turns) for _, mine in both)
        for short, other in beside.items():
            if both := pairs(runs, other, name):
                ratios = [mine.ttft_ms / it.ttft_ms for it, mine in both]
                row[f"ttft_to_{short}"] = spread(median_with_interval(ratios))
        rows.append(row)
    return rows


def pairs(runs: dict[int, dict[str, Run]], base: str, name: str) -> list[tuple[Run, Run]]:
    """Return per round both runs with the requests that both had; none if ``name`` is ``base``."""
    return [
        in_both(run[base], run[name])
        for run in runs.values()
        if {base, name} <= set(run) and name != base
    ]


RUN_RATIOS: dict[str, Callable[[Run], float]] = {
    "ttft_ratio": lambda run: run.ttft_ms,
    "later_turns_ttft_ratio": lambda run: run.later_ttft_ms,
    "tpot_ratio": lambda run: run.tpot_ms,
    "cpu_per_request_ratio": lambda run: run.cpu_s / run.num_requests,
}


def median_of(runs: Sequence[Run], of: Callable[[Run], float]) -> float:
    return round(statistics.median(of(run) for run in runs), 3)


def spread(found: Estimate) -> Row:
    """Return an estimate as a cell. low, high: None if there are too few values."""
    return {name: rounded(value) for name, value in asdict(found).items()}


ASKED_RATIOS: dict[str, Callable[[Asked], float]] = {
    "ttft_ratio": lambda asked: asked.ttft_ms,
    "tpot_ratio": lambda asked: asked.tpot_ms,
    "cpu_ratio": lambda asked: asked.cpu_s,
}
BURST_RATIOS: dict[str, Callable[[Burst], float]] = {
    "tokens_per_s_ratio": lambda burst: burst.tokens_per_s,
    "burst_cpu_ratio": lambda burst: burst.cpu_s,
}


def new_prompt_rows(contestant: str, starts: Sequence[NewPrompts]) -> list[Row]:
    """Return rows for new prompts of a contestant and the one without it, and their ratio.

    The ratio of a start is the median over pairs of the same prompts. The result is the median over
    starts, because servers of a kind differ from start to start.
    """
    if not starts:
        return []
    rows: list[Row] = []
    for mine in zip(*(row for start in starts for row in start.asked), strict=True):
        row: Row = {
            "kind": "new prompts",
            "contestant": mine[0].contestant,
            "prompts": len(mine),
            "reused": sum(each.cached_tokens for each in mine),
            "ttft_ms": spread(median_with_interval([each.ttft_ms for each in mine])),
            "tpot_ms": spread(median_with_interval([each.tpot_ms for each in mine])),
            "cpu_s": spread(median_with_interval([each.cpu_s for each in mine])),
        }
        rows.append(row)
    bursts = zip(*(row for start in starts for row in start.bursts), strict=True)
    for row, those in zip(rows, bursts, strict=False):
        row["tokens_per_s"] = spread(median_with_interval([each.tokens_per_s for each in those]))
    ratios: Row = {"kind": "new prompts, ratios", "contestant": contestant, "starts": len(starts)}
    for what, of in ASKED_RATIOS.items():
        ratios[what] = over_starts([median_ratio(start.asked, of) for start in starts])
    for what, of_burst in BURST_RATIOS.items():
        ratios[what] = over_starts([median_ratio(start.bursts, of_burst) for start in starts])
    return [*rows, ratios]


def median_ratio(pairs: Sequence[Sequence[Measured]], of: Callable[[Measured], float]) -> float:
    """Return the median ratio of the second to the first."""
    return statistics.median(of(mine) / of(alone) for alone, mine in pairs)


def over_starts(ratios: Sequence[float]) -> Row:
    """Return the median of the starts' ratios, and each of them."""
    median: Row = spread(median_with_interval(ratios))
    return {**median, "by_start": [round(ratio, 4) for ratio in ratios]}


def changed(cell: object, change: Callable[[float], float]) -> Estimate:
    assert isinstance(cell, dict)
    bounds = {name: cell[name] for name in ("low", "high") if cell[name] is not None}
    return Estimate(cell["value"], **bounds).changed(change)


def judged_row(found: Estimate, target: float) -> Row:
    return {**spread(found), "target": target, "met": is_met(found, target, at_least=False)}


def measured_rows(results: Results, medians: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Return all rows in reading order."""
    each_run = [
        turn_row(name, number, run)
        for number, those in results.runs.items()
        for name, run in those.items()
    ]
    checks: list[Row] = [{"kind": "check", **asdict(check)} for check in results.checks]
    slow = [row for name, each in results.slow_disk.items() for row in each.rows(name)]
    return [*checks, *medians, *each_run, *new, *slow]


@dataclass(frozen=True, slots=True)
class TurnTarget:
    """Target of the mean time to first token in the multi-turn benchmark.

    Attributes:
        target_id: its id.
        figure: ratio in the rows of medians that is judged, or its change if ``is_change``.
        contestants: contestants that it counts for, with the largest value wanted.
        facts: further fields of the target.
    """

    target_id: str
    figure: str
    contestants: Mapping[str, float]
    is_change: bool = False
    facts: Mapping[str, object] = field(default_factory=dict)


def turn_targets(turns: Sequence[Row], wanted: Sequence[TurnTarget]) -> list[Row]:
    """Return the targets of the multi-turn benchmark that its medians decide."""
    found = []
    for row in turns:
        name = str(row["contestant"])
        for target in wanted:
            if name in target.contestants and target.figure in row:
                less = 1.0 if target.is_change else 0.0
                value = changed(row[target.figure], lambda ratio, less=less: ratio - less)  # type: ignore[misc]
                common = {"id": target.target_id, "contestant": name, **target.facts}
                found.append({**common, **judged_row(value, target.contestants[name])})
    return found


def result_json(
    results: Results,
    base: str,
    beside: Mapping[str, str],
    wanted: Sequence[TurnTarget],
    rows: Sequence[Row] = (),
    targets: Sequence[Row] = (),
) -> dict[str, list[Row]]:
    """Return ``rows`` and ``targets`` of the result.

    Args:
        results: all measurements.
        base, beside: see ``summary_rows``.
        wanted: targets of the multi-turn benchmark.
        rows, targets: of further parts.
    """
    medians = summary_rows(results.runs, base, beside)
    new = [row for name, starts in results.new.items() for row in new_prompt_rows(name, starts)]
    return {
        "rows": [*measured_rows(results, medians, new), *rows],
        "targets": [*turn_targets(medians, wanted), *targets, *common_targets(results, new)],
    }


def common_targets(results: Results, new: Sequence[Row]) -> list[Row]:
    """Return targets T2 and T3.

    T2 is the loss of time to first token and of throughput without reuse, T3 the cost of a disk
    that is slower than computing. low, high: bounds of the true value. met: None if the target lies
    between them.
    """
    found = []
    for row in new:
        common = {"id": "T2", "contestant": row["contestant"]}
        if "ttft_ratio" in row:
            loss = changed(row["ttft_ratio"], lambda ratio: ratio - 1)
            found.append({**common, "measure": "TTFT", **judged_row(loss, LOSS)})
        if "tokens_per_s_ratio" in row:
            loss = changed(row["tokens_per_s_ratio"], lambda ratio: 1 - ratio)
            found.append({**common, "measure": "throughput", **judged_row(loss, LOSS)})
    for name, slow in results.slow_disk.items():
        found += slow.targets(name)
    return found


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table per kind of row: a line per figure, a column per contestant.

    Single runs are left out.
    """
    found = []
    for kind in dict.fromkeys(str(row["kind"]) for row in rows if row["kind"] != SINGLE_RUN):
        those = [row for row in rows if row["kind"] == kind]
        table = Table(title=kind)
        table.add_column("")
        for row in those:
            table.add_column(str(row.get("contestant", "")), justify="right")
        for name in dict.fromkeys(name for row in those for name in row):
            if name not in ("kind", "contestant"):
                table.add_row(name.replace("_", " "), *(_cell(row.get(name)) for row in those))
        found.append(table)
    return found


def _cell(value: object) -> str:
    if isinstance(value, dict):
        if value["low"] is None:
            return f"{value['value']:g}"
        return f"{value['value']:g} ({value['low']:g} to {value['high']:g})"
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
