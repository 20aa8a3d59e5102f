"""Reads traces, one file per format; ``reading.py`` tells them apart by what is in them."""

from __future__ import annotations

from kvtier.tools.replay.traces.options import ReadOptions
from kvtier.tools.replay.traces.reading import read_traces

__all__ = ["ReadOptions", "read_traces"]
