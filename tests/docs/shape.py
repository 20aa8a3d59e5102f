"""Compare a command's output with its page, numbers aside.

Each line of the page must match a line of the output, in the same order. Runs of blanks and of
characters that draw tables count as one. A number matches any number, with a unit of size or time
any unit of the same kind. ``...`` within a line matches any text, as a line of its own any lines.

Output that the page leaves out is allowed, because other parts of a server may print meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

ANYTHING = "..."
NUMBER = r"[-+\N{MINUS SIGN}]?\d[\d,]*(?:\.\d+)?"
SIZES, TIMES = "B|bytes|KiB|MiB|GiB|TiB", "ns|µs|ms|s|min|h|d"
DRAWN = re.compile("[\N{BOX DRAWINGS LIGHT HORIZONTAL}-\N{RIGHT HALF BLOCK}]+")


def shape(line: str) -> str:
    """Return the parts of a line that are compared."""
    line = DRAWN.sub(" | ", line.replace("\N{NO-BREAK SPACE}", " "))
    line = re.sub(r"\b[0-9a-f]{8,}\b", "#", line)
    line = re.sub(NUMBER, "#", line)
    line = re.sub(rf"# ?(?:{SIZES})\b", "#B", line)
    line = re.sub(rf"# ?(?:{TIMES})\b", "#s", line)
    line = re.sub(r"(?:\| *)+", "| ", line)
    return " ".join(line.split()).strip("| ")


def missing_line(said: str, printed: str) -> str | None:
    """The first line of the page that the output does not have, in order; None for none."""
    shapes = [shape(splitline) for splitline in printed.splitlines()]
    at = 0
    for line in said.splitlines():
        if line.strip() in ("", ANYTHING) or not shape(line):
            continue
        at = _find(line, shapes, at)
        if at < 0:
            return line
    return None


def _find(line: str, shapes: Sequence[str], at: int) -> int:
    """Return the index behind the first match of a page's line in ``shapes[at:]``, or -1."""
    parts = [re.escape(shape(part)) for part in line.split(ANYTHING)]
    wanted = re.compile(".*".join(part or "" for part in parts))
    for number in range(at, len(shapes)):
        if wanted.fullmatch(shapes[number]):
            return number + 1
    return -1
