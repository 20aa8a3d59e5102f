"""Format sizes, times, shares and counts, for terminals and reports.

``page/words.js`` does the same on the page.
"""

from __future__ import annotations

from math import floor, log10

TOO_FEW = "too few to tell"


def share(part: float | None) -> str:
    """Format a share: ``0.384`` as 38 %."""
    if part is None:
        return TOO_FEW
    if 0 < part < 0.005:
        return "below 1 %"
    return f"{100 * part:.0f} %"


def seconds(value: float | None) -> str:
    """Format a time in a suitable unit; a negative one as 0."""
    if value is None:
        return TOO_FEW
    for limit, unit, name in (
        (0.9995e-3, 1e-6, "µs"),
        (0.9995, 1e-3, "ms"),
        (100, 1, "s"),
        (7200, 60, "min"),
        (48 * 3600, 3600, "h"),
    ):
        if value < limit:
            return f"{_short(value / unit)} {name}" if value > 0 else "0 s"
    return f"{_short(value / 86400)} d"


def count(value: float | None) -> str:
    """Format a number shortly: 1234567 as 1.23 M."""
    if value is None:
        return TOO_FEW
    for least, unit, name in ((1e9, 1e9, " G"), (1e6, 1e6, " M"), (1e4, 1e3, " k")):
        if value >= least:
            return f"{_short(value / unit)}{name}"
    return f"{value:.0f}"


def engines(seconds_per_s: float) -> str:
    """Format saved seconds per second as the number of engines that would be busy: 0.28 engines."""
    num = f"{seconds_per_s:.2g}"
    return f"{num} engine{'s' * (num != '1')}"


def size(num_bytes: float | None, digits: int = 3) -> str:
    """Format a size in powers of 1024."""
    if num_bytes is None:
        return TOO_FEW
    for power, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << power:
            return f"{_short(num_bytes / (1 << power), digits)} {name}"
    return f"{num_bytes:.0f} B"


def _short(value: float, digits: int = 3) -> str:
    """Round to ``digits`` significant digits, but keep the integer part: 1.02, 12.3, 1023."""
    num_decimals = max(0, digits - 1 - floor(log10(value)))
    text = f"{value:.{num_decimals}f}"
    return text.rstrip("0").rstrip(".") if num_decimals else text
