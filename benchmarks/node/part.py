"""Result of a part of the benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.table import Table

JsonRow = Mapping[str, object]


class Part(NamedTuple):
    """Rows with the same fields, and the targets that they decide."""

    rows: Sequence[JsonRow]
    targets: Sequence[dict[str, object]]


def table(name: str, part: Part) -> Table:
    """Return the rows as a table, a column per field."""
    made = Table(title=name)
    for field in part.rows[0]:
        made.add_column(field, justify="right")
    for row in part.rows:
        made.add_row(*(_text(value) for value in row.values()))
    return made


def _text(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
