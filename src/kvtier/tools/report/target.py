"""Targets of figures, and whether they are met."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.tools.report.figures import SURE, TOO_FEW, percent
from kvtier.tools.report.stats import Estimate, rounded

DIGITS = 4
"""Digits after the point to which figures are rounded, before comparison as well."""
TOO_SMALL = "too small a run to tell"


def is_met(found: Estimate, wanted: float, at_least: bool, digits: int = DIGITS) -> bool | None:
    """Whether a figure is on the right side of ``wanted``.

    None if ``wanted`` is within its interval. This is the only place that decides this.

    Args:
        found: the figure.
        wanted: the target.
        at_least: whether the figure must be at least ``wanted``; otherwise at most.
        digits: digits after the point to which the figure is printed.
    """
    low, high = (round(each, digits) for each in (found.low, found.high))
    if at_least:
        low, high, wanted = -high, -low, -wanted
    return True if high <= wanted else False if low > wanted else None


@dataclass(frozen=True, slots=True)
class Target:
    """A figure and its target.

    Attributes:
        target_id: name of the target.
        meaning: meaning of the figure.
        found: the figure.
        wanted: value to reach.
        at_least: whether the figure must be at least ``wanted``; otherwise at most.
        deviation: how the measurement deviates from the target's definition; "" if it does not.
        comparable: False if the deviation makes the figure useless for the target.
    """

    target_id: str
    meaning: str
    found: Estimate
    wanted: float
    at_least: bool
    deviation: str = ""
    comparable: bool = True

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if this run can't tell."""
        return is_met(self.found, self.wanted, self.at_least) if self.comparable else None

    @property
    def outcome(self) -> str:
        """The outcome in words: "met", "not met", or why that can't be told."""
        if not self.comparable:
            return TOO_SMALL
        return {True: "met", False: "not met", None: TOO_FEW}[self.met]

    def as_json(self) -> Mapping[str, object]:
        """Return the row for the list of targets.

        ``met`` is null if that can't be told. ``quick`` is present only if the measurement deviates
        from the target's definition.
        """
        row: dict[str, object] = {
            "id": self.target_id,
            "meaning": self.meaning,
            "value": rounded(self.found.value, DIGITS),
            "interval_95": self.found.interval_json(DIGITS),
            "target": self.wanted,
            "met": self.met,
        }
        if self.deviation:
            row["quick"] = True
        return row


def target_bound(target: Target) -> str:
    """Return "at least 95.0 %"."""
    return f"{'at least' if target.at_least else 'at most'} {percent(target.wanted)}"


def target_figure(target: Target) -> str:
    """Return "95.3 %", or "" if the figure may be on either side of the target."""
    is_told = target.met is not None or target.found.low == target.found.high
    return percent(target.found.value) if is_told else ""


def target_interval(target: Target) -> str:
    """Return "95 % sure: 95.1 % to 95.5 %".

    Returns "" for a count, without an interval, or if the target does not apply to the run.
    """
    found = target.found
    if not target.comparable or not found.is_bounded or found.low == found.high:
        return ""
    return f"{SURE}: {percent(found.low)} to {percent(found.high)}"


def target_words(target: Target) -> str:
    """Return "T1: 95.3 % (95 % sure: 95.1 % to 95.5 %), target at least 95.0 %: met"."""
    figure, interval = target_figure(target), target_interval(target)
    if interval:
        figure = f"{figure} ({interval})" if figure else interval
    remark = f" ({target.deviation})" if target.deviation else ""
    said = f"{figure}, target" if figure else "target"
    return f"{target.target_id}: {said} {target_bound(target)}: {target.outcome}{remark}"
