"""Figures in words, rounded to what can be meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.tools.report.stats import Estimate

TOO_FEW = "too few runs to tell"
SURE = "95\N{NO-BREAK SPACE}% sure"
GAP = "\N{NO-BREAK SPACE}"
"""Between a number and its unit."""


def number(value: float) -> str:
    """ "48", "4.2", "1,020"."""
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def milliseconds(value: float) -> str:
    """ "48 ms", "4.2 ms", "1,020 ms"."""
    return f"{number(value)}{GAP}ms"


def size(num_bytes: float) -> str:
    """Bytes for people: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def capacity(num_bytes: float) -> str:
    """A size that somebody chose: "64 GiB", "1.5 TiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g}{GAP}{unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g}{GAP}TiB"


def ago(seconds: float) -> str:
    """A time for people: "3.2 h"."""
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{max(0.0, seconds) / divisor:.{0 if divisor == 1 else 1}f} {unit}"
    return f"{seconds / 86400:.1f} d"


def percent(share: float, signed: bool = False, digits: int = 1) -> str:
    """ "95.3 %", or "+0.4 %" where the sign is the message."""
    rounded = round(100 * share, digits) + 0.0  # no "-0.0"
    sign = "+" if signed and rounded else ""
    return f"{rounded:{sign}.{digits}f}{GAP}%".replace("-", "\N{MINUS SIGN}")


def counted(number: int, noun: str) -> str:
    """ "1 prompt", "20 prompts"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def between(found: Estimate) -> str:
    """ "-0.2 % to +0.9 %", or that too little was measured."""
    if not found.is_bounded:
        return TOO_FEW
    return f"{percent(found.low, signed=True)} to {percent(found.high, signed=True)}"


def about(found: Estimate, signed: bool = False) -> str:
    """Format a figure with bounds: "95.3 %" if the interval is below a point, else "95 %"."""
    is_narrow = found.high - found.low < 0.01
    return percent(found.value, signed, digits=1 if is_narrow else 0)


def change(found: Estimate) -> str:
    """A share, as far as it can be told.

    "+0.9 % (+0.4 % to +1.3 %)" where it is on one side of nothing, "-0.2 % to +0.9 %" where it may
    be nothing, else that it can't.
    """
    if not found.is_bounded or found.contains(0):
        return between(found)
    return f"{percent(found.value, signed=True)} ({between(found)})"
