"""Figures of a load: for all requests, for first turns, and for later ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from statistics import median

from rich.console import Console
from rich.table import Table

from kvtier.core.errors import printable
from kvtier.tools.bench_url.exchange import Exchange
from kvtier.tools.bench_url.load import LoadRun
from kvtier.tools.report.figures import counted, milliseconds, number, percent
from kvtier.tools.report.stats import percentile, rounded

NOT_REPORTED = (
    "No cached tokens were reported. Servers that have to be told to report them: vLLM by "
    "--enable-prompt-tokens-details, SGLang by --enable-cache-report."
)


@dataclass(frozen=True, slots=True)
class Times:
    """Median and 95th percentile; None if there are too few values."""

    median_ms: float | None
    p95_ms: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        """Summarize times in seconds."""
        values = [1000 * second for second in seconds]
        return cls(
            rounded(median(values), 3) if values else None, rounded(percentile(values, 95), 3)
        )


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """Figures of some requests. Tokens are sums; None if the server reports none."""

    requests: int
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    ttft: Times
    end_to_end: Times

    @classmethod
    def of(cls, found: Sequence[Exchange]) -> TurnFigures:
        """Summarize answered requests."""
        return cls(
            len(found),
            _sum(each.prompt_tokens for each in found),
            _sum(each.cached_tokens for each in found),
            _sum(each.completion_tokens for each in found),
            Times.of([each.first_token_s for each in found]),
            Times.of([each.whole_s for each in found]),
        )

    @property
    def cached_share(self) -> float | None:
        """Share of the prompt tokens that the server had cached."""
        if self.cached_tokens is None or not self.prompt_tokens:
            return None
        return self.cached_tokens / self.prompt_tokens


def figures(run: LoadRun) -> dict[str, TurnFigures]:
    """Return the figures of all requests, of first turns and of later ones."""
    first = [answer.exchange for answer in run.answers if answer.turn == 1]
    later = [answer.exchange for answer in run.answers if answer.turn > 1]
    return {
        "all": TurnFigures.of(first + later),
        "first turns": TurnFigures.of(first),
        "later turns": TurnFigures.of(later),
    }


def rates(run: LoadRun) -> dict[str, float]:
    """Return requests and tokens per second; tokens only if the server reports them."""
    every = figures(run)["all"]
    told = {
        "requests": every.requests,
        "prompt_tokens": every.prompt_tokens,
        "completion_tokens": every.completion_tokens,
    }
    return {name: num / run.wall_s for name, num in told.items() if num is not None}


def errors(run: LoadRun) -> list[tuple[str, int, str]]:
    """Return kind, number and an example of failed requests, the most frequent kind first."""
    examples = {failure.kind: str(failure) for failure in reversed(run.failures)}
    kinds = Counter(failure.kind for failure in run.failures)
    return [(kind, num, examples[kind]) for kind, num in kinds.most_common()]


def load_json(run: LoadRun) -> dict[str, object]:
    """Return everything as one object, as every benchmark prints it."""
    return {
        "benchmark": "url",
        "url": run.endpoint.server + run.endpoint.path,
        "model": run.endpoint.model,
        "options": {**asdict(run.options), "text": [str(each) for each in run.options.text]},
        "wall_s": rounded(run.wall_s),
        "per_second": {name: rounded(each) for name, each in rates(run).items()},
        **{name.replace(" ", "_"): asdict(each) for name, each in figures(run).items()},
        "not_sent": run.num_not_sent,
        "errors": [
            {"kind": kind, "requests": num, "example": example}
            for kind, num, example in errors(run)
        ],
    }


def show_load(console: Console, run: LoadRun) -> None:
    """Print a table of the figures, and sentences below it."""
    parts = figures(run)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for heading in (
        *("requests", "prompt\ntokens", "cached", "TTFT\nmedian", "TTFT\np95"),
        *("end to end\nmedian", "end to end\np95"),
    ):
        table.add_column(heading, justify="right")
    for name, each in parts.items():
        times = (*astuple(each.ttft), *astuple(each.end_to_end))
        table.add_row(
            name,
            f"{each.requests:,}",
            "" if each.prompt_tokens is None else f"{each.prompt_tokens:,}",
            "" if each.cached_share is None else percent(each.cached_share),
            *("" if value is None else milliseconds(value) for value in times),
        )
    console.print(table)
    told = ", ".join(f"{number(num)} {name.replace('_', ' ')}" for name, num in rates(run).items())
    lines = [f"{printable(run.endpoint.model)}, {run.wall_s:.1f} s; per second: {told}"]
    if run.answers and parts["all"].cached_tokens is None:
        lines.append(NOT_REPORTED)
    lines += [f"{counted(num, 'request')} failed: {example}" for _, num, example in errors(run)]
    if run.num_not_sent:
        lines.append(f"{counted(run.num_not_sent, 'request')} not sent: a turn before them failed")
    for line in lines:
        console.print(line, soft_wrap=True)


def _sum(values: Iterator[int | None]) -> int | None:
    """Return the sum of the values that are not None; None if there are none."""
    told = [value for value in values if value is not None]
    return sum(told) if told else None
