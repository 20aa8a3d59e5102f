"""The report's figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.tools.bench_serve.overhead import OverheadResult
from kvtier.tools.bench_serve.summary import PLACES
from kvtier.tools.bench_serve.ttft import COLD, TtftResult
from kvtier.tools.report import svg
from kvtier.tools.report.figures import between, counted, milliseconds, percent
from kvtier.tools.report.stats import Estimate
from kvtier.tools.report.svg import INK, LINE, MUTED, SvgPicture, picture

COLOURS = {COLD: svg.COLD, HOST: svg.HOST, DEVICE: svg.DEVICE, DISK: svg.DISK}

LABEL_HEIGHT = 0.42
"""Height of a row's label above the row; rows are 1 apart."""


def ttft_distribution(result: TtftResult) -> SvgPicture:
    """Draw every request as a dot, by source; time on a logarithmic axis."""

    def draw(width: float) -> Figure:
        figure = Figure(figsize=(width, 0.85 * len(PLACES) + 0.7), layout="constrained")
        axes = figure.add_subplot()
        places = [place for place in PLACES if result.summary(place)]
        for row, place in enumerate(reversed(places)):
            values = result.times_from(place)
            _strip(axes, row, values, COLOURS[place])
            summary = result.summary(place)
            assert summary is not None
            axes.text(
                0.0, row + LABEL_HEIGHT, PLACES[place], transform=axes.get_yaxis_transform(),
                va="center", ha="left", fontweight="bold", color=INK,
            )  # fmt: skip
            axes.text(
                1.0, row + LABEL_HEIGHT, f"median {milliseconds(summary.p50)}",
                transform=axes.get_yaxis_transform(), va="center", ha="right", color=MUTED,
            )  # fmt: skip
        axes.set_ylim(-0.35, len(places) - 0.3)
        axes.set_yticks([])
        _log_milliseconds(axes, "x", [row.ttft_ms for row in result.rows])
        axes.set_xlabel("time to first token, logarithmic")
        return figure

    return picture(
        draw,
        "Each dot is one request, one at a time. The bar marks the median.",
        "Time to first token of every request, by source of the prompt, on a logarithmic axis.",
    )


