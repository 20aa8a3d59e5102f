"""``python -m kvtier.tools.cli``."""

from __future__ import annotations

from kvtier.tools.cli import app

app(prog_name="kvtier")
