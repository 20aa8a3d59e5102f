"""Times of a log's lines, which may lack the year."""

from __future__ import annotations

import re
from datetime import date
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.tools.replay.traces.lines import TraceLine

DAY_S = 86_400
YEAR_S = 365 * DAY_S
NO_YEAR = 2001
"""Year assumed for the first line without a year. It is no leap year."""
_EPOCH = date(1970, 1, 1).toordinal()
_TIME = re.compile(
    r"(?:([0-9]{4})-)?([0-9]{2})-([0-9]{2})[ T]([0-9]{2}):([0-9]{2}):([0-9]{2})"
    r"(?:[.,]([0-9]{1,6}))?"
)


class Clock:
    """Reads the times of a log's lines, in their order.

    In lines without a year, a jump back by more than half a year is a turn of the year, and
    29 February exists only if a line has it.

    has_year: whether all lines so far had a year.
    """

    def __init__(self) -> None:
        self.has_year = True
        self._before: float | None = None
        self._years_s = 0
        self._has_leap_day = False

    def time_s(self, line: TraceLine, text: str) -> float:
        """Return the first time in ``text``, in seconds since 1970.

        Without a year, it is relative to an assumed one.
        """
        found = _TIME.search(text)
        if found is None:
            line.refuse("a request without a time; the log must say when")
        year, *rest = found.groups()
        month, day, hour, minute, second = map(int, rest[:5])
        is_leap_day = year is None and (month, day) == (2, 29)
        try:
            days = date(int(year or NO_YEAR), month, day - is_leap_day).toordinal() - _EPOCH
        except ValueError:
            days = -1
        if days < 0 or hour > 23 or minute > 59 or second > 60:
            line.refuse(f"{found[0]!r} is no time")
        time_s = days * DAY_S + hour * 3600 + minute * 60 + second + float(f"0.{rest[5] or 0}")
        if year is not None:
            return time_s
        self.has_year = False
        self._has_leap_day |= is_leap_day
        if is_leap_day or (month > 2 and self._has_leap_day):
            time_s += DAY_S
        return self._in_its_year(time_s)

    def _in_its_year(self, time_s: float) -> float:
        """Return the time in the year of the line before, in the next one or in the last one."""
        time_s += self._years_s
        if self._before is None:
            self._before = time_s
        if time_s - self._before > YEAR_S / 2:
            return time_s - YEAR_S  # a late line of the previous year
        if self._before - time_s > YEAR_S / 2:
            length_s = YEAR_S + DAY_S * self._has_leap_day
            self._years_s += length_s
            self._has_leap_day = False
            time_s += length_s
        self._before = time_s
        return time_s
