"""Figures in words, rounded to what can be meant."""

from __future__ import annotations

from kvtier.serve_bench.stats import Estimate

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


def change(found: Estimate) -> str:
    """A share, as far as it can be told: "+0.9 % (+0.4 % to +1.3 %)" where it is on one side of
    nothing, "-0.2 % to +0.9 %" where it may be nothing, else that it can't."""
    if not found.is_bounded or found.contains(0):
        return between(found)
    return f"{percent(found.value, signed=True)} ({between(found)})"
