"""The command line. Importing it is fast: commands import what they need when they run."""

from __future__ import annotations

from kvtier.cli.main import app

__all__ = ["app"]