def second_pass(result: TtftResult) -> SvgPicture:
    """Draw the second pass in the order of its requests: time above, source of tokens below."""
    rows = [row for row in result.rows if row.turn == 2]

    def draw(width: float) -> Figure:
        figure = Figure(figsize=(width, 4.3), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        cold = result.summary(COLD)
        assert cold is not None
        above.axhline(cold.p50, color=COLOURS[COLD], linewidth=1.4, dashes=(4, 3))
        above.annotate(
            f"median without the cache: {milliseconds(cold.p50)}", (1.0, cold.p50), (0, 4),
            xycoords=above.get_yaxis_transform(), textcoords="offset points",
            va="bottom", ha="right", color=MUTED,
        )  # fmt: skip
        order = np.array([row.order + 1 for row in rows])
        for place, marker in ((HOST, "o"), (DEVICE, "D"), (COLD, "s")):
            chosen = [row for row in rows if row.served_from == place]
            above.plot(
                [row.order + 1 for row in chosen], [row.ttft_ms for row in chosen], marker,
                color=COLOURS[place], markersize=4.5, markeredgewidth=0,
            )  # fmt: skip
        times = [cold.p50 * 1.8, *(row.ttft_ms for row in rows)]
        _log_milliseconds(above, "y", times)
        above.set_title("Time to first token", loc="left", fontsize=10, fontweight="bold")
        base = np.zeros(len(rows))
        for place in (DEVICE, HOST, COLD):
            heights = np.array(
                [
                    result.prompt_tokens - sum(row.hit_tokens.values())
                    if place == COLD
                    else row.hit_tokens.get(place, 0)
                    for row in rows
                ]
            )
            below.bar(order, heights, 0.82, base, color=COLOURS[place], linewidth=0)
            base += heights
        below.set_title(
            "Prompt tokens, by source",
            loc="left", fontsize=10, fontweight="bold",
        )  # fmt: skip
        above.tick_params(bottom=False)
        below.set_xlim(0.4, len(rows) + 0.6)
        below.set_ylim(0, result.prompt_tokens)
        below.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        below.set_xlabel("requests of the second pass, in order")
        for axes in (above, below):
            axes.grid(visible=False, axis="x")
        return figure

    return picture(
        draw,
        f"The device pool has room for {counted(result.device_prompts, 'prompt')}, the host tier "
        "for all. The newest prompts are asked first, so they are found on the device; the older "
        "ones come from the host. The end of each prompt is always computed.",
        "Requests of the second pass in order: time to first token, and tokens by tier.",
    )


def overhead_pairs(result: OverheadResult) -> SvgPicture:
    """Draw the ratio on / off of every pair, with the median and a band of one per cent."""
    lines: list[tuple[str, list[float], Estimate]] = [
        ("Time to first token", [row.ttft_ratio for row in result.rows], result.ttft_ratio),
        ("Throughput", [row.throughput_ratio for row in result.rows], result.throughput_ratio),
    ]

    def draw(width: float) -> Figure:
        figure = Figure(figsize=(width, 2.5), layout="constrained")
        axes = figure.add_subplot()
        every = np.array([100 * (value - 1) for _, values, _ in lines for value in values])
        # Outliers of a busy machine would squeeze the rest, so they are drawn at the edge.
        edge = max(5.0, 1.3 * float(np.percentile(np.abs(every), 80)))
        axes.axvspan(-1, 1, color=LINE, alpha=0.55, linewidth=0)
        axes.axvline(0, color=MUTED, linewidth=1)
        for row, (title, values, median) in enumerate(reversed(lines)):
            points = [100 * (value - 1) for value in values]
            inside = [value for value in points if abs(value) < edge]
            _strip(axes, row, inside, COLOURS[DEVICE], median=False)
            for marker, place, count in (
                ("<", -0.985 * edge, sum(value <= -edge for value in points)),
                (">", 0.985 * edge, sum(value >= edge for value in points)),
            ):
                axes.plot(
                    [place] * count, row + _jitter(count), marker, color=COLOURS[DEVICE],
                    alpha=0.6, markersize=5, markeredgewidth=0,
                )  # fmt: skip
            low, high = (
                min(edge, max(-edge, 100 * (value - 1))) for value in (median.low, median.high)
            )
            axes.plot([low, high], [row, row], color=INK, linewidth=1.6)
            at_median = min(edge, max(-edge, 100 * (median.value - 1)))
            axes.plot([at_median], [row], "D", color=INK, markersize=6)
            axes.text(
                0.0, row + LABEL_HEIGHT, title, transform=axes.get_yaxis_transform(),
                va="center", ha="left", fontweight="bold",
            )  # fmt: skip
            axes.text(
                1.0, row + LABEL_HEIGHT, between(median.changed(lambda ratio: ratio - 1)),
                transform=axes.get_yaxis_transform(), va="center", ha="right", color=MUTED,
            )  # fmt: skip
        axes.set_xlim(-edge, edge)
        axes.set_ylim(-0.35, len(lines) - 0.3)
        axes.set_yticks([])
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda value, _: percent(value / 100, signed=True, digits=0))
        )
        axes.set_xlabel("with the cache, against without")
        return figure

    return picture(
        draw,
        "Each dot compares both engines on the same new prompts. The diamond is the median, the "
        "line through it its 95 % interval; triangles lie outside the picture. Grey: within 1 %.",
        "Ratio of every pair with the cache on and off, with the median.",
    )


def _strip(axes: Axes, row: int, values: Sequence[float], colour: str, median: bool = True) -> None:
    """Draw values as dots around a row, at reproducible positions."""
    axes.plot(
        values, row + _jitter(len(values)), "o", color=colour, alpha=0.55, markersize=5,
        markeredgewidth=0,
    )  # fmt: skip
    if median and values:
        middle = float(np.median(values))
        axes.plot([middle, middle], [row - 0.2, row + 0.2], color=INK, linewidth=2)


def _jitter(count: int) -> npt.NDArray[np.float64]:
    """Return offsets that keep neighbours apart, from a low-discrepancy sequence."""
    return (np.arange(count, dtype=np.float64) * 0.6180339887 % 1 - 0.5) * 0.3


def _log_milliseconds(axes: Axes, which: str, values: Sequence[float]) -> None:
    """Make an axis logarithmic, with a few round ticks in ms."""
    low, high = min(values) / 1.25, max(values) * 1.25
    steps = (1, 2, 5) if high / low < 300 else (1,)
    ticks = [
        step * 10.0**power
        for power in range(-3, 7)
        for step in steps
        if low <= step * 10.0**power <= high
    ]
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    (axes.set_xlim if which == "x" else axes.set_ylim)(low, high)
    axis.set_ticks(ticks)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g} ms"))
    axis.set_minor_formatter(NullFormatter())
    axis.set_ticks([], minor=True)
