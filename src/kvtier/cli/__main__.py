"""``python -m kvtier.cli``."""

from __future__ import annotations

from kvtier.cli import app

app(prog_name="kvtier")
