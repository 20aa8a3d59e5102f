"""The report's figures."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from kvtier.tools.replay.policies import OPTIMUM
from kvtier.tools.replay.result import ReplayResult
from kvtier.tools.replay.sizing import Point
from kvtier.tools.replay.summary import CANT_TELL, WEAK, can_tell, money, policy_name
from kvtier.tools.report.figures import capacity, percent
from kvtier.tools.report.svg import (
    COLD,
    DEVICE,
    DISK,
    GOOD,
    HOST,
    INK,
    LINE,
    MUTED,
    SvgPicture,
    picture,
)

COLOURS = (DEVICE, HOST, DISK, GOOD, INK, MUTED)
"""Colours of policies, in order; the optimum is grey."""


def hits(result: ReplayResult) -> SvgPicture:
    """Draw the hit ratio of blocks by size, a line per policy, with that of an unlimited cache."""

    def draw(width: float) -> Figure:
        figure = Figure(figsize=(width, 3.9), layout="constrained")
        axes = figure.add_subplot()
        ceiling = 100 * result.ceiling.hit_ratio
        axes.axhline(ceiling, color=MUTED, linewidth=1, dashes=(1, 2))
        axes.annotate(
            f"unlimited: {percent(result.ceiling.hit_ratio)}", (0.0, ceiling), (0, 4),
            xycoords=axes.get_yaxis_transform(), textcoords="offset points",
            va="bottom", ha="left", color=MUTED,
        )  # fmt: skip
        colours = iter(COLOURS * 2)
        for name, points in result.curves.items():
            is_best = name == OPTIMUM
            axes.plot(
                [point.num_bytes for point in points],
                [100 * point.hit_ratio for point in points],
                color=COLD if is_best else next(colours), linewidth=2, marker="o", markersize=4,
                dashes=(4, 2) if is_best else (None, None), label=policy_name(name),
            )  # fmt: skip
        axes.set_ylim(0, max(1.0, 1.12 * ceiling))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
        _sizes(axes, [point.num_bytes for point in next(iter(result.curves.values()))], width)
        axes.set_xlabel("size of the tier")
        axes.legend(frameon=False, labelcolor=INK, loc="lower right")
        return figure

    return picture(
        draw,
        "Share of all blocks that one tier of each size hits. The optimum knows the future: it "
        "evicts the block whose next use is furthest away.",
        "Hit ratio by size, a line for each policy.",
    )


def saved(result: ReplayResult) -> SvgPicture:
    """Draw the value of the time that host memory and a disk save, and their cost, by size."""
    rows = [
        ("Host memory, without a disk", result.host, HOST, result.best_host),
        ("A disk below the host memory", result.disk, DISK, result.best_disk),
    ]
    rows = [row for row in rows if row[1]]

    def draw(width: float) -> Figure:
        figure = Figure(figsize=(width, 2.9 * len(rows)), layout="constrained")
        for axes, (title, points, colour, best) in zip(
            figure.subplots(len(rows), 1, squeeze=False)[:, 0], rows, strict=True
        ):
            is_told = [can_tell(result, point) for point in points]
            _worth(axes, points, is_told, colour, best)
            axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
            _sizes(axes, [point.num_bytes for point in points], width)
        return figure

    return picture(
        draw,
        f"Value of the accelerator time saved per hour, and cost of the memory. {WEAK}",
        "Value and cost of host memory and of a disk, by size.",
    )


def _worth(
    axes: Axes, points: Sequence[Point], is_told: Sequence[bool], colour: str, best: Point | None
) -> None:
    """Draw the value and the cost of sizes.

    The value's line is solid up to the largest size that the trace supports.
    """
    at = [point.num_bytes for point in points]
    worth = [point.saved for point in points]
    num_told = sum(is_told)
    if num_told:
        axes.plot(at[:num_told], worth[:num_told], color=colour, linewidth=2, label="value")
    if num_told < len(points):
        begin = max(0, num_told - 1)
        axes.plot(
            at[begin:], worth[begin:], color=colour, linewidth=1, alpha=0.35, linestyle="dotted",
            label=CANT_TELL,
        )  # fmt: skip
    axes.plot(
        at, [point.price for point in points], color=MUTED, linewidth=1.4, dashes=(4, 2),
        label="cost",
    )  # fmt: skip
    for point, told in zip(points, is_told, strict=True):
        axes.plot(
            [point.num_bytes], [point.saved], "o", color=colour, markersize=5,
            alpha=1.0 if told else 0.35, markeredgewidth=0,
        )  # fmt: skip
    if best is not None:
        axes.plot([best.num_bytes], [best.saved], "D", color=INK, markersize=8, label="recommended")
    # The line of the cost may be cut at the top, but must begin in the plot.
    top = max(*(point.saved for point in points), min(point.price for point in points))
    axes.set_ylim(min(0.0, *(point.saved for point in points)), 1.15 * top if top > 0 else 1.0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: money(value)))
    axes.set_ylabel("per hour")
    axes.legend(frameon=False, labelcolor=INK, loc="best")


def _sizes(axes: Axes, num_bytes: Sequence[int], width: float) -> None:
    """Make the x axis logarithmic, with as many of the sizes as ticks as there is room for."""
    axes.set_xscale("log", base=2)
    every = -(-len(num_bytes) // max(2, int(width / 1.1)))
    axes.xaxis.set_ticks(list(num_bytes[::every]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: capacity(value)))
    axes.tick_params(axis="x", color=LINE)
