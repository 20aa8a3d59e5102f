"""Format figures, rounded to a meaningful number of digits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.observe.live.wording import seconds, size

if TYPE_CHECKING:
    from kvtier.tools.report.stats import Estimate

TOO_FEW = "too few runs to tell"
SURE = "95\N{NO-BREAK SPACE}% sure"
GAP = "\N{NO-BREAK SPACE}"
"""Blank between a number and its unit."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One finding: title, figure, meaning.

    good: whether it is as promised; None if nothing was promised.
    """

    title: str
    figure: str
    meaning: str
    good: bool | None = None


def number(value: float) -> str:
    """Format a number: "48", "4.2", "1,020"."""
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def milliseconds(value: float) -> str:
    """Format milliseconds: "48 ms", "4.2 ms", "1,020 ms"."""
    return f"{number(value)}{GAP}ms"


def capacity(num_bytes: float) -> str:
    """Format a capacity: "64 GiB", "1.5 TiB", without line breaks."""
    return size(num_bytes, digits=4).replace(" ", GAP)


def duration(value: float) -> str:
    """Format a time: "4.2 s", "3.2 h", without line breaks."""
    return seconds(value).replace(" ", GAP)


def percent(share: float, signed: bool = False, digits: int = 1) -> str:
    """Format a share: "95.3 %", or "+0.4 %" if ``signed``."""
    rounded = round(100 * share, digits) + 0.0  # no "-0.0"
    sign = "+" if signed and rounded else ""
    return f"{rounded:{sign}.{digits}f}{GAP}%".replace("-", "\N{MINUS SIGN}")


def counted(number: int, noun: str) -> str:
    """Format a count: "1 prompt", "20 prompts"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def between(found: Estimate) -> str:
    """Format an interval: "-0.2 % to +0.9 %", or ``TOO_FEW`` if there is none."""
    if not found.is_bounded:
        return TOO_FEW
    return f"{percent(found.low, signed=True)} to {percent(found.high, signed=True)}"


def about(found: Estimate, signed: bool = False) -> str:
    """Format a figure with bounds: "95.3 %" if the interval is below a point, else "95 %"."""
    is_narrow = found.high - found.low < 0.01
    return percent(found.value, signed, digits=1 if is_narrow else 0)


def change(found: Estimate) -> str:
    """Format a relative change.

    It is "+0.9 % (+0.4 % to +1.3 %)", or "-0.2 % to +0.9 %" if the interval contains 0, or
    ``TOO_FEW`` if there is no interval.
    """
    if not found.is_bounded or found.contains(0):
        return between(found)
    return f"{percent(found.value, signed=True)} ({between(found)})"
