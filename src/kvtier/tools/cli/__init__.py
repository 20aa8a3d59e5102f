"""Command line. Importing it is fast, since commands import their dependencies when they run."""

from __future__ import annotations

from kvtier.tools.cli.main import app

__all__ = ["app"]
