"""Readers of traces, one module per format. ``reading.py`` detects the format by content."""

from __future__ import annotations

from kvtier.tools.replay.options import ReadOptions
from kvtier.tools.replay.traces.reading import read_traces

__all__ = ["ReadOptions", "read_traces"]
